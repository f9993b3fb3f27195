"""Whether results stand in the order of the paper (PAFT, tables 1 and 2, figures 5, 6, 9), by rules. Pure.

Of each result the mean over seeds. A *loss* is how much worse a result is than the clean run's, in points: of test
accuracy one is one of a hundred, of a text's loss 0.05 nats a byte (what a point of the next byte's accuracy is worth
there, roughly). *Averaging often* are sync_5, sync_10 and dyn: every 50 is but a few times in runs this short.

    harm     noised training is harmed (a loss of 5 points or more) at 1e-2 and 1e-1
    growth   a larger variance harms noised training no less, within a point
    close    where the paper's PAFT is within a point of clean (1e-4, 1e-3), averaging often is too
    gain     where noised training is harmed at up to 1e-2, or by bursts, averaging often undoes half of it or more
    often    averaging every 5 iterations is no worse than every 50 at 1e-2, within a point
    never    at no noise is averaging often worse than not averaging, within a point

Invariant: a rule is not judged where its results are missing; it is then not among the rules that hold.

In: results by noise and method. Out: `Verdict`s, in words.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .sdc_runs import BURSTS, NOISED, VARIANCES

Results = Mapping[tuple[str, str], Sequence[float]]  # by noise and method: a score for each seed
OFTEN = ("sync_5", "sync_10", "dyn")
CLOSE = ("1e-4", "1e-3")
HARM, HALF, SLACK, WITHIN = 5.0, 0.5, 1.0, 1.0  # points, share, points, points


@dataclass(frozen=True)
class Scale:
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


SCALES = {"digits": Scale(1.0), "text": Scale(-0.05)}


@dataclass(frozen=True)
class Verdict:
    """One rule at one place."""

    rule: str
    holds: bool
    said: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'BROKEN':<7}{self.rule:<7}{self.said}"


def judge(losses: Mapping[tuple[str, str], float]) -> list[Verdict]:
    """All rules on all results that are there. `losses`: points, by noise and method."""
    return [Verdict(*found) for rule in (_harm, _growth, _close, _gain, _often, _never) for found in rule(losses)]


def order_holds(verdicts: Sequence[Verdict]) -> bool:
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
