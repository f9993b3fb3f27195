"""What a rank does in one iteration, as spans, and when it is idle in it, as bubbles (BAFT 4.1).

Order and length of the spans repeat from iteration to iteration, so the bubbles of the next one are known ahead. Times
are in seconds since the rank's own iteration began. A bubble is what no compute covers (forward, backward, update): a
receive that waits, a send, the time between two commands, and the part of a gradient reduction that only waits.

Waiting and work in a reduction: all ranks that meet in a collective leave it together, and the last one to come waits
for nobody. So its length on that rank, the shortest of all, is the work, at the end of everybody's span; what is
longer elsewhere is waiting, at the begin. `reduce_work` takes that minimum, `bubbles` is given it; without it a
reduction counts as work from end to end. Where stages have unequal amounts to reduce, the minimum is that of the
least, and the waiting of the others is overrated by at most the difference of their work.

Invariant: pure; what is not measured is not made up. In: timelines. Out: their median, their bubbles, how busy a rank
is, a table; `Misses` says when what is measured no longer is what was profiled.
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

LEAST = 1e-3  # seconds; what is shorter is no bubble, but the time between two commands
SHOWN = 16  # ranks in a table


class Kind(Enum):
    """What a span is spent with."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    UPDATE = "update"

    __hash__ = object.__hash__  # members are there once; by name, as Enum does it, is a third of what planning takes


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE})


@dataclass(frozen=True)
class Span:
    """One thing a rank does. `chunk` is the model chunk of an interleaved schedule; -1: of no microbatch."""

    kind: Kind
    begin: float  # seconds since the iteration began
    end: float
    microbatch: int = -1
    chunk: int = 0


Shape = tuple[tuple[Kind, int, int], ...]


@dataclass(frozen=True)
class Timeline:
    """One rank, one iteration, or the median of several; spans by begin, none of them inside another."""

    rank: int
    seconds: float  # of the whole iteration
    spans: tuple[Span, ...]
    memory: tuple[int, ...] = ()  # bytes in use at each span's begin; empty where unknown
    leads: tuple[float, ...] = ()  # by which the host is ahead: begin, end, then of each span; empty for never

    def opens(self, after: int) -> float:
        """When the host tells of the end of span `after`, -1 for the begin of the iteration: before it is, where a
        device computes. Seconds since the iteration began."""
        if after < 0:
            return -self.leads[0] if self.leads else 0.0
        return self.spans[after].end - (self.leads[3 + 2 * after] if self.leads else 0.0)

    def closes(self, after: int) -> float:
        """Likewise of the begin of the compute span that is next, or of the end of the iteration."""
        for index in range(after + 1, len(self.spans)):
            if self.spans[index].kind in COMPUTE:
                return self.spans[index].begin - (self.leads[2 + 2 * index] if self.leads else 0.0)
        return self.seconds - (self.leads[1] if self.leads else 0.0)

    @property
    def shape(self) -> Shape:
        """What comes after what, without times."""
        return tuple((span.kind, span.microbatch, span.chunk) for span in self.spans)


@dataclass(frozen=True)
class Bubble:
    """Idle time of a rank."""

    index: int
    begin: float  # seconds since the iteration began
    end: float
    after: int  # index, among all spans, of the compute span after whose end it begins; -1 before the first

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def strays(timelines: Sequence[Timeline]) -> tuple[int, ...]:
    """Indices of the iterations that do not have the commonest shape (the earlier one, of two as common): a skipped
    update, a replayed forward."""
    shapes = [timeline.shape for timeline in timelines]
    if not shapes:
        return ()
    common = Counter(shapes).most_common(1)[0][0]
    return tuple(index for index, shape in enumerate(shapes) if shape != common)


def median(timelines: Sequence[Timeline]) -> Timeline:
    """The usual iteration of one rank: the median of each length and of each gap before it, one after another, `strays`
    left out; of memory the most.

    Of lengths and not of edges: a delay moves all edges behind it, and several, each in another place of another
    iteration, would meet in the medians of edges. Raises FtError for none, or for timelines of several ranks.
    """
    if len({timeline.rank for timeline in timelines}) != 1:
        found = sorted({timeline.rank for timeline in timelines})
        raise FtError(f"a median is over iterations of one rank; found those of ranks {found}: give one rank's")
    left_out = strays(timelines)
    chosen = [timeline for index, timeline in enumerate(timelines) if index not in left_out]
    spans: list[Span] = []
    now = 0.0
    before = [0.0] * len(chosen)  # where the span before has ended, in each iteration
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
    """Seconds of work in the first, second, ... reduction, from its length on each of the ranks that meet in it."""
    most = max(map(len, lengths), default=0)
    return tuple(min(one[i] for one in lengths if i < len(one)) for i in range(most))


