"""Check runs with corrupted gradients: the order of results (PAFT, tables 1 and 2, figures 5, 6, 9) and theory. Pure.

Order. Of each result the mean over seeds. A *loss* is how much worse a result is than the clean run's, in points: of
test accuracy a point is one of a hundred, of a text's loss 0.05 nats a byte (roughly what a point of the next byte's
accuracy is worth there). *Averaging often* are sync_5, sync_10 and dyn: every 50 is a few times in runs this short.

    harm     noised training is harmed (a loss of 5 points or more) at 1e-2 and 1e-1
    growth   a larger variance harms noised training no less, within a point
    close    where the paper's PAFT is within a point of clean (1e-4, 1e-3), averaging often is too
    gain     where noised training is harmed at up to 1e-2, or by bursts, averaging often undoes half of it or more
    often    averaging every 5 iterations is no worse than every 50 at 1e-2, within a point
    never    at no noise is averaging often worse than not averaging, within a point

Theory (PAFT, Lemma 3.1). Divergence and its estimator, with SGD and PAFT-Sync on noise of known size. Divergences
between two averagings are taken from the parameters themselves; only the one at an averaging is the executor's own.

Invariant: a rule whose results are missing is not judged; it does not count as one that holds.

In: results by noise and method; the outcome of a run with known noise. Out: `RuleVerdict`s; `TheoryErrors`, relative.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ft_plugins.events import catalogue
from ft_plugins.sync.noise import expected_divergence
from workloads.sdc_runs import BURSTS, NOISED, RANKS, VARIANCES, faults
from workloads.trained import TrainingOutcome, TrainingRun

Results = Mapping[tuple[str, str], Sequence[float]]  # by noise and method: a score for each seed
OFTEN = ("sync_5", "sync_10", "dyn")
CLOSE = ("1e-4", "1e-3")
THEORY_H, THEORY_ITERATIONS, THEORY_PEAK_RATE = 5, 30, 0.02
HARM, HALF, SLACK, WITHIN = 5.0, 0.5, 1.0, 1.0  # points, share, points, points


@dataclass(frozen=True)
class ScoreScale:
    """What a score is: `point` is negative where less is better."""

    point: float

    def losses(self, clean: Sequence[float], results: Results) -> dict[tuple[str, str], float]:
        """Points below clean, by noise and method; infinite where a run has no number left."""
        best = statistics.mean(clean)
        found = {}
        for key, scores in results.items():
            mean = statistics.fmean(scores)
            found[key] = (best - mean) / self.point if math.isfinite(mean) else math.inf
        return found


SCALES = {"digits": ScoreScale(1.0), "text": ScoreScale(-0.05)}


@dataclass(frozen=True)
class RuleVerdict:
    """One rule at one place."""

    rule: str
    holds: bool
    said: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'BROKEN':<7}{self.rule:<7}{self.said}"


def judge(losses: Mapping[tuple[str, str], float]) -> list[RuleVerdict]:
    """All rules on all results that are there. `losses`: points, by noise and method."""
    return [RuleVerdict(*found) for rule in (_harm, _growth, _close, _gain, _often, _never) for found in rule(losses)]


def order_holds(verdicts: Sequence[RuleVerdict]) -> bool:
    """Every rule that could be judged holds, and there is one."""
    return bool(verdicts) and all(one.holds for one in verdicts)


Losses = Mapping[tuple[str, str], float]
Found = Iterator[tuple[str, bool, str]]


def _harm(losses: Losses) -> Found:
    for noise in ("1e-2", "1e-1"):
        if (noise, NOISED) in losses:
            loss = losses[noise, NOISED]
            yield "harm", loss >= HARM, f"{noise}: noised loses {loss:.1f} points, expected {HARM:.0f} or more"


def _growth(losses: Losses) -> Found:
    there = [noise for noise in VARIANCES if (noise, NOISED) in losses]
    for less, more in zip(there, there[1:], strict=False):
        small, large = losses[less, NOISED], losses[more, NOISED]
        yield "growth", large >= small - SLACK, f"noised loses {small:.1f} at {less}, {large:.1f} at {more}"


def _close(losses: Losses) -> Found:
    for noise in CLOSE:
        for method in OFTEN:
            if (noise, method) in losses:
                loss = losses[noise, method]
                said = f"{noise}: {method} loses {loss:.2f} points, expected {WITHIN:.0f} or less"
                yield "close", loss <= WITHIN, said


def _gain(losses: Losses) -> Found:
    for noise in [*VARIANCES][:3] + [*BURSTS]:
        harm = losses.get((noise, NOISED), 0.0)
        for method in OFTEN if harm >= HARM else ():
            if (noise, method) in losses:
                left = losses[noise, method]
                holds = math.isfinite(left) and (math.isinf(harm) or harm - left >= HALF * harm)
                yield "gain", holds, f"{noise}: noised loses {harm:.1f}, {method} {left:.1f}, expected half or less"


def _often(losses: Losses) -> Found:
    if ("1e-2", "sync_5") in losses and ("1e-2", "sync_50") in losses:
        often, seldom = losses["1e-2", "sync_5"], losses["1e-2", "sync_50"]
        yield "often", often <= seldom + SLACK, f"1e-2: every 5 loses {often:.1f}, every 50 {seldom:.1f}"


def _never(losses: Losses) -> Found:
    for (noise, method), loss in losses.items():
        if method in OFTEN and (noise, NOISED) in losses:
            without = losses[noise, NOISED]
            yield "never", loss <= without + SLACK, f"{noise}: {method} loses {loss:.1f}, noised {without:.1f}"


@dataclass(frozen=True)
class TheoryErrors:
    """The worst of a run: of sigma; of the squared divergence; the largest divergence right after an averaging."""

    sigma: float
    divergence: float
    left: float


def theory_run(noise: str, variance: float) -> tuple[TrainingRun, float]:
    """What is to be run, and its sigma."""
    paft = {"mode": "sync", "h": THEORY_H}
    run = TrainingRun(
        "digits", 1, THEORY_ITERATIONS, paft, faults(noise, 1), 1, optimizer="sgd", peak_rate=THEORY_PEAK_RATE
    )  # fmt: skip
    return run, variance**0.5


def theory_errors(outcome: TrainingOutcome, sigma: float) -> TheoryErrors:
    """Of a run whose divergences were taken after every update."""
    rates, dimension = outcome.ranks[0].rates, outcome.ranks[0].dimension
    expected = {
        step: expected_divergence(sigma, rates[(step - 1) // THEORY_H * THEORY_H : step], dimension, RANKS)
        for step in range(1, THEORY_ITERATIONS + 1)
    }
    seen = dict(outcome.ranks[0].divergences)
    left = max(divergence for step, divergence in seen.items() if step % THEORY_H == 0)
    found = {step: divergence for step, divergence in seen.items() if step % THEORY_H}
    turns = [event.fields for event in outcome.named(catalogue.REPLICAS_AVERAGED.name) if event.rank == 0]
    found |= {turn["iteration"]: turn["divergence"] for turn in turns}
    return TheoryErrors(
        max(abs(turn["sigma"] / sigma - 1) for turn in turns),
        max(abs(divergence**2 / expected[step] - 1) for step, divergence in found.items()),
        left,
    )
