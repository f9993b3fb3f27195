"""Which version is exchanged next and which one counts for the node tier: one decision for the job. Pure.

Invariant: a version counts only when every node has said that its data, its parity and its copies of it are complete;
what counted before is kept until every node has. The decision is taken by the node at position 0 from what all nodes
report, and can be taken anew from reports alone by an SMP that knows nothing yet: nothing but the reports is state.

The version to be exchanged is named before it exists (the next multiple of the interval that no rank has begun), so
that each SMP is waiting for it when its ranks seal it; an SMP that missed it all the same says so, and a later one is
named. After a recovery the restored version comes first: its redundancy is what was lost.

In: `Report`s, the epoch. Out: `Directive`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..snapshot.slots import Version


@dataclass(frozen=True)
class Epoch:
    """What one incarnation of the job agreed on: its lineage, what that grows from, how many nodes, how often."""

    lineage: int
    base: Version | None
    nodes: int
    interval: int  # iterations between two versions that are exchanged, at least


@dataclass(frozen=True)
class Report:
    """What the SMP of one node says of itself. `begun` is the newest iteration that a rank of it has begun to capture.

    `encoded`: what was sent by this node has been taken, what it keeps of that version is complete.
    """

    begun: int
    exchange: Version | None = None
    missed: Version | None = None
    encoded: Version | None = None
    counted: Version | None = None


@dataclass(frozen=True)
class Directive:
    """What every SMP does now: exchange that version, keep what counts."""

    exchange: Version | None = None
    counts: Version | None = None


def decide(epoch: Epoch, before: Directive, reports: Mapping[int, Report]) -> Directive:
    """The directive after `before`, from the newest report of each position that has one."""
    counts = _newest(before.counts, *(report.counted for report in reports.values()))
    exchange = _newest(before.exchange, *(report.exchange for report in reports.values()))
    if exchange is not None and counts is not None and exchange <= counts:
        exchange = None
    if len(reports) < epoch.nodes:
        return Directive(exchange, counts)
    if exchange is not None and all(report.encoded == exchange for report in reports.values()):
        counts, exchange = exchange, None
    elif exchange is not None and any(report.missed == exchange for report in reports.values()):
        exchange = None
    if exchange is None:
        exchange = _next(epoch, counts, reports)
    return Directive(exchange, counts)


def _next(epoch: Epoch, counts: Version | None, reports: Mapping[int, Report]) -> Version:
    """The restored version until it counts on every node, then the next turn that no rank has begun."""
    missed = _newest(*(report.missed for report in reports.values()))
    base = epoch.base
    unsettled = base is not None and (counts is None or counts <= base) and missed is None
    if base is not None and unsettled and any(report.counted != base for report in reports.values()):
        return base
    begun = max(base.iteration if base else 0, *(report.begun for report in reports.values()))
    if missed is not None and missed.lineage == epoch.lineage:
        begun = max(begun, missed.iteration)
    return Version(epoch.lineage, (begun // epoch.interval + 1) * epoch.interval)


def _newest(*versions: Version | None) -> Version | None:
    return max((version for version in versions if version is not None), default=None)
