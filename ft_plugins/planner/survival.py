"""Compute how long the newest snapshot survives: REFT's equations 1 to 3, extended to two losses per group (RAIM6).

Time to failure of a node is Weibull, P(t) = exp(-l t^c) with t in days (REFT Eq. 1), independent between nodes;
l is a rate per day only for c = 1, in general per day^c. With P_s = exp(-l_hw t^c), k nodes in groups of n:

    checkpoints only   P_s^k P_tr^k = exp(-k (l_hw + l_sw) t^c)              lost with any failure         (Eq. 3)
    REFT, RAIM5        (P_s^n + n (1-P_s) P_s^(n-1))^(k/n)                   a group may lose one node     (Eq. 2)
    REFT, RAIM6        (sum over j <= 2 of C(n,j) (1-P_s)^j P_s^(n-j))^(k/n)  a group may lose two

n is the size of a redundancy group, into which jobs cut their sharding groups (`redundancy.grouping`). If failure
domains fail too, groups survive as in `group_survival`; the product over groups is then a lower bound.

The paper's factor P_re^k (a failing snapshot process) is 1 here: a new one adopts the memory.

Invariant: computations use logarithms of probabilities, so tens of thousands of nodes or tiny rates do not cost
precision. Simultaneous failures of several nodes (a rack, a switch) are in the model only as failures of a domain.

In: `Cluster`. Out: probabilities, days, and `Outlook`, a table of both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from ..errors import ConfigError
from ..redundancy.grouping import cut_nodes
from ..redundancy.parity import LEAST_NODES
from .group_survival import log_shared_survival

HORIZONS = (1, 7, 30)  # days for which an outlook has the probability
_STEPS = 200  # bisection: doublings from 1e-25 to 1e3, and halvings to the last digit, each take fewer


class Scheme(Enum):
    """How state is protected; the value is its machine-readable name."""

    CHECKPOINT = "checkpoint"
    RAIM5 = "raim5"
    RAIM6 = "raim6"

    @property
    def losses(self) -> int:
        """How many nodes a redundancy group may lose without losing state in memory."""
        return {Scheme.CHECKPOINT: 0, Scheme.RAIM5: 1, Scheme.RAIM6: 2}[self]

    @property
    def least(self) -> int:
        """How many nodes a group must have, as in the exchange: RAIM6 below four would be copies, not parity."""
        return LEAST_NODES.get(self.losses, 1)

    @property
    def title(self) -> str:
        """The display name."""
        return "checkpoints only" if self is Scheme.CHECKPOINT else f"REFT, {self.name}"


@dataclass(frozen=True)
class Cluster:
    """`nodes` in sharding groups of `group_nodes`; Weibull scale of hardware and software failures of a node, per
    day^`shape`. Raises ConfigError.

    Sharding groups are cut into redundancy groups of at most `redundancy_nodes` (0: not cut). A failure domain has
    `domain_nodes` nodes, of one sharding group as far as possible, and fails as a whole at `domain_rate`.
    """

    nodes: int
    group_nodes: int
    hw_rate: float
    sw_rate: float
    shape: float = 1.0
    redundancy_nodes: int = 0
    domain_nodes: int = 1
    domain_rate: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.group_nodes, bool) or not isinstance(self.group_nodes, int) or self.group_nodes < 2:
            raise ConfigError(
                f"group_nodes: expected an integer >= 2, found {self.group_nodes!r}; "
                "a node alone in its group has no other node to keep its parity"
            )
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 1:
            raise ConfigError(f"nodes: expected an integer >= 1, found {self.nodes!r}")
        if self.nodes % self.group_nodes:
            raise ConfigError(f"nodes: expected a multiple of group_nodes ({self.group_nodes}), found {self.nodes}")
        demand("hw_rate", self.hw_rate, "from 0 to 100", 0 <= self.hw_rate <= 100)
        demand("sw_rate", self.sw_rate, "from 0 to 100", 0 <= self.sw_rate <= 100)
        demand("shape", self.shape, "from 0.1 to 10", 0.1 <= self.shape <= 10)
        demand("domain_rate", self.domain_rate, "from 0 to 100", 0 <= self.domain_rate <= 100)
        if isinstance(self.domain_nodes, bool) or not isinstance(self.domain_nodes, int) or self.domain_nodes < 1:
            raise ConfigError(f"domain_nodes: expected an integer >= 1, found {self.domain_nodes!r}")
        if self.redundancy_nodes and self.redundancy_nodes < 2:
            raise ConfigError(f"redundancy_nodes: expected an integer >= 2, found {self.redundancy_nodes!r}")

    @property
    def domains(self) -> int:
        """The number of failure domains."""
        return -(-self.nodes // self.domain_nodes)

    def redundancy_groups(self, losses: int) -> Mapping[tuple[int, ...], int]:
        """The redundancy groups of one sharding group, as the numbers of nodes in each of their domains, and how often
        each occurs."""
        return _cut(self.group_nodes, self.domain_nodes, self.redundancy_nodes or self.group_nodes, losses)

    def largest_group(self, losses: int) -> int:
        """Nodes of the largest redundancy group."""
        return max(map(sum, self.redundancy_groups(losses)))

    @property
    def groups(self) -> int:
        """The number of sharding groups."""
        return self.nodes // self.group_nodes

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes that groups of this size can use."""
        return tuple(scheme for scheme in Scheme if scheme.least <= self.group_nodes)


