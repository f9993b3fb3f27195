"""What schedules of layers are compared with: the paper's search, all possibilities, a lower bound. Pure, and slow.

`search` is Algorithm 2 of DreamDDP with its last two branches as its text describes them: the printed lines 26 to 30
swap their names, and step back to h - 1 instead of on to h + 1. Like the paper's, it may leave the last sets empty. Of
schedules of equal cost it keeps the first.

With the cost of section 3.2, that of `layers_schedule`, the search is exact, because both of its rules are:

    optimal hiding    a layer moved from the next set to one that hides it too exposes nothing, and leaves less there
    delayed           a layer added to a set that exposes time already exposes all of its c; in the next set no more

So it only takes longer than the program: up to 2^(H - 1) schedules. With `simplified` it decides by the sum of c, to
which section 3.3 shortens that cost. That sum ignores that the link waits for a backward, and neither rule holds.

In: a profile, H. Out: a schedule; how many complete ones the search compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, combinations_with_replacement, product

from ft_plugins.sync.layers.layer_profile import LayerProfile
from ft_plugins.sync.layers.layers_schedule import LayerSchedule, require_period, unavoidable_ns


@dataclass(frozen=True)
class SearchResult:
    """The best schedule of a search, the nanoseconds of a period that it expects to be exposed, and the number of
    complete schedules that it compared."""

    schedule: LayerSchedule
    expected: int
    solutions: int


def search(profile: LayerProfile, period: int, simplified: bool = False) -> SearchResult:
    """Algorithm 2, without the filling; `simplified`: with the cost of section 3.3. Raises ConfigError."""
    require_period(len(profile), period)
    walk = _Search(profile, period, simplified)
    walk.solve(0, 0, 0, 0, 0, ())
    assert walk.best is not None
    expected, cuts = walk.best
    return SearchResult(_schedule(len(profile), cuts), expected, walk.solutions)


class _Search:
    """One search. A position is that of a layer in the order of the backward."""

    def __init__(self, profile: LayerProfile, period: int, simplified: bool) -> None:
        self._simplified = simplified
        self._ends = profile.backward_ends_ns[::-1]
        self._times = profile.communication_ns[::-1]
        self._count, self._last, self._compute = len(profile), period - 1, profile.compute_ns
        self.best: tuple[int, tuple[int, ...]] | None = None  # exposed, positions at which sets after the first begin
        self.solutions = 0
        # by position: the last launch of a set of all layers from there on, and the time after which it would end
        self._after, self._tail = [0] * (self._count + 1), [0] * (self._count + 1)
        for at in reversed(range(self._count)):
            self._after[at] = self._after[at + 1] + self._times[at]
            self._tail[at] = max(self._tail[at + 1], self._ends[at] + self._after[at])

    def solve(self, at: int, number: int, begin: int, free: int, exposed: int, cuts: tuple[int, ...]) -> None:
        """Assign the positions from `at` on; set `number` began at position `begin`, and its link is free at `free`."""
        while at < self._count:
            launch = 0 if self._simplified and at > begin else self._ends[at]
            if number == self._last:  # all others
                free = max(free, launch) + self._after[at]
                free = free if self._simplified else max(free, self._tail[at])
                break
            end = max(launch, free) + self._times[at]
            if at == begin or end <= self._compute:  # at least one; optimal hiding
                at, free = at + 1, end
                continue
            if free <= self._compute:  # the search: assign it to this set, or to the next
                self.solve(at + 1, number, begin, end, exposed, cuts)
            exposed += max(0, free - self._compute)  # also if delayed
            number, begin, free, cuts = number + 1, at, 0, (*cuts, at)
        exposed += max(0, free - self._compute)
        self.solutions += 1
        if self.best is None or exposed < self.best[0]:
            self.best = exposed, cuts + (self._count,) * (self._last - len(cuts))


def contiguous(layers: int, period: int, empty: bool = False) -> Iterator[LayerSchedule]:
    """All schedules of contiguous sets; with `empty` also those in which some are."""
    choose = combinations_with_replacement if empty else combinations
    for cuts in choose(range(0 if empty else 1, layers + empty), period - 1):
        yield _schedule(layers, cuts)


def partitions(layers: int, period: int) -> Iterator[LayerSchedule]:
    """All schedules that average each layer once, contiguous or not."""
    for chosen in product(range(period), repeat=layers):
        sets = (tuple(layer for layer in reversed(range(layers)) if chosen[layer] == one) for one in range(period))
        yield LayerSchedule(layers, tuple(sets))


def _schedule(layers: int, cuts: tuple[int, ...]) -> LayerSchedule:
    order, bounds = range(layers - 1, -1, -1), [0, *cuts, layers]
    return LayerSchedule(layers, tuple(tuple(order[i:j]) for i, j in zip(bounds, bounds[1:], strict=False)))


def least_exposed_ns(profile: LayerProfile, period: int) -> int:
    """A lower bound of `exposed_ns` over all schedules of `period` iterations, also with sets that are not contiguous.

    The layers up to l can hide at most T - e(l) in each iteration: none of them is launched before e(l)."""
    sums = accumulate(profile.communication_ns)
    rooms = (period * (profile.compute_ns - end) for end in profile.backward_ends_ns)
    bounds = (sum_ns - room for sum_ns, room in zip(sums, rooms, strict=True))
    return max(0, unavoidable_ns(profile), *bounds)
