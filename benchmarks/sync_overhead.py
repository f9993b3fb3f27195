"""Measure what PAFT costs per iteration, with links throttled so that PAFT-Sync costs as much as in the paper.

    python benchmarks/sync_overhead.py [--quick] [--rounds N] [--calibrations N] [--workers 8 16 32]
                                       [--output FOLDER]

4 ranks, each in a network namespace with a link throttled by `tc` (needs root); gradients, averages and digests really
pass it. Compute is a sleep, so that 2 cores are enough; workloads/sync_cost.py lists what is real. Gradients are
reduced in every iteration over the same link, with as many bytes as an averaging. So an averaging costs at most 1/H of
an iteration, and H is 2. First the link is throttled until PAFT-Sync costs 23% of a plain iteration (the paper at 32
workers: 0.333 s plain, 0.411 s PAFT-Sync, 0.373 s PAFT). Then, in the same run, rounds of blocks of 20 iterations
follow, one block per mode in random order. Cost = seconds / seconds of the round's plain block - 1; median over rounds,
with its 95% bootstrap interval.

    paft_sync       averaged every 2 iterations, training waits
    paft_dyn        averaged every 2 iterations, behind the next forward and backward
    paft_adaptive   interval chosen from the noise, which is a 20th of the gradients' length
    audit_10        digests of parameters and momentum compared after every 10 iterations
    audit_1         after every iteration

With more workers (`_8`, `_16`, `_32`; the paper's table 3): one round of plain, paft_sync and paft_dyn each. As all
share the processors, compute is longer and the link slower in proportion; the shares of an iteration stay.

    paft_sync_8, paft_dyn_8, paft_dyn_of_sync_8, ...

Claims: paft_sync 0.23 +- 0.03 (`calibrated`), paft_dyn_of_sync <= 0.5, audit_10 <= 0.005.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace

from harness.emulated_nodes import network
from harness.gang import gang
from workloads import sync_blocks, sync_cost
from workloads.running import PROGRESS, Figures, arguments, run, say
from workloads.sync_blocks import PLAIN, PolicyFigure
from workloads.sync_cost import ADAPTIVE, SyncMeasurement, SyncPlan

RANKS = 4
H = 2
TARGET, WITHIN = 0.23, 0.03  # of the claim
CALIBRATE_WITHIN = 0.012
CALIBRATIONS, QUICK_CALIBRATIONS = 6, 3
ROUNDS, QUICK_ROUNDS = 16, 2
BLOCK, SMOKE_BLOCK = 20, 2  # iterations
COMPUTE_SECONDS = 0.15  # six times the processor time of an averaging on two cores
LAYERS, WIDTH = 4, 32768
MBPS = 250.0  # initial rate
NOISE = 20.0
AUDIT_MOST = 0.005
WORKERS, QUICK_WORKERS = (8, 16, 32), (8,)
SCALED = ("paft_sync", "paft_dyn")
BOUND, ROUND_BOUND = 300.0, 120.0  # seconds; a round takes half a minute on two idle cores
MODES = {
    "paft_sync": {"mode": "sync", "h": H},
    "paft_dyn": {"mode": "dyn", "h": H, "h_min": H, "h_max": H},
    ADAPTIVE: {"mode": "dyn"},
    "audit_10": {"mode": "audit", "audit_interval": 10},
    "audit_1": {"mode": "audit", "audit_interval": 1},
}


def planned(rounds: int, calibrations: int, seed: int) -> SyncPlan:
    """The plan of the measurement."""
    blocks = sync_blocks.shuffled((PLAIN, *MODES), rounds, seed)
    return SyncPlan(
        MODES, blocks, BLOCK, COMPUTE_SECONDS, LAYERS, WIDTH, H, TARGET, CALIBRATE_WITHIN, MBPS, calibrations, NOISE
    )


def scaled(plan: SyncPlan, mbps: float, ranks: int, iterations: int = BLOCK) -> SyncPlan:
    """One round of more ranks, on links of which that of RANKS had `mbps`."""
    modes, larger = {name: MODES[name] for name in SCALED}, ranks / RANKS
    return replace(
        plan, modes=modes, blocks=sync_blocks.shuffled((PLAIN, *modes), 1, ranks), iterations=iterations,
        compute_seconds=larger * plan.compute_seconds, mbps=mbps / larger, calibrations=0,
    )  # fmt: skip


def run_plan(plan: SyncPlan, seconds: float, world: int = RANKS) -> SyncMeasurement:
    """Run the plan on `world` ranks. Times are means over ranks, which meet in every iteration; the rest rank 0's."""
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder, network(range(1, world + 1)) as hosts:
        ranks = gang(sync_cost.measure, world, plan, hosts, folder, hosts=hosts, seconds=seconds)
    means = tuple(
        {name: statistics.mean(each[name] for each in rows) for name in rows[0]}
        for rows in zip(*(one.seconds for one in ranks), strict=True)
    )
    return SyncMeasurement(means, ranks[0].calibration, ranks[0].mbps, ranks[0].intervals)