def bubbles(timeline: Timeline, least: float = LEAST, reduce_work: Sequence[float] = ()) -> tuple[Bubble, ...]:
    """The idle times of at least `least` seconds, in order.

    `reduce_work[i]` is how many seconds of the i-th reduction are work; all of those that it does not reach.
    """
    found: list[Bubble] = []
    idle_since, after, reductions = 0.0, -1, 0

    def until(begin: float) -> None:
        if begin > idle_since and begin - idle_since >= least:
            found.append(Bubble(len(found), idle_since, begin, after))

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
    return tuple(found)


def busy_share(timeline: Timeline, reduce_work: Sequence[float] = ()) -> float:
    """The part of the iteration in which the rank is not idle, from 0 to 1."""
    if timeline.seconds <= 0:
        return 0.0
    return 1 - sum(bubble.seconds for bubble in bubbles(timeline, 0.0, reduce_work)) / timeline.seconds


@dataclass(frozen=True)
class SenderFacts:
    """What a rank alone knows of the copies that it sends; 0 where it knows nothing."""

    ready_seconds: float = 0.0  # from the end of an iteration until what is captured of it is sealed
    beside_bytes: int = 0  # that go out with each version beside its slot's data: small state and digests
    layers: tuple[int, ...] = ()  # bytes of each layer in a slot, in the order in which they lie there


@dataclass(frozen=True)
class Profile:
    """The timelines of all ranks of a job, by rank, and what else they have told each other with them.

    `least_reductions`: seconds of the first, second, ... reduction on the rank where it is shortest; None where they
    are to be looked up in the timelines, all of them.
    """

    timelines: Sequence[Timeline]
    senders: tuple[SenderFacts, ...] = ()  # empty where nobody sends
    least_reductions: tuple[float, ...] | None = field(default=None, compare=False)

    @cached_property
    def reduce_work(self) -> tuple[float, ...]:
        """Of a job in which every rank, through others, waits for every other before the update."""
        known = self.least_reductions
        return reduce_work([reductions(one) for one in self.timelines]) if known is None else known

    def bubbles(self, rank: int, least: float = LEAST) -> tuple[Bubble, ...]:
        """Those of one rank."""
        return bubbles(self.timelines[rank], least, self.reduce_work)

    def table(self, least: float = LEAST) -> str:
        """The profile for people."""
        return table(self.timelines, least, self.reduce_work)


def table(timelines: Sequence[Timeline], least: float = LEAST, reduce_work: Sequence[float] = ()) -> str:
    """Where the time of an iteration goes: a line for each rank, for the first ones of many."""
    head = ("rank", "iteration", "forward", "backward", "update", "busy", "idle", "bubbles", "longest", "memory")
    rows: list[tuple[str, ...]] = [head]
    for timeline in timelines[:SHOWN]:
        found = bubbles(timeline, least, reduce_work)
        spent = {
            kind: sum(span.end - span.begin for span in timeline.spans if span.kind is kind) for kind in COMPUTE
        }
        idle = sum(bubble.seconds for bubble in found)
        longest = max((bubble.seconds for bubble in found), default=0.0)
        memory = f"{max(timeline.memory) / 2**30:.2f} GiB" if timeline.memory else "unknown"
        rows.append(
            (
                str(timeline.rank), _ms(timeline.seconds),
                *(_ms(spent[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)),
                f"{busy_share(timeline, reduce_work):.0%}", _ms(idle), str(len(found)), _ms(longest), memory,
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    rest = len(timelines) - SHOWN
    return "\n".join([*lines, *([f"and {rest} ranks more"] if rest > 0 else [])])


@dataclass(frozen=True)
class Misses:
    """How often what was measured did not fit the profile: one more for a miss, one less for a fit, never below 0.

    So a profile is given up when more iterations miss it than fit, `limit` more, and not for a slow one now and then.
    """

    tolerance: float  # of an edge, as a share of the profiled iteration
    limit: int
    count: int = 0

    def seen(self, expected: Timeline, measured: Timeline) -> Misses:
        """After one more iteration."""
        missed = furthest(expected, measured) > self.tolerance * expected.seconds
        return replace(self, count=min(self.limit, self.count + 1) if missed else max(0, self.count - 1))

    @property
    def again(self) -> bool:
        """Whether it is time for another profile."""
        return self.count >= self.limit


def furthest(expected: Timeline, measured: Timeline) -> float:
    """Seconds between an edge of a span and where it was expected, of the edge that is furthest off; infinite where
    the iteration had another shape."""
    if expected.shape != measured.shape:
        return float("inf")
    pairs = zip(expected.spans, measured.spans, strict=True)
    return max((max(abs(one.begin - other.begin), abs(one.end - other.end)) for one, other in pairs), default=0.0)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic collector, in a block or as a decorator; it is on again afterwards if it was on before.

    Planning makes a million small values, none of which is part of a cycle; walking them takes two fifths of its time.
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
