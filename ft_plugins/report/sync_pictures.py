"""Draw what `planner.sync_plan` computed: the time of an iteration under each policy over the bandwidth of the link.

Invariant: draws only what the planner computed; needs no display.

In: a `SyncOutlook`. Out: a picture, in the format of the path's suffix.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..model.timeline import Kind
from ..planner.sync_plan import ComparedPolicy, SyncOutlook, rate
from .canvas import SPANS, new_figure, style_axes

COLOURS = dict(zip(ComparedPolicy, ("#7a8794", "#0b6fb8", "#c8322b", "#2c8a4b", "#d98e04", "#8a5ab3"), strict=True))
BOUND = "#1c1f22"
SHADE = 0.08


def draw_sync(outlook: SyncOutlook, path: Path) -> None:
    """Draw to `path`. Raises ConfigError for another format or without links to draw, OSError if it cannot be
    written."""
    if not outlook.curve:
        raise ConfigError(
            "a plot over bandwidth needs at least two different links and a profile with bytes; give --link-mbps twice"
        )
    figure = new_figure(path, 11, 8)
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    links = [link.mbps or 0.0 for link in outlook.curve]
    for number, (policy, colour) in enumerate(COLOURS.items()):
        seconds = [link.seconds[policy] for link in outlook.curve]
        above.plot(links, seconds, color=colour, linewidth=1.8, label=policy.title, zorder=3 + len(COLOURS) - number)
    above.plot(links, [link.bound for link in outlook.curve], "--", color=BOUND, linewidth=1.0, label="bound")
    for policy, low, high in outlook.ranges():
        for axes in (above, below):
            axes.axvspan(low, high, color=COLOURS[policy], alpha=SHADE, linewidth=0)
    above.set_xscale("log")
    above.set_yscale("log")
    above.set_xlim(links[0], links[-1])
    above.set_ylabel("seconds per iteration")
    for axis_part in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
        axis_part(lambda value, _: f"{value:g}")
    pays = ", ".join(f"{policy.title} up to {rate(high)}" for policy, _, high in outlook.ranges())
    above.set_title(f"What pays: {pays}", loc="left", fontsize=11, fontweight="bold")
    above.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    below.step(links, [link.schedule.period for link in outlook.curve], color=SPANS[Kind.FORWARD], where="mid")
    below.set_ylabel("H, iterations")
    below.set_xlabel(f"bandwidth of the link, Mbit/s ({outlook.profile.replicas} replicas)")
    below.set_ylim(0, None)
    for axes in (above, below):
        style_axes(axes)
    figure.savefig(path)
