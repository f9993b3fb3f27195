"""Compare the sizes of redundancy groups: how long the newest snapshot survives, and what its parity takes. Pure.

Of groups of n nodes, each node keeps parity of 1/(n - 1) of a share under RAIM5, of 2/(n - 2) under RAIM6; the smaller
the groups, the more may be lost. Where domains fail too, groups may become smaller so that no two of their nodes are of
one domain (`redundancy.grouping`); then a larger bound makes no difference.

In: `survival.Cluster`. Out: `GroupSizes`, a table of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .group_survival import choose_group_nodes
from .survival import HORIZONS, Cluster, Scheme, columns, days_until, log_survival, loss

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)  # nodes of a group that are compared, and all of a sharding group
ENCODED = (Scheme.RAIM5, Scheme.RAIM6)
_DAYS = HORIZONS[-1]


@dataclass(frozen=True)
class GroupSurvival:
    """One scheme with groups of at most `nodes`. `parity`: of a share, on the node that keeps most of it; `days` until
    survival falls below the threshold (inf: never); `lost`: chance of a loss within the longest of HORIZONS."""

    scheme: Scheme
    nodes: int
    groups: int
    parity: float
    days: float
    lost: float


@dataclass(frozen=True)
class GroupSizes:
    """Survival by size of the redundancy groups. `chosen`: the bound of the cluster, 0 for none."""

    threshold: float
    chosen: int
    auto: int
    sizes: tuple[GroupSurvival, ...]

    def of(self, scheme: Scheme) -> tuple[GroupSurvival, ...]:
        """Those of one scheme, by size."""
        return tuple(one for one in self.sizes if one.scheme is scheme)

    def table(self) -> str:
        """The comparison as a table; '' if there is only one size."""
        bounds = sorted({one.nodes for one in self.sizes})
        if len(bounds) < 2:
            return ""
        schemes = [scheme for scheme in ENCODED if self.of(scheme)]
        of_each = "parity", f"days above {self.threshold:g}", f"lost within {_DAYS} d"
        rows: list[tuple[str, ...]] = [("nodes of a group", *(f"{s.name}: {c}" for s in schemes for c in of_each))]
        for bound in bounds:
            by_scheme = {one.scheme: one for one in self.sizes if one.nodes == bound}
            cells = [text for scheme in schemes for text in _cells(by_scheme.get(scheme))]
            rows.append((f"{bound}{' *' if bound == self.chosen else ''}", *cells))
        head = f"survival by size of redundancy groups; --reft-group-nodes auto would choose {self.auto}"
        return "\n".join([head, *columns(rows), "  * as in this plan"])

    def block(self) -> list[dict[str, Any]]:
        """The comparison as JSON; `days` None: never."""
        return [
            {
                "scheme": one.scheme.value, "nodes": one.nodes, "groups": one.groups, "parity": one.parity,
                "days": one.days if math.isfinite(one.days) else None, "lost": one.lost,
            }
            for one in self.sizes
        ]  # fmt: skip


def plan_group_sizes(cluster: Cluster, threshold: float, sizes: Sequence[int] = SIZES) -> GroupSizes:
    """Compare groups of these sizes, that of the cluster, and whole sharding groups. Raises ConfigError for a threshold
    outside (0, 1)."""
    whole = cluster.group_nodes
    chosen = min(cluster.redundancy_nodes or whole, whole)
    bounds = sorted({*(size for size in sizes if size < whole), chosen, whole})
    compared = [
        _survival(replace(cluster, redundancy_nodes=bound), scheme, threshold)
        for scheme in ENCODED
        for bound in bounds
        if scheme in cluster.schemes and bound >= scheme.least
    ]
    return GroupSizes(threshold, chosen, choose_group_nodes(cluster.nodes, Scheme.RAIM5.losses), tuple(compared))


def _survival(cluster: Cluster, scheme: Scheme, threshold: float) -> GroupSurvival:
    cut = cluster.redundancy_groups(scheme.losses)
    smallest = min(map(sum, cut))
    return GroupSurvival(
        scheme,
        cluster.redundancy_nodes,
        cluster.groups * sum(cut.values()),
        scheme.losses / (smallest - scheme.losses),
        days_until(cluster, scheme, threshold),
        loss(log_survival(cluster, scheme, _DAYS)),
    )


def _cells(one: GroupSurvival | None) -> tuple[str, ...]:
    if one is None:
        return "", "", ""
    days = "always" if math.isinf(one.days) else f"{one.days:.3g}" if one.days < 1000 else f"{one.days:.0f}"
    return f"{one.parity:.1%}", days, f"{one.lost:.2g}"
