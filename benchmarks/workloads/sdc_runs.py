"""Define the runs with corrupted gradients, by method and noise. Pure.

Noise is Gaussian and added to each rank's gradients after their aggregation. The paper quotes its *variance* sigma^2;
`gauss=` in a fault is sigma. Noises:

    1e-4 .. 1e-1     in every iteration, independent on each replica
    burst_0.1, _1    variance 1e-4, and 0.1 or 1 in every 40th iteration (the paper: every 500th of far more)

Methods: `clean` (nothing of the package is called), `noised` (no averaging), PAFT-Sync every 5, 10, 50 iterations,
PAFT-Dyn with its defaults; `sync_5_all`: every 5, of the optimizer's state as well. With noise on one replica of four
only: `audit` compares after each update and repairs; `struck` does not, which shows what the audit repaired.

Invariant: runs of one learner and seed start from the same model and read the same data; a noise is the same for all
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
FAULTY_RANK = 1  # with noise on one replica only
CLEAN, NOISED, AUDIT, UNAUDITED = "clean", "noised", "audit", "struck"
NEVER = 1_000_000  # iterations
BURST_EVERY = 40
VARIANCES = {"1e-4": 1e-4, "1e-3": 1e-3, "1e-2": 1e-2, "1e-1": 1e-1}
STEADY = {"1": 1.0}  # no model learns with it; only its divergence is compared with theory
BURSTS = {"burst_0.1": 0.1, "burst_1": 1.0}  # variance of a burst
AVERAGING: Mapping[str, Mapping[str, Any]] = {
    "sync_5": {"mode": "sync", "h": 5},
    "sync_10": {"mode": "sync", "h": 10},
    "sync_50": {"mode": "sync", "h": 50},
    "dyn": {"mode": "dyn"},
}
METHODS = (NOISED, *AVERAGING)
ALL_STATE = "sync_5_all"  # averages the optimizer's state, too
_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    NOISED: {"mode": "sync", "h": NEVER},
    **AVERAGING,
    ALL_STATE: {**AVERAGING["sync_5"], "average_optimizer_state": True},
    UNAUDITED: {"mode": "sync", "h": NEVER},
    AUDIT: {"mode": "audit", "audit_interval": 1},
}


@dataclass(frozen=True)
class Case:
    """One run with its method and noise. `noise` is '' for a clean run."""

    method: str
    noise: str
    run: TrainingRun

    def __str__(self) -> str:
        return f"{self.run.learner} seed {self.run.seed} {self.method}{' ' + self.noise if self.noise else ''}"


def faults(noise: str, seed: int, rank: int | None = None) -> str:
    """The faults of a noise, on `rank` or on all ranks."""
    condition = "" if rank is None else f"rank={rank}"
    if variance := (VARIANCES | STEADY).get(noise):
        return _fault((condition,), variance, seed)
    burst = _fault((f"iteration%{BURST_EVERY}=0", condition), BURSTS[noise], seed)
    return f"{burst};{_fault((condition,), VARIANCES['1e-4'], seed)}"


def _fault(conditions: Sequence[str], variance: float, seed: int) -> str:
    condition = ",".join(filter(None, conditions))
    return f"update.gradients{'@' if condition else ''}{condition}:gauss={math.sqrt(variance):.6g}~{seed}"


def case(learner: str, seed: int, iterations: int, method: str, noise: str = "") -> Case:
    """One case."""
    if method == CLEAN:
        return Case(CLEAN, "", TrainingRun(learner, seed, iterations))
    armed = faults(noise, seed, FAULTY_RANK if method in (AUDIT, UNAUDITED) else None)
    return Case(method, noise, TrainingRun(learner, seed, iterations, _BLOCKS[method], armed))


def cases(
    learner: str, seed: int, iterations: int, noises: Sequence[str], methods: Sequence[str], audited: Sequence[str]
) -> Iterator[Case]:
    """All cases of a learner and seed: clean, then every method with every noise, then noise on one replica only."""
    yield case(learner, seed, iterations, CLEAN)
    for noise in noises:
        for method in methods:
            yield case(learner, seed, iterations, method, noise)
    for noise in audited:
        for method in (UNAUDITED, AUDIT):
            yield case(learner, seed, iterations, method, noise)
