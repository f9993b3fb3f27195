"""Choose which layers are averaged in which iteration of a period, so that averaging hides behind the backward
(DreamDDP, sections 3.2 and 3.3). Pure.

Each layer is averaged in one of the H iterations of a period. Within an iteration, the averaging of a layer is launched
when its own backward ends; averagings run one after another on one link; the iteration ends when both the backward and
the last averaging have ended. With e(l) the end of the backward of layer l since the iteration began, T that of the
whole backward, c(l) the averaging of layer l, and S the layers of an iteration, that is at

    max(T, max over l in S of (e(l) + sum of c(k) over k in S with k <= l))           `iteration_ns`

which is the paper's Eq. 7 and 8 with its recursion for timestamps solved: layers are numbered as in the forward, so
those with k <= l are launched with l or later. Time beyond T is exposed. (Section 3.3 simplifies the recursion to the
sum of c over S, which is too short where the link waits for a backward.)

The sets are contiguous in the order of the backward, so the best ones are a shortest path over cuts: `plan_layers` is
exact among contiguous sets, in O(H L^2) steps.

Two facts about the exposed time x(S): a subset exposes no more; and x(A) + x(B) <= x(A and B together), for any two
disjoint sets. So no set needs to be empty while H <= L, a longer period never exposes more, and no period exposes less
than every layer would alone.

`spread_layers` goes beyond the paper. With contiguous sets one iteration has only the first layers, whose
backward ends last, so there is hardly any backward left to hide them behind, while its link idles until then. Nothing
but the search needs contiguous sets: the convergence theorem asks that each layer is averaged at least once in H
iterations. Where layers launched early and late share an iteration, both hide.

Minimising exposed time over all sets is bin packing. So sets are filled greedily: from the first layer to the last,
each goes to the iteration in which it adds the least exposed time. The time that a layer adds is final, because layers
after it are launched earlier and change nothing for it (see the formula). Of equal ones the
fullest iteration is taken, and in a second attempt the emptiest; the best of both and of the contiguous schedule is
kept.

Invariant: whole nanoseconds, so costs are exact and schedules are the same on all ranks. Of several best schedules the
chosen one has the largest first set, then the largest second one, and so on: link time is left idle at the end of a
period, where the paper fills it (`layers_filling`).

In: `LayerProfile`, H. Out: `LayerSchedule`, costs. Raises ConfigError for an H outside 1 to L."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from .layer_profile import LayerProfile

TOLERANCE = 0.01  # of the compute of a period: exposed time that a period of automatic length may have
_NEVER = 1 << 61  # nanoseconds; more than any exposed time


@dataclass(frozen=True)
class LayerSchedule:
    """By iteration of a period, the layers that are averaged, in the order in which they are launched: descending.
    Raises ConfigError unless each of the `layers` is averaged at least once, and not twice in one iteration."""

    layers: int
    iterations: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for number, own in enumerate(self.iterations):
            if any(later >= earlier for earlier, later in zip(own, own[1:], strict=False)):
                raise ConfigError(f"schedule of layers: iteration {number}: expected descending layers, found {own}")
        if {layer for own in self.iterations for layer in own} != set(range(self.layers)) or not self.layers:
            raise ConfigError(
                f"schedule of layers: expected each of {self.layers} layers in some iteration, found {self.iterations}"
            )

    @property
    def period(self) -> int:
        """H: iterations after which the schedule repeats."""
        return len(self.iterations)

    def due(self, step: int) -> tuple[int, ...]:
        """The layers that are averaged in iteration `step` of training, counted from 1."""
        return self.iterations[(step - 1) % self.period]


# ------------------------------------------------------------------------------------------------ cost


def iteration_ns(profile: LayerProfile, layers: Collection[int]) -> int:
    """Nanoseconds of an iteration in which `layers` are averaged, by the formula above."""
    own = sorted(layers)
    until = accumulate(profile.communication_ns[layer] for layer in own)
    ends = (profile.backward_ends_ns[layer] + sum_ns for layer, sum_ns in zip(own, until, strict=True))
    return max(profile.compute_ns, max(ends, default=0))


def period_ns(profile: LayerProfile, schedule: LayerSchedule) -> int:
    """Nanoseconds of a period (Eq. 8, with the forwards)."""
    return sum(iteration_ns(profile, layers) for layers in schedule.iterations)


def exposed_ns(profile: LayerProfile, schedule: LayerSchedule) -> int:
    """Nanoseconds of a period for which training waits for the link."""
    return period_ns(profile, schedule) - schedule.period * profile.compute_ns


def unhidden_period_ns(profile: LayerProfile, period: int) -> int:
    """Nanoseconds of a period of full synchronisation: all layers after the last iteration, behind nothing (Eq. 4)."""
    return period * profile.compute_ns + sum(profile.communication_ns)


def unavoidable_ns(profile: LayerProfile) -> int:
    """Nanoseconds that are exposed in a period of any length: layers that do not hide even alone in an iteration."""
    return sum(iteration_ns(profile, (layer,)) - profile.compute_ns for layer in range(len(profile)))


# ------------------------------------------------------------------------------------------------ schedules


def equal_number(layers: int, period: int) -> LayerSchedule:
    """PLSGD-ENP: contiguous sets of as equal numbers of layers as possible, larger ones first. Raises ConfigError."""
    require_period(layers, period)
    sizes = [layers // period + (number < layers % period) for number in range(period)]
    return _cut(layers, list(accumulate(sizes)))


def plan_layers(profile: LayerProfile, period: int) -> LayerSchedule:
    """The schedule of `period` contiguous sets with the least `period_ns`. Raises ConfigError."""
    require_period(len(profile), period)
    exposed = _exposed_by_cut(profile)
    rests = [rest for _, rest in zip(range(period), _rests(exposed), strict=False)]
    return _reconstructed(exposed, rests)


def choose_period(profile: LayerProfile, most: int | None = None, tolerance: float = TOLERANCE) -> LayerSchedule:
    """The best schedule of the shortest period, of at most `most` iterations (None, or more than L: L), that hides
    everything: it exposes no more than every layer would alone, plus `tolerance` of the period's compute. If none does,
    that of `most` iterations, which exposes least per iteration. Raises ConfigError."""
    most = len(profile) if most is None else min(most, len(profile))
    require_period(len(profile), most)
    exposed, unavoidable = _exposed_by_cut(profile), unavoidable_ns(profile)
    rests: list[npt.NDArray[np.int64]] = []
    for rest in _rests(exposed):
        rests.append(rest)
        if len(rests) == most or int(rest[0]) - unavoidable <= tolerance * len(rests) * profile.compute_ns:
            break
    return _reconstructed(exposed, rests)


def require_period(layers: int, period: int) -> None:
    """Raises ConfigError unless each of `period` iterations can average a layer of its own."""
    if not 1 <= period <= layers:
        raise ConfigError(
            f"H = {period} with {layers} layer{'s' * (layers != 1)}: expected 1 to {layers} iterations, so that a "
            "layer can be averaged in each; choose an H in that range"
        )


def _exposed_by_cut(profile: LayerProfile) -> npt.NDArray[np.int64]:
    """[i, j]: what averaging the i-th to the (j-1)-th layer of the backward in one iteration exposes; _NEVER for none
    (j <= i)."""
    count = len(profile)
    communication = np.array(profile.communication_ns[::-1], dtype=np.int64)
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(communication)])
    launches = np.array(profile.backward_ends_ns[::-1], dtype=np.int64) - before[:-1]
    latest = np.maximum.accumulate(np.where(_later(count, 0), launches, -_NEVER), axis=1)  # [i, j]: launches i to j
    exposed = np.full((count, count + 1), _NEVER, dtype=np.int64)
    ends = latest + before[1:] - profile.compute_ns
    exposed[:, 1:] = np.where(_later(count, 0), np.maximum(ends, 0), _NEVER)
    return exposed


def _later(count: int, by: int) -> npt.NDArray[np.bool_]:
    return np.triu(np.ones((count, count), dtype=np.bool_), by)


def _rests(exposed: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """For 1, 2, ... sets: [i], the least that those sets can expose which divide all layers of the backward from the
    i-th on; at least _NEVER where there are fewer layers than sets."""
    count = len(exposed)
    rest = np.append(exposed[:, count], _NEVER)
    yield rest
    while True:
        rest = np.append(np.minimum((exposed + rest).min(axis=1), _NEVER), _NEVER)
        yield rest


def _reconstructed(exposed: npt.NDArray[np.int64], rests: list[npt.NDArray[np.int64]]) -> LayerSchedule:
    """The best schedule, with the largest sets first."""
    count, at = len(exposed), 0
    cuts = []
    for whole, rest in zip(rests[:0:-1], rests[-2::-1], strict=True):
        best = np.flatnonzero(exposed[at] + rest == whole[at])
        at = int(best[-1])
        cuts.append(at)
    return _cut(count, [*cuts, count])


def _cut(layers: int, ends: list[int]) -> LayerSchedule:
    """The order of the backward, cut before each of `ends`."""
    order = range(layers - 1, -1, -1)
    return LayerSchedule(layers, tuple(tuple(order[i:j]) for i, j in zip([0, *ends], ends, strict=False)))


def spread_layers(profile: LayerProfile, period: int) -> LayerSchedule:
    """The best schedule found whose sets need not be contiguous. Raises ConfigError."""
    contiguous = plan_layers(profile, period)
    found = (contiguous, *(_filled_greedily(profile, period, fullest) for fullest in (True, False)))
    return min(found, key=lambda schedule: exposed_ns(profile, schedule))


def _filled_greedily(profile: LayerProfile, period: int, fullest: bool) -> LayerSchedule:
    used, exposed = np.zeros(period, dtype=np.int64), np.zeros(period, dtype=np.int64)
    chosen: list[list[int]] = [[] for _ in range(period)]
    for layer, (seconds, launched) in enumerate(zip(profile.communication_ns, profile.backward_ends_ns, strict=True)):
        added = np.maximum(used + (seconds + launched - profile.compute_ns) - exposed, 0)
        least = np.flatnonzero(added == added.min())
        number = int(least[(used[least].argmax() if fullest else used[least].argmin())])
        used[number] += seconds
        exposed[number] += added[number]
        chosen[number].append(layer)
    return LayerSchedule(len(profile), tuple(tuple(reversed(own)) for own in chosen))
