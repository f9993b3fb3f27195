"""The picture of a report: loss over wall time of the failed and of the unfailed run, the failure, the snapshots.

Invariant: draws what the two runs wrote and nothing else; needs no display.

In: the runs and their report. Out: a PNG.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..events import catalogue
from .report import Loss, Report, Run, committed

UNFAILED, FAILED, FAILURE = "#7a8794", "#0b6fb8", "#c8322b"


def draw(failed: Run, unfailed: Run, report: Report, path: Path) -> None:
    """Write the picture to `path`."""
    figure = Figure(figsize=(10, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    losses, snapshots = figure.subplots(2, 1, sharex=True, height_ratios=[8, 1])
    killed = next((event.time for event in failed.events if event.type is catalogue.SIGNAL_SENT), None)
    _draw_losses(losses, failed, unfailed, killed)
    if killed is not None:
        _draw_failure(losses, failed, report, killed)
    _draw_snapshots(snapshots, failed, unfailed, killed)
    losses.set_title(_title(report), loc="left", fontsize=12, fontweight="bold")
    losses.set_ylabel("loss (nats per byte)")
    losses.legend(frameon=False, loc="lower left")
    snapshots.set_xlabel("seconds since the start of each run")
    ended = max(run.losses[-1].time - run.began for run in (failed, unfailed))
    losses.set_xlim(0, ended * 1.02)
    for axes in (losses, snapshots):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e4e7ea", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)


def _title(report: Report) -> str:
    if report.proven:
        lost = {0: "no iteration", 1: "one iteration"}.get(
            report.iterations_lost or 0, f"{report.iterations_lost} iterations"
        )
        what = "node" if "lost" in report.killed else "process"
        return f"One {what} killed, {lost} lost, final state identical bit for bit"
    return "Survival is not proven: " + report.unproven[0]


def _draw_losses(axes: Any, failed: Run, unfailed: Run, killed: float | None) -> None:
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


def _draw_failure(axes: Any, failed: Run, report: Report, killed: float) -> None:
    at = killed - failed.began
    axes.axvline(at, color=FAILURE, linewidth=1.4)
    seconds, text = report.seconds, f"SIGKILL of {report.struck}"
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


def _draw_snapshots(axes: Any, failed: Run, unfailed: Run, killed: float | None) -> None:
    rows = [[time - run.began for time, _ in committed(run.events)] for run in (unfailed, failed)]
    axes.eventplot(rows, colors=[UNFAILED, FAILED], lineoffsets=[1, 0], linelengths=0.7, linewidths=1.0)
    if killed is not None:
        axes.axvline(killed - failed.began, color=FAILURE, linewidth=1.4)
    axes.set_yticks([0.5], ["snapshots"])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, 1.6)
