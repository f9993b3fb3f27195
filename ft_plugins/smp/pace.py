"""Measure how often a version is committed, against the plan, and how much of the copies went in bubbles.

Planned is what the trainers write next to their gates (bubbles.gate): the iterations within which the bubbles carry one
version. As only every `interval`-th version is exchanged, a plan cannot be better than that.

Invariant: facts only, of one incarnation; nothing here changes what is sent. A version is announced before it exists,
and not before the previous one is committed, which takes a heartbeat: so one iteration more than planned is usual.
Reported (`rarer`) is more than twice the plan, several times in a row, or that nothing is committed any more.

In: versions as they are committed, the pacers of this node's ranks. Out: fields for events and `ft-plugins status`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from ..bubbles.gate_pacer import GatePacer
from ..snapshot.slots import Version

_IN_A_ROW = 3  # distances that it takes to judge
_RARER = 2  # times the plan, and one iteration more
_LATELY = 8  # recent versions of which the share in bubbles is reported
_HELD = 16  # further iterations, in which copies may wait for another profile, before none is reported


class Pace:
    """One node's, for one incarnation. Called under the tier's lock."""

    def __init__(self, interval: int, last: Version | None) -> None:
        """`interval`: iterations between two versions that are exchanged, at least; `last` is committed already."""
        self.pacers: dict[int, GatePacer] = {}  # of this node's ranks, where copies go out in bubbles
        self._interval = interval
        self._last = last
        self._base = last  # the version before all that are awaited
        self._distances: deque[int] = deque(maxlen=_IN_A_ROW)
        self._sums = deque([(0, 0)], maxlen=_LATELY + 1)  # bytes in bubbles, and all, when versions were committed
        self.waits = 0  # iterations captured since the last commit
        self.rarer = False

    def committed(self, version: Version) -> bool:
        """`version` is committed. Whether that changed `rarer`."""
        before, was = self._last, self.rarer
        self._last = self._base = version
        self.waits = 0
        self._sums.append(self._gone())
        if before is not None and before.lineage == version.lineage:
            self._distances.append(version.iteration - before.iteration)
        planned = self._followed()
        if planned is None or len(self._distances) < _IN_A_ROW:
            return False
        too_far = [distance > _RARER * planned + 1 for distance in self._distances]
        self.rarer = all(too_far) or (was and any(too_far))
        return self.rarer != was

    def captured(self, newest: Version) -> bool:
        """`newest` was captured, committed or not. Whether that changed `rarer`."""
        planned = self._followed()
        if not newest.iteration:  # of its lineage nothing is captured yet; it may begin at any iteration
            return False
        if self._base is None or newest.lineage != self._base.lineage:
            self._base = newest  # the first one of its lineage: none of it is committed yet
        self.waits = newest.iteration - self._base.iteration
        if planned is None or self.rarer or self.waits <= _IN_A_ROW * (_RARER * planned + 1) + _HELD:
            return False
        self.rarer = True
        return True

    def _followed(self) -> int | None:
        """`planned`; without a plan nothing is rarer: trainers report that the plan is gone."""
        planned = self.planned
        self.rarer = self.rarer and planned is not None
        return planned

    @property
    def planned(self) -> int | None:
        """Iterations per version by the plan; None where there is none, or none yet."""
        found = max((pacer.planned for pacer in self.pacers.values()), default=0)
        return -(-found // self._interval) * self._interval if found else None

    @property
    def iterations(self) -> int | None:
        """Between the last two that counted; None before there were two."""
        return self._distances[-1] if self._distances else None

    @property
    def share_in_bubbles(self) -> float | None:
        """Of what went for the last versions that count; None where nothing went."""
        (inside, total), (inside_before, total_before) = self._gone(), self._sums[0]
        return (inside - inside_before) / (total - total_before) if total > total_before else None

    def _gone(self) -> tuple[int, int]:
        inside = sum(pacer.inside_bytes for pacer in self.pacers.values())
        return inside, inside + sum(pacer.late_bytes + pacer.rate_bytes for pacer in self.pacers.values())

    def fields(self) -> dict[str, Any]:
        """For an event: iterations per version, bytes that went in their bubble, were through after it, or went by a
        rate; and of windows in which there was something to send, bytes that they took and offered."""
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
        return f"{often}, planned {self.planned}: a lost node costs so many more"

    def status(self) -> dict[str, Any]:
        """For people and programs: the same, and by rank."""
        ranks = [
            {
                "rank": rank, "in_bubbles": pacer.inside_bytes, "late": pacer.late_bytes, "by_rate": pacer.rate_bytes,
            }  # fmt: skip
            for rank, pacer in sorted(self.pacers.items())
        ]
        share = self.share_in_bubbles
        return {**self.fields(), "waits": self.waits, "share_in_bubbles": share, "rarer": self.rarer, "copies": ranks}


def in_words(tier: Mapping[str, Any]) -> str:
    """A status in a few words; '' if it says nothing."""
    if not tier.get("iterations") and not tier.get("rarer"):
        return ""
    often = _often(tier["iterations"], tier["waits"] if tier["rarer"] else 0)
    if not tier.get("planned"):
        return often
    inside = tier["share_in_bubbles"]
    share = f", {inside:.0%} of it in bubbles" if inside is not None else ""
    return f"{often}, planned {tier['planned']}{share}" + (": rarer than planned" if tier["rarer"] else "")


def _often(iterations: int | None, waits: int) -> str:
    """Between the last two commits, or since the last one, if that is more."""
    none = iterations is None or waits > iterations
    many = waits if none else iterations
    if not many:
        return "one just now"
    return f"{'none in' if none else 'every'} {many} iteration{'s' * (many > 1)}"
