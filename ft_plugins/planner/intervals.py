"""Choose how often to snapshot and to checkpoint, and compute what that costs per day.

Each of three tiers handles the failures that the tier before does not survive. With L_hw, L_sw the mean failures per
node and day (`survival.mean_rate`), k nodes in groups of n, m losses that a group survives, S the state that a node
captures:

    process tier   software failures, k L_sw a day: the node's memory survives
    node tier      lost nodes, k L_hw a day, less those of the storage tier
    storage tier   m more nodes of a group are lost before the first is rebuilt: k L_hw P(B >= m) a day, B binomial of
                   n-1 nodes that fail with 1 - exp(-L_hw R). (REFT Eq. 7 is the same event, for one group, with the
                   rate itself as the probability.)
    rebuild        R = time until the replacement starts + n S / link: each of its n blocks of S/(n-m) bytes is computed
                   from n-m others (REFT 'RAIM5 Decoding')
    exchange       m S per node and snapshot: each block goes to the m nodes that keep parity of its stripe. This is
                   for state that data parallelism shards; replicated state needs no exchange.
    cost           O_save = T_total / T_save x cost of one save, O_lost = T_save / 2 x T_total / T_fail (BAFT, 'The all
                   overhead'); T_save / 2 grows by the lag of a tier, because the previous save is the newest one until
                   the exchange or the write is done
    optimum        T_save = sqrt(2 x cost of one save / rate) (Young 1974; REFT Eq. 5), in whole iterations. For
                   snapshots the rate is that of all failures, and T_save at least what the limits of
                   `snapshot_interval` need; for checkpoints at least what storage needs

Restart, load and the wait for a replacement cost the same under every scheme and are left out. The model is of first
order: if the cost is near a whole day, it only shows that there is hardly any progress.

Invariant: pure arithmetic; link and storage keep up with every interval.

In: `survival.Cluster`, `Costs`. Out: `IntervalPlan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from ..errors import ConfigError
from .group_survival import log_group_survival
from .survival import Cluster, Scheme, columns, demand, loss, lost_per_day, mean_rate

DAY = 86400.0  # seconds


@dataclass(frozen=True)
class Costs:
    """The costs of saving. Sizes in GiB, times in seconds, speeds in GiB per second. Raises ConfigError."""

    state_gib: float  # captured by one node
    iteration_seconds: float
    snapshot_seconds: float  # training waits at the fence, for each snapshot
    link_gib_per_second: float  # of one node, to its group
    storage_gib_per_second: float  # of the whole job
    max_overhead: float = 0.01  # share of time that snapshots may take
    replace_seconds: float = 600.0  # from the loss of a node until its substitute starts
    checkpoint_seconds: float | None = None  # wait of training for a checkpoint without REFT; None: the whole write

    def __post_init__(self) -> None:
        for name in ("state_gib", "iteration_seconds", "link_gib_per_second", "storage_gib_per_second"):
            demand(name, getattr(self, name), "from 1e-6 to 1e9", 1e-6 <= getattr(self, name) <= 1e9)
        demand("max_overhead", self.max_overhead, "from 1e-6 to 1", 1e-6 <= self.max_overhead <= 1)
        for name in ("snapshot_seconds", "replace_seconds", "checkpoint_seconds"):
            value = getattr(self, name)
            if value is not None:
                demand(name, value, "from 0 to 1e9", 0 <= value <= 1e9)

    @classmethod
    def from_options(cls, values: Mapping[str, float | None]) -> Costs | None:
        """The costs in `values`, where None means not given; None if none is given. Raises ConfigError if only some of
        the required ones are."""
        present = {name: value for name, value in values.items() if value is not None}
        missing = [part.name for part in fields(cls) if part.default is MISSING and part.name not in present]
        if present and missing:
            raise ConfigError(
                f"{', '.join(present)}: no effect without {', '.join(missing)}; give "
                f"{'it' if len(missing) == 1 else 'them'} too"
            )
        return cls(**present) if present else None


@dataclass(frozen=True)
class Tier:
    """What one tier handles and costs per day: failures, seconds for saving, seconds of lost work.

    `every`: interval in iterations; None: never, because no failures need this tier.
    """

    name: str
    failures: float
    every: int | None
    save_seconds: float
    lost_seconds: float


@dataclass(frozen=True)
class SchemePlan:
    """The tiers of one scheme, in order of use. `rebuild_seconds` is 0 without parity."""

    scheme: Scheme
    tiers: tuple[Tier, ...]
    rebuild_seconds: float

    @property
    def save_seconds(self) -> float:
        """Seconds per day, O_save of all tiers."""
        return math.fsum(tier.save_seconds for tier in self.tiers)

    @property
    def lost_seconds(self) -> float:
        """Seconds per day, O_lost of all tiers."""
        return math.fsum(tier.lost_seconds for tier in self.tiers)

    @property
    def cost(self) -> float:
        """Seconds per day, O_save + O_lost."""
        return self.save_seconds + self.lost_seconds


@dataclass(frozen=True)
class IntervalPlan:
    """Intervals and costs of every scheme that the groups can have."""

    cluster: Cluster
    costs: Costs
    schemes: tuple[SchemePlan, ...]

    def table(self) -> str:
        """The plan as a table."""
        cluster, i = self.cluster, self.costs.iteration_seconds
        rates = [mean_rate(rate, cluster.shape) for rate in (cluster.hw_rate, cluster.sw_rate)]
        hardware, software = (f"one in {1 / rate:.0f} days" if rate else "none" for rate in rates)
        head = f"intervals and cost per day; mean failures of a node: hardware {hardware}, software {software}"
        rows: list[tuple[str, ...]] = [
            ("", "tier", "failures/day", "save every", "interval", "saving", "lost work", "of the day")
        ]
        for plan in self.schemes:
            name = plan.scheme.title
            for tier in plan.tiers:
                count = "never" if tier.every is None else f"{tier.every} iteration{'s' * (tier.every > 1)}"
                length = "" if tier.every is None else span(tier.every * i)
                cost = (span(tier.save_seconds), span(tier.lost_seconds))
                rows.append((name, tier.name, f"{tier.failures:.3g}", count, length, *cost, ""))
                name = ""
            share = f"{plan.cost / DAY:.2%}" if plan.cost < DAY else "no progress"
            rows.append(("", "total", "", "", "", span(plan.save_seconds), span(plan.lost_seconds), share))
        return "\n".join([head, *columns(rows)])

    def block(self) -> dict[str, Any]:
        """The plan as JSON."""
        schemes = {
            plan.scheme.value: {
                "rebuild_seconds": plan.rebuild_seconds,
                "cost_seconds_per_day": plan.cost,
                "tiers": {tier.name: asdict(tier) for tier in plan.tiers},
            }
            for plan in self.schemes
        }
        return {"costs": asdict(self.costs), "schemes": schemes}


def plan_intervals(cluster: Cluster, costs: Costs) -> IntervalPlan:
    """Intervals and costs of every scheme that the groups can have."""
    plans = [
        _checkpoints(cluster, costs) if scheme is Scheme.CHECKPOINT else _reft(cluster, costs, scheme)
        for scheme in cluster.schemes
    ]
    return IntervalPlan(cluster, costs, tuple(plans))


def snapshot_interval(costs: Costs, losses: int) -> int:
    """The fewest iterations between snapshots that keep the wait at the fence below `max_overhead` of the time, and
    leave time for the exchange of `losses` x S."""
    seconds = max(costs.snapshot_seconds / costs.max_overhead, exchange_seconds(costs, losses))
    return iterations(seconds, costs)


def cheapest_snapshots(failures: float, costs: Costs, losses: int) -> int:
    """Iterations between snapshots at which saving and lost work together cost least, within the limits of
    `snapshot_interval`, if the job has so many failures a day."""
    shortest, best = snapshot_interval(costs, losses), young(costs.snapshot_seconds, failures)
    return shortest if math.isinf(best) else max(shortest, iterations(best, costs))


def cheapest_checkpoints(beyond: float, costs: Costs, nodes: int, snapshots: int) -> int | None:
    """Iterations between checkpoints of `nodes`, a multiple of those between snapshots; None if none of the failures
    is `beyond` memory: so many a day are."""
    write = nodes * costs.state_gib / costs.storage_gib_per_second
    return _whole(max(young(costs.snapshot_seconds, beyond), write), snapshots, costs)


def failures_per_day(cluster: Cluster) -> float:
    """All failures of the job per day: of hardware, of software, and of failure domains."""
    return lost_per_day(cluster) + cluster.nodes * mean_rate(cluster.sw_rate, cluster.shape)


def exchange_seconds(costs: Costs, losses: int) -> float:
    """Seconds that a node sends after a snapshot: m S / link."""
    return losses * costs.state_gib / costs.link_gib_per_second


def rebuild_seconds(cluster: Cluster, costs: Costs, losses: int = 1) -> float:
    """Seconds from the loss of a node until the group is fully protected again: time to replace it + n S / link."""
    return costs.replace_seconds + cluster.largest_group(losses) * costs.state_gib / costs.link_gib_per_second


def storage_rate(cluster: Cluster, costs: Costs, scheme: Scheme) -> float:
    """Failures per day of the whole job that only storage survives; without REFT all of them (REFT Eq. 6).

    Of the failures of domains, those of which a redundancy group loses too many nodes at once.
    """
    hardware = mean_rate(cluster.hw_rate, cluster.shape)
    if scheme is Scheme.CHECKPOINT:
        return failures_per_day(cluster)
    hazard = hardware * rebuild_seconds(cluster, costs, scheme.losses) / DAY
    groups = cluster.redundancy_groups(scheme.losses)
    too_many = math.fsum(
        count
        * sum(members)
        / cluster.group_nodes
        * loss(log_group_survival(sum(members) - 1, scheme.losses - 1, hazard))
        for members, count in groups.items()
    )
    at_once = any(max(members) > scheme.losses for members in groups)
    domains = cluster.domains * mean_rate(cluster.domain_rate, cluster.shape)
    return cluster.nodes * hardware * too_many + (domains if at_once else 0.0)


def young(cost: float, rate: float) -> float:
    """The cheapest interval in seconds for saves of `cost` seconds and `rate` failures a day: sqrt(2 cost / rate)."""
    return math.sqrt(2 * cost * DAY / rate) if rate else math.inf


def iterations(seconds: float, costs: Costs) -> int:
    """The fewest iterations that last at least `seconds`."""
    # a quotient rounded up above a whole number (0.07 / 0.01) must not add an iteration
    return max(1, math.ceil(seconds / costs.iteration_seconds * (1 - 1e-12)))


def span(seconds: float) -> str:
    """A duration as text."""
    for unit, length in (("d", DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.3g} s"


def _checkpoints(cluster: Cluster, costs: Costs) -> SchemePlan:
    """The framework's own checkpoints; they lag by the part of the write that training does not wait for."""
    write, rate = _write_seconds(cluster, costs), storage_rate(cluster, costs, Scheme.CHECKPOINT)
    cost = write if costs.checkpoint_seconds is None else costs.checkpoint_seconds
    every = _whole(max(young(cost, rate), write), 1, costs)
    return SchemePlan(Scheme.CHECKPOINT, (_tier("storage", rate, every, cost, max(0.0, write - cost), costs),), 0.0)


