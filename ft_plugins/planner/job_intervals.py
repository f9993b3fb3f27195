"""Choose the intervals of a running job, from what it has measured of itself (REFT, Eq. 8 to 11). Pure.

The model is that of `intervals`, for one job in place of a cluster: what a node captures is 1 GiB there, and link and
storage are as fast as the measured seconds say.

    failures   per node and day as given; else observed: one more than there were restarts, over the time since the job
               began to choose. What was observed may be the loss of a node
    settled    an interval changes only if it was wrong by a factor of WORTH: measured times vary. It grows to at most
               GROWTH times what it was: a single stall does not decide for the next thousands of iterations

Invariant: intervals are from 1 to MOST_CAPTURED and MOST_STORED; what is not chosen stays.

In: `Measured`, `MeasuredJob`, the intervals so far. Out: intervals, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from .intervals import DAY, Costs, cheapest_checkpoints, cheapest_snapshots, storage_rate
from .survival import Cluster, Scheme

WORTH = 1.5
GROWTH = 4  # times what it was, an interval is at most
MOST_CAPTURED, MOST_STORED = 1000, 100_000
MOST_FAILURES = 100.0  # per node and day, as in `Cluster`: a job that has just begun knows no more
_LEAST, _MOST = 1e-6, 1e9  # of what `Costs` takes


@dataclass(frozen=True)
class MeasuredJob:
    """What does not change. `losses`: how many nodes of a redundancy group may be lost, of at most `group_nodes`.
    `hw_rate`, `sw_rate`: failures per node and day, None if both are to be observed."""

    captured: bool  # whether the interval of snapshots is chosen
    stored: bool  # that of checkpoints
    nodes: int
    group_nodes: int
    losses: int
    exchange_interval: int = 1  # snapshots
    hw_rate: float | None = None
    sw_rate: float | None = None


@dataclass(frozen=True)
class Measured:
    """Seconds: of an iteration; that training waited at fences for each snapshot; of the last exchange, and the last
    checkpoint, 0 if there was none; since the job began to choose. And how often it restarted since."""

    iteration: float
    fences: float
    exchange: float
    storage: float
    job: float
    restarts: int


@dataclass(frozen=True)
class Choice:
    """Iterations between two snapshots, and two checkpoints; the figures that they follow from, in words."""

    captured: int
    stored: int
    reason: str


def choose(job: MeasuredJob, measured: Measured, captured: int, stored: int) -> Choice:
    """The intervals to use after these."""
    hardware, software = job.hw_rate or 0.0, job.sw_rate or 0.0
    observed = job.hw_rate is None and job.sw_rate is None
    if observed:
        per_day = (measured.restarts + 1) * DAY / max(measured.job, _LEAST)
        hardware = min(per_day / job.nodes, MOST_FAILURES)
    failures = job.nodes * (hardware + software)
    costs = Costs(
        1.0, _bounded(measured.iteration), min(measured.fences, _MOST),
        _speed(job.losses, measured.exchange / job.exchange_interval), _speed(job.nodes, measured.storage),
    )  # fmt: skip
    if job.captured:
        captured = _settled(captured, min(MOST_CAPTURED, cheapest_snapshots(failures, costs, job.losses)))
    if job.stored and measured.storage:
        beyond = job.nodes * hardware
        if job.losses:
            cluster = Cluster(-(-job.nodes // job.group_nodes) * job.group_nodes, job.group_nodes, hardware, software)
            scheme = Scheme.RAIM6 if job.losses == Scheme.RAIM6.losses else Scheme.RAIM5
            beyond = storage_rate(cluster, costs, scheme) * job.nodes / cluster.nodes
        best = cheapest_checkpoints(beyond, costs, job.nodes, captured) or MOST_STORED
        stored = _settled(stored, min(MOST_STORED, best))
    reason = (
        f"an iteration takes {measured.iteration:.3g} s, fences wait {measured.fences:.2g} s for a snapshot, an "
        f"exchange takes {measured.exchange:.2g} s and a checkpoint {measured.storage:.2g} s; {failures:.3g} failures "
        f"a day {'at most, as far as observed' if observed else 'as given'}"
    )
    return Choice(captured, stored, reason)


def _settled(before: int, wanted: int) -> int:
    if max(before, wanted) < WORTH * min(before, wanted):
        return before
    return min(wanted, GROWTH * before) if before else wanted


def _bounded(value: float) -> float:
    return min(max(value, _LEAST), _MOST)


def _speed(amount: int, seconds: float) -> float:
    return _bounded(amount / seconds) if seconds else _MOST
