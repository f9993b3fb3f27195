"""The spans of a rank in one iteration, and its bubbles: the time in which it does not compute (BAFT 4.1). Pure.

Order and length of the spans repeat from iteration to iteration, so the next iteration's bubbles are known in advance.
Times are in seconds since the rank's own iteration began. A bubble is time not covered by compute (forward, backward,
update): a receive that waits, a send, a gap of at least LEAST, and the part of a gradient reduction that only waits.

All ranks leave a collective together, and the last to enter does not wait. So the length of a reduction on that rank,
the shortest of all, is the work, at the end of every rank's span; the rest of a longer span is waiting, at its begin.
`reduce_work` computes that minimum for `bubbles`; without it a whole reduction is work. If stages reduce unequal
amounts, the minimum is that of the smallest, and waiting on the others is overestimated by at most the difference.

In: timelines. Out: their median, their bubbles, the busy share of a rank, a table; `Misses` decides when measured
iterations no longer fit the profile.
"""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from ..errors import FtError

LEAST = 1e-3  # seconds; shorter gaps are the time between two commands, not bubbles
SHOWN = 16  # ranks in a table


class Kind(Enum):
    """What a rank does in a span."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    UPDATE = "update"

    __hash__ = object.__hash__  # members are singletons; Enum's hash by name takes a third of planning time


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE})


@dataclass(frozen=True)
class Span:
    """One action of a rank. `microbatch` -1: of none; `chunk`: the model chunk of an interleaved schedule."""

    kind: Kind
    begin: float  # seconds since the iteration began
    end: float
    microbatch: int = -1
    chunk: int = 0


Shape = tuple[tuple[Kind, int, int], ...]


@dataclass(frozen=True)
class Timeline:
    """One iteration of one rank, or the median of several; spans by begin, not nested."""

    rank: int
    seconds: float  # of the whole iteration
    spans: tuple[Span, ...]
    memory: tuple[int, ...] = ()  # bytes in use at each span's begin; empty if unknown
    # seconds by which the thread is ahead of the device: at begin and end of the iteration, then of each span; empty: 0
    leads: tuple[float, ...] = ()

    def opens_at(self, after: int) -> float:
        """When the gate of the bubble after span `after` (-1: before the first) can open: when the host reports the end
        of that span, or the begin of the iteration; seconds since that began. A thread ahead of its device reports it
        before it happens."""
        if after < 0:
            return -self.leads[0] if self.leads else 0.0
        return self.spans[after].end - (self.leads[3 + 2 * after] if self.leads else 0.0)

    def closes_at(self, after: int) -> float:
        """When that gate closes: when the host reports the begin of the next compute span, or the iteration's end."""
        for index in range(after + 1, len(self.spans)):
            if self.spans[index].kind in COMPUTE:
                return self.spans[index].begin - (self.leads[2 + 2 * index] if self.leads else 0.0)
        return self.seconds - (self.leads[1] if self.leads else 0.0)

    @property
    def shape(self) -> Shape:
        """The sequence of spans without times."""
        return tuple((span.kind, span.microbatch, span.chunk) for span in self.spans)


@dataclass(frozen=True)
class Bubble:
    """Idle time of a rank."""

    index: int
    begin: float  # seconds since the iteration began
    end: float
    after: int  # index, among all spans, of the compute span that it follows; -1 before the first

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def strays(timelines: Sequence[Timeline]) -> tuple[int, ...]:
    """Indices of the iterations without the most common shape (of a tie, the earlier): a skipped update, a replayed
    forward."""
    shapes = [timeline.shape for timeline in timelines]
    if not shapes:
        return ()
    common = Counter(shapes).most_common(1)[0][0]
    return tuple(index for index, shape in enumerate(shapes) if shape != common)


def median(timelines: Sequence[Timeline]) -> Timeline:
    """The usual iteration of one rank: the median of each span's length and of the gap before it, without `strays`;
    the maximum of memory.

    Medians of lengths, not of edges: a delay shifts all later edges, so delays at different places in different
    iterations would add up in medians of edges. Raises FtError for no timelines, or for those of several ranks.
    """
    if len({timeline.rank for timeline in timelines}) != 1:
        ranks = sorted({timeline.rank for timeline in timelines})
        raise FtError(f"median of iterations: expected the timelines of one rank, found those of ranks {ranks}")
    left_out = strays(timelines)
    chosen = [timeline for index, timeline in enumerate(timelines) if index not in left_out]
    spans: list[Span] = []
    now = 0.0
    before = [0.0] * len(chosen)  # end of the previous span, in each iteration
    for same in zip(*(timeline.spans for timeline in chosen), strict=True):
        begin = now + _middle([span.begin - end for span, end in zip(same, before, strict=True)])
        now = begin + _middle([span.end - span.begin for span in same])
        spans.append(replace(same[0], begin=begin, end=now))
        before = [span.end for span in same]
    seconds = now + _middle([timeline.seconds - end for timeline, end in zip(chosen, before, strict=True)])
    measured = [timeline.memory for timeline in chosen if timeline.memory]
    memory = tuple(map(max, zip(*measured, strict=True))) if measured else ()
    ahead = [timeline.leads for timeline in chosen if timeline.leads]
    leads = tuple(_middle(list(same)) for same in zip(*ahead, strict=True))
    return Timeline(chosen[0].rank, seconds, tuple(spans), memory, leads)


def reductions(timeline: Timeline) -> tuple[float, ...]:
    """Seconds of the first, second, ... reduction of an iteration."""
    return tuple(span.end - span.begin for span in timeline.spans if span.kind is Kind.REDUCE)


