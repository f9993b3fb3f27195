"""Fill windows with whole layers, each as full as possible (BAFT, Algorithm 2). Pure.

A window of M bytes takes the remaining layers whose sum is largest within M: a knapsack with values equal to weights.
Dynamic programming over sums: after each layer a row of bits marks the reachable sums; the largest within M is traced
back. Sums are in units: the greatest common divisor of the layers, or M / UNITS if that is larger. Layers are rounded
up to units, so no window is overfilled; since rounding may exclude a layer that just fits, the result of taking the
largest layers first is used if it is better.

Invariant: every byte is sent once. A layer that no window can take whole goes first, in parts as windows have room; the
others go whole.

In: bytes of each layer, in the order of the slot; what each window carries. Out: byte ranges of the slot, window by
window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from typing import NamedTuple

UNITS = 1 << 14


class LayerPart(NamedTuple):
    """Bytes `start .. stop` of the slot: a layer, or a part of a large one."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def parts_of(layers: Sequence[int]) -> list[LayerPart]:
    """The layers in the slot, without empty ones."""
    stops = list(accumulate(layers))
    return [LayerPart(stop - nbytes, stop) for nbytes, stop in zip(layers, stops, strict=True) if nbytes]


def fullest(sizes: Sequence[int], room: int) -> list[int]:
    """The indices of the `sizes` with the largest sum within `room`, ascending."""
    fitting = [place for place, size in enumerate(sizes) if 0 < size <= room]
    if sum(sizes[place] for place in fitting) <= room:
        return fitting
    unit = max(gcd(*(sizes[place] for place in fitting)), -(-room // UNITS))
    width = room // unit
    mask = (1 << (width + 1)) - 1
    rows = [1]
    for place in fitting:
        units = -(-sizes[place] // unit)
        rows.append((rows[-1] | rows[-1] << units) & mask)
    rest = rows[-1].bit_length() - 1
    taken = []
    for number in range(len(fitting), 0, -1):
        if not rows[number - 1] >> rest & 1:
            taken.append(fitting[number - 1])
            rest -= -(-sizes[fitting[number - 1]] // unit)
    largest = _largest_first(sizes, fitting, room)
    return max(taken[::-1], largest, key=lambda places: sum(sizes[place] for place in places))


def _largest_first(sizes: Sequence[int], fitting: Sequence[int], room: int) -> list[int]:
    taken = []
    for place in sorted(fitting, key=lambda place: -sizes[place]):
        if sizes[place] <= room:
            taken.append(place)
            room -= sizes[place]
    return sorted(taken)


def fill(
    layers: Sequence[int], first: Sequence[int], every: Sequence[int], most: int
) -> list[list[tuple[LayerPart, ...]]]:
    """The parts sent in each window, iteration by iteration, up to the last iteration needed, or `most`.

    `first` and `every`: bytes that each window carries in the first iteration and in each later one; one of them must
    be more than 0.
    """
    parts, largest = parts_of(layers), max(every)
    large = deque(part for part in parts if part.nbytes > largest)
    left = [part for part in parts if part.nbytes <= largest]
    smallest = min((part.nbytes for part in left), default=0)
    iterations: list[list[tuple[LayerPart, ...]]] = []
    while (large or left) and len(iterations) < most:
        windows: list[tuple[LayerPart, ...]] = []
        for room in every if iterations else first:
            heads = _cut(large, room) if large else ()
            room -= sum(part.nbytes for part in heads)
            places = fullest([part.nbytes for part in left], room) if left and room >= smallest else []
            if places:
                gone = set(places)
                heads = (*heads, *(left[place] for place in places))
                left = [part for place, part in enumerate(left) if place not in gone]
                smallest = min((part.nbytes for part in left), default=0)
            windows.append(heads)
        iterations.append(windows)
    return iterations


def _cut(parts: deque[LayerPart], room: int) -> tuple[LayerPart, ...]:
    """Remove and return the first `room` bytes of `parts`."""
    heads: list[LayerPart] = []
    while parts and room:
        part = parts.popleft()
        stop = min(part.stop, part.start + room)
        room -= stop - part.start
        heads.append(LayerPart(part.start, stop))
        if stop < part.stop:
            parts.appendleft(LayerPart(stop, part.stop))
    return tuple(heads)
