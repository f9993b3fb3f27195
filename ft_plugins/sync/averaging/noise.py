"""Estimate the noise in gradients from how far replicas have diverged. Pure.

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

Invariant: reports are combined in rank order, so all ranks compute the same bits.

In: sums of squares by rank. Out: `NoiseMeasurement`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ..buckets import PARAMETERS, ReplicaBucket

Table = npt.NDArray[np.float64]
FIELDS = 5  # of a `NoisePart`, as a row of a table


@dataclass(frozen=True)
class NoisePart:
    """One rank's share of the sums over the whole model. Each sum is divided by the number of replicas, so all replicas
    of a tensor together count it once.

    `divergence`: ||mean - theta||^2; `weight`: n (M-1)/M; `signal`: ||step||^2; `elements`: n; `nonfinite`: number of
    non-finite coordinates on this rank, which are in none of the sums.
    """

    divergence: float = 0.0
    weight: float = 0.0
    signal: float = 0.0
    elements: float = 0.0
    nonfinite: int = 0

    def __add__(self, other: NoisePart) -> NoisePart:
        return NoisePart(
            self.divergence + other.divergence, self.weight + other.weight, self.signal + other.signal,
            self.elements + other.elements, self.nonfinite + other.nonfinite,
        )  # fmt: skip

    def row(self) -> list[float]:
        return [self.divergence, self.weight, self.signal, self.elements, float(self.nonfinite)]


@dataclass(frozen=True)
class NoiseMeasurement:
    """What one averaging measured, the same on every rank.

    `divergence`: root mean square of ||mean - theta_m|| over replicas; `sigma`: the estimate of s, None if there is
    none; `signal`: length of the last step, noise included; `dimension`: number of parameters of the model;
    `nonfinite`: ranks with non-finite parameters.
    """

    divergence: float
    sigma: float | None
    signal: float
    dimension: int
    rates_squared: float  # sum of lr^2 since the replicas were equal
    nonfinite: tuple[int, ...] = ()

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
    divergence, weight, signal, elements = (math.fsum(table[:, column]) for column in range(FIELDS - 1))
    return NoiseMeasurement(
        math.sqrt(divergence) if divergence >= 0 else math.nan, estimate(divergence, weight, rates_squared),
        math.sqrt(signal) if signal >= 0 else math.nan, round(elements), rates_squared,
        tuple(int(rank) for rank in np.flatnonzero(table[:, FIELDS - 1])),
    )  # fmt: skip


def weight_of(dimension: float, replicas: int) -> float:
    """d (M-1)/M. Raises ConfigError for fewer than two replicas."""
    if replicas < 2:
        raise ConfigError(f"{replicas} replica(s) cannot diverge: expected at least 2")
    return dimension * (replicas - 1) / replicas


def expected_divergence(sigma: float, rates: Iterable[float], dimension: float, replicas: int) -> float:
    """E ||mean - theta_m||^2 after updates at these learning rates (Lemma 3.1, corrected)."""
    return weight_of(dimension, replicas) * sigma**2 * math.fsum(rate**2 for rate in rates)


def estimate(divergence: float, weight: float, rates_squared: float) -> float | None:
    """s from a measured squared divergence: 0 if that is 0, None without updates or coordinates."""
    if divergence == 0 and weight > 0:
        return 0.0
    if weight <= 0 or rates_squared <= 0:
        return None
    return math.sqrt(divergence / (weight * rates_squared))
