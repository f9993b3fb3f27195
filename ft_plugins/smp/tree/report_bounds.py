"""Bound what other nodes report of versions by the lineage, and by what ranks can have begun. Pure; no I/O.

Ranks are never more than one captured version apart, because the reduction of an iteration needs all of them. So what
this node's ranks have begun bounds what any node can have begun, missed, sent or committed, and what can be announced.

Invariant: neither part of a decision ever goes back, so one wrong number would hold all commits up until training
reaches it. What exceeds a bound is not used. Its sender stays in the job: it lives, and its next report may be right.

In: the epoch, what this node has begun, summaries and announcements. Out: the same without what exceeds a bound, and
the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...snapshot.segment.slots import Version
from .agreement import Announcement, ExchangeDecision, ExchangeEpoch, Summary
from .standstill import Behind, Lack

# iterations by which a neighbour's report may be newer than this node's own, at equal progress: an SMP looks at its
# ranks every 0.05 s, ten times as rarely under load, and the shortest iterations take 2 ms. Ranks themselves are one
# interval apart at most, also under local SGD. A wrong number below the bound holds commits up for that long.
AHEAD = 256


@dataclass(frozen=True)
class Bounds:
    """What can be true. `begun`, `named` and `committed` are iterations of `lineage`: of what ranks have begun, of a
    version that was announced, which may be further ahead, and of one that is committed."""

    lineage: int
    base: Version | None
    begun: int
    named: int
    committed: int

    @classmethod
    def of(cls, epoch: ExchangeEpoch, begun: int, committed: Version | None) -> Bounds:
        """By the newest iteration that this node's ranks have begun, and the committed version as it is known here."""
        start = epoch.base.iteration if epoch.base else 0
        least = max(begun, start)
        most = least + AHEAD + epoch.interval
        since = committed.iteration if committed is not None and committed.lineage == epoch.lineage else start
        # `agreement.decide` announces a version that was missed again by half of the iterations since the committed one
        named = most + (most - min(since, most)) // 2 + epoch.interval
        return cls(epoch.lineage, epoch.base, most, named, least)

    def summary(self, position: int, summary: Summary) -> tuple[Summary, str]:
        """A child's summary as it can be used, and why it cannot be used whole; ''."""
        begun = Version(self.lineage, summary.begun) if summary.begun else None
        reason = self._excess(
            ("begun", begun, self.begun), ("encoded", summary.newest_encoded, self.begun),
            ("encoded", summary.least_encoded, self.begun), ("missed", summary.missed, self.named),
            ("late", summary.late, self.named), ("exchange", summary.exchange, self.named),
        ) or self._excess_committed(summary.newest_committed, summary.least_committed)  # fmt: skip
        if not reason:
            return summary, ""
        behind = Behind(Lack.REPORT, position)
        return Summary(summary.covered, lost=summary.lost, stall=summary.stall, behind=behind), reason

    def announcement(self, announcement: Announcement) -> tuple[Announcement, str]:
        """The parent's announcement as it can be used, and why it cannot be used whole; ''."""
        decision = announcement.decision
        named = self._excess(("exchange", decision.exchange, self.named))
        committed = self._excess_committed(decision.committed)
        usable = ExchangeDecision(None if named else decision.exchange, None if committed else decision.committed)
        return replace(announcement, decision=usable), named or committed

    def _excess(self, *reported: tuple[str, Version | None, int]) -> str:
        for name, version, most in reported:
            if version is None or version == self.base:
                continue
            if version.lineage != self.lineage or version.iteration > most:
                return f"{name}: iteration {version.iteration} of lineage {version.lineage}; {self._expected(most)}"
        return ""

    def _excess_committed(self, *versions: Version | None) -> str:
        """What was committed before the last recovery counts until a newer version is committed. A version is
        committed once every node has reported that it has sent it: this one too, so its ranks have begun it."""
        own = [version for version in versions if version is not None and version.lineage >= self.lineage]
        return self._excess(*(("committed", version, self.committed) for version in own))

    def _expected(self, most: int) -> str:
        return f"expected lineage {self.lineage} and at most iteration {most}, by what the ranks here have begun"
