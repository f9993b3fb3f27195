"""Draw what `local_sgd.py` measured, and the bars and lanes that `dreamddp.py` draws too.

Invariant: draws only what was measured, and needs no display.

In: seconds of iterations by scenario, round and policy; step logs with spans. Out: pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from ft_plugins.report.plan_pictures import new_figure, style_axes
from workloads.local_blocks import LaneSpan, StepLog, window_of_synchronisation
from workloads.local_scenarios import POLICIES
from workloads.sleeping_replica import COMPUTE, EXCHANGE, LAG

COLOURS = dict(zip(POLICIES, ("#7a8794", "#c8322b", "#d98e04", "#8a5ab3", "#0b6fb8", "#2c8a4b"), strict=True))
SPAN_COLOURS = {"forward": "#0b6fb8", "backward": "#2c8a4b", "judge": "#8a5ab3", LAG: "#c8322b"}
EXCHANGED = ("#d98e04", "#f0c75e")  # modules, or layers, in turn


def draw_iterations(scenarios: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """A panel for each scenario: medians over rounds of an iteration by policy, and of the gain over plain."""
    figure = new_figure(path, 3.6 * len(scenarios) + 1, 4.5)
    panels = figure.subplots(1, len(scenarios), squeeze=False)[0]
    for axes, (name, rounds) in zip(panels, scenarios.items(), strict=True):
        draw_bars(axes, name, COLOURS, rounds, lambda row, policy: row["plain"] / row[policy])
    panels[0].set_ylabel("s of an iteration; range over rounds")
    figure.savefig(path)


def draw_bars(
    axes: Axes, name: str, colours: Mapping[str, str], rounds: Sequence[Mapping[str, float]],
    gain: Callable[[Mapping[str, float], str], float],
) -> list[str]:  # fmt: skip
    """A bar for each policy that was measured, with its range over rounds and the median gain; returns the policies."""
    policies = [policy for policy in colours if any(policy in row for row in rounds)]
    for at, policy in enumerate(policies):
        rows = [row for row in rounds if policy in row]
        values = [row[policy] for row in rows]
        middle = statistics.median(values)
        errors = [[middle - min(values)], [max(values) - middle]]
        axes.bar(at, middle, 0.8, color=colours[policy], yerr=errors, capsize=3)
        text = f"{statistics.median(gain(row, policy) for row in rows):.2f}x"
        axes.annotate(text, (at, middle), xytext=(0, 6), ha="center", textcoords="offset points", fontsize=8)
    axes.set_xticks(range(len(policies)), policies, rotation=40, ha="right", fontsize=8)
    axes.set_title(name, loc="left", fontweight="bold", fontsize=9)
    style_axes(axes)
    return policies


def draw_lanes(
    logs: Mapping[str, Sequence[StepLog]], policies: Iterable[str], window: Callable[[StepLog], tuple[float, float]],
    compute: float, path: Path,
) -> None:  # fmt: skip
    """A row for each policy: what the first replica did within a window. Shaded: the first `compute` seconds."""
    shown = [policy for policy in policies if policy in logs]
    figure = new_figure(path, 12, 1.1 * len(shown) + 1)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, policy in zip(panels, shown, strict=True):
        begin, end = window(logs[policy][0])
        numbers: dict[str, int] = {}
        axes.axvspan(0, compute, color="#eef1f3", zorder=0)
        for span in (each for each in logs[policy][0].spans if begin <= each.begin < end):
            colour = _colour(span, numbers)
            place = int(span.lane == EXCHANGE)
            axes.barh(place, span.end - span.begin, left=span.begin - begin, height=0.7, color=colour)
        axes.set_yticks((0, 1), (COMPUTE, EXCHANGE), fontsize=7)
        axes.set_ylim(1.5, -0.5)
        axes.set_title(policy, loc="left", fontsize=9, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("s; forward blue, backward green, exchanges in turn orange, judging violet")
    figure.savefig(path)


def draw_synchronisation(logs: Mapping[str, Sequence[StepLog]], path: Path) -> None:
    """What the first replica did around a synchronisation of each policy."""
    draw_lanes(logs, POLICIES, lambda log: window_of_synchronisation(log, EXCHANGE), 0.0, path)


def _colour(span: LaneSpan, numbers: dict[str, int]) -> str:
    if span.lane == EXCHANGE and span.what != "judge":
        return EXCHANGED[numbers.setdefault(span.what, len(numbers)) % 2]
    return SPAN_COLOURS[span.what]
