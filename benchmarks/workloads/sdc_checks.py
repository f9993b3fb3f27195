"""Check runs with corrupted gradients against the paper's order of results and against theory. Pure.

Order (PAFT, tables 1 and 2, figures 5, 6, 9). Results are means over seeds. The *loss* of a result is its distance
from the clean run in points. A point is 1% of test accuracy, or 0.05 nats per byte of a text's loss (roughly equivalent
to 1% of accuracy on the next byte). *Frequent* averaging is sync_5, sync_10 and dyn; sync_50 averages only a few times
in runs this short.

    harm     noise of 1e-2 and 1e-1 costs noised training 5 points or more
    growth   a larger variance costs noised training no less, within a point
    close    at 1e-4 and 1e-3, where the paper's PAFT is within a point of clean, so is frequent averaging
    gain     if noise up to 1e-2 or bursts cost noised training 5 points, frequent averaging recovers at least half
    often    at 1e-2, averaging every 5 iterations is no worse than every 50, within a point
    never    frequent averaging is never worse than no averaging, within a point

Theory (PAFT, Lemma 3.1): divergence and its estimator, with SGD and PAFT-Sync on known noise. Divergences between two
averagings are computed from the parameters; only the divergence at an averaging is the executor's own.

Invariant: a rule with missing results is not judged, and does not count as holding.

In: results by noise and method; the outcome of a run with known noise. Out: `RuleVerdict`s; `TheoryErrors`, relative.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ft_plugins.events import catalogue
from workloads.noise_theory import expected_divergence
from workloads.sdc_runs import BURSTS, NOISED, RANKS, VARIANCES, faults
from workloads.trained import TrainingOutcome, TrainingRun

Results = Mapping[tuple[str, str], Sequence[float]]  # by noise and method: one score per seed
OFTEN = ("sync_5", "sync_10", "dyn")
CLOSE = ("1e-4", "1e-3")
THEORY_H, THEORY_ITERATIONS, THEORY_PEAK_RATE = 5, 30, 0.02
HARM, HALF, SLACK, WITHIN = 5.0, 0.5, 1.0, 1.0  # points, share, points, points


@dataclass(frozen=True)
class ScoreScale:
    """The unit of a score. `point` is negative if lower scores are better."""

    point: float

    def losses(self, clean: Sequence[float], results: Results) -> dict[tuple[str, str], float]:
        """Points below clean, by noise and method; infinite for a non-finite score."""
        best = statistics.mean(clean)
        points = {}
        for key, scores in results.items():
            mean = statistics.fmean(scores)
            points[key] = (best - mean) / self.point if math.isfinite(mean) else math.inf
        return points


SCALES = {"digits": ScoreScale(1.0), "text": ScoreScale(-0.05)}


@dataclass(frozen=True)
class RuleVerdict:
    """One rule, judged on one set of results."""

    rule: str
    holds: bool
    detail: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'BROKEN':<7}{self.rule:<7}{self.detail}"


def judge(losses: Mapping[tuple[str, str], float]) -> list[RuleVerdict]:
    """Judge all rules on the available results. `losses`: points, by noise and method."""
    return [RuleVerdict(*fields) for rule in (_harm, _growth, _close, _gain, _often, _never) for fields in rule(losses)]


def order_holds(verdicts: Sequence[RuleVerdict]) -> bool:
    """Whether at least one rule was judged and all judged rules hold."""
    return bool(verdicts) and all(one.holds for one in verdicts)


Losses = Mapping[tuple[str, str], float]
Verdicts = Iterator[tuple[str, bool, str]]


def _harm(losses: Losses) -> Verdicts:
    for noise in ("1e-2", "1e-1"):
        if (noise, NOISED) in losses:
            loss = losses[noise, NOISED]
            yield "harm", loss >= HARM, f"{noise}: noised loses {loss:.1f} points, expected {HARM:.0f} or more"


def _growth(losses: Losses) -> Verdicts:
    judged = [noise for noise in VARIANCES if (noise, NOISED) in losses]
    for less, more in zip(judged, judged[1:], strict=False):
        small, large = losses[less, NOISED], losses[more, NOISED]
        yield "growth", large >= small - SLACK, f"noised loses {small:.1f} at {less}, {large:.1f} at {more}"


def _close(losses: Losses) -> Verdicts:
    for noise in CLOSE:
        for method in OFTEN:
            if (noise, method) in losses:
                loss = losses[noise, method]
                detail = f"{noise}: {method} loses {loss:.2f} points, expected {WITHIN:.0f} or less"
                yield "close", loss <= WITHIN, detail


def _gain(losses: Losses) -> Verdicts:
    for noise in [*VARIANCES][:3] + [*BURSTS]:
        harm = losses.get((noise, NOISED), 0.0)
        for method in OFTEN if harm >= HARM else ():
            if (noise, method) in losses:
                left = losses[noise, method]
                holds = math.isfinite(left) and (math.isinf(harm) or harm - left >= HALF * harm)
                yield "gain", holds, f"{noise}: noised loses {harm:.1f}, {method} {left:.1f}, expected half or less"


def _often(losses: Losses) -> Verdicts:
    if ("1e-2", "sync_5") in losses and ("1e-2", "sync_50") in losses:
        often, seldom = losses["1e-2", "sync_5"], losses["1e-2", "sync_50"]
        yield "often", often <= seldom + SLACK, f"1e-2: every 5 loses {often:.1f}, every 50 {seldom:.1f}"


def _never(losses: Losses) -> Verdicts:
    for (noise, method), loss in losses.items():
        if method in OFTEN and (noise, NOISED) in losses:
            without = losses[noise, NOISED]
            yield "never", loss <= without + SLACK, f"{noise}: {method} loses {loss:.1f}, noised {without:.1f}"


@dataclass(frozen=True)
class TheoryErrors:
    """Worst relative errors of sigma and of the squared divergence in a run; the largest divergence right after an
    averaging."""

    sigma: float
    divergence: float
    remaining: float


def theory_run(noise: str, variance: float) -> tuple[TrainingRun, float]:
    """The run that is compared with theory, and its sigma."""
    paft = {"mode": "sync", "h": THEORY_H}
    run = TrainingRun(
        "digits", 1, THEORY_ITERATIONS, paft, faults(noise, 1), 1, optimizer="sgd", peak_rate=THEORY_PEAK_RATE
    )  # fmt: skip
    return run, variance**0.5


def theory_errors(outcome: TrainingOutcome, sigma: float) -> TheoryErrors:
    """The errors of a run whose divergence was measured after every update."""
    rates, dimension = outcome.ranks[0].rates, outcome.ranks[0].dimension
    expected = {
        step: expected_divergence(sigma, rates[(step - 1) // THEORY_H * THEORY_H : step], dimension, RANKS)
        for step in range(1, THEORY_ITERATIONS + 1)
    }
    measured = dict(outcome.ranks[0].divergences)
    remaining = max(divergence for step, divergence in measured.items() if step % THEORY_H == 0)
    divergences = {step: divergence for step, divergence in measured.items() if step % THEORY_H}
    averagings = [event.fields for event in outcome.named(catalogue.REPLICAS_AVERAGED.name) if event.rank == 0]
    divergences |= {fields["iteration"]: fields["divergence"] for fields in averagings}
    return TheoryErrors(
        max(abs(fields["sigma"] / sigma - 1) for fields in averagings),
        max(abs(divergence**2 / expected[step] - 1) for step, divergence in divergences.items()),
        remaining,
    )
