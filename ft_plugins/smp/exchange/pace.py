"""Measure how often a version is committed, compared to the plan, and how much of the copies was sent in bubbles.

The plan is what the trainers write next to their gates (bubbles.gate.gate): the iterations in which the bubbles carry
one version. As only every `interval`-th version is exchanged, the plan is at least that.

Invariant: facts only, of one incarnation; nothing here changes what is sent. A version is announced before it exists,
and not before the previous one is committed on all nodes: so one iteration more than planned is normal.
`rarer` means more than twice the plan, several times in a row, or that nothing is committed any more.

In: versions as they are committed, the pacers of this node's ranks. Out: fields for events and `ft-plugins status`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...snapshot.segment.slots import Version

if TYPE_CHECKING:  # the command line imports this module, and not numpy
    from ...bubbles.gate.gate_pacer import GatePacer

_IN_A_ROW = 3  # distances needed for a judgement
_RARER = 2  # times the plan, plus one iteration
_RECENT = 8  # versions over which the share in bubbles is reported
_REPROFILING = 16  # extra iterations, in which copies may wait for another profile, before `rarer` is set


class Pace:
    """The pace of one node, for one incarnation. Call under the tier's lock."""

    def __init__(self, interval: int, last: Version | None, restored: Version | None = None) -> None:
        """`interval`: minimum number of iterations between two exchanged versions; `last` is committed already.
        `restored`: by this incarnation, which commits it first, however often it commits later."""
        self.pacers: dict[int, GatePacer] = {}  # of this node's ranks, if copies are sent in bubbles
        self._interval = interval
        self._last = last
        self._restored = restored
        self._base = last  # the version from which `waits` counts
        self._distances: deque[int] = deque(maxlen=_IN_A_ROW)
        self._sums = deque([(0, 0)], maxlen=_RECENT + 1)  # bytes in bubbles, and all bytes, at each commit
        self.waits = 0  # iterations captured since the last commit
        self.usual = 0  # the longest of the recent distances; 0 before the first commit of a new version
        self.rarer = False

    def committed(self, version: Version) -> bool:
        """Record that `version` is committed. Returns whether that changed `rarer`."""
        before, was_rarer = self._last, self.rarer
        self._last = self._base = version
        waits, self.waits = self.waits, 0
        self._sums.append(self._sent())
        if version == self._restored:
            return False
        if before is not None and before.lineage == version.lineage:
            self._distances.append(version.iteration - before.iteration)
        self.usual = max(self._distances, default=max(waits, 1))
        planned = self._followed_plan()
        if planned is None or len(self._distances) < _IN_A_ROW:
            return False
        too_far = [distance > _RARER * planned + 1 for distance in self._distances]
        self.rarer = all(too_far) or (was_rarer and any(too_far))
        return self.rarer != was_rarer

    def captured(self, newest: Version) -> bool:
        """Record that `newest` was captured, committed or not. Returns whether that changed `rarer`."""
        planned = self._followed_plan()
        if not newest.iteration:  # nothing of its lineage is captured yet; it may begin at any iteration
            return False
        if self._base is None or newest.lineage != self._base.lineage:
            self._base = newest  # the first version of its lineage, of which none is committed yet
        self.waits = newest.iteration - self._base.iteration
        if planned is None or self.rarer or self.waits <= _IN_A_ROW * (_RARER * planned + 1) + _REPROFILING:
            return False
        self.rarer = True
        return True

    def _followed_plan(self) -> int | None:
        """`planned`. Without a plan, clears `rarer`: trainers report that the plan is gone."""
        planned = self.planned
        self.rarer = self.rarer and planned is not None
        return planned

    @property
    def planned(self) -> int | None:
        """Iterations per version by the plan; None if there is no plan, or none yet."""
        iterations = max((pacer.planned for pacer in self.pacers.values()), default=0)
        return -(-iterations // self._interval) * self._interval if iterations else None

    @property
    def iterations(self) -> int | None:
        """Iterations between the last two committed versions; None before there were two."""
        return self._distances[-1] if self._distances else None

    @property
    def share_in_bubbles(self) -> float | None:
        """The share of bytes sent in bubbles, over the last committed versions; None if nothing was sent."""
        (inside, total), (inside_before, total_before) = self._sent(), self._sums[0]
        return (inside - inside_before) / (total - total_before) if total > total_before else None

    def _sent(self) -> tuple[int, int]:
        """Bytes sent in bubbles, and in total."""
        inside = sum(pacer.inside_bytes for pacer in self.pacers.values())
        return inside, inside + sum(pacer.late_bytes + pacer.rate_bytes for pacer in self.pacers.values())

    def fields(self) -> dict[str, Any]:
        """For an event: iterations per version; bytes sent in their bubble, after it, or at a rate; of windows in which
        there was something to send, the bytes taken and offered."""
        return {
            "iterations": self.iterations,
            "planned": self.planned,
            "in_bubbles": sum(pacer.inside_bytes for pacer in self.pacers.values()),
            "late": sum(pacer.late_bytes for pacer in self.pacers.values()),
            "by_rate": sum(pacer.rate_bytes for pacer in self.pacers.values()),
            "taken": sum(pacer.fullness.taken for pacer in self.pacers.values()),
            "offered": sum(pacer.fullness.offered for pacer in self.pacers.values()),
        }

    def words(self) -> str:
        """The alarm when `rarer` has changed."""
        often = _often(self.iterations, self.waits)
        if not self.rarer:
            return f"{often}, planned {self.planned}"
        return f"{often}, planned {self.planned}: losing a node costs more iterations than planned"

    def status(self) -> dict[str, Any]:
        """For people and programs: `fields`, and bytes by rank."""
        ranks = [
            {
                "rank": rank,
                "in_bubbles": pacer.inside_bytes,
                "late": pacer.late_bytes,
                "by_rate": pacer.rate_bytes,
            }  # fmt: skip
            for rank, pacer in sorted(self.pacers.items())
        ]
        share = self.share_in_bubbles
        return {**self.fields(), "waits": self.waits, "share_in_bubbles": share, "rarer": self.rarer, "copies": ranks}


def pace_text(tier: Mapping[str, Any]) -> str:
    """A short text from the status of a node tier; '' if there is nothing to report."""
    if not tier.get("iterations") and not tier.get("rarer"):
        return ""
    often = _often(tier["iterations"], tier["waits"] if tier["rarer"] else 0)
    if not tier.get("planned"):
        return often
    inside = tier["share_in_bubbles"]
    share = f", {inside:.0%} of it in bubbles" if inside is not None else ""
    return f"{often}, planned {tier['planned']}{share}" + (": rarer than planned" if tier["rarer"] else "")


def _often(iterations: int | None, waits: int) -> str:
    """Iterations between the last two commits, or since the last one if that is more, as text."""
    overdue = iterations is None or waits > iterations
    count = waits if overdue else iterations
    if not count:
        return "one just now"
    return f"{'none in' if overdue else 'every'} {count} iteration{'s' * (count > 1)}"
