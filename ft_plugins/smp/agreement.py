"""Decide which version to exchange next and which version is committed for the node tier. Pure; no I/O.

A version is committed once every node reports that its data, parity and copies are complete. The previously committed
version stays pinned until then. The coordinator (the node at position 0) decides from the nodes' reports alone, so a
replacement coordinator can reconstruct the decision.

The next version to exchange is announced before any rank starts capturing it, so every SMP is waiting when its ranks
seal it. An SMP that missed it reports that, and a later one is announced. After a recovery the restored version is
exchanged first, because its redundancy was lost.

In: `NodeReport`s, the incarnation's facts, times (seconds, monotonic). Out: `ExchangeDecision`, silent positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import ProtocolError
from ..snapshot.slots import Version


@dataclass(frozen=True)
class ExchangeEpoch:
    """What all nodes of one incarnation agree on. `base` is the restored version, None after a start from nothing."""

    lineage: int
    base: Version | None
    nodes: int
    interval: int  # minimum number of iterations between two exchanged versions


@dataclass(frozen=True)
class NodeReport:
    """The state of one node. `begun` is the newest iteration that one of its ranks has begun to capture.

    `exchange`: the version that this node sends, or waits to send because it was announced.
    `encoded`: all receivers have taken what this node sent of that version, and what it stores of it is complete.
    """

    begun: int
    exchange: Version | None = None
    missed: Version | None = None
    encoded: Version | None = None
    committed: Version | None = None


@dataclass(frozen=True)
class ExchangeDecision:
    """What every SMP does now: exchange one version, keep the committed one."""

    exchange: Version | None = None
    committed: Version | None = None


def decide(epoch: ExchangeEpoch, before: ExchangeDecision, reports: Mapping[int, NodeReport]) -> ExchangeDecision:
    """The decision after `before`, from the newest report of each position that has sent one."""
    committed = _newest(before.committed, *(report.committed for report in reports.values()))
    exchange = _newest(before.exchange, *(report.exchange for report in reports.values()))
    if exchange is not None and committed is not None and exchange <= committed:
        exchange = None
    if len(reports) < epoch.nodes:
        return ExchangeDecision(exchange, committed)
    if exchange is not None and all(report.encoded == exchange for report in reports.values()):
        committed, exchange = exchange, None
    elif exchange is not None and any(report.missed == exchange for report in reports.values()):
        exchange = None
    if exchange is None:
        exchange = _next(epoch, committed, reports)
    return ExchangeDecision(exchange, committed)


def _next(epoch: ExchangeEpoch, committed: Version | None, reports: Mapping[int, NodeReport]) -> Version:
    """The restored version until every node has committed it, then the next due iteration that no rank has begun."""
    missed = _newest(*(report.missed for report in reports.values()))
    base = epoch.base
    unsettled = base is not None and (committed is None or committed <= base) and missed is None
    if base is not None and unsettled and any(report.committed != base for report in reports.values()):
        return base
    begun = max(base.iteration if base else 0, *(report.begun for report in reports.values()))
    if missed is not None and missed.lineage == epoch.lineage:
        begun = max(begun, missed.iteration)
    return Version(epoch.lineage, (begun // epoch.interval + 1) * epoch.interval)


def _newest(*versions: Version | None) -> Version | None:
    return max((version for version in versions if version is not None), default=None)


@dataclass(frozen=True)
class Coordinator:
    """The state of the coordinator: the newest report of each position and when it arrived.

    A node is lost when it has been silent for `detect_seconds`, whether it was killed, stopped or cut off.
    """

    epoch: ExchangeEpoch
    detect_seconds: float
    heard: Mapping[int, float]
    reports: Mapping[int, NodeReport] = field(default_factory=dict)
    decision: ExchangeDecision = ExchangeDecision()

    @classmethod
    def start(cls, epoch: ExchangeEpoch, detect_seconds: float, now: float) -> Coordinator:
        """Every node has `detect_seconds` from now for its first report."""
        return cls(epoch, detect_seconds, dict.fromkeys(range(epoch.nodes), now))

    def receive(self, position: int, report: NodeReport, now: float) -> Coordinator:
        """The state after a report; its `decision` is the reply. Raises ProtocolError for an unknown position."""
        if position not in self.heard:
            raise ProtocolError(f"position {position} is not in this job of {self.epoch.nodes} nodes")
        reports = {**self.reports, position: report}
        decision = decide(self.epoch, self.decision, reports)
        return replace(self, heard={**self.heard, position: now}, reports=reports, decision=decision)

    def lost(self, now: float) -> tuple[int, ...]:
        """The positions that have been silent for too long."""
        return tuple(position for position, heard in self.heard.items() if now - heard > self.detect_seconds)
