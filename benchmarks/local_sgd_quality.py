"""Measure what local SGD does to the loss, with sound data and with one of four replicas fed garbage for a while.

    python benchmarks/local_sgd_quality.py [--quick] [--learners noisy_digits text] [--seeds 1 2 3] [--tau N]
                                           [--rate FACTOR] [--output FOLDER]

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

Claims: edit_loss_x <= 1.01; edit_garbage_x <= 1.02, and diloco_garbage_x above that; each on both learners (`holds`).

With --output results are added to FOLDER/quality.jsonl, and runs that it holds are not done again. Seeds and learners
may so be measured one after another.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from figures import line
from ft_plugins.errors import FtError
from ft_plugins.rehearse.stopping import raising_signals
from workloads import learners
from workloads.quality_runs import (
    DILOCO,
    EDIT,
    FULL,
    PLAIN,
    POLICIES,
    QUICK,
    RANKS,
    STRUCK,
    Outcomes,
    QualityOutcome,
    QualityRun,
    QualityScale,
    by_policy,
    ratios,
    runs,
    worst,
)
from workloads.quality_training import from_line, to_line, train_quality

NAMES = tuple(FULL)
EDIT_MOST, GARBAGE_MOST = 1.01, 1.02  # of the claims


def measure(
    scales: Mapping[str, QualityScale], seeds: Sequence[int], saved: Path | None, rate: float = 1.0
) -> Iterator[QualityOutcome]:
    """Do the runs of all learners and seeds, as `measure_runs`. `rate`: of inner rates."""
    todo = [one for seed in seeds for name, scale in scales.items() for one in runs(name, seed, scale)]
    return measure_runs([replace(one, rate=rate * one.rate) for one in todo], saved)


def measure_runs(todo: Sequence[QualityRun], saved: Path | None) -> Iterator[QualityOutcome]:
    """Do the runs that are not in `saved`, and add them to it. Prints a line for each."""
    done = {}
    if saved is not None and saved.exists():
        done = {repr(one.run): one for one in map(from_line, saved.read_text().splitlines())}
    learners.prepare(tuple(dict.fromkeys(run.learner for run in todo)))
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder:
        for number, run in enumerate(todo):
            began = time.monotonic()
            if (outcome := done.get(repr(run))) is None:
                outcome = train_quality(run, Path(folder) / str(number))
                if saved is not None:
                    with saved.open("a") as file:
                        file.write(to_line(outcome) + "\n")
            print(f"{run!s:<36} {outcome.loss:8.4f} {time.monotonic() - began:7.1f} s", flush=True)
            yield outcome


def learner_figures(outcomes: Outcomes) -> dict[str, float | bool]:
    """The figures of one learner. Prints the ratios of each seed."""
    found: dict[str, list[float]] = {}
    for policy in [one for one in POLICIES if one != PLAIN]:
        found[f"{policy}_loss_x"] = ratios(outcomes, (policy, False), (PLAIN, False))
    for policy in STRUCK:
        found[f"{policy}_garbage_x"] = ratios(outcomes, (policy, True), (policy, False))
        found[f"{policy}_garbage_peak_x"] = worst(outcomes, policy)
    for name, by_seed in found.items():
        print(f"  {name:<32} {'  '.join(f'{ratio:.4f}' for ratio in by_seed)}", flush=True)
    plain = [one.loss for one in outcomes[PLAIN, False].values()]
    values: dict[str, float | bool] = {name: statistics.median(by_seed) for name, by_seed in found.items()}
    struck, sound = outcomes[EDIT, True].values(), outcomes[EDIT, False].values()
    return values | {
        "plain_loss": statistics.median(plain),
        "seed_spread": (max(plain) - min(plain)) / statistics.median(plain),
        "garbage_left_out": statistics.fmean(one.left_out_of_garbage for one in struck),
        "sound_left_out": statistics.fmean(one.left_out(range(RANKS)) for one in sound),
        "edit_holds": values[f"{EDIT}_loss_x"] <= EDIT_MOST,
        "garbage_holds": values[f"{EDIT}_garbage_x"] <= GARBAGE_MOST < values[f"{DILOCO}_garbage_x"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, and runs too short for the claims")
    parser.add_argument("--learners", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="(default 1 2 3)")
    parser.add_argument("--tau", type=int, help="local iterations between synchronisations, a divisor of the default")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of every inner rate")
    parser.add_argument("--output", type=Path, help="folder for results and pictures")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
    seeds = args.seeds or ((1,) if args.quick else (1, 2, 3))
    scales = {name: QUICK if args.quick else FULL[name] for name in args.learners}
    if args.tau is not None:
        scales = {name: replace(scale, tau=args.tau) for name, scale in scales.items()}
    try:
        outcomes = [*measure(scales, seeds, args.output and args.output / "quality.jsonl", args.rate)]
    except FtError as error:
        sys.exit(f"local_sgd_quality: {error}")
    values: dict[str, float | bool] = {}
    for name in args.learners:
        print(f"{name}, by seed:", flush=True)
        chosen = by_policy(outcomes, name)
        values |= {f"{name}_{figure}": value for figure, value in learner_figures(chosen).items()}
        if args.output is not None:
            from workloads.quality_pictures import draw_quality

            draw_quality(name, chosen, args.output / f"quality_{name}.png")
    values["holds"] = all(bool(value) for name, value in values.items() if name.endswith("_holds"))
    print(line("local_sgd_quality", values))


if __name__ == "__main__":
    with raising_signals():
        sys.exit(main())
