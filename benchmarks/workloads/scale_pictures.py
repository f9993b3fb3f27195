"""Draw what `scale.py` measured: how seconds, memory and shares grow with the job.

Invariant: draws only what was measured, and needs no display.

In: figures by name, single figures of plans. Out: pictures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_plugins.report.plan_pictures import new_figure, style_axes

ON_NODE = 8
PANELS: tuple[tuple[str, str, float, tuple[str, ...]], ...] = (
    ("s of all plans, worst shape", "plans", 1, ("seconds",)),
    ("MiB of a process, worst plan", "plans", 1, ("mib",)),
    ("s, all ranks on this machine", "ranks", 1, ("meet_seconds", "gather_seconds", "barrier_seconds")),
    ("share of a processor, busiest SMP", "smps", ON_NODE, ("share",)),
    ("share of a processor, lead", "lead", ON_NODE, ("waiting_share", "running_share")),
    ("s to form a round", "lead", ON_NODE, ("form_seconds",)),
)


def draw_growth(found: Mapping[str, float], path: Path) -> None:
    """A panel for each quantity, over the ranks of the job; both axes logarithmic."""
    panels = [panel for panel in PANELS if any(name.startswith(f"{panel[1]}_") for name in found)]
    figure = new_figure(path, 3.4 * len(panels) + 0.5, 3.2)
    for axes, (label, part, ranks, names) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for name in names:
            points = sorted(
                (ranks * int(match[1]), value)
                for key, value in found.items()
                if (match := re.fullmatch(rf"{part}_(\d+)_{name}", key))
            )
            axes.loglog(*zip(*points, strict=True), "o-", label=name.replace("_", " "))
        axes.set_xlabel("ranks")
        axes.set_title(label, loc="left", fontsize=9)
        axes.legend(fontsize=7)
        style_axes(axes)
    figure.savefig(path)


def draw_plans(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Seconds of each plan over the ranks of the job, a panel for each shape."""
    shapes = list(dict.fromkeys(str(row["shape"]) for row in rows))
    figure = new_figure(path, 4.5 * len(shapes), 4.5)
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False, sharey=True)[0], shapes, strict=True):
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in rows:
            if row["shape"] == shape:
                lines[str(row["plan"])].append((int(row["ranks"]), max(1e-6, float(row["seconds"]))))
        for name, points in sorted(lines.items(), key=lambda entry: -entry[1][-1][1]):
            axes.loglog(*zip(*sorted(points), strict=True), "o-", markersize=3, label=name)
        axes.set_title(shape, loc="left", fontsize=9)
        axes.set_xlabel("ranks")
        axes.legend(fontsize=6)
        style_axes(axes)
    figure.savefig(path)
