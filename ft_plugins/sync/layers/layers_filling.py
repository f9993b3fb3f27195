"""Fill idle link time of a schedule with layers that are then averaged more than once in a period (DreamDDP, section
3.4, and beyond). Pure.

    late layers    the paper's Eq. 12: in each iteration the layers L, L-1, ... whose backward comes first, as many as
                   its schedule does not reach and its length allows
    any layers     by iteration the most useful layers, wherever their backward comes, by an exact knapsack

How much an averaging is worth depends on when its layer is averaged anyway. With c(l) the seconds of a layer's
averaging, which stand for its parameters, and g the iterations between two of its averagings, `interval_in_effect` is

    sum over l and g of c(l) g^2 / (H sum of c)

the interval in which a random parameter finds itself at a random iteration: H without filling, less with it. An
averaging h iterations after the one before, and g - h before the next, is worth 2 h (g - h) c(l). The knapsack
maximises the sum of that in one iteration, given all others; iterations are filled in turn, starting from Eq. 12, and a
choice is kept if it lowers the interval. So the result is never worse than the paper's.

The knapsack is the one of a machine with deadlines (Lawler and Moore, 1969): from the first layer to the last, the
chosen averagings up to layer l must fit between the end of its backward and the end of the iteration. Times are in
units of which the largest room has at most UNITS: averagings rounded up, rooms down. So rounding never lengthens an
iteration; the choice is exact if a unit is a nanosecond, else up to rounding.

Invariant: no iteration becomes longer; every layer is averaged in every iteration in which it was before. Of choices of
equal worth, the one that fits into the shortest time is kept.

In: a profile, a schedule. Out: `LayerSchedule`, `interval_in_effect`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import pairwise

import numpy as np

from .layer_profile import LayerProfile
from .layers_schedule import LayerSchedule, iteration_ns

UNITS = 8192
RESERVE = (
    0.1  # of an iteration's compute: averagings that are not needed must not delay an update when they take longer
)
SWEEPS = 2  # how often each iteration is filled, at most


def interval_in_effect(profile: LayerProfile, schedule: LayerSchedule) -> float:
    """The mean interval between averagings, over parameters and iterations; in iterations, at most H."""
    weights = _weights(profile)
    gaps = [
        sum((after - before) ** 2 for before, after in pairwise([*turns, turns[0] + schedule.period]))
        for turns in _turns(schedule)
    ]
    squares = sum(weight * own for weight, own in zip(weights, gaps, strict=True))
    return squares / (schedule.period * sum(weights))


def fill_late(profile: LayerProfile, schedule: LayerSchedule) -> LayerSchedule:
    """Eq. 12: in each iteration also the layers whose backward comes first, without making it longer."""
    filled = []
    for own in schedule.iterations:
        limit, late = iteration_ns(profile, own), len(profile)
        while late > 0 and late - 1 not in own:
            if iteration_ns(profile, {*own, *range(late - 1, len(profile))}) > limit:
                break
            late -= 1
        filled.append(_launched({*own, *range(late, len(profile))}))
    return LayerSchedule(schedule.layers, tuple(filled))


def fill(profile: LayerProfile, schedule: LayerSchedule, bounded: bool = False) -> LayerSchedule:
    """The schedule with late layers or, where that is better, any layers in its idle link time. `bounded`: no iteration
    averages more bytes than the largest of `schedule`, whose results have to fit into memory, and RESERVE of the link's
    time stays idle; the least useful layers are then left out."""
    most = max(map(partial(_nbytes, profile), schedule.iterations)) if bounded else None
    filled = schedule if bounded else fill_late(profile, schedule)
    for _ in range(SWEEPS):
        before = filled
        for number, own in enumerate(schedule.iterations):
            worth = _worth(profile, filled, number, own)
            extra = _most_useful(profile, own, worth, RESERVE if bounded else 0.0)
            if most is not None:
                extra = _within(profile, extra, worth, most - _nbytes(profile, own))
            iterations = list(filled.iterations)
            iterations[number] = _launched({*own, *extra})
            changed = LayerSchedule(schedule.layers, tuple(iterations))
            if interval_in_effect(profile, changed) < interval_in_effect(profile, filled):
                filled = changed
        if filled == before:
            break
    return filled


def _worth(profile: LayerProfile, schedule: LayerSchedule, number: int, own: Collection[int]) -> dict[int, int]:
    """What averaging each layer but `own` in iteration `number` is worth, given all other iterations."""
    period, worth = schedule.period, {}
    for layer, (turns, weight) in enumerate(zip(_turns(schedule), _weights(profile), strict=True)):
        if layer not in own:
            since = min((number - turn - 1) % period + 1 for turn in turns if turn != number)
            until = min((turn - number - 1) % period + 1 for turn in turns if turn != number)
            worth[layer] = 2 * since * until * weight
    return worth


def _most_useful(
    profile: LayerProfile, own: Collection[int], worth: Mapping[int, int], reserve: float = 0.0
) -> set[int]:
    """The layers of the largest total `worth` that can be averaged in the iteration of `own` without lengthening it, so
    that they end by `reserve` of the compute earlier."""
    limit, rooms, reserved = iteration_ns(profile, own) - round(reserve * profile.compute_ns), [], 0
    for layer, launched in enumerate(profile.backward_ends_ns):
        reserved += profile.communication_ns[layer] if layer in own else 0
        rooms.append(max(-1, limit - launched - reserved))  # for further layers up to this one, if it is averaged
    if max(rooms) < 0:
        return set()
    unit = max(1, -(-max(rooms) // UNITS))
    best = np.full(max(rooms) // unit + 1, -np.inf)  # by units in use: the largest worth
    best[0] = 0.0
    taken: dict[int, np.ndarray] = {}
    for layer, room in enumerate(rooms):
        places = room // unit + 1  # numbers of units that may be in use
        if layer in own:
            best[max(1, places) :] = -np.inf  # with no further layer so far, it has no reserve to keep
            continue
        units = -(-profile.communication_ns[layer] // unit)
        if places > units and worth[layer] > 0:
            added = best[: places - units] + worth[layer]
            taken[layer] = added > best[units:places]
            best[units:places] = np.where(taken[layer], added, best[units:places])
    return set(_backtracked(profile, taken, int(best.argmax()), unit))


def _within(profile: LayerProfile, layers: Collection[int], worth: Mapping[int, int], most: int) -> set[int]:
    """The layers without the least useful ones per byte, until they have at most `most` bytes."""

    def useful(layer: int) -> tuple[float, int]:
        return worth[layer] / max(1, profile.layers[layer].nbytes), layer

    kept: set[int] = set()
    for layer in sorted(layers, key=useful, reverse=True):
        if _nbytes(profile, {*kept, layer}) <= most:
            kept.add(layer)
    return kept


def _nbytes(profile: LayerProfile, layers: Collection[int]) -> int:
    return sum(profile.layers[layer].nbytes for layer in layers)


def _backtracked(profile: LayerProfile, taken: dict[int, np.ndarray], used: int, unit: int) -> Iterator[int]:
    for layer, places in reversed(taken.items()):
        units = -(-profile.communication_ns[layer] // unit)
        if units <= used < units + len(places) and places[used - units]:
            used -= units
            yield layer


def _turns(schedule: LayerSchedule) -> list[list[int]]:
    """By layer, the iterations in which it is averaged, ascending."""
    turns: list[list[int]] = [[] for _ in range(schedule.layers)]
    for number, own in enumerate(schedule.iterations):
        for layer in own:
            turns[layer].append(number)
    return turns


def _weights(profile: LayerProfile) -> tuple[int, ...]:
    """What stands for a layer's parameters; all equal if nothing is communicated."""
    return profile.communication_ns if any(profile.communication_ns) else (1,) * len(profile)


def _launched(layers: Collection[int]) -> tuple[int, ...]:
    """In the order in which they are launched."""
    return tuple(sorted(layers, reverse=True))
