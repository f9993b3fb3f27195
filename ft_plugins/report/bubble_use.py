"""What a job did with its bubbles: their share of an iteration, how often a checkpoint was committed, what was sent.

Invariant: everything is from events of the job itself: `timeline.recorded` and `bubbles.planned` of each rank,
`version.committed` of each node. Of several plans, the one with most committed versions is taken; the first of these
versions began before that plan and is left out of all sums. A node reports only those bubbles of a rank in which most
was sent: what was sent in the others is unknown, not zero.

In: events of all nodes. Out: `BubbleUse`; None where nothing was planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..bubbles.pacing import LIMITS
from ..bubbles.timeline_values import Row
from ..events import Event, catalogue

_COUNTED = ("in_bubbles", "late", "by_rate")


@dataclass(frozen=True)
class CopyTraffic:
    """How copies were sent from one committed version to another, `versions` and `iterations` later; in bytes."""

    idle_share: float  # of an iteration that is bubbles, over all ranks
    planned_iterations: int  # that a checkpoint takes
    versions: int
    iterations: int
    in_bubbles: int
    late: int
    by_rate: int

    @property
    def nbytes(self) -> int:
        """All that went."""
        return self.in_bubbles + self.late + self.by_rate

    @property
    def in_bubble_share(self) -> float | None:
        """Of all that went, what went in its bubble; None where nothing did."""
        return self.in_bubbles / self.nbytes if self.nbytes else None

    @property
    def every(self) -> float | None:
        """Iterations from one checkpoint to the next; None where there were no two."""
        return self.iterations / self.versions if self.versions else None

    def line(self) -> str:
        """In a sentence."""
        text = f"Bubbles are {self.idle_share:.0%} of an iteration"
        if self.every is None or self.in_bubble_share is None:
            return (
                f"{text}; a checkpoint every {self.planned_iterations} was planned, fewer than two were committed since"
            )
        late, rate = (each / self.nbytes for each in (self.late, self.by_rate))
        return (
            f"{text}; a checkpoint every {self.every:.1f} iterations (planned: {self.planned_iterations}); "
            f"{self.in_bubble_share:.0%} of its bytes went in their bubble, {late:.0%} late, {rate:.0%} by a rate"
        )


@dataclass(frozen=True)
class BubbleUse:
    """`rows` by rank, `nodes` where each stands; `sent` are bytes by rank and bubble, during `sending`; of ranks
    `partly_reported` they are not all."""

    rows: tuple[Row, ...]
    nodes: Mapping[int, str]
    sent: Mapping[int, Mapping[int, int]]
    sending: CopyTraffic
    partly_reported: Set[int] = frozenset()

    def bytes_per_iteration(self, rank: int, bubble: int) -> float | None:
        """Bytes that went in that bubble, on average; None where it was not reported."""
        sent = self.sent.get(rank, {})
        if rank in self.partly_reported and bubble not in sent:
            return None
        return sent.get(bubble, 0) / self.sending.iterations if self.sending.iterations else 0.0


def bubble_use(events: Sequence[Event]) -> BubbleUse | None:
    """Of a run, or None."""
    timelines: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.type is catalogue.TIMELINE_RECORDED and event.rank is not None:
            timelines[event.rank].append(event)
    if not timelines:
        return None
    rounds = range(min(map(len, timelines.values())))
    return max((_under(events, {rank: those[k] for rank, those in timelines.items()}) for k in rounds), key=_versions)


def _versions(use: BubbleUse) -> int:
    return use.sending.versions


def _under(events: Sequence[Event], plans: Mapping[int, Event]) -> BubbleUse:
    """What was sent under one plan, of which every rank has reported its part."""
    sums = dict.fromkeys(_COUNTED, 0)
    sent: dict[int, dict[int, int]] = defaultdict(dict)
    partly_reported: set[int] = set()
    spans = [(0, 0)]  # versions and iterations, of each node
    for node in {event.node for event in plans.values()}:
        since = max(event.time for event in plans.values() if event.node == node)
        counts = _counts(events, node, since)
        if len(counts) < 2:
            continue
        first, last = counts[0].fields, counts[-1].fields
        spans.append((len(counts) - 1, last["iteration"] - first["iteration"]))
        for key in _COUNTED:
            sums[key] += last[key] - first[key]
        before, after = (_filled(fields) for fields in (first, last))
        for rank, bubbles in after.items():
            if len(bubbles) >= LIMITS.reported_bubbles:
                partly_reported.add(rank)
            whole, earlier = len(before.get(rank, ())) < LIMITS.reported_bubbles, before.get(rank, {})
            sent[rank] = {at: nbytes - earlier.get(at, 0) for at, nbytes in bubbles.items() if whole or at in earlier}
    rows = tuple(Row.read(rank, event.fields) for rank, event in sorted(plans.items()))
    idle = sum(end - begin for row in rows for _, begin, end in row.bubbles)
    versions, iterations = max(spans)
    sending = CopyTraffic(
        idle / max(1e-9, sum(row.seconds for row in rows)), _planned(events, plans), versions, iterations, **sums
    )
    return BubbleUse(rows, {rank: event.node for rank, event in plans.items()}, sent, sending, partly_reported)


def _filled(fields: Mapping[str, Any]) -> dict[int, dict[int, int]]:
    """Bytes by rank and bubble, since there is the plan."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, bubble, nbytes in fields.get("filled", ()):
        found[rank][bubble] = nbytes
    return found


def _counts(events: Sequence[Event], node: str, since: float) -> list[Event]:
    """Versions committed on a node, until its ranks made a new plan or restarted."""
    found = []
    for event in events:
        if event.node != node or event.time <= since:
            continue
        if event.name in (catalogue.TIMELINE_RECORDED.name, catalogue.RANK_ATTACHED.name):
            break
        if event.type is catalogue.VERSION_COMMITTED:
            found.append(event)
    return found


def _planned(events: Sequence[Event], plans: Mapping[int, Event]) -> int:
    """Iterations of a checkpoint, by the summary that a rank emits right before its timeline."""
    rank, plan = min(plans.items())
    before = [
        event.fields["iterations"]
        for event in events
        if event.type is catalogue.BUBBLES_PLANNED and event.rank == rank and event.time <= plan.time
    ]
    return int(before[-1]) if before else 0
