"""Measure what local SGD does to the loss, with sound data and with one of four replicas fed garbage for a while.

    python benchmarks/local_sgd_quality.py [--quick] [--learners noisy_digits text] [--seeds 1 2 3] [--tau N]
                                           [--rate FACTOR] [--parts policies sweep elastic longer] [--output FOLDER]

4 gloo ranks train a classifier of scikit-learn's digits, to which noise is added, and a byte-level GPT on the sources
of Python's standard library, in a loop of plain torch under sessions (workloads/learners.py, quality_training.py):
plain data parallelism, Post Local SGD, DiLoCo, EDiT, and EDiT with a lower inner rate (`edit_low_rate`), on the same
data in the same order for as many iterations. Settings, and what garbage and the final loss are:
workloads/quality_runs.py. Ratios are of the final losses of two runs with the same seed, and medians over seeds; the
lines before the last one have those of each seed.

    LEARNER_POLICY_loss_x           loss under the policy / loss of plain data parallelism
    LEARNER_POLICY_garbage_x        loss with garbage / loss without, under the same policy
    LEARNER_POLICY_garbage_peak_x   the largest such ratio at any evaluation since the garbage began
    LEARNER_plain_loss              nats, per digit or byte
    LEARNER_seed_spread             of plain training: (largest - smallest) / median over seeds. Ratios within it
                                    say little
    LEARNER_garbage_left_out        share of the modules of the replica with garbage that EDiT left out while it had it
    LEARNER_sound_left_out          share of the modules of all replicas that EDiT left out in the runs without garbage

The other parts have one seed:

    sweep     LEARNER_POLICY_best_rate_N    of the inner rates tried, the one with the least loss, with N replicas, in
                                            multiples of the usual one; LEARNER_POLICY_best_rate_x: most over fewest
    elastic   LEARNER_growing_x, LEARNER_shrinking_x    loss of EDiT over that of plain, with 2, then 4, then 8
                                            replicas, and the other way round
    longer    LEARNER_longer_edit_low_rate_loss_x       as edit_low_rate_loss_x, of 4 times as many iterations

Claims: edit_loss_x <= 1.01; edit_garbage_x <= 1.02, and diloco_garbage_x above that; each on both learners (`holds`).

With --output results are added to FOLDER/quality.jsonl, and runs that it holds are not done again. Seeds and learners
may so be measured one after another.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from workloads import learners
from workloads.quality_runs import (
    DILOCO,
    EDIT,
    EDIT_LOW,
    FULL,
    PLAIN,
    POLICIES,
    RANKS,
    SMOKE,
    Outcomes,
    QualityOutcome,
    QualityRun,
    best_rates,
    by_policy,
    elastic,
    longer,
    ratios,
    runs,
    swept,
    worst,
)
from workloads.quality_training import from_line, to_line, train_quality
from workloads.running import PROGRESS, Figures, arguments, run, say

NAMES = tuple(FULL)
QUICK_LEARNERS, QUICK_RUNS = NAMES[:1], ((PLAIN, False), (EDIT, False), (EDIT_LOW, False), (EDIT, True))
PARTS = {"policies": runs, "sweep": swept, "elastic": elastic, "longer": longer}
QUICK_PARTS = ("policies", "elastic")
EDIT_MOST, GARBAGE_MOST = 1.01, 1.02  # of the claims


def measure_runs(todo: Sequence[QualityRun], saved: Path | None) -> Iterator[QualityOutcome]:
    """Do the runs that are not in the file `saved`, and add them to it. Prints a line for each."""
    done = {}
    if saved is not None and saved.exists():
        done = {repr(one.run): one for one in map(from_line, saved.read_text().splitlines())}
    learners.prepare(tuple(dict.fromkeys(run.learner for run in todo)))
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder:
        PROGRESS.plan(len(todo))
        for number, each in enumerate(todo):
            PROGRESS.step(str(each))
            began = time.monotonic()
            if (outcome := done.get(repr(each))) is None:
                outcome = train_quality(each, Path(folder) / str(number))
                if saved is not None:
                    with saved.open("a") as file:
                        file.write(to_line(outcome) + "\n")
            say(f"{each!s:<36} {outcome.loss:8.4f} {time.monotonic() - began:7.1f} s")
            yield outcome


def learner_figures(outcomes: Outcomes) -> Figures:
    """The figures of one learner, as far as its runs were done. Prints the ratios of each seed."""
    found: dict[str, list[float]] = {}
    for policy, garbage in outcomes:
        if garbage:
            found[f"{policy}_garbage_x"] = ratios(outcomes, (policy, True), (policy, False))
            found[f"{policy}_garbage_peak_x"] = worst(outcomes, policy)
        elif policy != PLAIN:
            found[f"{policy}_loss_x"] = ratios(outcomes, (policy, False), (PLAIN, False))
    for name, by_seed in found.items():
        say(f"  {name:<32} {'  '.join(f'{ratio:.4f}' for ratio in by_seed)}")
    plain = [one.loss for one in outcomes[PLAIN, False].values()]
    values: Figures = {name: statistics.median(by_seed) for name, by_seed in found.items()}
    struck, sound = outcomes[EDIT, True].values(), outcomes[EDIT, False].values()
    values |= {
        "plain_loss": statistics.median(plain),
        "seed_spread": (max(plain) - min(plain)) / statistics.median(plain),
        "garbage_left_out": statistics.fmean(one.left_out_of_garbage for one in struck),
        "sound_left_out": statistics.fmean(one.left_out(range(RANKS)) for one in sound),
        "edit_holds": values[f"{EDIT}_loss_x"] <= EDIT_MOST,
    }
    if (DILOCO, True) in outcomes:
        values["garbage_holds"] = values[f"{EDIT}_garbage_x"] <= GARBAGE_MOST < values[f"{DILOCO}_garbage_x"]
    return values


def part_figures(outcomes: Outcomes) -> Figures:
    """The figures of the other parts, as far as their runs were done."""
    values: Figures = {}
    for policy in (PLAIN, EDIT):
        if best := best_rates(outcomes, policy):
            values |= {f"{policy}_best_rate_{count}": rate for count, rate in best.items()}
            values[f"{policy}_best_rate_x"] = best[max(best)] / best[min(best)]
    compared = {way + "_x": (f"{EDIT} {way}", f"{PLAIN} {way}") for way in ("growing", "shrinking")}
    compared["longer_edit_low_rate_loss_x"] = f"{EDIT_LOW} longer", f"{PLAIN} longer"
    for name, (ours, plain) in compared.items():
        if (ours, False) in outcomes:
            values[name] = statistics.median(ratios(outcomes, (ours, False), (plain, False)))
    return values


def measure(chosen: argparse.Namespace) -> Figures:
    """All runs, and what they show."""
    parts = chosen.parts or (QUICK_PARTS if chosen.quick else tuple(PARTS))
    names = chosen.learners or (NAMES[1:] if chosen.smoke else QUICK_LEARNERS if chosen.quick else NAMES)
    todo = []
    seeds = chosen.seeds or ((1,) if chosen.quick else (1, 2, 3))
    for seed, name, part in product(seeds, names, parts):
        scale = SMOKE if chosen.smoke else FULL[name] if chosen.tau is None else replace(FULL[name], tau=chosen.tau)
        if part == "policies":
            each = runs(name, seed, scale)
            todo += [one for one in each if not chosen.quick or (one.policy, one.garbage is not None) in QUICK_RUNS]
        elif seed == seeds[0]:
            todo += PARTS[part](name, seed, scale)
    todo = [replace(one, rate=chosen.rate * one.rate) for one in todo]
    outcomes = [*measure_runs(todo, chosen.output and chosen.output / "quality.jsonl")]
    values: Figures = {}
    for name in names:
        say(f"{name}, by seed:")
        found = by_policy(outcomes, name)
        others = part_figures(found)
        found = {key: by_seed for key, by_seed in found.items() if key[0] in POLICIES}
        own = {**(learner_figures(found) if "policies" in parts else {}), **others}
        values |= {f"{name}_{figure}": value for figure, value in own.items()}
        if chosen.output is not None and found:
            from workloads.quality_pictures import draw_quality

            draw_quality(name, found, chosen.output / f"quality_{name}.png")
    return values | {"holds": all(bool(value) for name, value in values.items() if name.endswith("_holds"))}


if __name__ == "__main__":
    parser = arguments(
        __doc__, "one seed of the digits: plain, EDiT, and EDiT with garbage; replicas that grow and shrink"
    )
    parser.add_argument("--learners", nargs="+", choices=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, help="(default 1 2 3)")
    parser.add_argument("--tau", type=int, help="local iterations between synchronisations, a divisor of the default")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--rate", type=float, default=1.0, help="factor of every inner rate")
    run("local_sgd_quality", measure, parser)