def figures(plan: SyncPlan, measured: SyncMeasurement, costs: dict[str, PolicyFigure]) -> Figures:
    """The figures of the last line."""
    sync, dyn = costs["paft_sync"], costs["paft_dyn"]
    values: Figures = {name: cost.value for name, cost in costs.items()}
    for name, cost in costs.items():
        values |= {f"{name}_low": cost.low, f"{name}_high": cost.high}
    calibrated = abs(sync.value - TARGET) <= WITHIN
    return values | {
        "paft_dyn_of_sync": dyn.value / sync.value,
        "calibrated": calibrated,
        "holds": calibrated and dyn.value <= sync.value / 2 and costs["audit_10"].value <= AUDIT_MOST,
        "adaptive_interval": statistics.median(measured.intervals) if measured.intervals else 0.0,
        "h": H,
        "ranks": RANKS,
        "link_mbps": measured.mbps,
        "bytes_averaged": plan.parameters * 4,
        "plain_seconds": statistics.median(each[PLAIN] for each in measured.seconds),
        "rounds": len(measured.seconds),
    }


def measure(chosen: argparse.Namespace) -> Figures:
    """Run the plan. Prints the calibration and each cost."""
    rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else ROUNDS)
    calibrations = chosen.calibrations or (QUICK_CALIBRATIONS if chosen.quick else CALIBRATIONS)
    if chosen.smoke:
        rounds = calibrations = 1
    plan = planned(rounds, calibrations, chosen.seed)
    PROGRESS.step(f"at most {calibrations} rates, then {rounds} rounds of {len(MODES) + 1} blocks")
    measured = run_plan(plan, BOUND + ROUND_BOUND * len(plan.blocks))
    for mbps, plain, share in measured.calibration:
        say(f"calibration: {mbps:7.1f} Mbit/s   plain {1000 * plain:6.1f} ms   PAFT-Sync {share:+.1%}")
    costs = sync_blocks.costs(measured.seconds)
    for name, cost in costs.items():
        say(f"{name:<14} {cost.value:8.2%} ({cost.low:.2%} to {cost.high:.2%})")
    if chosen.output is not None:
        from workloads.pictures import draw_costs

        draw_costs(costs, chosen.output / "costs.png")
    values = figures(plan, measured, costs)
    for ranks in chosen.workers if chosen.workers is not None else QUICK_WORKERS if chosen.quick else WORKERS:
        PROGRESS.step(f"{ranks} workers")
        larger = scaled(plan, measured.mbps, ranks, SMOKE_BLOCK if chosen.smoke else BLOCK)
        one = sync_blocks.costs(run_plan(larger, BOUND + ROUND_BOUND * ranks / RANKS, ranks).seconds)
        values |= {f"{name}_{ranks}": cost.value for name, cost in one.items()}
        values[f"paft_dyn_of_sync_{ranks}"] = one["paft_dyn"].value / one["paft_sync"].value
        say(f"{ranks} workers: {'   '.join(f'{name} {cost.value:.2%}' for name, cost in one.items())}")
    return values


if __name__ == "__main__":
    parser = arguments(__doc__, f"{QUICK_ROUNDS} rounds and {QUICK_CALIBRATIONS} rates")
    parser.add_argument("--rounds", type=int, help=f"rounds of one block per mode (default {ROUNDS})")
    parser.add_argument("--calibrations", type=int, help=f"rates tried at most (default {CALIBRATIONS})")
    parser.add_argument("--workers", nargs="*", type=int, help="numbers of further ranks (default 8 16 32; quick: 8)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of blocks")
    run("sync_overhead", measure, parser)
