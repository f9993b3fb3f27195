"""How far replicas drift apart by theory, with which measured divergence and noise are compared.

In: the noise of a step, learning rates, numbers of parameters and replicas. Out: squared distances. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ft_plugins.errors import ConfigError


def weight_of(dimension: float, replicas: int) -> float:
    """d (M-1)/M. Raises ConfigError for fewer than two replicas."""
    if replicas < 2:
        raise ConfigError(f"{replicas} replica(s) cannot diverge: expected at least 2")
    return dimension * (replicas - 1) / replicas


def expected_divergence(sigma: float, rates: Iterable[float], dimension: float, replicas: int) -> float:
    """E ||mean - theta_m||^2 after updates at these learning rates (PAFT's Lemma 3.1, corrected)."""
    return weight_of(dimension, replicas) * sigma**2 * math.fsum(rate**2 for rate in rates)
