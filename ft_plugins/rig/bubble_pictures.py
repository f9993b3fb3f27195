"""Pictures of pipelines: who idles when, bubbles by configuration and by schedule (BAFT, figures 3 and 4), what a
checkpoint costs (figure 7), and goodput over the size of a job.

Invariant: draws what the planner computes and nothing else; needs no display.

In: timelines, studies, plans. Out: pictures, in the format that a name ends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ..model.timeline import Kind, Timeline
from ..planner.goodput import GoodputPlan, ProtectionKind
from ..planner.intervals import DAY
from ..planner.pipeline import PipelineSchedule
from ..planner.study import Scale, Shape
from .canvas import plain, sheet

SPANS = {
    Kind.FORWARD: "#0b6fb8",
    Kind.BACKWARD: "#2c8a4b",
    Kind.SEND: "#f0c75e",
    Kind.RECV: "#f3e3b3",
    Kind.REDUCE: "#8a5ab3",
    Kind.UPDATE: "#7a8794",
}
SCHEDULES = dict(zip(PipelineSchedule, ("#7a8794", "#0b6fb8", "#2c8a4b", "#c8322b", "#d98e04"), strict=True))
PROTECTIONS = dict(zip(ProtectionKind, ("#7a8794", "#c8322b", "#d98e04", "#0b6fb8", "#2c8a4b"), strict=True))
PAPER_LEAST = 0.2  # bubbles that the paper found everywhere
MOST_RANKS = 64  # that a picture has rows for


def draw_plan(timelines: Sequence[Timeline], plans: Sequence[GoodputPlan], path: Path) -> None:
    """One iteration, a row for each rank, and goodput over the nodes. Raises ConfigError for another format, OSError
    where it cannot be written."""
    figure = sheet(path, 12, 8)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    shown = timelines[:MOST_RANKS]
    for one in shown:
        for kind, colour in SPANS.items():
            bars = [(span.begin, span.end - span.begin) for span in one.spans if span.kind is kind]
            above.broken_barh(bars, (one.rank - 0.4, 0.8), color=colour, linewidth=0)
    above.set_xlim(0, timelines[0].seconds)
    above.set_ylim(len(shown) - 0.5, -0.5)
    above.set_ylabel("rank of the pipeline")
    above.set_xlabel("one iteration, in forward passes of a stage")
    above.set_title(f"{plans[0].bubble_share:.1%} of an iteration is bubbles", loc="left", fontweight="bold")
    found = {span.kind for one in shown for span in one.spans}
    names = {Kind.SEND: "send, waiting", Kind.RECV: "receive, waiting"}
    patches = [Patch(color=SPANS[kind], label=names.get(kind, kind.value)) for kind in SPANS if kind in found]
    above.legend(handles=patches, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _goodput(below, plans, [plan.nodes for plan in plans], "nodes")
    figure.savefig(path)


def draw_goodput(scales: Sequence[Scale], path: Path) -> None:
    """Goodput of the family."""
    figure = sheet(path, 10, 6)
    _goodput(figure.subplots(), [one.plan for one in scales], [one.job.ranks for one in scales], "ranks")
    figure.savefig(path)


def draw_shapes(shapes: Sequence[Shape], path: Path) -> None:
    """Bubbles of each stage, a panel for each batch (figure 3)."""
    figure = sheet(path, 12, 5)
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
        plain(axes)
    figure.axes[0].set_ylabel("share of the iteration that is bubbles, by stage")
    figure.savefig(path)


def draw_schedules(scales: Sequence[Scale], path: Path) -> None:
    """Bubbles of each schedule over the size of the job (figure 4)."""
    figure = sheet(path, 12, 5)
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
    plain(axes)
    figure.savefig(path)


def draw_overheads(shapes: Sequence[Shape], path: Path) -> None:
    """Time of an iteration without checkpoints, with one sent in bubbles, with one sent at once; and the overhead of
    the first two (figure 7)."""
    figure = sheet(path, 13, 5)
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
        plain(axes)
        overhead = axes.twinx()
        overhead.plot([one.in_bubbles * 100 for one in chosen], "o-", color="#c8322b", label="BAFT's overhead")
        overhead.set_ylim(0, 4)
        wait = f"{chosen[0].snapshot_seconds * 1e3:.0f} ms"
        overhead.set_ylabel(f"overhead of BAFT, %, if training waits {wait} for a snapshot", color="#c8322b")
        overhead.spines[["top"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_measured(rows: Sequence[tuple[str, float, float, float]], path: Path) -> None:
    """Of each shape its name, overhead in bubbles, the upper end of its interval, overhead of sending at once."""
    figure = sheet(path, 11, 4.5)
    left, right = figure.subplots(1, 2)
    names = [name for name, *_ in rows]
    means = [100 * mean for _, mean, _, _ in rows]
    errors = [max(0.0, 100 * upper - mean) for (_, _, upper, _), mean in zip(rows, means, strict=True)]
    left.bar(names, means, color="#2c8a4b", yerr=[[0.0] * len(errors), errors], capsize=4)
    left.axhline(1.0, color="#c8322b", linewidth=1, linestyle="--")
    left.set_title("copies in bubbles", loc="left", fontweight="bold")
    right.bar(names, [100 * share for *_, share in rows], color="#d98e04")
    right.set_title("copies at once, in the iteration that sends", loc="left", fontweight="bold")
    for axes in (left, right):
        axes.set_ylabel("% of an iteration without protection")
        plain(axes)
    figure.savefig(path)


def _goodput(axes: Axes, plans: Sequence[GoodputPlan], sizes: Sequence[int], unit: str) -> None:
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
    plain(axes)
