"""The metrics: every figure that Prometheus is given, declared once. Pure.

Invariant: a metric without a sample is left out; nothing unknown is reported as 0. An event that did not come is known
not to have come, so counts have a sample of 0 from the start, those of ranks as soon as the rank has memory. A count
may still have grown before it is read for the first time, so that `increase` does not see it: the rules for alarms
compare ages.

To add a metric: declare it here, and write what derives from the table again (see `derived`). Tests
compare them. In: a `Node`. Out: samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..events import EventType, Severity, catalogue
from .event_counts import Counts

Labels = Mapping[str, str]
Sample = tuple[Labels, float]
ALARMS = sorted(name for name, kind in catalogue.EVENTS.items() if kind.severity is Severity.ALARM)


@dataclass(frozen=True)
class Node:
    """A job on one node: the reply of its SMP to `status`, None if it gave none in time, and the sums of its events."""

    job: str
    name: str
    status: Mapping[str, Any] | None
    counts: Counts


@dataclass(frozen=True)
class Metric:
    """`labels`: in addition to `ftp_job` and `node`. `counts`: the event and its field ('' for how often) that are
    summed, if any. `meaning` is shown alone, without the name."""

    name: str
    meaning: str
    read: Callable[[Node], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    counts: tuple[str, str] | None = None

    @property
    def kind(self) -> str:
        """As Prometheus calls it."""
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def unit(self) -> str:
        """For people; empty for a number."""
        words = self.name.removesuffix("_total").split("_")
        return words[-1] if words[-1] in ("seconds", "bytes", "ratio", "iterations") else ""


def summed_fields() -> dict[str, list[str]]:
    """The fields of which sums are wanted, by the event that has them."""
    fields: dict[str, list[str]] = {}
    for event, field in filter(None, (metric.counts for metric in METRICS)):
        fields.setdefault(event, []).extend([field] if field else [])
    return fields


# ---- how a metric is read ----


def _fact(*path: str) -> Callable[[Node], Iterator[Sample]]:
    """One figure of the SMP's reply."""

    def read(node: Node) -> Iterator[Sample]:
        value: Any = node.status
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            yield {}, float(value)

    return read


def _tiers(key: str) -> Callable[[Node], Iterator[Sample]]:
    """A figure of the newest version of each tier."""

    def read(node: Node) -> Iterator[Sample]:
        for tier, newest in (node.status or {}).get("history", {}).get("tiers", {}).items():
            if newest is not None:
                yield {"tier": tier}, float(newest[key])

    return read


def _memory(node: Node) -> Iterator[Sample]:
    if node.status is not None:
        tier = node.status["node_tier"]
        yield {}, float(sum(each["bytes"] for each in node.status["segments"]) + tier.get("parity_bytes", 0))


def _backlog(node: Node) -> Iterator[Sample]:
    """Only where nodes protect each other, and versions of one lineage are compared."""
    if node.status is None or not node.status["node_tier"].get("nodes"):
        return
    tiers = node.status["history"]["tiers"]
    newest, committed = tiers["process"], tiers["node"]
    if newest and committed and newest["lineage"] == committed["lineage"]:
        yield {}, float(max(0, newest["iteration"] - committed["iteration"]))


def _fill(node: Node) -> Iterator[Sample]:
    tier = (node.status or {}).get("node_tier", {})
    if tier.get("offered"):
        yield {}, tier["taken"] / tier["offered"]


def _judged(node: Node) -> Mapping[str, float]:
    """The verdict on whether ranks hang; empty while there is none, as at a start or with --ftp-hang-seconds 0."""
    progress = (node.status or {}).get("progress", {})
    return progress if progress.get("hang_seconds") else {}


def _idle(node: Node) -> Iterator[Sample]:
    if verdict := _judged(node):
        yield {}, verdict["no_progress_seconds"]


def _hang_limit(node: Node) -> Iterator[Sample]:
    if verdict := _judged(node):
        yield {}, verdict["hang_seconds"]


def _slow(node: Node) -> Iterator[Sample]:
    for rank, factor in (node.status or {}).get("progress", {}).get("slow", ()):
        yield {"rank": str(rank)}, float(factor)


def _alarms(node: Node) -> Iterator[Sample]:
    for name in ALARMS:
        yield {"alarm": name}, sum(node.counts.of(name).values())


def _standing(node: Node) -> Iterator[Sample]:
    if node.counts.alarm:
        yield {"alarm": node.counts.alarm}, 1.0


def _counted(name: str, meaning: str, event: EventType, field: str = "", ranks: bool = False) -> Metric:
    """A metric that counts events, or sums one of their fields; `ranks`: of each rank that reports them."""

    def read(node: Node) -> Iterator[Sample]:
        found = node.counts.of(event.name, field)
        if ranks:
            begun = {each["rank"]: 0.0 for each in (node.status or {}).get("segments", ())} | found
            yield from (({"rank": str(rank)}, value) for rank, value in begun.items() if rank is not None)
        else:
            yield {}, sum(found.values())

    return Metric(name, meaning, read, ("rank",) if ranks else (), (event.name, field))


# ---- the table ----

