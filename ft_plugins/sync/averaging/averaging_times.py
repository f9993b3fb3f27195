"""When replicas are averaged next: every H iterations, or as often as the noise in gradients requires. Pure.

A turn is the iteration after whose update averaging starts. Once it is applied, the schedule derives the next turn from
what was measured over all ranks, so all ranks derive the same (PAFT, section 4.2):

    H_next = ||g|| / sigma    clipped to [H_min, H_max]

||g|| is the length of one step over the whole model, and sigma the length of the noise in it: s sqrt(d), with s the
standard deviation in one of d coordinates (`estimate`). s alone, compared with a norm over d coordinates, would give
ever longer intervals for larger models. The measured step contains the noise, which adds less than 1 to the ratio. Both
are measured at the turn itself. With `largest` both are those of one tensor, p_max, the one with the longest noise on
any rank: the paper's own ratio, ||g_pmax|| / sigma_max.

With g~_m = g + e_m, e_m ~ N(0, s^2) in each of d coordinates, and SGD, M replicas that were equal diverge as

    E ||mean - theta_m||^2  =  d (M-1)/M  s^2  sum(lr^2)        over the updates since they were equal

(the mean contains the replica's own noise, hence (M-1)/M: PAFT's Lemma 3.1, corrected); inverting that gives s. Over a
whole model the left side is the sum over TP, PP and the kinds of replica sets, and d (M-1)/M becomes the `weight`: the
sum of n (M-1)/M over tensors of n elements and M replicas. Each tensor counts once, however many ranks of other TP or
PP indices hold it.

With other optimizers s is the noise of the *step*, the change of a parameter in units of the learning rate. `signal` is
the length of that step, so both have the same units and ||g|| / (s sqrt(d)) is the signal-to-noise ratio of the step:

    SGD              the step is the gradient: s is the noise of the gradient, `signal` is ||g||.
    momentum mu      the step is the velocity. Noise in a gradient reaches the parameters gradually, 1/(1-mu) of it in
                     the end, and so does the gradient: beyond 1/(1-mu) iterations s tends to s_gradient / (1-mu) and
                     the signal to ||g|| / (1-mu).
    Adam, AdamW      the step is normalised by the second moment: s is the noise of that step, of the order of
                     s_gradient / sqrt(v), and does not reflect the gradient's scale; with noise alone it tends to 1.

Invariant: reports are combined in rank order, so all ranks compute the same bits. No interval is below 1, and none of a
noise-driven schedule is out of its bounds. No noise gives H_max; noise that cannot be measured (NaN, or an update of
length 0 with noise) gives H_min. A turn without information (learning rates of 0) keeps the interval.

In: sums of squares by rank, or None. Out: `NoiseMeasurement`, `Turn`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...config import PaftConfig
from ...errors import ConfigError
from ..buckets import PARAMETERS, ReplicaBucket

Table = npt.NDArray[np.float64]
FIELDS = 7  # of a `NoisePart`, as a row of a table


@dataclass(frozen=True)
class NoisePart:
    """One rank's share of the sums over the whole model. Each sum is divided by the number of replicas, so all replicas
    of a tensor together count it once.

    `divergence`: ||mean - theta||^2; `weight`: n (M-1)/M; `signal`: ||step||^2; `elements`: n; `nonfinite`: number of
    non-finite coordinates on this rank, which are in none of the sums. `apart`, `steps`: by tensor, this rank's part of
    it, M/(M-1) ||mean - theta||^2 and ||step||^2; empty unless asked for.
    """

    divergence: float = 0.0
    weight: float = 0.0
    signal: float = 0.0
    elements: float = 0.0
    nonfinite: int = 0
    apart: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: NoisePart) -> NoisePart:
        return NoisePart(
            self.divergence + other.divergence, self.weight + other.weight, self.signal + other.signal,
            self.elements + other.elements, self.nonfinite + other.nonfinite,
            {**self.apart, **other.apart}, {**self.steps, **other.steps},
        )  # fmt: skip

    def row(self) -> list[float]:
        largest = max(self.apart, key=self.apart.__getitem__, default="")
        pair = [self.apart.get(largest, 0.0), self.steps.get(largest, 0.0)]
        return [self.divergence, self.weight, self.signal, self.elements, *pair, float(self.nonfinite)]


@dataclass(frozen=True)
class NoiseMeasurement:
    """What one averaging measured, the same on every rank.

    `divergence`: root mean square of ||mean - theta_m|| over replicas; `sigma`: the estimate of s, None if there is
    none; `signal`: length of the last step, noise included; `dimension`: number of parameters of the model;
    `nonfinite`: ranks with non-finite parameters; `largest`: of the tensor with the longest noise, the length of its
    step and of the noise in it, `largest_noise`.
    """

    divergence: float
    sigma: float | None
    signal: float
    dimension: int
    rates_squared: float  # sum of lr^2 since the replicas were equal
    nonfinite: tuple[int, ...] = ()
    largest: float = 0.0
    largest_noise: float = 0.0

    @property
    def noise(self) -> float:
        """Length of the noise in one step, s sqrt(d), comparable with `signal`; NaN if unknown."""
        return math.nan if self.sigma is None else self.sigma * math.sqrt(self.dimension)


def part_of(bucket: ReplicaBucket, divergence: float, signal: float, finite: int) -> NoisePart:
    """A rank's report on one bucket: squared norms over its `finite` finite coordinates."""
    nonfinite = bucket.elements - finite
    if not (bucket.in_norm and bucket.role in PARAMETERS):
        return NoisePart(nonfinite=nonfinite)
    count = len(bucket.replicas)
    weight = finite * (count - 1) / count
    return NoisePart(divergence / count, weight / count, signal / count, finite / count, nonfinite)


