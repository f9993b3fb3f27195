"""Report how a job used its bubbles: their share of an iteration, iterations per version, the bytes sent.

Invariant: everything comes from the job's events: `timeline.recorded` and `bubbles.planned` of each rank,
`version.committed` of each node. Of several plans, the one with the most committed versions is used. The first of these
versions began before the plan and is left out of all sums. A node reports only the bubbles of a rank that carried most;
the bytes sent in the others are unknown, not zero.

In: events of all nodes. Out: `BubbleUse`; None if nothing was planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..bubbles.pacing import LIMITS
from ..bubbles.timeline_values import Row
from ..events import Event, catalogue

_BYTE_FIELDS = ("in_bubbles", "late", "by_rate")


@dataclass(frozen=True)
class CopyTraffic:
    """Bytes of copies sent between two committed versions that are `versions` and `iterations` apart."""

    idle_share: float  # bubbles, as a share of an iteration, over all ranks
    planned_iterations: int  # per version
    versions: int
    iterations: int
    in_bubbles: int
    late: int
    by_rate: int

    @property
    def nbytes(self) -> int:
        """All bytes sent."""
        return self.in_bubbles + self.late + self.by_rate

    @property
    def in_bubble_share(self) -> float | None:
        """The share of bytes sent in their bubble; None if nothing was sent."""
        return self.in_bubbles / self.nbytes if self.nbytes else None

    @property
    def every(self) -> float | None:
        """Iterations from one committed version to the next; None for fewer than two."""
        return self.iterations / self.versions if self.versions else None

    def line(self) -> str:
        """A summary in one sentence."""
        text = f"Bubbles are {self.idle_share:.0%} of an iteration"
        if self.every is None or self.in_bubble_share is None:
            return f"{text}; planned: a version every {self.planned_iterations}; fewer than two were committed since"
        late, rate = (each / self.nbytes for each in (self.late, self.by_rate))
        return (
            f"{text}; a version every {self.every:.1f} iterations (planned: {self.planned_iterations}); "
            f"{self.in_bubble_share:.0%} of its bytes sent in their bubble, {late:.0%} late, {rate:.0%} rate-limited"
        )


@dataclass(frozen=True)
class BubbleUse:
    """One plan and what was sent under it. `nodes`: by rank; `sent`: bytes by rank and bubble, during `sending`, not
    complete for the ranks `partly_reported`."""

    rows: tuple[Row, ...]
    nodes: Mapping[int, str]
    sent: Mapping[int, Mapping[int, int]]
    sending: CopyTraffic
    partly_reported: Set[int] = frozenset()

    def bytes_per_iteration(self, rank: int, bubble: int) -> float | None:
        """Mean bytes per iteration sent in a bubble; None if not reported."""
        sent = self.sent.get(rank, {})
        if rank in self.partly_reported and bubble not in sent:
            return None
        return sent.get(bubble, 0) / self.sending.iterations if self.sending.iterations else 0.0


def bubble_use(events: Sequence[Event]) -> BubbleUse | None:
    """The bubble use of a run; None if nothing was planned."""
    timelines: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.type is catalogue.TIMELINE_RECORDED and event.rank is not None:
            timelines[event.rank].append(event)
    if not timelines:
        return None
    rounds = range(min(map(len, timelines.values())))
    uses = (_under(events, {rank: own[k] for rank, own in timelines.items()}) for k in rounds)
    return max(uses, key=lambda use: use.sending.versions)


def _under(events: Sequence[Event], plans: Mapping[int, Event]) -> BubbleUse:
    """What was sent under one plan. `plans`: its `timeline.recorded` event of every rank."""
    sums = dict.fromkeys(_BYTE_FIELDS, 0)
    sent: dict[int, dict[int, int]] = defaultdict(dict)
    partly_reported: set[int] = set()
    spans = [(0, 0)]  # versions and iterations, of each node
    for node in {event.node for event in plans.values()}:
        since = max(event.time for event in plans.values() if event.node == node)
        committed = _committed(events, node, since)
        if len(committed) < 2:
            continue
        first, last = committed[0].fields, committed[-1].fields
        spans.append((len(committed) - 1, last["iteration"] - first["iteration"]))
        for key in _BYTE_FIELDS:
            sums[key] += last[key] - first[key]
        before, after = (_filled(fields) for fields in (first, last))
        for rank, bubbles in after.items():
            if len(bubbles) >= LIMITS.reported_bubbles:
                partly_reported.add(rank)
            earlier = before.get(rank, {})
            all_reported = len(earlier) < LIMITS.reported_bubbles
            sent[rank] = {
                at: nbytes - earlier.get(at, 0) for at, nbytes in bubbles.items() if all_reported or at in earlier
            }
    rows = tuple(Row.read(rank, event.fields) for rank, event in sorted(plans.items()))
    idle = sum(end - begin for row in rows for _, begin, end in row.bubbles)
    versions, iterations = max(spans)
    sending = CopyTraffic(
        idle / max(1e-9, sum(row.seconds for row in rows)), _planned(events, plans), versions, iterations, **sums
    )
    return BubbleUse(rows, {rank: event.node for rank, event in plans.items()}, sent, sending, partly_reported)


def _filled(fields: Mapping[str, Any]) -> dict[int, dict[int, int]]:
    """Bytes by rank and bubble since the plan was made."""
    by_rank: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, bubble, nbytes in fields.get("filled", ()):
        by_rank[rank][bubble] = nbytes
    return by_rank


def _committed(events: Sequence[Event], node: str, since: float) -> list[Event]:
    """The commits of a node until its ranks made a new plan or restarted."""
    commits = []
    for event in events:
        if event.node != node or event.time <= since:
            continue
        if event.name in (catalogue.TIMELINE_RECORDED.name, catalogue.RANK_ATTACHED.name):
            break
        if event.type is catalogue.VERSION_COMMITTED:
            commits.append(event)
    return commits


def _planned(events: Sequence[Event], plans: Mapping[int, Event]) -> int:
    """Planned iterations per version, from the summary that a rank emits right before its timeline."""
    rank, plan = min(plans.items())
    before = [
        event.fields["iterations"]
        for event in events
        if event.type is catalogue.BUBBLES_PLANNED and event.rank == rank and event.time <= plan.time
    ]
    return int(before[-1]) if before else 0
