"""Decide which version to exchange next and which version is committed for the node tier. Pure; no I/O.

A version is committed once every node reports that its data, parity and copies are complete. The previously committed
version stays pinned until then. The node at position 0 decides, from the nodes' reports alone, so a replacement of its
SMP can reconstruct the decision.

Reports are merged on their way to it into one `Summary` of bounded size. Merging is commutative, associative and
idempotent: a node that has just changed its place in the tree may be included twice, once with an outdated report. An
outdated report can delay a commit, never cause one: what must hold for all nodes must hold for both reports.

The next version to exchange is announced before any rank starts capturing it, so every SMP is waiting when its ranks
seal it. An SMP that missed it reports that, and a later one is announced. If ranks were past the version when it was
announced, the next one is announced further ahead, by half of the iterations since the committed one: however long
reports take, after a few attempts a version is announced in time. Without a committed one it is FURTHER at most, or
twice of those by which it was late; the first announcement of all is a guess: ranks may continue from any iteration of
the framework's own checkpoint. After a recovery the restored
version is exchanged first, because its redundancy was lost. A version that was announced before the ranks chose other
intervals, by which they do not capture it, is given up for a later one at once.

What other nodes report is bounded first (`Bounds`), by the lineage and by what ranks can have begun. Ranks are never
more than one captured version apart, because the reduction of an iteration needs all of them. So what this node's ranks
have begun bounds what any node can have begun, missed, sent or committed, and what can be announced. Neither part of a
decision ever goes back, so one wrong number would hold all commits up until training reaches it. What exceeds a bound
is not used. Its sender stays in the job: it lives, and its next report may be right.

In: `NodeReport`s, the incarnation's facts. Out: `Summary`, `ExchangeDecision`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from ...planner.job_intervals import GROWTH
from ...snapshot.schedule import ChosenSchedule, next_due
from ...snapshot.segment.slots import Version
from ..watch.hang import Stall
from ..watch.hang import merged as merged_stall
from .standstill import Behind, Lack

FURTHER = 64  # iterations: where ranks begin is not known, so half of those since then may be very many
LOST_LIMIT = 64  # positions in one summary; more are reported after these have been dealt with
# iterations by which a neighbour's report may be newer than this node's own, at equal progress: an SMP looks at its
# ranks every 0.05 s, ten times as rarely under load, and the shortest iterations take 2 ms. Ranks themselves are one
# interval apart at most, also under local SGD. A wrong number below the bound holds commits up for that long.
AHEAD = 256


class Sealing(Enum):
    """Whether the ranks of a node have sealed the version to exchange. MISSED: one of them has skipped it, or was past
    the point where it reads that parity of it is needed."""

    DONE = "on all ranks"
    PENDING = "not yet on all"
    MISSED = "never"


@dataclass(frozen=True)
class ExchangeEpoch:
    """What all nodes of one incarnation agree on. `base` is the restored version, None after a start from nothing."""

    lineage: int
    base: Version | None
    nodes: int
    interval: int  # minimum number of iterations between two exchanged versions, as configured
    chosen: ChosenSchedule | None = None  # as this node knows; the same on all soon

    @property
    def distance(self) -> int:
        """Minimum number of iterations between two exchanged versions."""
        return self.interval * (self.chosen.now.captured if self.chosen else 1)

    def due(self, after: int) -> int:
        """The first iteration after `after` whose version may be exchanged."""
        return self.chosen.due(after, self.interval) if self.chosen else next_due(after, self.interval)

    def gives_up(self, version: Version) -> bool:
        """Whether ranks have chosen not to capture a version that was announced."""
        return self.chosen is not None and version != self.base and self.due(version.iteration - 1) != version.iteration


@dataclass(frozen=True)
class NodeReport:
    """The state of one node. `begun` is the newest iteration that one of its ranks has begun to capture.

    `exchange`: the version that this node sends, or waits to send because it was announced.
    `missed`: a version, announced to this node, that it can never send or complete; no newer than `exchange`, if any.
    `late`: the same, if the reason is that ranks were past it when they read that it was announced.
    `encoded`: all receivers have taken what this node sent of that version, and what it stores of it is complete.
    `stall`: its ranks make no progress, and where they are.
    `behind`: what its exchange lacks, if that takes long.
    `chosen`: the intervals that its ranks chose; known to every node by itself, and not sent.
    """

    begun: int
    exchange: Version | None = None
    missed: Version | None = None
    encoded: Version | None = None
    committed: Version | None = None
    late: Version | None = None
    stall: Stall | None = None
    behind: Behind | None = None
    chosen: ChosenSchedule | None = None


@dataclass(frozen=True)
class ExchangeDecision:
    """What every SMP does now: exchange one version, keep the committed one."""

    exchange: Version | None = None
    committed: Version | None = None


@dataclass(frozen=True)
class Announcement:
    """What position 0 announces to all nodes: its decision, positions that have been silent for too long, and that the
    job hangs (`stall`), and what the exchange lacks if it takes long (`behind`)."""

    decision: ExchangeDecision = ExchangeDecision()
    lost: tuple[int, ...] = ()
    stall: Stall | None = None
    behind: Behind | None = None


@dataclass(frozen=True)
class Summary:
    """The reports of the positions in `covered`, a bitmap. None is less than any version.

    `lost` are positions that were silent for too long where they were expected: at most the LOST_LIMIT lowest.
    `stall`: all of the nodes hang. `behind`: the first cause for which the exchange takes long.
    """

    covered: int = 0
    begun: int = 0
    exchange: Version | None = None  # the newest, as the next one
    missed: Version | None = None
    least_encoded: Version | None = None
    newest_encoded: Version | None = None
    least_committed: Version | None = None
    newest_committed: Version | None = None
    lost: tuple[int, ...] = ()
    late: Version | None = None
    stall: Stall | None = None
    behind: Behind | None = None


def summarize(position: int, report: NodeReport) -> Summary:
    """The summary of one report."""
    return Summary(
        1 << position, report.begun, report.exchange, report.missed, report.encoded, report.encoded, report.committed,
        report.committed, (), report.late, report.stall, report.behind,
    )  # fmt: skip


def merge(summaries: Iterable[Summary]) -> Summary:
    """The summary of all reports that are in any of `summaries`."""
    summaries = list(summaries)
    some = [summary for summary in summaries if summary.covered]
    covered = 0
    for summary in some:
        covered |= summary.covered
    lost = {position for summary in summaries for position in summary.lost}
    return Summary(
        covered,
        max((summary.begun for summary in some), default=0),
        _newest(summary.exchange for summary in some),
        _newest(summary.missed for summary in some),
        _least(summary.least_encoded for summary in some),
        _newest(summary.newest_encoded for summary in some),
        _least(summary.least_committed for summary in some),
        _newest(summary.newest_committed for summary in some),
        tuple(sorted(lost)[:LOST_LIMIT]),
        _newest(summary.late for summary in some),
        merged_stall(summary.stall for summary in some),
        min((summary.behind for summary in some if summary.behind is not None), default=None),
    )


def decide(epoch: ExchangeEpoch, before: ExchangeDecision, summary: Summary) -> ExchangeDecision:
    """The decision after `before`, from the newest reports."""
    committed = _newest((before.committed, summary.newest_committed))
    exchange = _newest((before.exchange, summary.exchange))
    if exchange is not None and committed is not None and exchange <= committed:
        exchange = None
    if summary.covered != (1 << epoch.nodes) - 1:
        return ExchangeDecision(exchange, committed)
    if exchange is not None and summary.least_encoded == summary.newest_encoded == exchange:
        committed, exchange = exchange, None
    elif exchange is not None and (summary.missed == exchange or epoch.gives_up(exchange)):
        summary, exchange = replace(summary, missed=exchange), None
    if exchange is None:
        exchange = _next(epoch, committed, summary)
    return ExchangeDecision(exchange, committed)


def _next(epoch: ExchangeEpoch, committed: Version | None, summary: Summary) -> Version:
    """The restored version until every node has committed it, then the next due iteration that no rank has begun."""
    base, missed = epoch.base, summary.missed
    unsettled = base is not None and (committed is None or committed <= base) and missed is None
    if base is not None and unsettled and not summary.least_committed == summary.newest_committed == base:
        return base
    begun = max(base.iteration if base else 0, summary.begun)
    if missed is not None and missed.lineage == epoch.lineage:
        begun = max(begun, missed.iteration)
    if summary.late is not None and summary.late == missed and (committed is None or missed > committed):
        since = committed if committed is not None and committed.lineage == epoch.lineage else base
        if since is not None:
            begun += (begun - since.iteration) // 2
        elif missed.lineage == epoch.lineage and missed.iteration > epoch.distance:  # else it was a guess
            begun += max(2 * (begun - missed.iteration), min(begun // 2, FURTHER))
    return Version(epoch.lineage, epoch.due(begun))


def newer(one: ExchangeDecision, other: ExchangeDecision) -> ExchangeDecision:
    """The later of two decisions of one incarnation, of which neither part ever goes back."""
    if one == other:
        return one
    exchange, committed = (one.exchange, other.exchange), (one.committed, other.committed)
    return ExchangeDecision(_newest(exchange), _newest(committed))


def _newest(versions: Iterable[Version | None]) -> Version | None:
    return max((version for version in versions if version is not None), default=None)


def _least(versions: Iterable[Version | None]) -> Version | None:
    every = list(versions)
    present = [version for version in every if version is not None]
    return min(present) if present and len(present) == len(every) else None


# ---- what other nodes report ----


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
        distance = epoch.distance * (GROWTH if epoch.chosen else 1)  # ranks of other nodes may have chosen just now
        most = least + AHEAD + distance
        since = committed.iteration if committed is not None and committed.lineage == epoch.lineage else start
        # `agreement.decide` announces a version that was missed again by half of the iterations since the committed one
        named = most + (most - min(since, most)) // 2 + distance
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
