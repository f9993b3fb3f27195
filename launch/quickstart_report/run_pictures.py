"""Draw runs: two runs of a job, one of them killed; and how a job used its bubbles.

`draw_comparison`: losses of the failed and the unfailed run by iteration, over each other, and by wall time with the
failure and the snapshots.
`draw_bubbles`: one iteration with a row per rank:

    ####  forward, backward, update, reduction, in their colours        light: a bubble
    [==]  a planned send window in a bubble, filled by the mean share that was sent per iteration
    [..]  the same, dotted, if no node reported the bytes sent

Invariant: draws only what the runs wrote and what `bubble_use` computed; needs no display.

In: the runs and their comparison; a `BubbleUse`. Out: a PNG.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch, Rectangle

from ft_plugins.bubbles.timeline.timeline_values import Row, Window
from ft_plugins.events import catalogue
from ft_plugins.model.timeline import Kind
from ft_plugins.rehearse.driver import Loss
from ft_plugins.report.plan_pictures import MAX_RANKS, SPANS, new_figure

from .bubble_use import BubbleUse
from .comparison import RunComparison, RunRecord, sealed_by_all

UNFAILED, FAILED, FAILURE, SYNCHRONISED = "#7a8794", "#0b6fb8", "#c8322b", "#2f8f4e"
IDLE, WINDOW, INK = "#e9edf1", "#d98e04", "#1c1f22"
UNREPORTED = ":"
_UNFAILED = {"color": UNFAILED, "label": "unfailed run", "linewidth": 4.0, "alpha": 0.5}  # is seen under the other
_FAILED = {"color": FAILED, "label": "run with one kill", "linewidth": 1.4}
_SYNCHRONISED = "replicas synchronised"
_HEIGHT = 0.78  # of a row; rows are one unit apart
_LABEL_SHARE = 0.053  # of the width; narrower windows have no label


def draw_comparison(failed: RunRecord, unfailed: RunRecord, report: RunComparison, path: Path) -> None:
    """Draw two runs of a job to `path`: by iteration, with their difference, and by time."""
    figure = new_figure(path, 12, 6, dpi=130)
    (losses, times), (differences, snapshots) = figure.subplots(2, 2, sharex="col", height_ratios=[5, 1])
    times.sharey(losses)
    killed = next((event.time for event in failed.events if event.type is catalogue.SIGNAL_SENT), None)
    for run, style in ((unfailed, _UNFAILED), (failed, _FAILED)):
        losses.plot([entry.iteration for entry in run.losses], [entry.loss for entry in run.losses], **style)
    differences.plot(*zip(*difference(failed, unfailed), strict=True), color=FAILED, linewidth=1.2)
    _draw_losses(times, failed, unfailed, killed)
    if killed is not None:
        _draw_failure(times, failed, report, killed)
    _draw_synchronisations(times, failed)
    _draw_snapshots(snapshots, failed, unfailed, killed)
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=12, fontweight="bold")
    losses.set_ylabel("loss (nats per byte)")
    differences.set_ylabel("difference")
    differences.set_xlabel("iteration")
    snapshots.set_xlabel("seconds since the start of each run")
    figure.supxlabel(f"measured on {_machine()}", x=0.99, ha="right", fontsize=8, color=UNFAILED)
    losses.legend(frameon=False, loc="lower left")
    marks = dict(zip(*reversed(times.get_legend_handles_labels()), strict=True))
    if _SYNCHRONISED in marks:
        times.legend([marks[_SYNCHRONISED]], [_SYNCHRONISED], frameon=False, loc="lower left")
    runs = (failed, unfailed)
    first, last = (pick(run.losses[at].time - run.began for run in runs) for pick, at in ((min, 0), (max, -1)))
    times.set_xlim(first - 0.03 * (last - first), last + 0.03 * (last - first))
    for axes in (losses, differences, times, snapshots):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e4e7ea", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)


def difference(failed: RunRecord, unfailed: RunRecord) -> list[tuple[int, float]]:
    """By iteration, in the order of the killed run, how much its loss is larger than that of the other one."""
    whole = {entry.iteration: entry.loss for entry in unfailed.losses}
    both = [entry for entry in failed.losses if entry.iteration in whole]
    return [(entry.iteration, entry.loss - whole[entry.iteration]) for entry in both] or [(0, float("nan"))]


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def _title(report: RunComparison) -> str:
    if report.proven:
        lost = {0: "no iteration", 1: "one iteration"}.get(
            report.iterations_lost or 0, f"{report.iterations_lost} iterations"
        )
        target = "node" if "lost" in report.killed else "process"
        return f"One {target} killed, {lost} lost, final state identical bit for bit"
    return "Survival is not proven: " + report.unproven[0]


def _draw_losses(axes: Any, failed: RunRecord, unfailed: RunRecord, killed: float | None) -> None:
    style: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 2.6}
    _line(axes, unfailed.began, list(unfailed.losses), color=UNFAILED, label="unfailed run", **style)
    before = [entry for entry in failed.losses if killed is None or entry.time < killed]
    after = [entry for entry in failed.losses if killed is not None and entry.time >= killed]
    _line(axes, failed.began, before, color=FAILED, label="run with one kill", **style)
    _line(axes, failed.began, after, color=FAILED, **style)
    if before and after:
        gap = [before[-1], after[0]]
        _line(axes, failed.began, gap, color=FAILED, linewidth=1.0, linestyle=(0, (2, 3)))


def _line(axes: Any, began: float, losses: list[Loss], **style: Any) -> None:
    axes.plot([entry.time - began for entry in losses], [entry.loss for entry in losses], **style)


def _draw_failure(axes: Any, failed: RunRecord, report: RunComparison, killed: float) -> None:
    at = killed - failed.began
    axes.axvline(at, color=FAILURE, linewidth=1.4)
    seconds, text = report.seconds, f"SIGKILL of {report.victim}"
    if seconds.down is not None:
        axes.axvspan(at, at + seconds.down, color=FAILURE, alpha=0.07, linewidth=0)
    parts = (("detect", seconds.detect), ("restart", seconds.restart), ("load", seconds.load))
    text += "".join(f"\n{name} {value:.2f} s" for name, value in parts if value is not None)
    if report.restored_from is not None:
        text += f"\nresumed from iteration {report.restored_from.iteration}"
    axes.annotate(
        text, (at, 0.98), xycoords=("data", "axes fraction"), xytext=(6, 0), textcoords="offset points",
        color=FAILURE, fontsize=9, va="top", ha="left",
    )  # fmt: skip


def _draw_synchronisations(axes: Any, failed: RunRecord) -> None:
    """Mark when the first rank had synchronised its replica under local SGD."""
    times = [e.time - failed.began for e in failed.events if e.type is catalogue.REPLICAS_SYNCHRONISED and e.rank == 0]
    for number, time in enumerate(times):
        label = None if number else _SYNCHRONISED
        axes.axvline(time, color=SYNCHRONISED, linewidth=0.8, linestyle=(0, (1, 2)), label=label)


def _draw_snapshots(axes: Any, failed: RunRecord, unfailed: RunRecord, killed: float | None) -> None:
    rows = [[time - run.began for time, _ in sealed_by_all(run.events)] for run in (unfailed, failed)]
    axes.eventplot(rows, colors=[UNFAILED, FAILED], lineoffsets=[1, 0], linelengths=0.7, linewidths=1.0)
    if killed is not None:
        axes.axvline(killed - failed.began, color=FAILURE, linewidth=1.4)
    axes.set_yticks([0.5], ["snapshots"])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, 1.6)


def draw_bubbles(use: BubbleUse, path: Path) -> None:
    """Draw the bubbles of one iteration to `path`."""
    rows = use.rows[:MAX_RANKS]
    figure = new_figure(path, 13, 1.7 + 0.62 * len(rows), dpi=150)
    axes = figure.subplots()
    width = max(row.seconds for row in rows) * 1e3
    for place, row in enumerate(rows):
        _draw_row(axes, use, row, place, width)
    axes.set_xlim(0, width)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [f"rank {row.rank}, {use.nodes[row.rank]}" for row in rows])
    axes.set_xlabel("milliseconds of one iteration (median of the measured ones)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    head, _, rest = use.traffic.line().partition("; ")
    axes.set_title(f"{head}\n", loc="left", fontsize=13, fontweight="bold")
    axes.text(0, 1.02, rest, transform=axes.transAxes, va="bottom", fontsize=10, color=INK)
    drawn = {kind for row in rows for kind, _, _ in row.spans}
    names = {Kind.REDUCE: "gradient reduction"}
    patches = [Patch(color=SPANS[kind], label=names.get(kind, kind.value)) for kind in SPANS if kind in drawn]
    patches += [
        Patch(color=IDLE, label="bubble"),
        Patch(facecolor="white", edgecolor=WINDOW, label="send window"),
        Patch(color=WINDOW, label="sent, on average"),
    ]
    if use.partly_reported:
        patches.append(Patch(facecolor="white", edgecolor=WINDOW, linestyle=UNREPORTED, label="bytes not reported"))
    figure.legend(handles=patches, frameon=False, loc="outside lower left", ncols=len(patches))
    figure.savefig(path)


def _draw_row(axes: Any, use: BubbleUse, row: Row, place: int, width: float) -> None:
    low = place - _HEIGHT / 2
    bars = {kind: [_ms(begin, end) for each, begin, end in row.spans if each is kind] for kind in SPANS}
    idle = [_ms(begin, end) for _, begin, end in row.bubbles]  # drawn over the waiting part of a reduction
    for colour, segments in ((SPANS[Kind.REDUCE], bars.pop(Kind.REDUCE)), (IDLE, idle)):
        axes.broken_barh(segments, (low, _HEIGHT), color=colour, linewidth=0)
    for kind, segments in bars.items():
        axes.broken_barh(segments, (low, _HEIGHT), color=SPANS[kind], linewidth=0)
    for bubble in dict.fromkeys(window.bubble for window in row.windows):
        left = use.bytes_per_iteration(row.rank, bubble)
        for window in (one for one in row.windows if one.bubble == bubble):
            sent = min(left, window.nbytes) if left is not None else None
            _draw_window(axes, window, sent, low, width)
            left = left - sent if left is not None and sent is not None else None
    target = f"→ rank {row.receiver}: {size(row.nbytes)}"
    axes.annotate(
        f"{target}, rate-limited" if row.reason else target, (1.0, place), xycoords=("axes fraction", "data"),
        xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK, annotation_clip=False,
    )  # fmt: skip


def _draw_window(axes: Any, window: Window, sent: float | None, low: float, width: float) -> None:
    """Draw a window filled from below by the share that was sent; dotted if that was not reported."""
    begin, length = _ms(window.begin, window.end)
    if sent is not None:
        share, bottom = sent / window.nbytes if window.nbytes else 0.0, low + _HEIGHT
        axes.add_patch(Rectangle((begin, bottom), length, -_HEIGHT * share, color=WINDOW, linewidth=0, alpha=0.85))
        if length > _LABEL_SHARE * width:
            text = f"{size(sent)}\nof {size(window.nbytes)}"
            axes.text(begin + length / 2, low + _HEIGHT / 2, text, ha="center", va="center", fontsize=7.5, color=INK)
    style = "-" if sent is not None else UNREPORTED
    frame = Rectangle((begin, low), length, _HEIGHT, fill=False, edgecolor=WINDOW, linewidth=1.1, linestyle=style)
    axes.add_patch(frame)


def _ms(begin: float, end: float) -> tuple[float, float]:
    return begin * 1e3, (end - begin) * 1e3


def size(nbytes: float) -> str:
    """Bytes as MiB or KiB."""
    if nbytes >= 1 << 20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.0f} KiB"
