"""Which runs show what corrupted gradients do, and what averaging and comparing do about it: methods by noises. Pure.

Noise is Gaussian, added to each rank's gradients after their aggregation; a *variance* sigma^2 is what the paper
quotes, `gauss=` in a fault is its root sigma. Noises:

    1e-4 .. 1e-1     in every iteration, on all replicas, each its own
    burst_0.1, _1    variance 1e-4, and in each 40th iteration 0.1 or 1 (the paper: each 500th of far more)

Methods: `clean` (nothing of the package is called), `noised` (nothing is averaged), PAFT-Sync every 5, 10, 50
iterations, PAFT-Dyn with its defaults. And where one replica of four alone is struck: `audit` compares after each
update and repairs, `struck` does not, so that it is seen what audit has undone.

Invariant: runs of one learner and seed begin with the same model and read the same data; a noise is the same for all
methods.

In: learner, seed, iterations. Out: `Case`s with their `TrainingRun`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads.trained import TrainingRun

RANKS = 4
STRUCK = 1  # the rank that is, where one is
CLEAN, NOISED, AUDIT, ALONE = "clean", "noised", "audit", "struck"
NEVER = 1_000_000  # iterations
BURST_EVERY = 40
VARIANCES = {"1e-4": 1e-4, "1e-3": 1e-3, "1e-2": 1e-2, "1e-1": 1e-1}
BURSTS = {"burst_0.1": 0.1, "burst_1": 1.0}  # variance of a burst
AVERAGING: Mapping[str, Mapping[str, Any]] = {
    "sync_5": {"mode": "sync", "h": 5},
    "sync_10": {"mode": "sync", "h": 10},
    "sync_50": {"mode": "sync", "h": 50},
    "dyn": {"mode": "dyn"},
}
METHODS = (NOISED, *AVERAGING)
_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    NOISED: {"mode": "sync", "h": NEVER},
    **AVERAGING,
    ALONE: {"mode": "sync", "h": NEVER},
    AUDIT: {"mode": "audit", "audit_interval": 1},
}


@dataclass(frozen=True)
class Case:
    """One run, by what it is for. `noise` is '' for a clean one."""

    method: str
    noise: str
    run: TrainingRun

    def __str__(self) -> str:
        return f"{self.run.learner} seed {self.run.seed} {self.method}{' ' + self.noise if self.noise else ''}"


def faults(noise: str, seed: int, rank: int | None = None) -> str:
    """The faults of a noise, on `rank` or on all."""
    where = "" if rank is None else f"rank={rank}"
    if noise in VARIANCES:
        return _strike((where,), VARIANCES[noise], seed)
    burst = _strike((f"iteration%{BURST_EVERY}=0", where), BURSTS[noise], seed)
    return f"{burst};{_strike((where,), VARIANCES['1e-4'], seed)}"


def _strike(conditions: Sequence[str], variance: float, seed: int) -> str:
    where = ",".join(filter(None, conditions))
    return f"update.gradients{'@' if where else ''}{where}:gauss={math.sqrt(variance):.6g}~{seed}"


def case(learner: str, seed: int, iterations: int, method: str, noise: str = "") -> Case:
    """One of them."""
    if method == CLEAN:
        return Case(CLEAN, "", TrainingRun(learner, seed, iterations))
    armed = faults(noise, seed, STRUCK if method in (AUDIT, ALONE) else None)
    return Case(method, noise, TrainingRun(learner, seed, iterations, _BLOCKS[method], armed))


def cases(
    learner: str, seed: int, iterations: int, noises: Sequence[str], methods: Sequence[str], audited: Sequence[str]
) -> Iterator[Case]:
    """All of a learner and a seed: the clean one first, then every method at every noise, then one replica struck."""
    yield case(learner, seed, iterations, CLEAN)
    for noise in noises:
        for method in methods:
            yield case(learner, seed, iterations, method, noise)
    for noise in audited:
        for method in (ALONE, AUDIT):
            yield case(learner, seed, iterations, method, noise)
