"""The picture of an outlook: survival of the newest snapshot over days, by scheme and number of nodes (REFT, figure 8).

Invariant: draws what the planner computes and nothing else; needs no display.

In: a cluster and a threshold. Out: a picture, in the format that its name ends on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes

from ..planner.survival import Cluster, Scheme, days_until, survival
from .canvas import sheet

COLOURS = {Scheme.CHECKPOINT: "#7a8794", Scheme.RAIM5: "#0b6fb8", Scheme.RAIM6: "#2c8a4b"}
SIZES = ((1 / 4, (0, (1, 1.5))), (1, "solid"), (4, (0, (5, 2))))  # of the cluster, and the line that stands for it
POINTS = 400


def draw(cluster: Cluster, threshold: float, path: Path) -> None:
    """Write the picture to `path`. Raises ConfigError for another format, OSError where it cannot be written."""
    figure = sheet(path, 10, 6)
    axes = figure.subplots()
    sizes = {_scaled(cluster, factor): line for factor, line in reversed(SIZES)} | {cluster: "solid"}
    ends = [days_until(size, scheme, at) for size in sizes for scheme in size.schemes for at in (0.999, 0.01)]
    days = _days([end for end in ends if math.isfinite(end)] or [0.01, 1000.0])
    for size, line in sorted(sizes.items(), key=lambda entry: entry[0].nodes):
        for scheme in size.schemes:
            chances = [survival(size, scheme, day) for day in days]
            label = f"{scheme.title}, {size.nodes} nodes"
            axes.plot(days, chances, color=COLOURS[scheme], linestyle=line, linewidth=1.8, label=label)
    _draw_threshold(axes, cluster, threshold)
    axes.set_xscale("log")
    axes.set_xlim(days[0], days[-1])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("days since all nodes were new and the last checkpoint was written")
    axes.set_ylabel("probability that the newest snapshot survives")
    axes.set_title(_title(cluster), loc="left", fontsize=12, fontweight="bold")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.savefig(path)


def _scaled(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, nodes=max(1, round(cluster.groups * factor)) * cluster.group_nodes)


def _days(ends: Sequence[float]) -> list[float]:
    """Points at equal distances on a logarithmic axis."""
    low, high = math.log(max(min(ends), 1e-6)), math.log(min(max(ends), 1e9))
    high = max(high, low + 1)
    return [math.exp(low + (high - low) * i / (POINTS - 1)) for i in range(POINTS)]


def _draw_threshold(axes: Axes, cluster: Cluster, threshold: float) -> None:
    axes.axhline(threshold, color="#c8322b", linewidth=1.0)
    for scheme in cluster.schemes:
        day = days_until(cluster, scheme, threshold)
        if math.isfinite(day):
            axes.plot([day], [threshold], "o", color=COLOURS[scheme], markersize=5)
            axes.annotate(
                f"{day:.3g} d", (day, threshold), xytext=(6, 5), textcoords="offset points", color=COLOURS[scheme]
            )


def _title(cluster: Cluster) -> str:
    return (
        f"Survival in groups of {cluster.group_nodes} nodes: hardware {cluster.hw_rate:g}, "
        f"software {cluster.sw_rate:g}, shape {cluster.shape:g}"
    )
