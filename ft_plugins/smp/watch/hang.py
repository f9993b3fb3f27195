"""Decide whether a job hangs, which rank it waits for, and which ranks are slow. Pure; no I/O.

A job hangs if no rank has completed an iteration for longer than a limit. The limit is the one that was given, or
follows from the iterations of this incarnation:

    usual iterations            ITERATIONS times the median, at least LEAST_SECONDS, at least LONGEST times the longest
    fewer than KNOWN measured   ITERATIONS times the first, between LEAST_SECONDS and LONG_SECONDS
    first iteration, or a rank in an evaluation or in the framework's own checkpoint
                                LONG_SECONDS without any edge, whatever was given, unless that is more
    several nodes whose SMPs do not know each other
                                at least APART_SECONDS: a rank of another node may be saving a checkpoint

A minute is for ranks between the begin of an iteration and its update. A stall that exceeds the limit is *patient* if
no limit was given and a rank that is waited for is past its update, or was seen at work within the limit (`works`): it
is no hang before LONG_SECONDS without an iteration. A rank that a signal has stopped is not at work.

A hang in the iteration in which the last one was makes the limit GROWTH times as long, unless one was given: the job
may do there what is not known here, and training gets past it at the second or third attempt.

Which rank: the one that did not come to where the others wait. Ranks of one pipeline stage pass the same edges in the
same order, so the one with the fewest edges is behind. Ranks of several stages do not; of those that are behind in
their stages, or of all if none is, it is one that works alone while the others wait for messages. A rank that is
stopped is always it. If none is found, all wait in the same place.

A rank is slow if, over the last KEPT iterations, its median computing time is SLOW times the median of the other ranks
of its stage on its node, and what it computes longer is SLOW_SHARE of an iteration, and SLOW_SECONDS. What the host
sees counts: where a device computes, that is how long its work takes to be submitted. It is slow until it has come half
way back.

In: `RankProgress` of the ranks of a node, times in seconds; `Signs` of work. Out: `HangVerdict`; `Stall`s, of nodes and
of the job; `SlowRank`s.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...model.progress import PAST_UPDATE, WorkPhase
from ...snapshot.segment.progress_words import KEPT, RankProgress

ITERATIONS = 10.0
LEAST_SECONDS = 60.0
LONGEST = 3.0
HANG = "hang of "  # begins what is reported to the agent in place of lost nodes
KNOWN = 3
LONG_SECONDS = 1800.0  # three times torch's default timeout of a collective with NCCL, and its default with gloo
APART_SECONDS = 600.0  # torch's default timeout of a collective with NCCL
GROWTH = 4.0
BUSY_SHARE = 0.05  # of a processor; the threads of a rank that only waits use less
SLOW = 1.5
SLOW_SHARE = 0.1
SLOW_SECONDS = 0.05  # of an iteration: what processes on one machine take from each other, which moves between ranks
_NEVER: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class Stall:
    """Where the rank is for which a job that hangs waits, as far as the nodes know that have been merged.

    `even`: no rank is behind any other; all are in this phase of this iteration. `patient`: it is no hang yet.
    """

    iteration: int
    waits: bool
    edges: int
    rank: int
    phase: WorkPhase
    position: int  # of its node
    even: bool
    patient: bool = False

    @property
    def order(self) -> tuple[int, bool, int, bool, int, int, int]:
        """The least is the culprit."""
        return self.iteration, self.waits, self.edges, not self.patient, self.rank, self.phase, self.position

    def who(self, node: str) -> str:
        """The culprit, for people: `node` is the name of its node."""
        if self.even:
            return f"all ranks, none behind the others, {self.phase.words} of iteration {self.iteration}"
        return f"rank {self.rank} of node {node}, {self.phase.words} of iteration {self.iteration}"


@dataclass(frozen=True)
class HangVerdict:
    """Whether the ranks of a node hang: `seconds` without progress, of `limit`, 0 if they are not judged. `stall` is
    there if the limit is exceeded; they hang unless it is patient. `ranks` are those for which the others wait, empty
    if none is behind."""

    seconds: float = 0.0
    limit: float = 0.0
    stall: Stall | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Signs:
    """What was seen of a rank's processes since they were looked at before: `busy`: the share of a processor that they
    used; `blocked`: one waits for a device or a file system, and could not be killed either; `moved`: the Python stack
    of the main thread has changed."""

    busy: float = 0.0
    blocked: bool = False
    moved: bool = False


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes `factor` times as long as the others of its stage on its node."""

    rank: int
    factor: float
    seconds: float  # longer than the others, per iteration


def limit_of(ranks: Collection[RankProgress], apart: bool = False, hangs: int = 0) -> float:
    """How many seconds without progress are a hang; 0 for any number. `apart`: other nodes are not known here.
    `hangs`: how often in a row the job hung in the present iteration."""
    given = next(iter(ranks)).limit_seconds
    if given == 0:
        return 0.0
    if any(rank.phase.long or not rank.done for rank in ranks):
        return max(LONG_SECONDS, given) if given is not None else LONG_SECONDS * GROWTH**hangs
    if given is not None:
        return given
    usual = usual_seconds(ranks)
    if usual is not None:
        limit = max(LEAST_SECONDS, ITERATIONS * usual, LONGEST * max(rank.longest for rank in ranks))
    else:
        limit = max(LEAST_SECONDS, min(ITERATIONS * max(rank.first for rank in ranks), LONG_SECONDS))
    return max(limit, APART_SECONDS if apart else 0.0) * GROWTH**hangs


