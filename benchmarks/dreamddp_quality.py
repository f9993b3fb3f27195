"""Measure what DreamDDP does to the loss, next to local SGD with full synchronisation at the same interval.

    python benchmarks/dreamddp_quality.py [--quick] [--learners deep_noisy_digits deep_text] [--seeds 1 2 3]
                                          [--periods 2 3] [--gain X] [--output FOLDER]

4 gloo ranks train a classifier of scikit-learn's digits, to which noise is added, and a byte-level GPT on the sources
of Python's standard library, as in `local_sgd_quality.py`, on the same data in the same order for as many iterations:
with plain data parallelism, with post_local_sgd every 5 iterations (`full`), and with DreamDDP, which averages each
module at least once in 5. Settings: workloads/dreamddp_quality_runs.py. Ratios are of two runs with the same seed, and
medians over seeds; the lines before the last one have those of each seed.

    LEARNER_loss_x          final loss of dreamddp / of full
    LEARNER_plain_loss_x    final loss of dreamddp / of plain
    LEARNER_iterations_x    iterations in which dreamddp reaches the final loss of full, plus 1%, / those of full
    LEARNER_time_x          the same in time, with --gain: how many times as fast iterations of dreamddp are; default:
                            `over_full_x` of dreamddp.py, least of its columns, where FOLDER is next to its folder
    LEARNER_divergence_x    mean over replicas of the squared distance from their mean after an update, of dreamddp / of
                            full, means over the iterations after the warm-up
    LEARNER_peak_divergence_x  the same, in the iteration of a period in which it is largest (the paper, Fig. 5b)
    LEARNER_h2_loss_x, ...  final loss of dreamddp with another H / with 5

Claim: loss_x <= 1.01 on both learners (`holds`).

With --output results are added to FOLDER/quality.jsonl, and runs that it holds are not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from local_sgd_quality import measure_runs
from workloads.dreamddp_quality_runs import (
    COMPARED,
    DREAMDDP,
    FULL_SYNC,
    LONG,
    PERIODS,
    SMOKE,
    WITHIN,
    OutcomesBySeed,
    by_seed,
    compared_run,
    divergence_ratios,
    loss_ratios,
    mean_divergence,
    peak_divergence,
    quality_ratios,
)
from workloads.quality_runs import PLAIN
from workloads.running import Figures, arguments, run, say

NAMES = tuple(LONG)


def learner_figures(outcomes: OutcomesBySeed, gain: float | None) -> Figures:
    """The figures of one learner. Prints the ratios of each seed."""
    found = {
        "loss_x": loss_ratios(outcomes, DREAMDDP, FULL_SYNC),
        "plain_loss_x": loss_ratios(outcomes, DREAMDDP, PLAIN),
        "full_plain_loss_x": loss_ratios(outcomes, FULL_SYNC, PLAIN),
        "iterations_x": quality_ratios(outcomes),
    }
    for name, of in (("divergence_x", mean_divergence), ("peak_divergence_x", peak_divergence)):
        if ratios := divergence_ratios(outcomes, of):
            found[name] = ratios
    found |= {
        f"h{h}_loss_x": loss_ratios(outcomes, policy, DREAMDDP) for policy, h in PERIODS.items() if policy in outcomes
    }
    if gain is not None:
        found["time_x"] = [ratio / gain for ratio in found["iterations_x"]]
    for name, ratios in found.items():
        say(f"  {name:<20} {'  '.join(f'{ratio:.4f}' for ratio in ratios)}")
    values: Figures = {name: statistics.median(ratios) for name, ratios in found.items()}
    for policy in COMPARED:
        values[f"{policy}_loss"] = statistics.median(one.loss for one in outcomes[policy].values())
    return values | {"holds": values["loss_x"] <= 1 + WITHIN}


def measured_gain(output: Path | None) -> float | None:
    """What `dreamddp.py` measured, if its folder is next to `output`."""
    line = output.parent / "dreamddp" / "dreamddp.json" if output else None
    return json.loads(line.read_text())["figures"].get("over_full_x") if line and line.exists() else None


def measure(chosen: argparse.Namespace) -> Figures:
    """All runs, and what they show."""
    names = chosen.learners or (NAMES[1:] if chosen.smoke else NAMES[:1] if chosen.quick else NAMES)
    seeds = chosen.seeds or ((1,) if chosen.quick else (1, 2, 3))
    wanted = chosen.periods if chosen.periods is not None else [] if chosen.quick else [*PERIODS.values()]
    policies = (*COMPARED, *(policy for policy, h in PERIODS.items() if h in wanted))
    gain = chosen.gain or measured_gain(chosen.output)
    todo = [
        compared_run(name, seed, policy, SMOKE if chosen.smoke else LONG[name])
        for seed in seeds for name in names for policy in policies
    ]  # fmt: skip
    outcomes = [*measure_runs(todo, chosen.output and chosen.output / "quality.jsonl")]
    values: Figures = {}
    for name in names:
        say(f"{name}, by seed:")
        found = by_seed(outcomes, name)
        values |= {f"{name}_{figure}": value for figure, value in learner_figures(found, gain).items()}
        if chosen.output is not None:
            from workloads.dreamddp_pictures import draw_losses

            draw_losses(name, found, chosen.output / f"quality_{name}.png")
    return values | {"holds": all(bool(values[f"{name}_holds"]) for name in names)}


if __name__ == "__main__":
    parser = arguments(__doc__, "one seed of the digits")
    parser.add_argument("--learners", nargs="+", choices=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, help="(default 1 2 3)")
    parser.add_argument("--periods", nargs="*", type=int, choices=PERIODS.values(), help="H of further runs")
    parser.add_argument("--gain", type=float, help="seconds of an iteration of full over those of dreamddp")
    run("dreamddp_quality", measure, parser)
