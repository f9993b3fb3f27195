"""Draw what `dreamddp.py` measured: iteration times by column and policy, and the iterations of a period.

Invariant: draws only what was measured or planned from it, and needs no display.

In: seconds of iterations by column, round and policy, with the plan; step logs with spans; losses. Out: pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ft_plugins.report.plan_pictures import new_figure, style_axes
from workloads.dreamddp_quality_runs import FULL_SYNC, OutcomesBySeed
from workloads.dreamddp_scenarios import COMPARED, DREAMDDP, PlannedColumn
from workloads.layer_shapes import H
from workloads.local_blocks import PLAIN, StepLog
from workloads.local_pictures import draw_bars, draw_lanes
from workloads.quality_pictures import median_curve
from workloads.sleeping_replica import SETTLE

COLOURS = dict(zip(COMPARED, ("#7a8794", "#7a4fb3", "#c8322b", "#d98e04", "#0b6fb8"), strict=True))
MeasuredColumn = tuple[Sequence[Mapping[str, float]], PlannedColumn, float]


def draw_columns(columns: Mapping[str, MeasuredColumn], path: Path) -> None:
    """A panel for each column: medians over rounds of an iteration by policy, and how many times dreamddp's. A dash:
    planned from the profile; the dotted line: the least of any schedule; a cross: the paper's overlapped baseline."""
    figure = new_figure(path, 2.6 * len(columns) + 1, 4.5)
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for axes, (name, (rounds, plan, paper)) in zip(panels, columns.items(), strict=True):
        policies = draw_bars(axes, name, COLOURS, rounds, lambda row, policy: row[policy] / row[DREAMDDP])
        for at, policy in enumerate(policies):
            axes.plot((at - 0.4, at + 0.4), (plan.seconds[policy],) * 2, color="black", linewidth=1.2)
        axes.plot([COMPARED.index(PLAIN)], [paper], "x", color="black")
        axes.axhline(plan.least, linestyle=":", color="black", linewidth=1.0)
    panels[0].set_ylabel("s of an iteration; range over rounds")
    figure.savefig(path)


def draw_period(logs: Mapping[str, Sequence[StepLog]], compute: float, path: Path) -> None:
    """What the first replica did in a period, after the iterations that settle. Shaded: as long as compute takes."""

    def window(log: StepLog) -> tuple[float, float]:
        last = len(log.begins) - 1
        return log.begins[min(SETTLE, last)], log.begins[min(SETTLE + H, last)]

    draw_lanes(logs, COMPARED, window, compute * H, path)


def draw_losses(learner: str, outcomes: OutcomesBySeed, path: Path) -> None:
    """The loss by iteration with each policy, medians over seeds; and the divergence, of the first seed."""
    figure = new_figure(path, 13, 5)
    axes, apart = figure.subplots(1, 2)
    colours = {PLAIN: COLOURS[PLAIN], FULL_SYNC: "#c8322b", DREAMDDP: COLOURS[DREAMDDP]}
    for policy, by_seed in outcomes.items():
        if policy not in colours:
            continue
        axes.plot(*median_curve(by_seed.values()), color=colours[policy], label=policy)
        if points := next(iter(by_seed.values())).divergences:
            apart.plot(*zip(*points, strict=True), ".", color=colours[policy])
    apart.set_title("squared distance from the mean", loc="left", fontweight="bold")
    apart.set_xlabel("iteration")
    style_axes(apart)
    axes.set_title(f"{learner}: loss of the mean of all replicas", loc="left", fontweight="bold")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss on held-out data, median over seeds")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=9)
    style_axes(axes)
    figure.savefig(path)
