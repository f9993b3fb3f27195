"""Draw benchmark results: bubbles by shape and by schedule (BAFT, figures 3 and 4), the cost of a checkpoint (figure
7), training with corrupted gradients (PAFT, figures 2, 5, 6 and 9), and the cost of averaging.

Invariant: draws only what was computed or measured, leaves out what is missing, and needs no display.

In: studies, costs, curves by noise and method. Out: pictures, in the format of the path's suffix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ft_plugins.model.timeline import Kind, Timeline
from ft_plugins.planner.intervals import DAY
from ft_plugins.report.plan_pictures import MAX_RANKS, SPANS, new_figure, style_axes
from workloads.pipelines.goodput import GoodputPlan, ProtectionKind
from workloads.pipelines.pipeline import PipelineSchedule
from workloads.sdc_runs import BURSTS, CLEAN, NOISED, VARIANCES
from workloads.study import ScaleStudy, ShapeStudy
from workloads.sync_blocks import PolicyFigure

SCHEDULES = dict(zip(PipelineSchedule, ("#7a8794", "#0b6fb8", "#2c8a4b", "#c8322b", "#d98e04", "#7a4fb3"), strict=True))
PROTECTIONS = dict(zip(ProtectionKind, ("#7a8794", "#c8322b", "#d98e04", "#0b6fb8", "#2c8a4b"), strict=True))
PAPER_LEAST = 0.2  # the smallest bubble share in the paper
Curve = Sequence[tuple[int, float]]
Curves = Mapping[tuple[str, str], Curve]  # by noise and method; the clean run is ('', 'clean')
METHODS = {
    CLEAN: "#1c1f22", NOISED: "#c8322b", "sync_5": "#2c8a4b", "sync_10": "#7fb069", "sync_50": "#d98e04",
    "dyn": "#0b6fb8",
}  # fmt: skip
NOISES = dict(zip(VARIANCES, ("#f0c75e", "#d98e04", "#c8322b", "#6b1a16"), strict=True))
DEGREE, BURST = "1e-2", "with bursts of variance "


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


def draw_goodput(scales: Sequence[ScaleStudy], path: Path) -> None:
    """Draw the goodput of the family."""
    figure = new_figure(path, 10, 6)
    goodput_axes(figure.subplots(), [one.plan for one in scales], [one.job.ranks for one in scales], "ranks")
    figure.savefig(path)


def draw_shapes(shapes: Sequence[ShapeStudy], path: Path) -> None:
    """Draw the bubbles of each stage, one panel per batch (figure 3)."""
    figure = new_figure(path, 12, 5)
    batches = sorted({one.job.batch for one in shapes}, reverse=True)
    for axes, batch in zip(figure.subplots(1, len(batches), sharey=True, squeeze=False)[0], batches, strict=True):
        chosen = [one for one in shapes if one.job.batch == batch]
        for at, one in enumerate(chosen):
            width = 0.8 / len(one.bubble_shares)
            places = [at - 0.4 + width * (stage + 0.5) for stage in range(len(one.bubble_shares))]
            axes.bar(places, one.bubble_shares, width * 0.9, color="#0b6fb8")
        axes.axhline(PAPER_LEAST, color="#c8322b", linewidth=1.0)
        axes.set_xticks(range(len(chosen)), [one.job.name for one in chosen])
        axes.set_title(f"batch {batch}, microbatch {chosen[0].job.micro_batch}", loc="left", fontweight="bold")
        style_axes(axes)
    figure.axes[0].set_ylabel("share of the iteration that is bubbles, by stage")
    figure.savefig(path)


def draw_schedules(scales: Sequence[ScaleStudy], path: Path) -> None:
    """Draw the bubbles of each schedule over the size of the job (figure 4)."""
    figure = new_figure(path, 12, 5)
    axes = figure.subplots()
    width = 0.8 / len(PipelineSchedule)
    for number, schedule in enumerate(PipelineSchedule):
        places = [at - 0.4 + width * (number + 0.5) for at in range(len(scales))]
        shares = [one.shares[schedule] for one in scales]
        axes.bar(places, shares, width * 0.9, color=SCHEDULES[schedule], label=schedule.value)
    labels = [f"{one.job.ranks} ranks\nd{one.job.dp}m{one.job.tp}p{one.job.pp}" for one in scales]
    axes.set_xticks(range(len(scales)), labels)
    axes.set_ylabel("share of the iteration that is bubbles")
    axes.legend(frameon=False, ncols=len(PipelineSchedule), loc="lower right", bbox_to_anchor=(1, 1))
    style_axes(axes)
    figure.savefig(path)


def draw_overheads(shapes: Sequence[ShapeStudy], path: Path) -> None:
    """Draw the time of an iteration without checkpoints, with one sent in bubbles, and with one sent at once; and the
    overhead of BAFT (figure 7)."""
    figure = new_figure(path, 13, 5)
    batches = sorted({one.job.batch for one in shapes}, reverse=True)
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        chosen = [one for one in shapes if one.job.batch == batch]
        bars = (
            ("no checkpoints", "#7a8794", [0.0 for _ in chosen]),
            ("BAFT, in bubbles", "#2c8a4b", [one.in_bubbles for one in chosen]),
            ("at once", "#d98e04", [one.at_once for one in chosen]),
        )
        for number, (label, colour, more) in enumerate(bars):
            places = [at - 0.27 + 0.27 * number for at in range(len(chosen))]
            heights = [one.iteration_seconds * (1 + share) for one, share in zip(chosen, more, strict=True)]
            axes.bar(places, heights, 0.25, color=colour, label=label)
        axes.set_xticks(range(len(chosen)), [f"{one.job.name}\nevery {one.iterations}" for one in chosen])
        axes.set_ylabel("seconds of an iteration, on average")
        axes.set_title(f"batch {batch}, microbatch {chosen[0].job.micro_batch}", loc="left", fontweight="bold")
        style_axes(axes)
        overhead = axes.twinx()
        overhead.plot([one.in_bubbles * 100 for one in chosen], "o-", color="#c8322b", label="BAFT's overhead")
        overhead.set_ylim(0, 4)
        wait = f"{chosen[0].snapshot_seconds * 1e3:.0f} ms"
        overhead.set_ylabel(f"overhead of BAFT, %, if training waits {wait} for a snapshot", color="#c8322b")
        overhead.spines[["top"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_measured(rows: Sequence[tuple[str, float, float, float]], path: Path) -> None:
    """Draw measured overheads. Rows: name of the shape, overhead in bubbles, upper end of its interval, overhead of
    sending at once."""
    figure = new_figure(path, 11, 4.5)
    left, right = figure.subplots(1, 2)
    names = [name for name, *_ in rows]
    means = [100 * mean for _, mean, _, _ in rows]
    errors = [max(0.0, 100 * upper - mean) for (_, _, upper, _), mean in zip(rows, means, strict=True)]
    left.bar(names, means, color="#2c8a4b", yerr=[[0.0] * len(errors), errors], capsize=4)
    left.axhline(1.0, color="#c8322b", linewidth=1, linestyle="--")
    left.set_title("copies in bubbles", loc="left", fontweight="bold")
    right.bar(names, [100 * share for *_, share in rows], color="#d98e04")
    right.set_title("copies at once, in the sending iteration", loc="left", fontweight="bold")
    for axes in (left, right):
        axes.set_ylabel("% of an iteration without protection")
        style_axes(axes)
    figure.savefig(path)


def draw_learner(name: str, scores: Curves, divergences: Curves, score: str, path: Path) -> None:
    """Draw all panels of one learner. Raises ConfigError for another format, OSError if it cannot be written."""
    figure = new_figure(path, 14, 8)
    panels = figure.subplots(2, 3)
    clean = scores.get(("", CLEAN), ())
    noised, divergence, degrees, intervals, *bursts = panels.flat
    for noise, colour in NOISES.items():
        _line(noised, scores.get((noise, NOISED), ()), colour, f"noised, {noise}")
        _line(divergence, [point for point in divergences.get((noise, NOISED), ()) if point[1] > 0], colour, noise)
        _line(degrees, scores.get((noise, NOISED), ()), colour, f"noised, {noise}", "--")
        _line(degrees, scores.get((noise, "dyn"), ()), colour, f"PAFT, {noise}")
    _line(noised, clean, METHODS[CLEAN], CLEAN)
    _line(degrees, clean, METHODS[CLEAN], CLEAN)
    divergence.set_yscale("log")
    panel = zip([DEGREE, *BURSTS], [intervals, *bursts], strict=True)
    for noise, axes in panel:
        for method, colour in METHODS.items():
            _line(axes, clean if method == CLEAN else scores.get((noise, method), ()), colour, method)
    for axes, title in zip(
        panels.flat,
        (f"{name}: noise without averaging", "divergence of replicas", "degrees of noise",
         f"averaging intervals, variance {DEGREE}", *(BURST + noise.removeprefix("burst_") for noise in BURSTS)),
        strict=True,
    ):  # fmt: skip
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel("iteration")
        axes.set_ylabel("||mean - theta||" if axes is divergence else score)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
        if axes.has_data():
            axes.legend(frameon=False, fontsize=7)
    figure.savefig(path)


def draw_costs(costs: Mapping[str, PolicyFigure], path: Path) -> None:
    """Draw the cost of each mode as a share of an iteration, with its interval."""
    figure = new_figure(path, 8, 4.5)
    axes = figure.subplots()
    names = list(costs)
    shares = [100 * one.value for one in costs.values()]
    below = [max(0.0, 100 * (one.value - one.low)) for one in costs.values()]
    above = [max(0.0, 100 * (one.high - one.value)) for one in costs.values()]
    axes.bar(names, shares, color="#0b6fb8", yerr=[below, above], capsize=4)
    for at, share in enumerate(shares):
        axes.annotate(f"{share:.2f}%", (at, share), xytext=(12, 4), textcoords="offset points", fontsize=9)
    axes.set_ylabel("% of a plain iteration")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _line(axes: Axes, curve: Curve, colour: str, label: str, style: str = "-") -> None:
    points = [point for point in curve if math.isfinite(point[1])]
    if points:
        axes.plot([at for at, _ in points], [value for _, value in points], style, color=colour, label=label)
