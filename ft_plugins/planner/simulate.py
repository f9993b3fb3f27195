"""How long an iteration takes on each rank of a pipeline, and what each rank is at: discrete events, no clock.

A rank works off its program; a message takes its link's latency and its bytes over the bandwidth. A *rendezvous* (the
default, as NCCL and gloo have it) begins when both sides have posted and ends for both at once; *eager*, it begins with
the send, which is done there and then. The messages of one link do not slow each other: what a pipeline sends for
itself is small beside its links.

After its last backward pass a rank reduces gradients, and updates; where the norm of all gradients is needed (`joint`,
as with gradient clipping), the update waits for the ranks of the whole pipeline: the bubble of the flush. All replicas
of the pipeline are alike, so one stands for a job of any size.

Invariant: the result depends on nothing but the arguments. A wait is never shorter than what is waited for; no rank
does two passes at once. A program that cannot end raises instead of hanging.

In: `Pipeline`, `Times`. Out: a `Timeline` for each rank, spans one after another. A wait for messages is one span, RECV
if anything is received and SEND else, as adapters record it; what nobody had to wait for leaves none. Both parts of a
backward pass that is split are BACKWARD.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ..errors import ConfigError
from ..model.timeline import Kind, Span, Timeline, gc_paused
from .pipeline import Compute, MessagePost, Messages, Operation, Pass, Pipeline, PipelineSchedule
from .schedules import program

NOT_YET = -1.0


@dataclass(frozen=True)
class PipelineLink:
    """From a rank to its neighbour and back. Seconds and bytes per second."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, nbytes: float) -> float:
        """How long a message takes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Times:
    """What things take, in seconds. `forward` and `backward` by stage, `reduce` and `update` by rank, `links` by rank
    (to the next one, the last to the first); one value stands for all. Raises ConfigError.

    `weight`: the part of `backward` that a zero-bubble schedule puts off.
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
        run.work_off()
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
    """`count` values, of as many or of one that stands for all. Raises ConfigError."""
    if len(values) == count:
        return values
    if len(values) == 1:
        return values * count
    raise ConfigError(f"{name}: expected 1 value or {count}, found {len(values)}")


class _Run:
    """Programs that are being worked off: each as far as it gets, until what it waits for is known."""

    def __init__(self, pipeline: Pipeline, times: Times, eager: bool) -> None:
        self._pipeline, self._eager = pipeline, eager
        self._seconds = _pass_seconds(pipeline, times)
        self._costs = _message_seconds(pipeline, times)
        self._sent = [NOT_YET] * pipeline.messages  # when a send was posted
        self._posted = [NOT_YET] * pipeline.messages  # when a receive was posted
        self._arrived = [NOT_YET] * pipeline.messages
        self._waiting: dict[int, int] = {}  # message -> the rank that goes on when it is known
        self._ready = deque(range(pipeline.ranks))
        self.now = [0.0] * pipeline.ranks
        self.spans: list[list[Span]] = [[] for _ in range(pipeline.ranks)]

    def work_off(self) -> None:
        """All programs to their ends. Raises ConfigError where they wait for each other."""
        programs = [program(self._pipeline, rank) for rank in range(self._pipeline.ranks)]
        at = [0] * len(programs)
        while self._ready:
            rank = self._ready.popleft()
            at[rank] = self._go_on(rank, programs[rank], at[rank])
        for rank, (operations, where) in enumerate(zip(programs, at, strict=True)):
            if where < len(operations):
                raise ConfigError(
                    f"schedule {self._pipeline.schedule.value}: rank {rank} waits for ever at {operations[where]}; "
                    "expected a program in which every message is sent and received"
                )

    def _go_on(self, rank: int, operations: list[Operation], at: int) -> int:
        """Work off a program from `at` until it ends or waits; where it stands then. A blocking `MessagePost` that
        waits is not passed: that it has been posted shows in its messages."""
        now, spans, ranks = self.now[rank], self.spans[rank], self._pipeline.ranks
        while at < len(operations):
            operation = operations[at]
            at += 1
            if isinstance(operation, Compute):
                begin = now
                now += self._seconds[operation.what][operation.chunk * ranks + rank]
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
        """Begin what can begin; whoever waits for it goes on."""
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
        """Both sides have come; `now` is that of the one whose program was worked off later, not of the later one."""
        start = now if self._eager else max(self._sent[message], self._posted[message])
        self._arrived[message] = start + self._costs[message // self._pipeline.microbatches]
        waiting = self._waiting.pop(message, None)
        if waiting is not None:
            self._ready.append(waiting)

    def _known(self, rank: int, sends: Messages, receives: Messages) -> float:
        """When all of these are done; NOT_YET, and called again when that may be known."""
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
        """A span of waiting."""
        count, ranks = self._pipeline.microbatches, self._pipeline.ranks
        message = (receives or sends)[0]
        stage, gradient = divmod(message // count, 2)
        if receives:
            stage += -1 if gradient else 1
        kind = Kind.RECV if receives else Kind.SEND
        self.spans[rank].append(Span(kind, begin, end, message % count, stage // ranks))


def _pass_seconds(pipeline: Pipeline, times: Times) -> dict[Pass, tuple[float, ...]]:
    """By pass and stage."""
    forward = spread("forward", times.forward, pipeline.stages)
    backward = spread("backward", times.backward, pipeline.stages)
    if pipeline.schedule is not PipelineSchedule.ZERO_BUBBLE:
        return {Pass.FORWARD: forward, Pass.BACKWARD: backward}
    weight = spread("weight", times.weight, pipeline.stages)
    rest = tuple(whole - part for whole, part in zip(backward, weight, strict=True))
    if min(rest) < 0:
        raise ConfigError(f"weight: expected at most backward, found {weight} of {backward}")
    return {Pass.FORWARD: forward, Pass.BACKWARD: rest, Pass.WEIGHT: weight}


def _message_seconds(pipeline: Pipeline, times: Times) -> list[float]:
    """By 2 x the stage that makes the message + 1 for a gradient."""
    hops = [link.seconds(times.message_bytes) for link in spread("links", times.links, pipeline.ranks)]
    return [hops[(stage - gradient) % pipeline.ranks] for stage in range(pipeline.stages) for gradient in (0, 1)]