def _reft(cluster: Cluster, costs: Costs, scheme: Scheme) -> SchemePlan:
    """REFT's tiers. A checkpoint is a snapshot that is also written to storage, in the background: it is charged the
    cost of a snapshot (REFT Eq. 11), although that snapshot is taken anyway."""
    software = mean_rate(cluster.sw_rate, cluster.shape)
    beyond, write = storage_rate(cluster, costs, scheme), _write_seconds(cluster, costs)
    snapshots = cheapest_snapshots(failures_per_day(cluster), costs, scheme.losses)
    checkpoints = cheapest_checkpoints(beyond, costs, cluster.nodes, snapshots)
    tiers = (
        _tier("process", cluster.nodes * software, snapshots, costs.snapshot_seconds, 0.0, costs),
        _tier("node", lost_per_day(cluster) - beyond, snapshots, 0.0, exchange_seconds(costs, scheme.losses), costs),
        _tier("storage", beyond, checkpoints, costs.snapshot_seconds, write, costs),
    )
    return SchemePlan(scheme, tiers, rebuild_seconds(cluster, costs, scheme.losses))


def _tier(name: str, rate: float, every: int | None, cost: float, lag: float, costs: Costs) -> Tier:
    """O_save and O_lost of a tier, per day."""
    if every is None:
        return Tier(name, rate, None, 0.0, 0.0)
    seconds = every * costs.iteration_seconds
    return Tier(name, rate, every, DAY / seconds * cost, (seconds / 2 + lag) * rate)


def _write_seconds(cluster: Cluster, costs: Costs) -> float:
    return cluster.nodes * costs.state_gib / costs.storage_gib_per_second


def _whole(seconds: float, step: int, costs: Costs) -> int | None:
    """The fewest iterations, a multiple of `step`, that last at least `seconds`."""
    if math.isinf(seconds):
        return None
    return -(-iterations(seconds, costs) // step) * step
