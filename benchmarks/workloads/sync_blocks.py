"""Compute the cost of a synchronisation from blocks of iterations of one run, and the next rate of the throttle. Pure.

A round has one block of each mode, in random order. The cost of a mode in a round is its seconds per iteration divided
by those of the round's plain block, minus 1, so slow changes of a shared machine cancel. The figure is the median over
rounds, with its 95% bootstrap interval.

Invariant: the same seed gives the same order and the same interval.

In: seconds by round and mode. Out: `PolicyFigure`s; the order of blocks; the next rate of a link.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ft_plugins.errors import FtError

PLAIN = "plain"
RESAMPLES = 10_000
Middle = Callable[..., Any]  # a statistic of an array along an axis
FACTOR = 8.0  # maximum change of a rate in one step


@dataclass(frozen=True)
class PolicyFigure:
    """A median over rounds, and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], seed: int = 1) -> PolicyFigure:
        return cls(statistics.median(values), *interval(values, seed))

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def shuffled(modes: Sequence[str], rounds: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """The order of the blocks of each round. Every round has every mode once."""
    order = random.Random(seed)
    return tuple(tuple(order.sample(list(modes), len(modes))) for _ in range(rounds))


def costs(seconds: Sequence[Mapping[str, float]], seed: int = 1) -> dict[str, PolicyFigure]:
    """The cost of each mode. `seconds`: per iteration by mode, one mapping per round."""
    by_mode = {}
    for mode in seconds[0]:
        if mode != PLAIN:
            shares = [each[mode] / each[PLAIN] - 1 for each in seconds]
            by_mode[mode] = PolicyFigure.of(shares, seed)
    return by_mode


def interval(shares: Sequence[float], seed: int = 1, middle: Middle = np.median) -> tuple[float, float]:
    """The 95% bootstrap interval of the median, or of another statistic `middle` (np.mean)."""
    draws = np.random.default_rng(seed).choice(np.asarray(shares), (RESAMPLES, len(shares)))
    low, high = np.quantile(middle(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def next_rate(rate: float, plain: float, share: float, h: int, target: float, nbytes: float) -> float:
    """The rate in bytes per second at which a synchronisation every `h` iterations costs `target` of a plain iteration.

    At the present `rate` a plain iteration takes `plain` seconds and a synchronisation costs the share `share` of it.
    Each rank sends `nbytes` per synchronisation, and the same for gradients in each iteration. If the transfer takes D
    longer, a synchronisation costs x + D and a plain iteration takes `plain` + D, so x + D = target h (plain + D), with
    the present cost x = share h plain. A step changes the rate by a factor of at most 8.

    Raises FtError if no rate can reach the target: gradients send as much, so the cost stays below 1/h.
    """
    if target * h >= 1:
        most = 1 / h
        raise FtError(f"a synchronisation every {h} iterations cannot cost {target:.0%}: expected less than {most:.0%}")
    more = h * plain * (target - share) / (1 - target * h)
    least, most = nbytes / rate / FACTOR, nbytes / rate * FACTOR
    return nbytes / min(max(nbytes / rate + more, least), most)