def combine(parts: Table | Sequence[Sequence[float]], rates_squared: float) -> NoiseMeasurement:
    """Combine all ranks' parts, in rank order. `rates_squared`: sum of lr^2 since the replicas were equal."""
    table = np.asarray(parts, dtype=np.float64).reshape(-1, FIELDS)
    divergence, weight, signal, elements = (math.fsum(table[:, column]) for column in range(4))
    apart, step = table[table[:, 4].argmax(), 4:6].tolist() if len(table) else (0.0, 0.0)
    return NoiseMeasurement(
        math.sqrt(divergence) if divergence >= 0 else math.nan, estimate(divergence, weight, rates_squared),
        math.sqrt(signal) if signal >= 0 else math.nan, round(elements), rates_squared,
        tuple(int(rank) for rank in np.flatnonzero(table[:, FIELDS - 1])), math.sqrt(step),
        math.sqrt(apart / rates_squared) if rates_squared > 0 else 0.0,
    )  # fmt: skip


def estimate(divergence: float, weight: float, rates_squared: float) -> float | None:
    """s from a measured squared divergence: 0 if that is 0, None without updates or coordinates."""
    if divergence == 0 and weight > 0:
        return 0.0
    if weight <= 0 or rates_squared <= 0:
        return None
    return math.sqrt(divergence / (weight * rates_squared))


@dataclass(frozen=True)
class Turn:
    """Averaging starts after the update of iteration `at`, `interval` iterations after the previous turn."""

    at: int
    interval: int
    reason: str = ""

    def __str__(self) -> str:
        return f"iteration {self.at}, interval {self.interval}" + (f" ({self.reason})" if self.reason else "")


class SyncSchedule(Protocol):
    """Decides when replicas are averaged."""

    def first(self, completed: int) -> Turn:
        """The first turn of a job that has completed `completed` iterations and has no turn yet."""

    def following(self, turn: Turn, measured: NoiseMeasurement | None) -> Turn:
        """The turn after `turn`; `measured` is None if nothing was measured."""

    def within(self, turn: Turn) -> Turn:
        """A restored turn, moved within this schedule's bounds: the configuration may have changed."""


@dataclass(frozen=True)
class Periodic:
    """PAFT-Sync: after iterations H, 2H, 3H, ... (Algorithm 1). Raises ConfigError if H is below 1."""

    h: int

    def __post_init__(self) -> None:
        if self.h < 1:
            raise ConfigError(f"replicas are averaged every {self.h} iterations: expected at least 1")

    def first(self, completed: int) -> Turn:
        return Turn((completed // self.h + 1) * self.h, self.h, "first")

    def following(self, turn: Turn, measured: NoiseMeasurement | None) -> Turn:
        return Turn(turn.at + self.h, self.h)

    def within(self, turn: Turn) -> Turn:
        return turn if turn.interval == self.h else self.first(turn.at - turn.interval)


@dataclass(frozen=True)
class NoiseDriven:
    """PAFT-Dyn (Algorithm 2): `h` is the first interval; `largest`: by the tensor with the longest noise, not by the
    whole model. Raises ConfigError for contradictory bounds."""

    h: int
    h_min: int
    h_max: int
    largest: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.h_min <= self.h_max:
            raise ConfigError(
                f"the interval of averaging is bounded by h_min {self.h_min} and h_max {self.h_max}: expected "
                "1 <= h_min <= h_max"
            )

    def first(self, completed: int) -> Turn:
        interval = self._clipped(self.h)
        return Turn(completed + interval, interval, "first")

    def following(self, turn: Turn, measured: NoiseMeasurement | None) -> Turn:
        interval, reason = self._interval(turn, measured)
        return Turn(turn.at + interval, interval, reason)

    def within(self, turn: Turn) -> Turn:
        interval = self._clipped(turn.interval)
        return Turn(turn.at - turn.interval + interval, interval, turn.reason)

    def _clipped(self, interval: int) -> int:
        return min(max(interval, self.h_min), self.h_max)

    def _interval(self, turn: Turn, measured: NoiseMeasurement | None) -> tuple[int, str]:
        if measured is not None and measured.nonfinite:
            return self.h_min, f"non-finite parameters on ranks {', '.join(map(str, measured.nonfinite))}: h_min"
        if measured is None or measured.sigma is None:
            return turn.interval, "nothing could be measured: interval unchanged"
        signal, noise = measured.signal, measured.noise
        if self.largest and noise:
            signal, noise = measured.largest, measured.largest_noise
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return self.h_min, "non-finite noise: h_min"
        if noise == 0:
            return self.h_max, "no noise: h_max"
        ratio = signal / noise
        reason = f"||g|| {signal:.3g} / sigma {noise:.3g} = {ratio:.3g}"
        if ratio < self.h_min:
            return self.h_min, f"{reason}, clipped to h_min"
        if ratio > self.h_max:
            return self.h_max, f"{reason}, clipped to h_max"
        return math.floor(ratio), reason


def schedule_of(config: PaftConfig) -> SyncSchedule | None:
    """The configured schedule; None if nothing is averaged."""
    match config.mode:
        case "sync":
            return Periodic(config.h)
        case "dyn":
            return NoiseDriven(config.h, config.h_min, config.h_max, config.noise_of == "largest")
    return None
