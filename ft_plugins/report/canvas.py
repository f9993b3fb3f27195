"""A sheet to draw on, for all pictures of benchmarks and plans.

In: a path whose suffix says the format. Out: a figure that knows how to be saved without a display.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def sheet(path: Path, width: float, height: float) -> Figure:
    """For a picture at `path`, sizes in inches. Raises ConfigError for a name that ends on none of FORMATS."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: expected a name that ends on one of {', '.join(FORMATS)}")
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes) -> None:
    """Lines of the value axis alone, behind what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