METRICS: tuple[Metric, ...] = (
    Metric(
        "ftp_smp_answered", "1 if the SMP gave its facts in time; 0 if not, and what comes from it is left out.",
        lambda node: [({}, float(node.status is not None))],
    ),
    Metric(
        "ftp_iteration", "The last iteration that all ranks of the node have completed.", _fact("history", "iteration")
    ),
    Metric(
        "ftp_iteration_age_seconds", "Seconds since the last completed iteration.",
        _fact("history", "iteration_age_seconds"),
    ),
    Metric(
        "ftp_iteration_seconds", "The usual duration of an iteration, as measured recently.",
        _fact("progress", "iteration_seconds"),
    ),
    Metric("ftp_idle_seconds", "Seconds without progress of any rank of the node, where that is judged.", _idle),
    Metric("ftp_hang_limit_seconds", "Seconds without progress after which the job is hung.", _hang_limit),
    Metric(
        "ftp_slow_rank_ratio", "Computing time of a slow rank, as a multiple of that of the others.", _slow, ("rank",)
    ),
    Metric("ftp_world_size", "Ranks of the job.", _fact("world_size")),
    Metric(
        "ftp_ranks", "Ranks of the node, started or to be started again; 0 once no launcher runs there.",
        _fact("ranks"),
    ),
    Metric("ftp_restarts_total", "Restarts that this node has seen.", _fact("history", "restarts")),
    Metric(
        "ftp_downtime_seconds_total", "Seconds without training, also of an outage that is not over.",
        _fact("history", "downtime_seconds"),
    ),
    Metric("ftp_down_seconds", "Seconds of the present outage.", _fact("history", "down_for_seconds")),
    _counted(
        "ftp_lost_iterations_total", "Iterations that were lost at restarts, and computed again.",
        catalogue.STATE_RESTORED, "lost", ranks=True,
    ),
    Metric("ftp_version_iteration", "The newest version, by tier: process, node or storage.", _tiers("iteration"),
           ("tier",)),
    Metric(
        "ftp_version_age_seconds", "Seconds since the newest version was first seen, by tier.", _tiers("age_seconds"),
        ("tier",),
    ),
    Metric("ftp_memory_claimed_bytes", "Host memory claimed on the node, parity included.", _memory),
    Metric("ftp_parity_bytes", "Parity and copies stored for other nodes.", _fact("node_tier", "parity_bytes")),
    _counted("ftp_snapshots_total", "Snapshots that ranks completed.", catalogue.SNAPSHOT_SEALED),
    _counted("ftp_captured_bytes_total", "Bytes that ranks captured.", catalogue.SNAPSHOT_SEALED, "bytes"),
    _counted(
        "ftp_capture_seconds_total", "Seconds from version point to seal of snapshots, hidden behind compute.",
        catalogue.SNAPSHOT_SEALED, "seconds",
    ),
    _counted("ftp_snapshots_skipped_total", "Versions that a rank did not capture.", catalogue.SNAPSHOT_SKIPPED),
    _counted(
        "ftp_fences_total", "Updates that passed the fence, whether they waited or not.", catalogue.FENCE_WAITED,
        ranks=True,
    ),
    _counted(
        "ftp_fence_wait_seconds_total", "Seconds that training stood still at the fence.", catalogue.FENCE_WAITED,
        "seconds", ranks=True,
    ),
    _counted("ftp_exchanged_bytes_total", "Bytes sent to other nodes.", catalogue.EXCHANGE_SENT, "bytes"),
    _counted("ftp_exchanged_in_bubbles_bytes_total", "Bytes sent to other nodes within bubbles.",
             catalogue.EXCHANGE_SENT, "in_bubbles"),
    _counted("ftp_exchange_seconds_total", "Seconds in which versions were being sent.", catalogue.EXCHANGE_SENT,
             "seconds"),
    Metric(
        "ftp_exchange_backlog_iterations",
        "Iterations from the committed version to the newest one in memory, of one lineage.", _backlog,
    ),
    Metric("ftp_bubble_fill_ratio", "How full the windows in bubbles were in which there was data.", _fill),
    _counted("ftp_versions_committed_total", "Versions complete on all nodes.", catalogue.VERSION_COMMITTED),
    _counted("ftp_checkpoints_total", "Checkpoints complete in storage.", catalogue.CHECKPOINT_COMPLETED),
    _counted("ftp_averagings_total", "Averagings of replicas.", catalogue.REPLICAS_AVERAGED, ranks=True),
    _counted(
        "ftp_averaging_wait_seconds_total", "Seconds that training waited for averagings.", catalogue.REPLICAS_AVERAGED,
        "waited_seconds", ranks=True,
    ),
    _counted(
        "ftp_synchronisations_total", "Synchronisations of local SGD.", catalogue.REPLICAS_SYNCHRONISED, ranks=True
    ),
    _counted(
        "ftp_synchronisation_wait_seconds_total", "Seconds that training waited for synchronisations.",
        catalogue.REPLICAS_SYNCHRONISED, "waited_seconds", ranks=True,
    ),
    Metric(
        "ftp_alarms_total", "Alarms that this node reported, by their names in the catalogue of events. Several "
        "ranks may report one.", _alarms, ("alarm",),
    ),
    Metric(
        "ftp_alarm_age_seconds", "Seconds since the newest alarm of that name, also of one before the first scrape.",
        lambda node: [({"alarm": name}, age) for name, age in node.counts.alarm_ages.items()], ("alarm",),
    ),
    Metric(
        "ftp_alarm_standing", "1 for the newest alarm, until an event ends it or ranks that were started after it "
        "complete an iteration.", _standing, ("alarm",),
    ),
)  # fmt: skip
