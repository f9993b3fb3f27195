"""Pictures of training with corrupted gradients: as figures 2, 5, 6 and 9 of the PAFT paper, and what averaging costs.

Invariant: draws what was measured and nothing else; what is missing is left out; needs no display.

In: curves by noise and method. Out: pictures, in the format that a name ends on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from .canvas import sheet
from .sdc_runs import BURSTS, CLEAN, NOISED, VARIANCES
from .sync_blocks import Cost

Curve = Sequence[tuple[int, float]]
Curves = Mapping[tuple[str, str], Curve]  # by noise and method; the clean one under ('', 'clean')
METHODS = {
    CLEAN: "#1c1f22", NOISED: "#c8322b", "sync_5": "#2c8a4b", "sync_10": "#7fb069", "sync_50": "#d98e04",
    "dyn": "#0b6fb8",
}  # fmt: skip
NOISES = dict(zip(VARIANCES, ("#f0c75e", "#d98e04", "#c8322b", "#6b1a16"), strict=True))
DEGREE, BURST = "1e-2", "with bursts of variance "


def draw_learner(name: str, scores: Curves, divergences: Curves, score: str, path: Path) -> None:
    """All panels of one learner. Raises ConfigError for another format, OSError where it cannot be written."""
    figure = sheet(path, 14, 8)
    panels = figure.subplots(2, 3)
    clean = scores.get(("", CLEAN), ())
    fails, drifts, degrees, intervals, *bursts = panels.flat
    for noise, colour in NOISES.items():
        _line(fails, scores.get((noise, NOISED), ()), colour, f"noised, {noise}")
        _line(drifts, [point for point in divergences.get((noise, NOISED), ()) if point[1] > 0], colour, noise)
        _line(degrees, scores.get((noise, NOISED), ()), colour, f"noised, {noise}", "--")
        _line(degrees, scores.get((noise, "dyn"), ()), colour, f"PAFT, {noise}")
    _line(fails, clean, METHODS[CLEAN], CLEAN)
    _line(degrees, clean, METHODS[CLEAN], CLEAN)
    drifts.set_yscale("log")
    panel = zip([DEGREE, *BURSTS], [intervals, *bursts], strict=True)
    for noise, axes in panel:
        for method, colour in METHODS.items():
            _line(axes, clean if method == CLEAN else scores.get((noise, method), ()), colour, method)
    for axes, title in zip(
        panels.flat,
        (f"{name}: noise not averaged away", "how far replicas drift apart", "degrees of noise",
         f"how often, variance {DEGREE}", *(BURST + noise.removeprefix("burst_") for noise in BURSTS)),
        strict=True,
    ):  # fmt: skip
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel("iteration")
        axes.set_ylabel("||mean - theta||" if axes is drifts else score)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
        if axes.has_data():
            axes.legend(frameon=False, fontsize=7)
    figure.savefig(path)


def draw_costs(costs: Mapping[str, Cost], path: Path) -> None:
    """Of each way its share of an iteration, with the interval."""
    figure = sheet(path, 8, 4.5)
    axes = figure.subplots()
    names = list(costs)
    shares = [100 * one.share for one in costs.values()]
    below = [max(0.0, 100 * (one.share - one.low)) for one in costs.values()]
    above = [max(0.0, 100 * (one.high - one.share)) for one in costs.values()]
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
