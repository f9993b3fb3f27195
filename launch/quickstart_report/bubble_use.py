"""Report how a job used its bubbles: their share of an iteration, iterations per version, the bytes sent.

Invariant: everything comes from the job's events: `timeline.recorded` and `bubbles.planned` of each rank,
`version.committed` of each node. Of several plans, the one with the most committed versions is used. The exchange of
its first version began before the plan, so the bytes of that version are left out. Timelines belong to one plan if the
ranks planned in the same iteration of the same incarnation: a rank that was lost before it recorded its timeline is
missing in that plan only.

For each rank a node reports only the bubbles that carried most bytes; the bytes sent in the others are unknown, not
zero. Bytes are counted by an SMP from its start, so commits of its replacement are left out.

In: events of all nodes. Out: `BubbleUse`; None if nothing was planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ft_plugins.bubbles.gate.pacing_limits import LIMITS
from ft_plugins.bubbles.timeline.timeline_values import Row
from ft_plugins.events import Event, catalogue

_BYTE_FIELDS = ("in_bubbles", "late", "by_rate")


@dataclass(frozen=True)
class CopyTraffic:
    """Bytes of copies, summed over nodes: each node's between its first and last committed version under the plan.
    `versions` and `iterations` are counted between these two, on the node with the most versions."""

    idle_share: float  # bubbles, as a share of an iteration, over all ranks
    planned_iterations_per_version: int
    versions: int
    iterations: int
    in_bubbles: int  # sent within windows
    late: int  # sent in windows that closed before the data had arrived
    by_rate: int  # sent outside bubbles, rate-limited

    @property
    def nbytes(self) -> int:
        """All bytes sent."""
        return self.in_bubbles + self.late + self.by_rate

    @property
    def in_bubble_share(self) -> float | None:
        """The share of bytes sent in their bubble; None if nothing was sent."""
        return self.in_bubbles / self.nbytes if self.nbytes else None

    @property
    def iterations_per_version(self) -> float | None:
        """Iterations from one committed version to the next; None for fewer than two."""
        return self.iterations / self.versions if self.versions else None

    def line(self) -> str:
        """A summary in one sentence."""
        text, planned = f"Bubbles are {self.idle_share:.0%} of an iteration", self.planned_iterations_per_version
        if self.iterations_per_version is None:
            return f"{text}; planned: a version every {planned}; fewer than two were committed since the plan"
        text += f"; a version every {self.iterations_per_version:.1f} iterations (planned: {planned})"
        if self.in_bubble_share is None:
            return f"{text}; no copies were sent"
        late, rate = (each / self.nbytes for each in (self.late, self.by_rate))
        return (
            f"{text}; {self.in_bubble_share:.0%} of its bytes sent in their bubble, {late:.0%} late, "
            f"{rate:.0%} rate-limited"
        )


@dataclass(frozen=True)
class BubbleUse:
    """One plan and what was sent under it. `nodes`: by rank. `sent`: bytes by rank and bubble, during the `iterations`
    of that rank. `partly_reported`: the ranks for which bubbles may be missing in `sent`."""

    rows: tuple[Row, ...]
    nodes: Mapping[int, str]
    sent: Mapping[int, Mapping[int, int]]
    traffic: CopyTraffic
    iterations: Mapping[int, int]  # by rank, between the commits of its node; missing if there are too few
    partly_reported: Set[int] = frozenset()

    def bytes_per_iteration(self, rank: int, bubble: int) -> float | None:
        """Mean bytes per iteration sent in a bubble; None if not reported."""
        sent, iterations = self.sent.get(rank, {}), self.iterations.get(rank, 0)
        if not iterations or (rank in self.partly_reported and bubble not in sent):
            return None
        return sent.get(bubble, 0) / iterations


def bubble_use(events: Sequence[Event]) -> BubbleUse | None:
    """The bubble use of a run; None if nothing was planned."""
    in_order = sorted(events, key=lambda event: event.time)
    uses = [_use_of_plan(in_order, timelines) for timelines in _plans(in_order)]
    return max(uses, key=lambda use: use.traffic.versions, default=None)


def _plans(events: Sequence[Event]) -> list[dict[int, Event]]:
    """The `timeline.recorded` events of each plan, by rank.

    All ranks of an incarnation attach before any of them plans, so the first attachment after a timeline begins the
    next incarnation.
    """
    plans: dict[tuple[int, int], dict[int, Event]] = defaultdict(dict)
    incarnation, has_planned = 0, False
    for event in events:
        if event.type is catalogue.RANK_ATTACHED and has_planned:
            incarnation, has_planned = incarnation + 1, False
        elif event.type is catalogue.TIMELINE_RECORDED and event.rank is not None:
            plans[incarnation, event.fields["iteration"]][event.rank] = event
            has_planned = True
    return list(plans.values())


def _use_of_plan(events: Sequence[Event], timelines: Mapping[int, Event]) -> BubbleUse:
    """What was sent under one plan. `timelines`: its `timeline.recorded` event of every rank."""
    sums = dict.fromkeys(_BYTE_FIELDS, 0)
    sent: dict[int, dict[int, int]] = defaultdict(dict)
    partly_reported: set[int] = set()
    iterations_of: dict[int, int] = {}
    progress = [(0, 0)]  # (versions, iterations) by node
    for node in {event.node for event in timelines.values()}:
        since = max(event.time for event in timelines.values() if event.node == node)
        committed = _committed(events, node, since)
        if len(committed) < 2:
            continue
        first, last = committed[0].fields, committed[-1].fields
        progress.append((len(committed) - 1, last["iteration"] - first["iteration"]))
        iterations_of |= {rank: progress[-1][1] for rank, event in timelines.items() if event.node == node}
        for key in _BYTE_FIELDS:
            sums[key] += last[key] - first[key]
        before, after = (_filled(fields) for fields in (first, last))
        for rank, bubbles in after.items():
            if len(bubbles) >= LIMITS.reported_bubbles:
                partly_reported.add(rank)
            earlier = before.get(rank, {})
            earlier_was_whole = len(earlier) < LIMITS.reported_bubbles  # a bubble that it lacks had 0 bytes
            sent[rank] = {
                at: nbytes - earlier.get(at, 0) for at, nbytes in bubbles.items() if earlier_was_whole or at in earlier
            }
    rows = tuple(Row.read(rank, event.fields) for rank, event in sorted(timelines.items()))
    planned = {rank: _planned(events, rank, event) for rank, event in sorted(timelines.items())}
    idle = sum(fields["idle_seconds"] for fields in planned.values())  # not from timelines: they omit later bubbles
    seconds = max(1e-9, sum(row.seconds for row in rows))  # avoids a division by zero
    versions, iterations = max(progress)
    per_version = planned[min(planned)]["iterations"]  # any rank's: all ranks adopt the same number
    traffic = CopyTraffic(idle / seconds, per_version, versions, iterations, **sums)
    nodes = {rank: event.node for rank, event in timelines.items()}
    return BubbleUse(rows, nodes, sent, traffic, iterations_of, partly_reported)


def _filled(fields: Mapping[str, Any]) -> dict[int, dict[int, int]]:
    """Bytes by rank and bubble since the plan was made."""
    by_rank: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, bubble, nbytes in fields.get("filled", ()):
        by_rank[rank][bubble] = nbytes
    return by_rank


def _committed(events: Sequence[Event], node: str, since: float) -> list[Event]:
    """The commits of a node's SMP after `since`, until its ranks made a new plan or restarted, or another SMP replaced
    it."""
    commits: list[Event] = []
    for event in events:
        if event.node != node or event.time <= since:
            continue
        if event.type in (catalogue.TIMELINE_RECORDED, catalogue.RANK_ATTACHED):
            break
        if event.type is catalogue.VERSION_COMMITTED:
            if commits and event.pid != commits[0].pid:
                break
            commits.append(event)
    return commits


def _planned(events: Sequence[Event], rank: int, timeline: Event) -> Mapping[str, Any]:
    """The fields of the `bubbles.planned` event that a rank emits right before its timeline; zeros if it is missing."""
    before = [
        event.fields
        for event in events
        if event.type is catalogue.BUBBLES_PLANNED and event.rank == rank and event.time <= timeline.time
    ]
    return before[-1] if before else {"iterations": 0, "idle_seconds": 0.0}
