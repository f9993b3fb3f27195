"""Draw survival of the newest snapshot over days (REFT, figure 8): by scheme and size of the cluster, and by size of
redundancy groups.

Invariant: draws only what the planner computed; needs no display.

The time of an iteration under each policy over the bandwidth of the link is drawn from `planner.sync_plan`.

In: a cluster and a threshold, or its `GroupSizes`. Out: a picture, in the format of the path's suffix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..errors import ConfigError
from ..model.timeline import Kind
from ..planner.group_sizes import ENCODED, GroupSizes
from ..planner.survival import Cluster, Scheme, days_until, survival
from ..planner.sync_plan import ComparedPolicy, SyncOutlook, rate

FORMATS = (".png", ".svg", ".pdf")
SPANS = {
    Kind.FORWARD: "#0b6fb8",
    Kind.BACKWARD: "#2c8a4b",
    Kind.SEND: "#f0c75e",
    Kind.RECV: "#f3e3b3",
    Kind.REDUCE: "#8a5ab3",
    Kind.UPDATE: "#7a8794",
}
MAX_RANKS = 64  # rows of a picture
COLOURS = {Scheme.CHECKPOINT: "#7a8794", Scheme.RAIM5: "#0b6fb8", Scheme.RAIM6: "#2c8a4b"}
LIMIT = "#c8322b"
SIZES = ((1 / 4, (0, (1, 1.5))), (1, "solid"), (4, (0, (5, 2))))  # factor of the cluster's size, line style
LINES = {Scheme.RAIM5: "solid", Scheme.RAIM6: (0, (5, 2))}  # of sizes of groups
POINTS = 400
POLICY_COLOURS = dict(
    zip(ComparedPolicy, ("#7a8794", "#0b6fb8", "#c8322b", "#2c8a4b", "#d98e04", "#8a5ab3"), strict=True)
)
BOUND = "#1c1f22"
SHADE = 0.08


def new_figure(path: Path, width: float, height: float, dpi: int = 130) -> Figure:
    """A figure to save at `path`, sizes in inches. Raises ConfigError for a suffix outside FORMATS."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: expected a name that ends in one of {', '.join(FORMATS)}")
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes) -> None:
    """Show only the grid lines of the value axis, behind the plot."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)


def draw_survival(cluster: Cluster, threshold: float, path: Path) -> None:
    """Draw to `path`. Raises ConfigError for another format, OSError if it cannot be written."""
    figure = new_figure(path, 10, 6)
    axes = figure.subplots()
    sizes = {_scaled(cluster, factor): line for factor, line in reversed(SIZES)} | {cluster: "solid"}
    ends = [days_until(size, scheme, at) for size in sizes for scheme in size.schemes for at in (0.999, 0.01)]
    days = _days([end for end in ends if math.isfinite(end)] or [0.01, 1000.0])
    for size, line in sorted(sizes.items(), key=lambda entry: entry[0].nodes):
        for scheme in size.schemes:
            chances = [survival(size, scheme, day) for day in days]
            label = f"{scheme.title}, {size.nodes} nodes"
            axes.plot(days, chances, color=COLOURS[scheme], linestyle=line, linewidth=1.8, label=label)
    for scheme in cluster.schemes:
        day = days_until(cluster, scheme, threshold)
        if math.isfinite(day):
            axes.plot([day], [threshold], "o", color=COLOURS[scheme], markersize=5)
            axes.annotate(
                f"{day:.3g} d", (day, threshold), xytext=(6, 5), textcoords="offset points", color=COLOURS[scheme]
            )
    title = f"Survival in groups of {cluster.largest_group(1)} nodes: hardware {cluster.hw_rate:g}, "
    _over_days(axes, days, threshold, f"{title}software {cluster.sw_rate:g}, shape {cluster.shape:g}")
    figure.savefig(path)


def draw_group_sizes(cluster: Cluster, sizes: GroupSizes, path: Path) -> None:
    """Draw survival over days by size on the left, and on the right the days above the threshold with the parity that
    each size takes. Raises ConfigError for another format, OSError if `path` cannot be written."""
    figure = new_figure(path, 14, 5.5)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    ends = [one.days for one in sizes.sizes if math.isfinite(one.days)] or [1.0]
    days = _days([min(ends) / 10, max(ends) * 10])
    bounds = sorted({one.nodes for one in sizes.sizes})
    shades = colormaps["viridis"]([0.9 * at / max(1, len(bounds) - 1) for at in range(len(bounds))])
    colours = dict(zip(bounds, shades, strict=True))
    for one in sizes.sizes:
        chances = [survival(replace(cluster, redundancy_nodes=one.nodes), one.scheme, day) for day in days]
        label = f"{one.scheme.name}, groups of {one.nodes}"
        left.plot(days, chances, color=colours[one.nodes], linestyle=LINES[one.scheme], linewidth=1.6, label=label)
    chances = [survival(cluster, Scheme.CHECKPOINT, day) for day in days]
    left.plot(days, chances, color=COLOURS[Scheme.CHECKPOINT], linewidth=1.6, label=Scheme.CHECKPOINT.title)
    title = f"Survival by group size: {cluster.nodes} nodes, sharding groups of {cluster.group_nodes}"
    _over_days(left, days, sizes.threshold, title)
    for scheme in ENCODED:
        shown = [one for one in sizes.of(scheme) if math.isfinite(one.days)]
        if not shown:
            continue
        right.plot([one.nodes for one in shown], [one.days for one in shown], "o-", color=COLOURS[scheme],
                   label=scheme.name, markersize=4)  # fmt: skip
        for one in shown:
            right.annotate(f"{100 * one.parity:.2g}%", (one.nodes, one.days), xytext=(4, 5), textcoords="offset points",
                           fontsize=8, color=COLOURS[scheme])  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_xticks(bounds, [str(bound) for bound in bounds])
    right.set(
        yscale="log",
        xlabel="nodes of a redundancy group; at each point: parity, of a share",
        ylabel=f"days above {sizes.threshold:g}",
    )
    if right.get_legend_handles_labels()[0]:
        right.legend(frameon=False)
    style_axes(right)
    figure.savefig(path)


def _over_days(axes: Axes, days: Sequence[float], threshold: float, title: str) -> None:
    """The threshold, and all that the axes of survival have."""
    axes.axhline(threshold, color=LIMIT, linewidth=1.0)
    axes.set(
        xscale="log",
        xlim=(days[0], days[-1]),
        ylim=(0, 1.02),
        xlabel="days since all nodes were new and the last checkpoint was written",
        ylabel="probability that the newest snapshot survives",
    )
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    style_axes(axes)


def _scaled(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, nodes=max(1, round(cluster.groups * factor)) * cluster.group_nodes)


def _days(ends: Sequence[float]) -> list[float]:
    """Points evenly spaced on a logarithmic axis."""
    low, high = math.log(max(min(ends), 1e-6)), math.log(min(max(ends), 1e9))
    high = max(high, low + 1)
    return [math.exp(low + (high - low) * i / (POINTS - 1)) for i in range(POINTS)]


def draw_sync(outlook: SyncOutlook, path: Path) -> None:
    """Draw to `path`. Raises ConfigError for another format or without links to draw, OSError if it cannot be
    written."""
    if not outlook.curve:
        raise ConfigError(
            "a plot over bandwidth needs at least two different links and a profile with bytes; give --link-mbps twice"
        )
    figure = new_figure(path, 11, 8)
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    links = [link.mbps or 0.0 for link in outlook.curve]
    for number, (policy, colour) in enumerate(POLICY_COLOURS.items()):
        seconds = [link.seconds[policy] for link in outlook.curve]
        above.plot(
            links, seconds, color=colour, linewidth=1.8, label=policy.title, zorder=3 + len(POLICY_COLOURS) - number
        )
    above.plot(links, [link.bound for link in outlook.curve], "--", color=BOUND, linewidth=1.0, label="bound")
    for policy, low, high in outlook.ranges():
        for axes in (above, below):
            axes.axvspan(low, high, color=POLICY_COLOURS[policy], alpha=SHADE, linewidth=0)
    above.set(xscale="log", yscale="log", xlim=(links[0], links[-1]), ylabel="seconds per iteration")
    for axis_part in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
        axis_part(lambda value, _: f"{value:g}")
    pays = ", ".join(f"{policy.title} up to {rate(high)}" for policy, _, high in outlook.ranges())
    above.set_title(f"What pays: {pays}", loc="left", fontsize=11, fontweight="bold")
    above.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    below.step(links, [link.schedule.period for link in outlook.curve], color=SPANS[Kind.FORWARD], where="mid")
    below.set(
        ylabel="H, iterations",
        xlabel=f"bandwidth of the link, Mbit/s ({outlook.profile.replicas} replicas)",
        ylim=(0, None),
    )
    for axes in (above, below):
        style_axes(axes)
    figure.savefig(path)
