"""The scheduling figures of DreamDDP: periods and seconds of planning, next to brute force and the paper's search.

Layers are those of the paper's models, the last LAYERS of each, as the paper takes 30, repeated where it has fewer.
Times follow from their sizes; communication is that of the paper's columns at BANDWIDTHS times their bandwidth. Brute
force compares all contiguous sets, none of them empty, and computes the cost of each set once. The paper's search
decides by the cost to which its section 3.3 shortens the exact one (`schedule_references`). Seconds are those of the
processor.

In: columns, H. Out: figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from ft_plugins.sync.layers.layer_profile import NANO, LayerProfile, LayerTimes
from ft_plugins.sync.layers.layers_schedule import equal_number, iteration_ns, period_ns
from workloads.dreamddp_scenarios import planned_seconds
from workloads.layer_shapes import PaperColumn, emulated
from workloads.schedule_references import contiguous, search

H, LAYERS, MANY = 5, 30, 200
BANDWIDTHS = (0.5, 1.0, 2.0)
OPTIMUM, PLANNED, SEARCH, EQUAL = "brute_force", "planned", "paper_search", "equal"


def shaped_profile(shape: str, ratio: float, layers: int = LAYERS) -> LayerProfile:
    """The last `layers` of a model, repeated, with `ratio` times as much communication as compute."""
    model = emulated(shape, 1.0, 1 << 24)
    chosen = ([*range(len(model))] * -(-layers // len(model)))[-layers:]
    per_parameter = ratio * sum(model.forwards[at] + model.backwards[at] for at in chosen)
    per_parameter /= sum(model.widths[at] for at in chosen)
    times = [
        LayerTimes(f"h.{number}", model.forwards[at], model.backwards[at], per_parameter * model.widths[at],
                   4 * model.widths[at])
        for number, at in enumerate(chosen)
    ]  # fmt: skip
    return LayerProfile(tuple(times), 8)


def best_contiguous_ns(profile: LayerProfile, period: int = H) -> int:
    """Of all contiguous sets the nanoseconds of the shortest period."""
    count, cost = len(profile), {}
    for first in range(count):
        for last in range(first + 1, count + 1):
            cost[first, last] = iteration_ns(profile, range(count - last, count - first))  # in the backward's order
    bounds = ([0, *_ends(each.iterations)] for each in contiguous(count, period))
    return min(sum(cost[pair] for pair in pairwise(each)) for each in bounds)


def _ends(sets: Sequence[Sequence[int]]) -> list[int]:
    ends, end = [], 0
    for own in sets:
        ends.append(end := end + len(own))
    return ends


def schedule_figures(columns: Sequence[PaperColumn]) -> dict[str, float]:
    """Of all columns and bandwidths the periods of each kind of planning over the best contiguous one: medians and the
    worst; seconds for LAYERS layers, medians, and for MANY, the worst."""
    ways: dict[str, Callable[[LayerProfile], float]] = {
        OPTIMUM: best_contiguous_ns,
        PLANNED: lambda profile: H * NANO * planned_seconds(profile, H),
        SEARCH: lambda profile: period_ns(profile, search(profile, H, simplified=True).schedule),
        EQUAL: lambda profile: period_ns(profile, equal_number(len(profile), H)),
    }
    periods: dict[str, list[float]] = {way: [] for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    many: dict[str, list[float]] = {way: [] for way in (PLANNED, SEARCH)}
    for column in columns:
        for bandwidth in BANDWIDTHS:
            ratio = column.ratio / bandwidth
            profile, deep = shaped_profile(column.shape, ratio), shaped_profile(column.shape, ratio, MANY)
            for way, plan in ways.items():
                began = time.process_time()
                periods[way].append(plan(profile))
                seconds[way].append(time.process_time() - began)
            for way in many:
                began = time.process_time()
                ways[way](deep)
                many[way].append(time.process_time() - began)
    values = {f"search_{way}_seconds": statistics.median(each) for way, each in seconds.items()}
    values |= {f"search_{way}_{MANY}_seconds": max(each) for way, each in many.items()}
    for way in (PLANNED, SEARCH, EQUAL):
        over = [one / best for one, best in zip(periods[way], periods[OPTIMUM], strict=True)]
        values |= {f"search_{way}_x": statistics.median(over), f"search_{way}_worst_x": max(over)}
    return values | {"search_seconds_x": values[f"search_{OPTIMUM}_seconds"] / values[f"search_{PLANNED}_seconds"]}