@dataclass(frozen=True)
class SchemeOutlook:
    """`days` until survival falls below the threshold (inf: never), and log survival after each of HORIZONS."""

    scheme: Scheme
    days: float
    log_survival: tuple[float, ...]


@dataclass(frozen=True)
class Outlook:
    """Survival of the newest snapshot under each scheme."""

    cluster: Cluster
    threshold: float
    schemes: tuple[SchemeOutlook, ...]

    def table(self) -> str:
        """The outlook as a table."""
        cluster = self.cluster
        unit = "day" if cluster.shape == 1 else f"day^{cluster.shape:g}"
        head = (
            f"survival of the newest snapshot: {cluster.nodes} nodes in {cluster.groups} groups of "
            f"{cluster.group_nodes}; failures per node and {unit}: hardware {cluster.hw_rate:g}, "
            f"software {cluster.sw_rate:g}"
        )
        if cluster.domain_rate:
            head += f"; per domain of {cluster.domain_nodes} nodes: {cluster.domain_rate:g}"
        afters = (f"after {days} d" for days in HORIZONS)
        rows: list[tuple[str, ...]] = [("", "losses per group", f"days above {self.threshold:g}", *afters)]
        for one in self.schemes:
            chances = tuple(_chance(log) for log in one.log_survival)
            rows.append((one.scheme.title, str(one.scheme.losses), _days(one.days), *chances))
        notes = ["  nodes fail independently here; simultaneous failures (a rack, a switch) are not included"]
        if cluster.domain_rate:
            notes = ["  domains and other nodes fail independently here"]
        notes += _notes_on_groups(cluster)
        if Scheme.RAIM6 not in cluster.schemes:
            notes.append(f"  RAIM6 needs groups of at least {Scheme.RAIM6.least} nodes")
        return "\n".join([head, *columns(rows), *notes])

    def block(self) -> dict[str, Any]:
        """The outlook as JSON: `loss` is 1 - survival without its rounding error; days None: never."""
        return {
            "cluster": asdict(self.cluster),
            "threshold": self.threshold,
            "schemes": {
                one.scheme.value: {
                    "losses": one.scheme.losses,
                    "days": one.days if math.isfinite(one.days) else None,
                    "after_days": {
                        str(days): {"survival": math.exp(log), "loss": loss(log)}
                        for days, log in zip(HORIZONS, one.log_survival, strict=True)
                    },
                }
                for one in self.schemes
            },
        }


def plan_survival(cluster: Cluster, threshold: float) -> Outlook:
    """The outlook of every scheme that the groups can use. Raises ConfigError for a threshold outside (0, 1)."""
    schemes = tuple(
        SchemeOutlook(
            scheme,
            days_until(cluster, scheme, threshold),
            tuple(log_survival(cluster, scheme, days) for days in HORIZONS),
        )
        for scheme in cluster.schemes
    )
    return Outlook(cluster, threshold, schemes)


def survival(cluster: Cluster, scheme: Scheme, days: float) -> float:
    """The probability that the newest snapshot outlives `days`."""
    return math.exp(log_survival(cluster, scheme, days))


def log_survival(cluster: Cluster, scheme: Scheme, days: float) -> float:
    """The natural logarithm of `survival` (equations: see the module). Raises ConfigError for a scheme that the groups
    cannot use, and for negative days."""
    _admit(cluster, scheme)
    demand("days", days, ">= 0", days >= 0)
    domain_hazard = _hazard(cluster.domain_rate, cluster.shape, days)
    if scheme is Scheme.CHECKPOINT:
        nodes = cluster.nodes * _hazard(cluster.hw_rate + cluster.sw_rate, cluster.shape, days)
        return -nodes - (cluster.domains * domain_hazard if domain_hazard else 0.0)
    return _log_groups_survival(cluster, scheme, _hazard(cluster.hw_rate, cluster.shape, days), domain_hazard)


def _log_groups_survival(cluster: Cluster, scheme: Scheme, hazard: float, domain_hazard: float) -> float:
    """log of the probability that no redundancy group loses more than `scheme` survives."""
    return cluster.groups * math.fsum(
        count * log_shared_survival(members, scheme.losses, hazard, domain_hazard)
        for members, count in cluster.redundancy_groups(scheme.losses).items()
    )


