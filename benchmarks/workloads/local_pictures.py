"""Draw what `local_sgd.py` measured: iteration times by scenario and policy, and a synchronisation of each policy.

Invariant: draws only what was measured, and needs no display.

In: seconds of iterations by scenario, round and policy; step logs with spans. Out: pictures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ft_plugins.report.canvas import new_figure, style_axes
from workloads.local_blocks import LaneSpan, StepLog, window_of_synchronisation
from workloads.local_scenarios import POLICIES
from workloads.sleeping_replica import COMPUTE, EXCHANGE, LAG

COLOURS = dict(zip(POLICIES, ("#7a8794", "#c8322b", "#d98e04", "#8a5ab3", "#0b6fb8", "#2c8a4b"), strict=True))
SPAN_COLOURS = {"forward": "#0b6fb8", "backward": "#2c8a4b", "judge": "#8a5ab3", LAG: "#c8322b"}
EXCHANGED = ("#d98e04", "#f0c75e")  # modules in turn


def draw_iterations(scenarios: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """A panel for each scenario: medians over rounds of an iteration by policy, and of the gain over plain."""
    figure = new_figure(path, 3.6 * len(scenarios) + 1, 4.5)
    panels = figure.subplots(1, len(scenarios), squeeze=False)[0]
    for axes, (name, rounds) in zip(panels, scenarios.items(), strict=True):
        policies = [policy for policy in POLICIES if any(policy in row for row in rounds)]
        for at, policy in enumerate(policies):
            values = [1000 * row[policy] for row in rounds if policy in row]
            middle = statistics.median(values)
            errors = [[middle - min(values)], [max(values) - middle]]
            axes.bar(at, middle, 0.8, color=COLOURS[policy], yerr=errors, capsize=3)
            gains = [row["plain"] / row[policy] for row in rounds if policy in row]
            axes.annotate(f"{statistics.median(gains):.2f}x", (at, middle), xytext=(0, 6), ha="center",
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axes.set_xticks(range(len(policies)), policies, rotation=40, ha="right", fontsize=8)
        axes.set_title(name, loc="left", fontweight="bold")
        style_axes(axes)
    panels[0].set_ylabel("ms of an iteration; range over rounds")
    figure.savefig(path)


def draw_timeline(logs: Mapping[str, Sequence[StepLog]], path: Path) -> None:
    """A row for each policy: what the first replica did around a synchronisation."""
    policies = [policy for policy in POLICIES if policy in logs]
    figure = new_figure(path, 12, 1.1 * len(policies) + 1)
    panels = figure.subplots(len(policies), 1, sharex=True, squeeze=False)[:, 0]
    for axes, policy in zip(panels, policies, strict=True):
        begin, end = window_of_synchronisation(logs[policy][0], EXCHANGE)
        numbers: dict[str, int] = {}
        for span in logs[policy][0].spans:
            if begin <= span.begin < end:
                place = 1 if span.lane == EXCHANGE else 0
                axes.barh(place, 1000 * (span.end - span.begin), left=1000 * (span.begin - begin), height=0.7,
                          color=_colour(span, numbers))  # fmt: skip
        axes.set_yticks((0, 1), (COMPUTE, EXCHANGE), fontsize=7)
        axes.set_ylim(1.5, -0.5)
        axes.set_title(policy, loc="left", fontsize=9, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms; forward blue, backward green, exchanges of modules orange, judging violet")
    figure.savefig(path)


def _colour(span: LaneSpan, numbers: dict[str, int]) -> str:
    if span.lane == EXCHANGE and span.what != "judge":
        return EXCHANGED[numbers.setdefault(span.what, len(numbers)) % 2]
    return SPAN_COLOURS[span.what]
