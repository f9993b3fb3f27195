"""Measure the effect of silently corrupted gradients on training, and of PAFT and the replica audit against it.

    python benchmarks/sdc.py [--quick] [--learners digits text] [--seeds 1 2 3] [--output FOLDER]

4 gloo ranks train a small ResNet on scikit-learn's digits (test accuracy) and a small GPT on bytes of real text (loss,
nats per byte) through sessions, as a user's own loop does (workloads/learners.py, trained.py). Noise is added to each
rank's gradients after their aggregation; the figure quoted is its *variance*, sigma squared, as in the paper. Runs are
short: 13 epochs instead of the paper's 120, and bursts every 40 iterations instead of 500. Methods and noises are in
workloads/sdc_runs.py, the rules for the paper's order and the comparison with theory in workloads/sdc_checks.py.

    LEARNER_clean, LEARNER_NOISE_METHOD     mean score over replicas and seeds, of the last version as the next update
                                            would see it
    order_holds          every rule that could be judged on these results holds
    audit_identical      with faults on one of four replicas, every run with an audit after each update ended
                         bit-identical to the clean run on every rank; the faults did act, and without audit they
                         changed the final state
    LEARNER_state_gain   points (workloads/sdc_checks.py) that averaging the optimizer's state adds, at 1e-2, every 5
    sigma_error, divergence_error
                         worst relative error with SGD on known noise, of variance 1 too: of the estimate of sigma, and
                         of the squared divergence against d (M-1)/M s^2 sum(lr^2)

Claims: order_holds, audit_identical, sigma_error and divergence_error <= 0.05, divergence_after_sync = 0.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ft_plugins.events import catalogue
from workloads import learners, sdc_checks
from workloads.pictures import draw_learner
from workloads.running import PROGRESS, Figures, arguments, run, say
from workloads.sdc_checks import SCALES, TheoryErrors
from workloads.sdc_runs import (
    ALL_STATE,
    AUDIT,
    BURSTS,
    CLEAN,
    METHODS,
    NOISED,
    RANKS,
    STEADY,
    UNAUDITED,
    VARIANCES,
    Case,
    case,
    cases,
)
from workloads.trained import TrainingOutcome, train

ITERATIONS = {"digits": 150, "text": 240}
SCORES = {"digits": "test accuracy, %", "text": "validation loss, nats per byte"}
NAMES = tuple(ITERATIONS)
AUDITED = ("1e-2", "burst_1")
SMOKE = 6  # iterations
QUICK_LEARNERS = ("digits",)
QUICK_NOISE, QUICK_METHODS = "1e-2", (NOISED, "sync_5", "dyn")
IN_BURSTS = (NOISED, "sync_10", "dyn")


@dataclass(frozen=True)
class Result:
    """A case and its outcome."""

    case: Case
    outcome: TrainingOutcome

    @property
    def injected(self) -> int:
        """How often a fault altered gradients."""
        return len(self.outcome.named(catalogue.FAULT_INJECTED.name))


def chosen(names: Sequence[str], seeds: Sequence[int], quick: bool) -> Iterator[Case]:
    """All cases to run; a clean run comes before the runs that are compared with it."""
    for name in names:
        for seed in seeds:
            count = ITERATIONS[name]
            yield case(name, seed, count, ALL_STATE, QUICK_NOISE)
            if quick:
                yield from cases(name, seed, count, (QUICK_NOISE,), QUICK_METHODS, (QUICK_NOISE,))
                continue
            yield from cases(name, seed, count, tuple(VARIANCES), METHODS, AUDITED[:1])
            rest = cases(name, seed, count, tuple(BURSTS), IN_BURSTS, AUDITED[1:])
            yield from (case for case in rest if case.method != CLEAN)


def identical(results: Sequence[Result]) -> bool:
    """Whether each audited run ended like the clean one, and each run with the same faults but no audit did not."""
    clean = {(one.case.run.learner, one.case.run.seed): one.outcome.digests for one in results if not one.case.noise}
    audited = [one for one in results if one.case.method == AUDIT]
    unaudited = [one for one in results if one.case.method == UNAUDITED]
    same = [set(one.outcome.digests) == set(clean[one.case.run.learner, one.case.run.seed]) for one in audited]
    other = [set(one.outcome.digests) != set(clean[one.case.run.learner, one.case.run.seed]) for one in unaudited]
    injected = all(one.injected for one in audited + unaudited)
    return bool(audited) and bool(unaudited) and all(same) and all(other) and injected


def by_method(results: Sequence[Result], name: str) -> dict[tuple[str, str], list[TrainingOutcome]]:
    """Outcomes of a learner by noise and method, one per seed."""
    outcomes: dict[tuple[str, str], list[TrainingOutcome]] = {}
    for one in results:
        if one.case.run.learner == name:
            outcomes.setdefault((one.case.noise, one.case.method), []).append(one.outcome)
    return outcomes


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """The mean over seeds."""
    return [(points[0][0], statistics.fmean(value for _, value in points)) for points in zip(*curves, strict=True)]


def draw(results: Sequence[Result], name: str, folder: Path) -> None:
    """Draw the picture of a learner."""
    outcomes = by_method(results, name)
    scores = {key: mean_curve([one.scores for one in runs]) for key, runs in outcomes.items()}
    divergences = {key: mean_curve([one.ranks[0].divergences for one in runs]) for key, runs in outcomes.items()}
    draw_learner(name, scores, divergences, SCORES[name], folder / f"sdc_{name}.png")


def figures(results: Sequence[Result], names: Sequence[str], theory: Sequence[TheoryErrors]) -> Figures:
    """The figures of the last line. Prints the verdict on each rule."""
    values: Figures = {}
    verdicts = []
    for name in names:
        scores = {key: [one.score for one in runs] for key, runs in by_method(results, name).items()}
        clean = scores.pop(("", CLEAN))
        values[f"{name}_clean"] = statistics.fmean(clean)
        for (noise, method), by_seed in scores.items():
            if math.isfinite(mean := statistics.fmean(by_seed)):
                values[f"{name}_{noise}_{method}"] = mean
        averaged = {key: by_seed for key, by_seed in scores.items() if key[1] in METHODS}
        judged = sdc_checks.judge(SCALES[name].losses(clean, averaged))
        if all((QUICK_NOISE, method) in scores for method in (ALL_STATE, "sync_5")):
            apart = statistics.fmean(scores[QUICK_NOISE, ALL_STATE]) - statistics.fmean(scores[QUICK_NOISE, "sync_5"])
            values[f"{name}_state_gain"] = apart / SCALES[name].point
        values[f"order_holds_{name}"] = sdc_checks.order_holds(judged)
        say("\n  ".join([f"{name}:", *map(str, judged)]))
        verdicts += judged
    values["order_holds"] = sdc_checks.order_holds(verdicts)
    values["audit_identical"] = identical(results)
    if theory:
        values["sigma_error"] = max(one.sigma for one in theory)
        values["divergence_error"] = max(one.divergence for one in theory)
        values["divergence_after_sync"] = max(one.remaining for one in theory)
    return values


def train_all(todo: Sequence[Case], noises: Mapping[str, float]) -> tuple[list[Result], list[TheoryErrors]]:
    """Do all runs one after the other: of the theory with each of `noises`, then `todo`. Prints a line for each."""
    results, theory = [], []
    learners.prepare([*dict.fromkeys(case.run.learner for case in todo), *(["digits"] if noises else [])])
    PROGRESS.plan(len(noises) + len(todo))
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder:
        for noise, variance in noises.items():
            PROGRESS.step(f"theory at {noise}")
            run, sigma = sdc_checks.theory_run(noise, variance)
            outcome = train(run, RANKS, Path(folder) / f"theory{noise}", every=True)
            theory.append(sdc_checks.theory_errors(outcome, sigma))
            say(f"theory at {noise}: {theory[-1]}")
        for number, case in enumerate(todo):
            PROGRESS.step(str(case))
            began = time.monotonic()
            outcome = train(case.run, RANKS, Path(folder) / str(number))
            results.append(Result(case, outcome))
            replicas = "identical" if len(set(outcome.digests)) == 1 else "diverged"
            seconds = time.monotonic() - began
            say(f"{case!s:<32} {outcome.score:8.3f}   replicas {replicas:<10} {seconds:5.1f} s")
    return results, theory


def measure(options: argparse.Namespace) -> Figures:
    """All runs, and what they show."""
    names = options.learners or (NAMES[1:] if options.smoke else QUICK_LEARNERS if options.quick else NAMES)
    todo = [*chosen(names, options.seeds or ((1,) if options.quick else (1, 2, 3)), options.quick)]
    noises = STEADY | ({QUICK_NOISE: VARIANCES[QUICK_NOISE]} if options.quick else VARIANCES)
    if options.smoke:
        todo = [replace(one, run=replace(one.run, iterations=SMOKE)) for one in todo]
        noises = {}
    results, theory = train_all(todo, noises)
    if options.output is not None:
        for name in names:
            draw(results, name, options.output)
    return figures(results, names, theory)


if __name__ == "__main__":
    parser = arguments(__doc__, f"one seed of the digits, noise of {QUICK_NOISE} only")
    parser.add_argument("--learners", nargs="+", choices=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, help="(default 1 2 3)")
    run("sdc", measure, parser)