def days_until(cluster: Cluster, scheme: Scheme, threshold: float) -> float:
    """Days until survival falls below `threshold`; inf if nothing fails.

    Closed form for checkpoints: (-ln threshold / (k (l_hw + l_sw)))^(1/c), and l_d for each domain. Otherwise survival
    depends only on x = (l_hw + l_d) t^c: bisection over x, upwards from the x at which all nodes and domains survive
    with that probability, a lower bound.
    """
    _admit(cluster, scheme)
    demand("threshold", threshold, "above 0 and below 1", 0 < threshold < 1)
    target = math.log(threshold)
    low = -target / cluster.nodes
    if scheme is Scheme.CHECKPOINT:
        rate = cluster.hw_rate + cluster.sw_rate + cluster.domains / cluster.nodes * cluster.domain_rate
        return _days_of(low, rate, cluster.shape)
    rate = cluster.hw_rate + cluster.domain_rate
    part = cluster.domain_rate / rate if rate else 0.0

    def survives(hazard: float) -> bool:
        return _log_groups_survival(cluster, scheme, (1 - part) * hazard, part * hazard) >= target

    high = 2 * low
    for _ in range(_STEPS):
        if not survives(high):
            break
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if survives(middle) else (low, middle)
    return _days_of(low, rate, cluster.shape)


def loss(log: float) -> float:
    """1 - exp(`log`), precise also near 0."""
    return 0.0 - math.expm1(log)


def mean_rate(rate: float, shape: float) -> float:
    """Long-run failures per day of a node that is replaced when it fails: 1 / MTTF = l^(1/c) / Gamma(1 + 1/c).

    MTTF is the mean of the Weibull distribution of REFT Eq. 1; the rate equals `rate` for shape 1. The survival
    equations start with new nodes instead: with a shape above 1 they have fewer failures than this in the first days.
    """
    return rate ** (1 / shape) / math.gamma(1 + 1 / shape)


def lost_per_day(cluster: Cluster) -> float:
    """Failures per day, in the long run, that take the memory of nodes: of nodes and of failure domains."""
    rates = ((cluster.nodes, cluster.hw_rate), (cluster.domains, cluster.domain_rate))
    return math.fsum(count * mean_rate(rate, cluster.shape) for count, rate in rates)


def demand(name: str, value: float, expected: str, met: bool) -> None:
    """Raise ConfigError unless `value` is a finite number and `met`."""
    if isinstance(value, bool) or not math.isfinite(value) or not met:
        raise ConfigError(f"{name}: expected a number {expected}, found {value!r}")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, the first left-aligned, the rest right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(["", f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in range(1, len(row)))])
        for row in rows
    ]


@lru_cache(maxsize=256)
def _cut(nodes: int, domain_nodes: int, most: int, losses: int) -> Mapping[tuple[int, ...], int]:
    domains = [node // domain_nodes for node in range(nodes)]
    return Counter(
        tuple(sorted(Counter(domains[node] for node in group).values())) for group in cut_nodes(domains, most, losses)
    )


def _notes_on_groups(cluster: Cluster) -> list[str]:
    """Remarks on redundancy groups that are not whole sharding groups, or that share a domain."""
    notes = []
    for scheme in cluster.schemes:
        groups = cluster.redundancy_groups(scheme.losses) if scheme.losses else {}
        sizes = sorted({sum(members) for members in groups})
        if sizes and sizes != [cluster.group_nodes]:
            size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} or {sizes[-1]}"
            notes.append(
                f"  {scheme.name}: each of them is cut into {sum(groups.values())} redundancy groups of {size}"
            )
        if cluster.domain_rate and any(max(members) > scheme.losses for members in groups):
            notes.append(f"  {scheme.name}: some redundancy groups lose too many nodes with one domain")
    return notes


def _admit(cluster: Cluster, scheme: Scheme) -> None:
    if scheme not in cluster.schemes:
        raise ConfigError(
            f"{scheme.name}: expected groups of at least {scheme.least} nodes, found {cluster.group_nodes}"
        )


def _hazard(rate: float, shape: float, days: float) -> float:
    try:
        return rate * days**shape if rate else 0.0
    except OverflowError:
        return math.inf


def _days_of(hazard: float, rate: float, shape: float) -> float:
    try:
        return (hazard / rate) ** (1 / shape) if rate else math.inf
    except OverflowError:
        return math.inf


def _days(days: float) -> str:
    return "always" if math.isinf(days) else f"{days:.3g}" if days < 1000 else f"{days:.0f}"


def _chance(log: float) -> str:
    """A probability as text; near 1 as 1 minus the rest."""
    missing = loss(log)
    if 0 < missing < 1e-4:
        return f"1 - {missing:.1e}"
    return f"{math.exp(log):.4f}" if log > math.log(1e-4) or log == -math.inf else f"{math.exp(log):.1e}"
