"""Draw what local SGD did to the loss of a learner: without garbage, and with garbage on one replica.

Invariant: as in `pictures`. Curves are medians over seeds.

In: `Outcomes` of one learner. Out: a picture, in the format of the path's suffix.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from ft_plugins.report.plan_pictures import new_figure, style_axes
from workloads.quality_runs import POLICIES, Outcomes, QualityOutcome

_SEVERAL = ("#1c1f22", "#d98e04", "#c8322b", "#0b6fb8", "#2c8a4b", "#7a4fb3", "#4fb3a5", "#b34f7a", "#7a8794")
COLOURS = dict(zip(POLICIES, _SEVERAL, strict=True))


def median_curve(outcomes: Iterable[QualityOutcome]) -> tuple[list[int], list[float]]:
    """Iterations, and the median loss over seeds at each."""
    points = [*zip(*(one.losses for one in outcomes), strict=True)]
    return [point[0][0] for point in points], [statistics.median(loss for _, loss in point) for point in points]


def draw_quality(learner: str, outcomes: Outcomes, path: Path) -> None:
    """Draw both panels; dashed lines are the same policies without garbage."""
    figure = new_figure(path, 13, 5)
    clean, struck = figure.subplots(1, 2, sharey=True)
    for (policy, garbage), by_seed in outcomes.items():
        axes = struck if garbage else clean
        axes.plot(*median_curve(by_seed.values()), color=COLOURS[policy], label=policy)
        if garbage:
            struck.plot(*median_curve(outcomes[policy, False].values()), "--", color=COLOURS[policy], linewidth=1.0)
            for one in list(by_seed.values())[:1] if policy == "edit" else ():
                struck.axvspan(*(one.run.garbage or (0, 0)), color="#e4e7ea")
    for axes, title in ((clean, f"{learner}: replicas with sound data"), (struck, "one of four fed garbage (grey)")):
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel("iteration")
        axes.set_yscale("log")
        style_axes(axes)
        if axes.has_data():
            axes.legend(frameon=False, fontsize=9)
    clean.set_ylabel("loss on held-out data, median over seeds")
    figure.savefig(path)
