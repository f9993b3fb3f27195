"""What a synchronisation costs, from blocks of iterations in one run: their order, their pairs, the throttle. Pure.

A round has a block of each mode, in random order. A mode's cost in a round is its seconds of an iteration over those of
the plain block of the same round, less 1; so what changes slowly on a shared machine is in both. The figure is the
median over rounds, with its 95% bootstrap interval.

Invariant: the same seed gives the same order and the same interval.

In: seconds by round and mode. Out: `SyncCost`; the order of blocks; the next rate of a link.
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
Middle = Callable[..., Any]  # of an array along an axis
FACTOR = 8.0  # by which a rate is changed at most in one step


@dataclass(frozen=True)
class SyncCost:
    """A share of the plain iteration's time, and the ends of its 95% interval."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:8.2%} ({self.low:.2%} to {self.high:.2%})"


def shuffled(modes: Sequence[str], rounds: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """The order of the blocks of each round: every mode once."""
    order = random.Random(seed)
    return tuple(tuple(order.sample(list(modes), len(modes))) for _ in range(rounds))


def costs(seconds: Sequence[Mapping[str, float]], seed: int = 1) -> dict[str, SyncCost]:
    """Of each mode, relative to plain. `seconds`: of an iteration, by mode; one mapping for each round."""
    found = {}
    for mode in seconds[0]:
        if mode != PLAIN:
            shares = [each[mode] / each[PLAIN] - 1 for each in seconds]
            found[mode] = SyncCost(statistics.median(shares), *interval(shares, seed))
    return found


def interval(shares: Sequence[float], seed: int = 1, middle: Middle = np.median) -> tuple[float, float]:
    """The 95% bootstrap interval of the median, or of another `middle` (np.mean)."""
    draws = np.random.default_rng(seed).choice(np.asarray(shares), (RESAMPLES, len(shares)))
    low, high = np.quantile(middle(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def next_rate(rate: float, plain: float, share: float, h: int, target: float, nbytes: float) -> float:
    """Bytes a second that have a synchronisation every `h` iterations cost `target` of a plain iteration's time.

    Known of `rate`: seconds of a plain iteration, and the `share` that it costs there. `nbytes` are sent by each rank
    in a synchronisation and, as gradients, in each iteration. Of a transfer that takes D more, one costs x + D, and a
    plain iteration takes `plain` + D, so x + D = target h (plain + D) where x = share h plain is what one costs now.
    No step goes beyond a factor of 8. Raises FtError where no rate can do it: what is sent as gradients as well cannot
    cost more than 1/h of an iteration.
    """
    if target * h >= 1:
        most = 1 / h
        raise FtError(f"a synchronisation every {h} iterations cannot cost {target:.0%}: expected less than {most:.0%}")
    more = h * plain * (target - share) / (1 - target * h)
    least, most = nbytes / rate / FACTOR, nbytes / rate * FACTOR
    return nbytes / min(max(nbytes / rate + more, least), most)
