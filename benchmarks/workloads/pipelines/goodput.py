"""Predict a job's goodput under each kind of protection, and how it changes as the job grows.

    disk         training waits until a checkpoint is in storage
    checkfreq    training waits for a copy (`checkpoint_seconds`, else `snapshot_seconds`) that is written in the
                 background (CheckFreq: snapshot and persist), one at a time
    replication  a node sends its state to another while training waits (as FTPipeHD and ResPipe do)
    reft         one snapshot per interval, exchanged in the background at the link's rate (RAIM5)
    baft         the same snapshot, sent to the neighbour in bubbles only: one every n iterations, n from `Fit`

With F failures a day and c seconds that training waits for a save:

    interval     sqrt(2 c / F) in whole iterations (Young 1974), at least what link, bubbles or storage need; that of
                 reft is the one in `intervals`
    O_save       c / interval, as a share of useful time (BAFT, 'The all overhead')
    O_lost       F (interval / 2 + lag), lag = from the snapshot until it is committed, as a share of all time
    O_restart    F (restart + load), load from where the state is: the link of a node, or storage for the whole job
    goodput      (1 - O_lost - O_restart) / (1 + O_save), at least 0

Failures that memory does not survive are restored from storage: under REFT see `intervals.storage_rate`; a copy on a
neighbour is lost with the other node of its pair, or one of the two others of three (redundancy.neighbour), until the
lost node is replaced and has sent and received again. Storage is then written in the background, at Young's interval
for that rate.

Invariant: pure arithmetic, first order: only the storage term includes failures during a repair.

In: `survival.Cluster`, `intervals.Costs`, timelines of one pipeline. Out: `GoodputPlan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ft_plugins.errors import ConfigError
from ft_plugins.model.timeline import Timeline
from ft_plugins.planner.group_survival import log_group_survival
from ft_plugins.planner.intervals import DAY, Costs, exchange_seconds, iterations, span, storage_rate, young
from ft_plugins.planner.survival import Cluster, Scheme, columns, demand, loss, lost_per_day, mean_rate
from ft_plugins.redundancy.neighbour import partner
from workloads.pipelines import fitting

GIB = float(1 << 30)
GROWTH = (1, 4, 16, 64)  # factors on the number of pipelines


class ProtectionKind(Enum):
    """How state is protected; the value is its machine-readable name."""

    DISK = "disk"
    CHECKFREQ = "checkfreq"
    REPLICATION = "replication"
    REFT = "reft"
    BAFT = "baft"

    @property
    def title(self) -> str:
        """The display name."""
        return {
            ProtectionKind.DISK: "synchronous checkpoints",
            ProtectionKind.CHECKFREQ: "CheckFreq-like",
            ProtectionKind.REPLICATION: "synchronous replication",
            ProtectionKind.REFT: "REFT, RAIM5",
            ProtectionKind.BAFT: "BAFT",
        }[self]


@dataclass(frozen=True)
class Upkeep:
    """The cost of one protection. Shares of time, seconds per failure, `every` in iterations (None: never)."""

    protection: ProtectionKind
    every: int | None
    save_share: float
    lost_seconds: float
    restart_seconds: float
    goodput: float


@dataclass(frozen=True)
class GoodputPlan:
    """The plan for one size of a job. `iterations_per_version` is BAFT's n; None: some rank's shared bubbles do not
    carry its copy, and all send at the link's rate as REFT does."""

    nodes: int
    failures: float  # per day
    iteration_seconds: float
    bubble_share: float
    iterations_per_version: int | None
    upkeeps: tuple[Upkeep, ...]

    def of(self, protection: ProtectionKind) -> Upkeep:
        """The costs of `protection`."""
        return next(one for one in self.upkeeps if one.protection is protection)


def plan_goodput(
    cluster: Cluster,
    costs: Costs,
    timelines: Sequence[Timeline],
    restart_seconds: float = 600.0,
    fit: fitting.Fit = fitting.fit,
) -> GoodputPlan:
    """The costs of every protection for a job whose nodes are each a stage (or part of one) of a pipeline.

    `timelines`: of that pipeline, in any unit; `costs.iteration_seconds` is the length of the iteration. Raises
    ConfigError for times below 0.
    """
    demand("restart_seconds", restart_seconds, "from 0 to 1e9", 0 <= restart_seconds <= 1e9)
    if not timelines or timelines[0].seconds <= 0:
        raise ConfigError("timelines: expected an iteration longer than 0 s, found none")
    stretched = costs.link_gib_per_second * costs.iteration_seconds / timelines[0].seconds
    wanted = fit(timelines, costs.state_gib * GIB, stretched * GIB)
    hardware, software = lost_per_day(cluster), cluster.nodes * mean_rate(cluster.sw_rate, cluster.shape)
    job = _Job(cluster, costs, restart_seconds, hardware, software, len(timelines))
    return GoodputPlan(
        cluster.nodes,
        hardware + software,
        costs.iteration_seconds,
        fitting.bubble_share(timelines),
        wanted,
        (*job.from_storage(), *job.from_memory(wanted)),
    )


def plan_growth(
    cluster: Cluster,
    costs: Costs,
    timelines: Sequence[Timeline],
    restart_seconds: float = 600.0,
    fit: fitting.Fit = fitting.fit,
) -> tuple[GoodputPlan, ...]:
    """`plan_goodput` for 1, 4, 16 and 64 times as many replicas of the pipeline and as large a batch: a node's part of
    the replicated state shrinks by that factor, failures grow. So do sharding groups, if they are cut."""
    return tuple(
        plan_goodput(
            replace(
                cluster,
                nodes=cluster.nodes * times,
                group_nodes=cluster.group_nodes * (times if cluster.redundancy_nodes else 1),
            ),
            replace(costs, state_gib=max(1e-6, costs.state_gib / times)),
            timelines,
            restart_seconds,
            fit,
        )
        for times in GROWTH
    )


