"""Whether divergence and its estimator are what theory says, with SGD on noise of known size (PAFT, Lemma 3.1).

Invariant: what is compared with was not measured by what is judged: divergences between two averagings are taken from
the parameters themselves; only that at an averaging, which ends it, is the executor's own.

In: an outcome of a run with SGD and PAFT-Sync. Out: `Errors`, relative.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..events import catalogue
from ..sync.noise import expected_divergence
from .sdc_runs import RANKS, faults
from .trained import Outcome, Run

H, ITERATIONS, PEAK_RATE = 5, 30, 0.02


@dataclass(frozen=True)
class Errors:
    """The worst of a run: of sigma; of the squared divergence; the largest divergence right after an averaging."""

    sigma: float
    divergence: float
    left: float


def run(noise: str, variance: float) -> tuple[Run, float]:
    """What is to be run, and its sigma."""
    paft = {"mode": "sync", "h": H}
    told = faults(noise, 1)
    return Run("digits", 1, ITERATIONS, paft, told, 1, optimizer="sgd", peak_rate=PEAK_RATE), variance**0.5


def errors(outcome: Outcome, sigma: float) -> Errors:
    """Of a run whose divergences were taken after every update."""
    rates, dimension = outcome.ranks[0].rates, outcome.ranks[0].dimension
    expected = {
        step: expected_divergence(sigma, rates[(step - 1) // H * H : step], dimension, RANKS)
        for step in range(1, ITERATIONS + 1)
    }
    seen = dict(outcome.ranks[0].divergences)
    left = max(divergence for step, divergence in seen.items() if step % H == 0)
    found = {step: divergence for step, divergence in seen.items() if step % H}
    turns = [event.fields for event in outcome.named(catalogue.REPLICAS_AVERAGED.name) if event.rank == 0]
    found |= {turn["iteration"]: turn["divergence"] for turn in turns}
    return Errors(
        max(abs(turn["sigma"] / sigma - 1) for turn in turns),
        max(abs(divergence**2 / expected[step] - 1) for step, divergence in found.items()),
        left,
    )
