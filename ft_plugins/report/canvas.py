"""Shared by all pictures: a figure that needs no display, the colours of spans, the style of axes.

In: a path whose suffix is the format. Out: a figure.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..errors import ConfigError
from ..model.timeline import Kind

FORMATS = (".png", ".svg", ".pdf")
SPANS = {
    Kind.FORWARD: "#0b6fb8",
    Kind.BACKWARD: "#2c8a4b",
    Kind.SEND: "#f0c75e",
    Kind.RECV: "#f3e3b3",
    Kind.REDUCE: "#8a5ab3",
    Kind.UPDATE: "#7a8794",
}
MAX_RANKS = 64  # rows of a picture


def new_figure(path: Path, width: float, height: float, dpi: int = 130) -> Figure:
    """A figure to save at `path`, sizes in inches. Raises ConfigError for a suffix outside FORMATS."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: expected a name that ends in one of {', '.join(FORMATS)}")
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes) -> None:
    """Show only the grid lines of the value axis, behind the plot."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
