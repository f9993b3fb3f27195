"""The picture of what a job did with its bubbles: one iteration, a row for each rank.

    ####  forward, backward, update, reduction, in their colours        light: a bubble
    [==]  a window of it in which the plan lets bytes go, filled as far as bytes went, on average over the iterations
    [..]  the same, dotted, where no node told what went

Invariant: draws what `bubble_use` found and nothing else; needs no display.

In: a `BubbleUse`. Out: a PNG.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..bubbles.timeline_values import Row, Window
from ..model.timeline import Kind
from .bubble_pictures import MOST_RANKS, SPANS
from .bubble_use import BubbleUse

IDLE, WINDOW, INK = "#e9edf1", "#d98e04", "#1c1f22"
UNTOLD = ":"
_HEIGHT = 0.78  # of a row, of which there is one a unit
_LABEL_SHARE = 0.053  # of the width; a window that is narrower has no label


def draw_bubbles(use: BubbleUse, path: Path) -> None:
    """Write the picture to `path`."""
    rows = use.rows[:MOST_RANKS]
    figure = Figure(figsize=(13, 1.7 + 0.62 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = max(row.seconds for row in rows) * 1e3
    for place, row in enumerate(rows):
        _draw_row(axes, use, row, place, width)
    axes.set_xlim(0, width)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [f"rank {row.rank}, {use.nodes[row.rank]}" for row in rows])
    axes.set_xlabel("milliseconds of one iteration (median of those that were measured)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    head, _, rest = use.sending.line().partition("; ")
    axes.set_title(f"{head}\n", loc="left", fontsize=13, fontweight="bold")
    axes.text(0, 1.02, rest, transform=axes.transAxes, va="bottom", fontsize=10, color=INK)
    found = {kind for row in rows for kind, _, _ in row.spans}
    names = {Kind.REDUCE: "gradient reduction"}
    patches = [Patch(color=SPANS[kind], label=names.get(kind, kind.value)) for kind in SPANS if kind in found]
    patches += [
        Patch(color=IDLE, label="bubble"),
        Patch(facecolor="white", edgecolor=WINDOW, label="window in which bytes may go"),
        Patch(color=WINDOW, label="what went, on average"),
    ]
    if use.in_part:
        patches.append(Patch(facecolor="white", edgecolor=WINDOW, linestyle=UNTOLD, label="nobody told what went"))
    figure.legend(handles=patches, frameon=False, loc="outside lower left", ncols=len(patches))
    figure.savefig(path)


def _draw_row(axes: Any, use: BubbleUse, row: Row, place: int, width: float) -> None:
    low = place - _HEIGHT / 2
    bars = {kind: [_ms(begin, end) for found, begin, end in row.spans if found is kind] for kind in SPANS}
    idle = [_ms(begin, end) for _, begin, end in row.bubbles]  # over the part of a reduction that only waits
    for colour, those in ((SPANS[Kind.REDUCE], bars.pop(Kind.REDUCE)), (IDLE, idle)):
        axes.broken_barh(those, (low, _HEIGHT), color=colour, linewidth=0)
    for kind, those in bars.items():
        axes.broken_barh(those, (low, _HEIGHT), color=SPANS[kind], linewidth=0)
    for bubble in dict.fromkeys(window.bubble for window in row.windows):
        left = use.an_iteration(row.rank, bubble)
        for window in (one for one in row.windows if one.bubble == bubble):
            went = min(left, window.nbytes) if left is not None else None
            _draw_window(axes, window, went, low, width)
            left = left - went if left is not None and went is not None else None
    to = f"→ rank {row.receiver}: {size(row.nbytes)}"
    axes.annotate(
        f"{to}, by a rate" if row.reason else to, (1.0, place), xycoords=("axes fraction", "data"), xytext=(6, 0),
        textcoords="offset points", va="center", fontsize=8.5, color=INK, annotation_clip=False,
    )  # fmt: skip


def _draw_window(axes: Any, window: Window, went: float | None, low: float, width: float) -> None:
    """Filled from below, as full as it was; of dots where nobody told."""
    begin, length = _ms(window.begin, window.end)
    if went is not None:
        share, bottom = went / window.nbytes if window.nbytes else 0.0, low + _HEIGHT
        axes.add_patch(Rectangle((begin, bottom), length, -_HEIGHT * share, color=WINDOW, linewidth=0, alpha=0.85))
        if length > _LABEL_SHARE * width:
            text = f"{size(went)}\nof {size(window.nbytes)}"
            axes.text(begin + length / 2, low + _HEIGHT / 2, text, ha="center", va="center", fontsize=7.5, color=INK)
    style = "-" if went is not None else UNTOLD
    frame = Rectangle((begin, low), length, _HEIGHT, fill=False, edgecolor=WINDOW, linewidth=1.1, linestyle=style)
    axes.add_patch(frame)


def _ms(begin: float, end: float) -> tuple[float, float]:
    return begin * 1e3, (end - begin) * 1e3


def size(nbytes: float) -> str:
    """Bytes for people."""
    if nbytes >= 1 << 20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.0f} KiB"
