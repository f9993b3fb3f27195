"""Draw what `dreamddp.py` measured: iteration times by column and policy, and the iterations of a period.

Invariant: draws only what was measured or planned from it, and needs no display.

In: seconds of iterations by column, round and policy, with the plan; step logs with spans; losses. Out: pictures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ft_plugins.report.canvas import new_figure, style_axes
from workloads.dreamddp_quality_runs import FULL_SYNC, OutcomesBySeed
from workloads.dreamddp_scenarios import COMPARED, DREAMDDP, PlannedColumn
from workloads.layer_shapes import H
from workloads.local_blocks import PLAIN, StepLog
from workloads.quality_pictures import median_curve
from workloads.sleeping_replica import COMPUTE, EXCHANGE, SETTLE

COLOURS = dict(zip(COMPARED, ("#7a8794", "#c8322b", "#d98e04", "#0b6fb8"), strict=True))
PASSES = {"forward": "#0b6fb8", "backward": "#2c8a4b"}
EXCHANGED = ("#d98e04", "#f0c75e")  # layers in turn
MeasuredColumn = tuple[Sequence[Mapping[str, float]], PlannedColumn, float]


def draw_columns(columns: Mapping[str, MeasuredColumn], path: Path) -> None:
    """A panel for each column: medians over rounds of an iteration by policy, and how many times dreamddp's. A dash:
    planned from the profile; the dotted line: the least of any schedule; a cross: the paper's overlapped baseline."""
    figure = new_figure(path, 2.6 * len(columns) + 1, 4.5)
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for axes, (name, (rounds, plan, paper)) in zip(panels, columns.items(), strict=True):
        policies = [policy for policy in COMPARED if all(policy in row for row in rounds)]
        for at, policy in enumerate(policies):
            values = [row[policy] for row in rounds]
            middle = statistics.median(values)
            axes.bar(at, middle, 0.8, color=COLOURS[policy],
                     yerr=[[middle - min(values)], [max(values) - middle]], capsize=3)  # fmt: skip
            axes.plot((at - 0.4, at + 0.4), (plan.seconds[policy],) * 2, color="black", linewidth=1.2)
            if DREAMDDP in policies:
                gain = statistics.median(row[policy] / row[DREAMDDP] for row in rounds)
                axes.annotate(f"{gain:.2f}x", (at, middle), xytext=(0, 6), ha="center", textcoords="offset points",
                              fontsize=8)  # fmt: skip
        axes.plot([COMPARED.index(PLAIN)], [paper], "x", color="black")
        axes.axhline(plan.least, linestyle=":", color="black", linewidth=1.0)
        axes.set_xticks(range(len(policies)), policies, rotation=40, ha="right", fontsize=8)
        axes.set_title(name, loc="left", fontweight="bold", fontsize=9)
        style_axes(axes)
    panels[0].set_ylabel("s of an iteration; range over rounds")
    figure.savefig(path)


def draw_period(logs: Mapping[str, Sequence[StepLog]], compute: float, path: Path) -> None:
    """A row for each policy: what the first replica did in a period, after the iterations that settle. Shaded: as long
    as the compute of a period takes."""
    policies = [policy for policy in COMPARED if policy in logs]
    figure = new_figure(path, 14, 1.1 * len(policies) + 1)
    panels = figure.subplots(len(policies), 1, sharex=True, squeeze=False)[:, 0]
    for axes, policy in zip(panels, policies, strict=True):
        log = logs[policy][0]
        begin = log.begins[min(SETTLE, len(log.begins) - 1)]
        end = log.begins[min(SETTLE + H, len(log.begins) - 1)]
        axes.axvspan(0, compute * H, color="#eef1f3", zorder=0)
        for number, span in enumerate(each for each in log.spans if begin <= each.begin < end):
            place = 1 if span.lane == EXCHANGE else 0
            colour = PASSES.get(span.what, EXCHANGED[number % 2])
            axes.barh(place, span.end - span.begin, left=span.begin - begin, height=0.7, color=colour)
        axes.set_yticks((0, 1), (COMPUTE, EXCHANGE), fontsize=7)
        axes.set_ylim(1.5, -0.5)
        axes.set_title(policy, loc="left", fontsize=9, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("s; forward blue, backward green, exchanges of layers orange")
    figure.savefig(path)


def draw_losses(learner: str, outcomes: OutcomesBySeed, path: Path) -> None:
    """The loss by iteration with each policy, medians over seeds."""
    figure = new_figure(path, 8, 5)
    axes = figure.subplots()
    colours = {PLAIN: COLOURS[PLAIN], FULL_SYNC: "#c8322b", DREAMDDP: COLOURS[DREAMDDP]}
    for policy, by_seed in outcomes.items():
        axes.plot(*median_curve(by_seed.values()), color=colours[policy], label=policy)
    axes.set_title(f"{learner}: loss of the mean of all replicas", loc="left", fontweight="bold")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss on held-out data, median over seeds")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=9)
    style_axes(axes)
    figure.savefig(path)