def reduce_work(lengths: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Seconds of work in the first, second, ... reduction, from its length on each participating rank."""
    most = max(map(len, lengths), default=0)
    return tuple(min(one[i] for one in lengths if i < len(one)) for i in range(most))


def bubbles(timeline: Timeline, least: float = LEAST, reduce_work: Sequence[float] = ()) -> tuple[Bubble, ...]:
    """The idle times of at least `least` seconds, in order.

    `reduce_work[i]` is the seconds of work in the i-th reduction; reductions beyond its length are all work.
    """
    idle: list[Bubble] = []
    idle_since, after, reductions = 0.0, -1, 0

    def until(begin: float) -> None:
        if begin > idle_since and begin - idle_since >= least:
            idle.append(Bubble(len(idle), idle_since, begin, after))

    for index, span in enumerate(timeline.spans):
        if span.kind in COMPUTE:
            until(span.begin)
            idle_since, after = max(idle_since, span.end), index
        elif span.kind is Kind.REDUCE:
            length = span.end - span.begin
            work = min(length, reduce_work[reductions]) if reductions < len(reduce_work) else length
            reductions += 1
            if work > 0:
                until(span.end - work)
                idle_since = max(idle_since, span.end)
    until(timeline.seconds)
    return tuple(idle)


def busy_share(timeline: Timeline, reduce_work: Sequence[float] = ()) -> float:
    """The share of the iteration in which the rank is not idle, from 0 to 1."""
    if timeline.seconds <= 0:
        return 0.0
    return 1 - sum(bubble.seconds for bubble in bubbles(timeline, 0.0, reduce_work)) / timeline.seconds


@dataclass(frozen=True)
class SenderFacts:
    """What only the sender knows of its copies; 0 for unknown."""

    ready_seconds: float = 0.0  # from the end of an iteration until its capture is sealed
    extra_bytes: int = 0  # sent with each version in addition to its slot's data: small state and digests
    layers: tuple[int, ...] = ()  # bytes of each layer, in the order of the slot


@dataclass(frozen=True)
class Profile:
    """The timelines of all ranks of a job, by rank, and the facts exchanged with them.

    `least_reductions`: seconds of the first, second, ... reduction on the rank where it is shortest; None: computed
    from all timelines.
    """

    timelines: Sequence[Timeline]
    senders: tuple[SenderFacts, ...] = ()  # empty if no rank sends
    least_reductions: tuple[float, ...] | None = field(default=None, compare=False)

    @cached_property
    def reduce_work(self) -> tuple[float, ...]:
        """Seconds of work in each reduction, if all ranks wait for each other before the update."""
        known = self.least_reductions
        return reduce_work([reductions(one) for one in self.timelines]) if known is None else known

    def bubbles(self, rank: int, least: float = LEAST) -> tuple[Bubble, ...]:
        """The bubbles of one rank."""
        return bubbles(self.timelines[rank], least, self.reduce_work)

    def table(self, least: float = LEAST) -> str:
        """The profile as a table."""
        return table(self.timelines, least, self.reduce_work)


def table(timelines: Sequence[Timeline], least: float = LEAST, reduce_work: Sequence[float] = ()) -> str:
    """Where the time of an iteration goes: one line per rank, for the first `SHOWN` ranks."""
    head = ("rank", "iteration", "forward", "backward", "update", "busy", "idle", "bubbles", "longest", "memory")
    rows: list[tuple[str, ...]] = [head]
    for timeline in timelines[:SHOWN]:
        idle = bubbles(timeline, least, reduce_work)
        spent = {kind: sum(span.end - span.begin for span in timeline.spans if span.kind is kind) for kind in COMPUTE}
        lengths = [bubble.seconds for bubble in idle]
        memory = f"{max(timeline.memory) / 2**30:.2f} GiB" if timeline.memory else "unknown"
        rows.append(
            (
                str(timeline.rank), _ms(timeline.seconds),
                *(_ms(spent[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)),
                f"{busy_share(timeline, reduce_work):.0%}", _ms(sum(lengths)), str(len(idle)),
                _ms(max(lengths, default=0.0)), memory,
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    rest = len(timelines) - SHOWN
    return "\n".join([*lines, *([f"and {rest} more ranks"] if rest > 0 else [])])


@dataclass(frozen=True)
class Misses:
    """A count of iterations that missed the profile: +1 for a miss, -1 for a fit, never below 0.

    So a profile is discarded once `limit` more iterations missed it than fit, not for an occasional slow one.
    """

    tolerance: float  # deviation of an edge, as a share of the profiled iteration
    limit: int
    count: int = 0

    def seen(self, expected: Timeline, measured: Timeline) -> Misses:
        """The count after one more iteration."""
        missed = largest_deviation(expected, measured) > self.tolerance * expected.seconds
        return replace(self, count=min(self.limit, self.count + 1) if missed else max(0, self.count - 1))

    @property
    def limit_reached(self) -> bool:
        """Whether a new profile is due."""
        return self.count >= self.limit


def largest_deviation(expected: Timeline, measured: Timeline) -> float:
    """The largest difference, in seconds, between a span's edge and where it was expected; infinite if the shapes
    differ."""
    if expected.shape != measured.shape:
        return float("inf")
    pairs = zip(expected.spans, measured.spans, strict=True)
    return max((max(abs(one.begin - other.begin), abs(one.end - other.end)) for one, other in pairs), default=0.0)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic collector in a block or as a decorator; afterwards it is on if it was on before.

    Planning makes a million small values, none in a cycle; walking them takes two fifths of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _middle(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