def usual_seconds(ranks: Collection[RankProgress]) -> float | None:
    """The usual duration of an iteration, as measured recently; None before it is known of all ranks."""
    measured = [rank.seconds for rank in ranks if len(rank.seconds) >= KNOWN]
    if not ranks or len(measured) < len(ranks):
        return None
    return statistics.median(statistics.median(seconds) for seconds in measured)


def works(rank: RankProgress, signs: Signs) -> bool:
    """Whether a rank is at work. Where others can keep it, using a processor shows nothing, because waits of a device
    poll: there its stack has to move too."""
    return signs.blocked or signs.busy >= BUSY_SHARE and (signs.moved or not rank.waits)


def judge(
    ranks: Sequence[RankProgress],
    now: float,
    *,
    position: int = 0,
    watched_since: float = 0.0,
    stopped: Collection[int] = (),
    apart: bool = False,
    hangs: int = 0,
    worked: Mapping[int, float] = _NEVER,
) -> HangVerdict:
    """Judge the ranks of the node at `position`. They are not judged until all have begun and once one has ended.

    `watched_since`: nothing is known of the time before. `stopped`: ranks that a signal has stopped. `worked`: when
    ranks were last seen at work.
    """
    if not ranks or len(ranks) < ranks[0].ranks_of_node or any(rank.phase is WorkPhase.ENDED for rank in ranks):
        return HangVerdict()
    limit = limit_of(ranks, apart, hangs)
    counts_edges = any(rank.phase.long or not rank.done for rank in ranks)
    progressed = max(rank.edge_at if counts_edges else rank.since for rank in ranks)
    seconds = max(0.0, now - max(progressed, watched_since))
    if not limit or seconds <= limit:
        return HangVerdict(seconds, limit)
    behind = culprits(ranks, stopped)
    given = ranks[0].limit_seconds is not None
    may = not stopped and not given and seconds <= LONG_SECONDS * GROWTH**hangs
    stalls = []
    for rank in behind or ranks:
        at_work = rank.phase in PAST_UPDATE or rank.rank in worked and now - worked[rank.rank] <= limit
        stalls.append(_stall(rank, position, bool(stopped), may and at_work))
    first = min(stalls, key=lambda stall: (not stall.patient, stall.order))
    return HangVerdict(seconds, limit, replace(first, even=not behind), tuple(sorted(rank.rank for rank in behind)))


def culprits(ranks: Sequence[RankProgress], stopped: Collection[int] = ()) -> list[RankProgress]:
    """The ranks for which the others wait; [] if none is behind."""
    if held := [rank for rank in ranks if rank.rank in stopped]:
        return held
    stages: dict[int, list[RankProgress]] = {}
    for rank in ranks:
        stages.setdefault(rank.stage, []).append(rank)
    behind: list[RankProgress] = []
    for members in stages.values():
        places = [(rank.iteration, rank.edges) for rank in members]
        if min(places) != max(places):
            behind += [rank for rank, place in zip(members, places, strict=True) if place == min(places)]
    earliest = min(rank.iteration for rank in behind or ranks)
    left = [rank for rank in behind or ranks if rank.iteration == earliest]
    alone = [rank for rank in left if not rank.waits]
    found = alone or (left if behind else [])
    return [] if len(found) == len(ranks) else found


def _stall(rank: RankProgress, position: int, stopped: bool, patient: bool) -> Stall:
    waits = rank.waits and not stopped
    return Stall(rank.iteration, waits, rank.edges, rank.rank, rank.phase, position, False, patient)


def stall_of_ended(ranks: Sequence[RankProgress], position: int) -> Stall:
    """That of a node whose ranks have all ended in order, while others go on: it says nothing of theirs (`merged`)."""
    return Stall(max(rank.iteration for rank in ranks), False, 0, ranks[0].rank, WorkPhase.ENDED, position, True)


def merged(stalls: Iterable[Stall | None]) -> Stall | None:
    """The stall of several nodes: None if one of them does not hang, else the one that the others wait for. Nodes whose
    ranks have ended are not counted where others have ranks.

    Commutative, associative and idempotent, like the merging of all reports.
    """
    every = list(stalls)
    present = [stall for stall in every if stall is not None]
    if not present or len(present) < len(every):
        return None
    present = [stall for stall in present if stall.phase is not WorkPhase.ENDED] or present
    even = all(stall.even for stall in present) and len({(stall.iteration, stall.phase) for stall in present}) == 1
    return replace(min(present, key=lambda stall: stall.order), even=even)


def slow_ranks(ranks: Collection[RankProgress], before: Collection[int] = ()) -> tuple[SlowRank, ...]:
    """The ranks that are slow now. Those with fewer than KEPT iterations are not compared. `before`: those that were
    slow, and are it until they have come half way back."""
    known = [rank for rank in ranks if len(rank.computed) == KEPT]
    slow = []
    for rank in known:
        peers = [one for one in known if one is not rank and one.stage == rank.stage]
        others = [statistics.median(one.computed) for one in peers]
        if not others:
            continue
        own, usual = statistics.median(rank.computed), statistics.median(others)
        part = 0.5 if rank.rank in before else 1.0
        least = max(SLOW_SHARE * statistics.median(rank.seconds), SLOW_SECONDS)
        if own - usual > part * (SLOW - 1.0) * usual and own - usual >= part * least:
            slow.append(SlowRank(rank.rank, own / usual if usual else float("inf"), own - usual))
    return tuple(slow)