def table(plans: Sequence[GoodputPlan]) -> str:
    """The plans as a table."""
    head = f"bubbles and goodput; {plans[0].bubble_share:.1%} of an iteration is bubbles"
    rows: list[tuple[str, ...]] = [
        ("", "nodes", "failures/day", "save every", "saving", "lost/failure", "restart", "goodput")
    ]
    for plan in plans:
        first = (str(plan.nodes), f"{plan.failures:.3g}")
        for one in plan.upkeeps:
            every = "never" if one.every is None else f"{one.every} iteration{'s' * (one.every > 1)}"
            spent = (f"{one.save_share:.2%}", span(one.lost_seconds), span(one.restart_seconds))
            rows.append((one.protection.title, *first, every, *spent, f"{one.goodput:.2%}"))
            first = ("", "")
    notes = []
    if plans[0].iterations_per_version is None:
        why = "a rank and its destination share no bubbles, or too few"
        notes.append(f"  {why}: BAFT sends at the link's rate, as REFT does")
    return "\n".join([head, *columns(rows), *notes])


@dataclass(frozen=True)
class _Job:
    """Failures per day of the whole job; each of the pipeline's `stages` is on a node of its own."""

    cluster: Cluster
    costs: Costs
    restart: float
    hardware: float
    software: float
    stages: int

    @property
    def failures(self) -> float:
        return self.hardware + self.software

    @property
    def write(self) -> float:
        """Seconds to write all state to storage, or to read it."""
        return self.cluster.nodes * self.costs.state_gib / self.costs.storage_gib_per_second

    def from_storage(self) -> tuple[Upkeep, Upkeep]:
        waited = self.costs.checkpoint_seconds
        copy = min(self.costs.snapshot_seconds if waited is None else waited, self.write)
        return (
            self._upkeep(ProtectionKind.DISK, self.write, self.write, 0.0, self.failures),
            self._upkeep(ProtectionKind.CHECKFREQ, copy, self.write, self.write - copy, self.failures),
        )

    def from_memory(self, wanted: int | None) -> tuple[Upkeep, Upkeep, Upkeep]:
        snapshot, send = self.costs.snapshot_seconds, exchange_seconds(self.costs, 1)
        bubbles = send if wanted is None else wanted * self.costs.iteration_seconds
        hazard = mean_rate(self.cluster.hw_rate, self.cluster.shape) * (self.costs.replace_seconds + 2 * send) / DAY
        others = [len(one) for one in partners(self.stages)] if self.stages > 1 else [1]  # some other node
        lost = [loss(log_group_survival(count, 0, hazard)) for count in others]
        both = self.hardware * math.fsum(lost) / len(lost)
        group = storage_rate(self.cluster, self.costs, Scheme.RAIM5)
        return (
            self._upkeep(ProtectionKind.REPLICATION, snapshot + send, 0.0, 0.0, both),
            self._upkeep(ProtectionKind.REFT, snapshot, max(send, snapshot / self.costs.max_overhead), send, group),
            self._upkeep(ProtectionKind.BAFT, snapshot, bubbles, bubbles, both),
        )

    def _upkeep(self, protection: ProtectionKind, wait: float, least: float, lag: float, beyond: float) -> Upkeep:
        """`wait`: seconds that training waits for a save; `least`: fewest seconds between saves; `lag`: from a snapshot
        until it is committed; `beyond`: failures per day that only storage survives."""
        survived = self.failures - beyond
        load = self.costs.state_gib / self.costs.link_gib_per_second
        if survived > 0:
            every = self._every(young(wait, self.failures), least)
            share, lost = self._saving(every, wait, lag)
            stored = self._every(young(self.costs.snapshot_seconds, beyond), self.write)
            more, lost_stored = self._saving(stored, self.costs.snapshot_seconds, self.write)
        else:
            stored = every = self._every(young(wait, beyond), least)
            share, lost_stored = self._saving(every, wait, lag)
            more, lost = 0.0, 0.0
        part = beyond / self.failures if self.failures else 0.0
        lost_mean = (1 - part) * lost + part * lost_stored
        restart = self.restart + (1 - part) * load + part * self.write
        gone = self.failures / DAY * (lost_mean + restart)
        return Upkeep(protection, every, share + more, lost_mean, restart, max(0.0, 1 - gone) / (1 + share + more))

    def _every(self, best: float, least: float) -> int | None:
        return None if math.isinf(best) else iterations(max(best, least), self.costs)

    def _saving(self, every: int | None, wait: float, lag: float) -> tuple[float, float]:
        """O_save, and the seconds of work lost per failure; 0 without saves."""
        if every is None:
            return 0.0, 0.0
        seconds = every * self.costs.iteration_seconds
        return wait / seconds, seconds / 2 + lag


def partners(nodes: int) -> tuple[frozenset[int], ...]:
    """For each of a pipeline's `nodes` (two or more), the others that must not be lost together with it."""
    keeper = [partner(node, nodes) for node in range(nodes)]
    return tuple(
        frozenset({keeper[node], *(other for other in range(nodes) if keeper[other] == node)}) for node in range(nodes)
    )
