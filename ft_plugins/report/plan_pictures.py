"""Draw plans: survival of the newest snapshot (REFT, figure 8), one iteration of a pipeline, goodput.

Invariant: draws only what the planner computed; needs no display.

In: a cluster and a threshold; timelines and goodput plans. Out: pictures, in the format of the path's suffix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ..model.timeline import Kind, Timeline
from ..planner.goodput import GoodputPlan, ProtectionKind
from ..planner.intervals import DAY
from ..planner.survival import Cluster, Scheme, days_until, survival
from .canvas import MAX_RANKS, SPANS, new_figure, style_axes

PROTECTIONS = dict(zip(ProtectionKind, ("#7a8794", "#c8322b", "#d98e04", "#0b6fb8", "#2c8a4b"), strict=True))
COLOURS = {Scheme.CHECKPOINT: "#7a8794", Scheme.RAIM5: "#0b6fb8", Scheme.RAIM6: "#2c8a4b"}
SIZES = ((1 / 4, (0, (1, 1.5))), (1, "solid"), (4, (0, (5, 2))))  # factor of the cluster's size, line style
POINTS = 400


def draw_plan(timelines: Sequence[Timeline], plans: Sequence[GoodputPlan], path: Path) -> None:
    """Draw one iteration with a row per rank, and goodput over the number of nodes. Raises ConfigError for another
    format, OSError if `path` cannot be written."""
    figure = new_figure(path, 12, 8)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    shown = timelines[:MAX_RANKS]
    for one in shown:
        for kind, colour in SPANS.items():
            bars = [(span.begin, span.end - span.begin) for span in one.spans if span.kind is kind]
            above.broken_barh(bars, (one.rank - 0.4, 0.8), color=colour, linewidth=0)
    above.set_xlim(0, timelines[0].seconds)
    above.set_ylim(len(shown) - 0.5, -0.5)
    above.set_ylabel("rank of the pipeline")
    above.set_xlabel("one iteration, in forward passes of a stage")
    above.set_title(f"{plans[0].bubble_share:.1%} of an iteration is bubbles", loc="left", fontweight="bold")
    drawn = {span.kind for one in shown for span in one.spans}
    names = {Kind.SEND: "send, waiting", Kind.RECV: "receive, waiting"}
    patches = [Patch(color=SPANS[kind], label=names.get(kind, kind.value)) for kind in SPANS if kind in drawn]
    above.legend(handles=patches, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    goodput_axes(below, plans, [plan.nodes for plan in plans], "nodes")
    figure.savefig(path)


def goodput_axes(axes: Axes, plans: Sequence[GoodputPlan], sizes: Sequence[int], unit: str) -> None:
    """Plot the time without progress under each protection over the size of a job, in `unit`."""
    for protection, colour in PROTECTIONS.items():
        lost = [max(1e-6, 1 - plan.of(protection).goodput) for plan in plans]
        axes.plot(sizes, lost, "o-", color=colour, label=protection.title, linewidth=1.6, markersize=4)
    restarts = [plan.failures * min(one.restart_seconds for one in plan.upkeeps) / DAY for plan in plans]
    axes.plot(sizes, [max(1e-6, share) for share in restarts], "--", color="#1c1f22", label="restarts alone")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(unit)
    axes.set_ylabel("time without progress")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3%}" if value < 1e-3 else f"{value:.1%}")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    style_axes(axes)


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
    """Points evenly spaced on a logarithmic axis."""
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
        f"Survival in groups of {cluster.largest_group(1)} nodes: hardware {cluster.hw_rate:g}, "
        f"software {cluster.sw_rate:g}, shape {cluster.shape:g}"
    )
