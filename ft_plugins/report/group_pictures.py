"""Draw survival by size of redundancy groups: REFT's figure 8 for one cluster, with a curve for each size.

Invariant: draws only what the planner computed; needs no display.

In: a cluster, its `GroupSizes`. Out: a picture, in the format of the path's suffix.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from matplotlib import colormaps

from ..planner.group_sizes import ENCODED, GroupSizes
from ..planner.survival import Cluster, Scheme, survival
from .canvas import new_figure, style_axes

POINTS = 200
_LINES = {Scheme.RAIM5: "solid", Scheme.RAIM6: (0, (5, 2))}
_COLOURS = {Scheme.RAIM5: "#0b6fb8", Scheme.RAIM6: "#2c8a4b"}


def draw_group_sizes(cluster: Cluster, sizes: GroupSizes, path: Path) -> None:
    """Draw survival over days by size on the left, and on the right the days above the threshold with the parity that
    each size takes. Raises ConfigError for another format, OSError if `path` cannot be written."""
    figure = new_figure(path, 14, 5.5)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    ends = [one.days for one in sizes.sizes if math.isfinite(one.days)] or [1.0]
    low, high = math.log(min(ends) / 10), math.log(max(ends) * 10)
    days = [math.exp(low + (high - low) * place / (POINTS - 1)) for place in range(POINTS)]
    bounds = sorted({one.nodes for one in sizes.sizes})
    shades = colormaps["viridis"]([0.9 * at / max(1, len(bounds) - 1) for at in range(len(bounds))])
    colours = dict(zip(bounds, shades, strict=True))
    for one in sizes.sizes:
        chances = [survival(replace(cluster, redundancy_nodes=one.nodes), one.scheme, day) for day in days]
        label = f"{one.scheme.name}, groups of {one.nodes}"
        left.plot(days, chances, color=colours[one.nodes], linestyle=_LINES[one.scheme], linewidth=1.6, label=label)
    chances = [survival(cluster, Scheme.CHECKPOINT, day) for day in days]
    left.plot(days, chances, color="#7a8794", linewidth=1.6, label=Scheme.CHECKPOINT.title)
    left.axhline(sizes.threshold, color="#c8322b", linewidth=1.0)
    left.set_xscale("log")
    left.set_ylim(0, 1.02)
    left.set_xlabel("days since all nodes were new and the last checkpoint was written")
    left.set_ylabel("probability that the newest snapshot survives")
    title = f"Survival by group size: {cluster.nodes} nodes, sharding groups of {cluster.group_nodes}"
    left.set_title(title, loc="left", fontsize=12, fontweight="bold")
    left.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    for scheme in ENCODED:
        shown = [one for one in sizes.of(scheme) if math.isfinite(one.days)]
        if not shown:
            continue
        right.plot([one.nodes for one in shown], [one.days for one in shown], "o-", color=_COLOURS[scheme],
                   label=scheme.name, markersize=4)  # fmt: skip
        for one in shown:
            right.annotate(f"{100 * one.parity:.2g}%", (one.nodes, one.days), xytext=(4, 5), textcoords="offset points",
                           fontsize=8, color=_COLOURS[scheme])  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(bounds, [str(bound) for bound in bounds])
    right.set_xlabel("nodes of a redundancy group; at each point: parity, of a share")
    right.set_ylabel(f"days above {sizes.threshold:g}")
    if right.get_legend_handles_labels()[0]:
        right.legend(frameon=False)
    style_axes(left)
    style_axes(right)
    figure.savefig(path)
