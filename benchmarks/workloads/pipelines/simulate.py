"""Simulate one iteration of a pipeline, as discrete events: the spans of each rank and their times.

Each rank executes its program; a message takes its link's latency plus bytes over bandwidth. A rendezvous (the default,
as in NCCL and gloo) starts when both sides have posted and ends for both at once; an eager message starts with the
send, which completes immediately. Messages on one link do not slow each other: a pipeline's own traffic is small
compared with its links.

After its last backward pass a rank reduces gradients, then updates; if the norm of all gradients is needed (`joint`, as
with gradient clipping), the update waits for all ranks of the pipeline: the bubble of the flush. All replicas of the
pipeline are identical, so one stands for a job of any size.

Invariant: the result depends only on the arguments. A rank does one pass at a time. A program that cannot end raises
instead of hanging.

In: `Pipeline`, `Times`. Out: a `Timeline` for each rank, spans in sequence. A wait for messages is one span, RECV if
any is received and SEND otherwise, as adapters record it; a message without a wait has none. Both parts of a split
backward pass are BACKWARD.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ft_plugins.errors import ConfigError
from ft_plugins.model.timeline import Kind, Span, Timeline, gc_paused
from workloads.pipelines.pipeline import Compute, MessagePost, Messages, Operation, Pass, Pipeline, PipelineSchedule
from workloads.pipelines.schedules import program

NOT_YET = -1.0


@dataclass(frozen=True)
class PipelineLink:
    """The link between two neighbouring ranks, both ways. Seconds and bytes per second."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, nbytes: float) -> float:
        """Seconds of a message of `nbytes`."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Times:
    """Durations in seconds: `forward` and `backward` by stage, `reduce` and `update` by rank, `links` by rank (to the
    next, from the last to the first); a single value is for all. Raises ConfigError.

    `weight`: the part of `backward` that a zero-bubble schedule defers.
    """

    forward: tuple[float, ...] = (1.0,)
    backward: tuple[float, ...] = (2.0,)
    weight: tuple[float, ...] = (1.0,)
    reduce: tuple[float, ...] = (0.0,)
    update: tuple[float, ...] = (0.0,)
    links: tuple[PipelineLink, ...] = (PipelineLink(),)
    message_bytes: float = 0.0
    joint: bool = True

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "reduce", "update"):
            bad = [value for value in getattr(self, name) if not 0 <= value < math.inf]
            if bad:
                raise ConfigError(f"{name}: expected seconds >= 0, found {bad[0]!r}")
        for link in self.links:
            if not (0 <= link.latency < math.inf and link.bandwidth > 0):
                raise ConfigError(f"links: expected latency >= 0 and bandwidth > 0, found {link}")


def simulate(pipeline: Pipeline, times: Times, *, eager: bool = False) -> tuple[Timeline, ...]:
    """The timelines of one iteration, by rank. Raises ConfigError for times that do not fit the pipeline."""
    with gc_paused():
        run = _Run(pipeline, times, eager)
        run.execute()
    ends = run.now
    reduced = [end + took for end, took in zip(ends, spread("reduce", times.reduce, pipeline.ranks), strict=True)]
    starts = [max(reduced)] * pipeline.ranks if times.joint else reduced
    updated = [start + took for start, took in zip(starts, spread("update", times.update, pipeline.ranks), strict=True)]
    seconds = max(updated)
    for spans, *bounds in zip(run.spans, ends, reduced, starts, updated, strict=True):
        for kind, begin, end in ((Kind.REDUCE, *bounds[:2]), (Kind.UPDATE, *bounds[2:])):
            if end > begin:
                spans.append(Span(kind, begin, end))
    return tuple(Timeline(rank, seconds, tuple(spans)) for rank, spans in enumerate(run.spans))


def spread(name: str, values: tuple, count: int) -> tuple:  # type: ignore[type-arg]
    """`count` values, from as many or from one that is for all. Raises ConfigError."""
    if len(values) == count:
        return values
    if len(values) == 1:
        return values * count
    raise ConfigError(f"{name}: expected 1 value or {count}, found {len(values)}")


class _Run:
    """Executes all programs, each until it waits for a message whose arrival is not yet known."""

    def __init__(self, pipeline: Pipeline, times: Times, eager: bool) -> None:
        self._pipeline, self._eager = pipeline, eager
        self._seconds = _pass_seconds(pipeline, times)
        self._costs = _message_seconds(pipeline, times)
        self._sent = [NOT_YET] * pipeline.messages  # when a send was posted
        self._posted = [NOT_YET] * pipeline.messages  # when a receive was posted
        self._arrived = [NOT_YET] * pipeline.messages
        self._waiting: dict[int, int] = {}  # message -> the rank that waits for it
        self._ready = deque(range(pipeline.ranks))
        self.now = [0.0] * pipeline.ranks
        self.spans: list[list[Span]] = [[] for _ in range(pipeline.ranks)]

    def execute(self) -> None:
        """Run all programs to their ends. Raises ConfigError if they deadlock."""
        programs = [program(self._pipeline, rank) for rank in range(self._pipeline.ranks)]
        at = [0] * len(programs)
        while self._ready:
            rank = self._ready.popleft()
            at[rank] = self._advance(rank, programs[rank], at[rank])
        for rank, (operations, where) in enumerate(zip(programs, at, strict=True)):
            if where < len(operations):
                raise ConfigError(
                    f"schedule {self._pipeline.schedule.value}: rank {rank} waits forever at {operations[where]}; "
                    "expected a program in which every message is sent and received"
                )

    def _advance(self, rank: int, operations: list[Operation], at: int) -> int:
        """Execute a program from `at` until it ends or waits; returns its position. A waiting blocking `MessagePost` is
        executed again later: its messages show that they were posted."""
        now, spans, ranks = self.now[rank], self.spans[rank], self._pipeline.ranks
        while at < len(operations):
            operation = operations[at]
            at += 1
            if isinstance(operation, Compute):
                begin = now
                place = ranks - 1 - rank if self._pipeline.upward(operation.microbatch) else rank
                now += self._seconds[operation.what][operation.chunk * ranks + place]
                kind = Kind.FORWARD if operation.what is Pass.FORWARD else Kind.BACKWARD
                spans.append(Span(kind, begin, now, operation.microbatch, operation.chunk))
                continue
            if isinstance(operation, MessagePost):
                self._post(operation, now)
                if not operation.blocking:
                    continue
            until = self._known(rank, operation.sends, operation.receives)
            if until == NOT_YET:
                self.now[rank] = now
                return at - 1
            if until > now:
                self._record(rank, now, until, operation.sends, operation.receives)
                now = until
        self.now[rank] = now
        return at

    def _post(self, post: MessagePost, now: float) -> None:
        """Post messages, and begin those that both sides have posted."""
        sent, posted = self._sent, self._posted
        for message in post.sends:
            if sent[message] == NOT_YET:
                sent[message] = now
                if self._eager or posted[message] != NOT_YET:
                    self._begin(message, now)
        for message in post.receives:
            if posted[message] == NOT_YET:
                posted[message] = now
                if not self._eager and sent[message] != NOT_YET:
                    self._begin(message, now)

    def _begin(self, message: int, now: float) -> None:
        """Begin a posted message. `now` is the time of the side that was executed later, which need not be the later
        time."""
        start = now if self._eager else max(self._sent[message], self._posted[message])
        made, microbatch = divmod(message, self._pipeline.microbatches)
        if self._pipeline.upward(microbatch):  # the link at the same distance from the other end
            made = 2 * self._pipeline.ranks - 4 - made + 6 * (made % 2)
        self._arrived[message] = start + self._costs[made]
        waiting = self._waiting.pop(message, None)
        if waiting is not None:
            self._ready.append(waiting)

    def _known(self, rank: int, sends: Messages, receives: Messages) -> float:
        """When all of these messages are done; NOT_YET if unknown, and the rank waits for the first such message."""
        until = 0.0
        for message in receives if self._eager else sends + receives:
            arrived = self._arrived[message]
            if arrived == NOT_YET:
                self._waiting[message] = rank
                return NOT_YET
            if arrived > until:
                until = arrived
        return until

    def _record(self, rank: int, begin: float, end: float, sends: Messages, receives: Messages) -> None:
        """Add a span of waiting."""
        count, ranks = self._pipeline.microbatches, self._pipeline.ranks
        message = (receives or sends)[0]
        stage, gradient = divmod(message // count, 2)
        if receives:
            stage += -1 if gradient else 1
        kind = Kind.RECV if receives else Kind.SEND
        self.spans[rank].append(Span(kind, begin, end, message % count, stage // ranks))


def _pass_seconds(pipeline: Pipeline, times: Times) -> dict[Pass, tuple[float, ...]]:
    """Seconds by pass and stage."""
    forward = spread("forward", times.forward, pipeline.virtual_stages)
    backward = spread("backward", times.backward, pipeline.virtual_stages)
    if pipeline.schedule is not PipelineSchedule.ZERO_BUBBLE:
        return {Pass.FORWARD: forward, Pass.BACKWARD: backward}
    weight = spread("weight", times.weight, pipeline.virtual_stages)
    rest = tuple(whole - part for whole, part in zip(backward, weight, strict=True))
    if min(rest) < 0:
        raise ConfigError(f"weight: expected at most backward, found {weight} of {backward}")
    return {Pass.FORWARD: forward, Pass.BACKWARD: rest, Pass.WEIGHT: weight}


def _message_seconds(pipeline: Pipeline, times: Times) -> list[float]:
    """Seconds of a message, by 2 x the stage that makes it + 1 for a gradient."""
    hops = [link.seconds(times.message_bytes) for link in spread("links", times.links, pipeline.ranks)]
    return [
        hops[(stage - gradient) % pipeline.ranks] for stage in range(pipeline.virtual_stages) for gradient in (0, 1)
    ]
