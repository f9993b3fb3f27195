"""Measure iteration times of DreamDDP on slow links, next to overlapped data parallelism and local SGD.

    python benchmarks/dreamddp.py [--quick] [--columns NAME ...] [--parts emulated real search] [--rounds N]
                                  [--output FOLDER]

The part `emulated`: 8 replicas of one rank, each in a network namespace with a link throttled by `tc` (needs root), as
in `local_sgd.py`: sessions, collectives, gradients and updates are real, compute is a sleep, so that 2 cores are
enough. Models have the layers of ResNet-18, ResNet-50, GPT-2 and Llama-2 (workloads/layer_shapes.py), scaled down; a
link's rate gives the ratio of communication to compute of the DreamDDP paper, for 8 and for 32 workers (table 1: the
columns, named `resnet18_8`). H is 10.

    plain       torch's DistributedDataParallel: gradients reduced in buckets, overlapped with the backward
    asc_wfbp    the paper's overlapped baseline, ASC-WFBP: each layer's gradients for themselves, several at a time
    full        local SGD (post_local_sgd): training waits for the mean of all parameters every H iterations
    enp         equal numbers of layers are averaged in each iteration behind the backward (`schedule: equal`)
    dreamddp    the layers that the schedule chooses, planned from what this run measures

First each column measures its layers (`measured_profile`). Then each round has a block per policy, in random order, of
whole periods; a gain is the seconds of an iteration over those of the round's dreamddp block. Medians over rounds, with
95% bootstrap intervals. A bound is what the column allows at most (workloads/dreamddp_scenarios.py).

    COLUMN_over_overlapped_x    over plain, or over the paper's overlapped baseline, ASC-WFBP, where that takes less at
                                the same compute (as a share of which its time is taken from the paper)
    COLUMN_over_ddp_x           over plain as measured
    COLUMN_over_asc_x           over asc_wfbp as measured. Links here carry no more if several exchanges share them; in
                                the paper ASC-WFBP takes less time than S-SGD's communication alone
    COLUMN_over_full_x, COLUMN_over_enp_x
    COLUMN_period_error         measured period over the plan's, less 1
    COLUMN_plain_of_ideal       plain over what it takes on an ideal link with the same buckets: whether it overlaps
    COLUMN_exchange_of_link     measured communication over what the link needs for the bytes
    COLUMN_h5_planned_x, ...    a planned iteration with another H over that with 10, by the measured profile
    over_overlapped_x, ...      the smallest of all columns; period_error: the largest
    columns                     how many

The part `real`: a job of 4 ranks whose compute is real: a ResNet on scikit-learn's digits, on links on which an
exchange of all parameters takes 3 times the compute (workloads/real_replica.py). DreamDDP profiles by itself, H is 5.

    real_x                      seconds of an iteration with DistributedDataParallel over those with DreamDDP
    real_over_full_x            the same of local SGD with full synchronisation

The part `search`: periods planned for the shapes of all columns, at three bandwidths each, H 5, over the best of all
contiguous sets, which brute force finds (workloads/schedule_search.py). Nothing is measured but the planning.

    search_planned_x            this project's schedule, median; below 1 as its sets need not be contiguous
    search_paper_search_x, search_equal_x     the paper's search, and equal numbers of layers; `_worst_x`: the worst
    search_planned_200_seconds, search_paper_search_200_seconds      to plan 200 layers, the worst

Claims: over_overlapped_x >= 1.73, over_full_x >= 1.16, over_enp_x >= 1.02, each or within 3% of its bound, as ratios of
the paper allow less in some columns; period_error within 5%; real_x > 1. `stolen_share` and `others_share` are the
shares of the processors' time that this run did not have.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ft_plugins.sync.layers.layer_profile import NANO, LayerProfile, write_profile
from harness.emulated_nodes import EmulatedHost, network
from workloads import real_replica, sleeping_replica
from workloads.dreamddp_scenarios import (
    ASC,
    COMPARED,
    DREAMDDP,
    ENP,
    FULL,
    FULL_RUN,
    REPLICAS,
    ColumnScenario,
    PlannedColumn,
    holds,
    measured_profile,
    planned_seconds,
)
from workloads.layer_shapes import COLUMNS
from workloads.local_blocks import PLAIN, StepLog
from workloads.running import PROGRESS, Figures, arguments, run, say
from workloads.schedule_search import schedule_figures
from workloads.sync_blocks import PolicyFigure

OVERLAPPED_LEAST, FULL_LEAST, ENP_LEAST, PERIOD_MOST = 1.73, 1.16, 1.02, 0.05
OTHER_PERIODS = (5, 15)  # H that are planned, next to the paper's
BOUND = 500.0  # seconds for one round
PARTS = ("emulated", "real", "search")
QUICK_PARTS = ("emulated", "search")
NAMES = tuple(column.name for column in COLUMNS)
QUICK_COLUMNS = ("resnet18_8",)


class ColumnResult:
    """The rounds of one column: seconds of an iteration by policy; the timeline of the first round."""

    def __init__(self, scenario: ColumnScenario, profile: LayerProfile) -> None:
        self.scenario, self.profile = scenario, profile
        self.plan = PlannedColumn.of(scenario, profile)
        self.seconds: list[dict[str, float]] = []
        self.logs: dict[str, list[StepLog]] = {}

    def add(self, logs: Mapping[str, list[StepLog]]) -> None:
        """One more round: the logs of all replicas by policy."""
        self.logs = self.logs or dict(logs)
        self.seconds.append({policy: self.scenario.seconds(policy, each) for policy, each in logs.items()})

    def middle(self, policy: str) -> float:
        """The median over rounds of an iteration's seconds."""
        return statistics.median(row[policy] for row in self.seconds)

    @property
    def paper_overlapped(self) -> float:
        """Seconds that the paper's overlapped baseline takes at this compute."""
        return self.scenario.column.overlapped_of_compute * self.scenario.compute

    def figures(self) -> Figures:
        """The column's figures, without its name. Prints the gains."""
        plan, scenario = self.plan, self.scenario
        link = scenario.column.ratio * scenario.compute
        values: Figures = {f"{policy}_ms": 1000 * self.middle(policy) for policy in COMPARED}
        values |= {f"{policy}_planned_ms": 1000 * seconds for policy, seconds in plan.seconds.items()}
        values |= {
            "compute_ms": 1000 * plan.compute,
            "ratio": scenario.column.ratio,
            "measured_ratio": plan.communication / plan.compute,
            "mbps": scenario.mbps,
            "least_ms": 1000 * plan.least,
            "ideal_over_full_x": plan.ideal_over_full,
            "exchange_of_link": plan.communication / link,
            "plain_of_ideal": self.middle(PLAIN) / plan.seconds[PLAIN],
        }
        values |= {f"h{h}_planned_x": planned_seconds(self.profile, h) / plan.seconds[DREAMDDP] for h in OTHER_PERIODS}
        plain = [min(row[PLAIN], self.paper_overlapped) for row in self.seconds]
        for name, baselines, policy, wanted in (
            ("over_overlapped_x", plain, PLAIN, OVERLAPPED_LEAST),
            ("over_ddp_x", [row[PLAIN] for row in self.seconds], PLAIN, 0.0),
            ("over_asc_x", [row[ASC] for row in self.seconds], ASC, 0.0),
            ("over_full_x", [row[FULL] for row in self.seconds], FULL, FULL_LEAST),
            ("over_enp_x", [row[ENP] for row in self.seconds], ENP, ENP_LEAST),
        ):
            ours = (row[DREAMDDP] for row in self.seconds)
            figure = PolicyFigure.of([one / other for one, other in zip(baselines, ours, strict=True)])
            bound = plan.bound(policy, statistics.median(baselines))
            values |= {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}
            values[f"{name}_bound"] = bound
            if wanted:
                values[f"{name}_holds"] = holds(figure.value, wanted, bound)
            say(f"{scenario.name}: {name} {figure}   bound {bound:.4g}")
        error = self.middle(DREAMDDP) / plan.seconds[DREAMDDP] - 1
        say(f"{scenario.name}: period {100 * error:+.1f}% of the plan's")
        return values | {"period_error": error, "period_error_holds": abs(error) <= PERIOD_MOST}


def measure_column(scenario: ColumnScenario, hosts: Sequence[EmulatedHost], seed: int, folder: Path) -> ColumnResult:
    """Measure the layers of one column, then run all its rounds."""
    order, path = random.Random(f"{seed} {scenario.name}"), folder / f"{scenario.name}.json"

    PROGRESS.step(f"{scenario.name}, its layers")
    arguments = (scenario.mbps, hosts, BOUND, scenario.burst)
    logs = sleeping_replica.run_round([scenario.profiled()], *arguments)[FULL]
    result = ColumnResult(scenario, measured_profile(scenario.model, logs))
    write_profile(result.profile, path)
    plan, link = result.plan, scenario.column.ratio * scenario.compute
    say(
        f"{scenario.name}: {scenario.mbps:.1f} Mbit/s, {plan.communication:.3f} s of communication (link alone "
        f"{link:.3f}), {plan.compute:.3f} s of compute (wanted {scenario.compute:.3f}); planned ms of an iteration: "
        + "   ".join(f"{policy} {1000 * seconds:.0f}" for policy, seconds in plan.seconds.items())
    )
    for number in range(scenario.rounds):
        PROGRESS.step(f"{scenario.name}, round {number + 1}", 2)
        blocks = [scenario.block(policy, path, number == 0) for policy in order.sample(COMPARED, len(COMPARED))]
        result.add(sleeping_replica.run_round(blocks, *arguments))
        times = "   ".join(f"{policy} {1000 * result.seconds[-1][policy]:.1f}" for policy in COMPARED)
        say(f"{scenario.name}, round {number + 1}: ms of an iteration: {times}")
    return result


def over_columns(by_column: Mapping[str, Figures]) -> Figures:
    """The figures of all columns together, and whether each claim holds in all of them."""
    values: Figures = {}
    over = (f"over_{what}_x" for what in ("overlapped", "ddp", "asc", "full", "enp"))
    for name in (*over, "plain_of_ideal", *(f"h{h}_planned_x" for h in OTHER_PERIODS)):
        found = [float(figures[name]) for figures in by_column.values()]
        values |= {name: min(found), f"{name}_middle": statistics.median(found), f"{name}_most": max(found)}
    values["period_error"] = max((float(figures["period_error"]) for figures in by_column.values()), key=abs)
    for name in ("over_overlapped_x", "over_full_x", "over_enp_x", "period_error"):
        values[f"{name}_holds"] = all(bool(figures[f"{name}_holds"]) for figures in by_column.values())
    return values | {"columns": len(by_column)}


def run_emulated(
    scenarios: Sequence[ColumnScenario], hosts: Sequence[EmulatedHost], seed: int, folder: Path
) -> tuple[list[ColumnResult], Figures]:
    """All columns."""
    PROGRESS.plan(sum(1 + 2 * one.rounds for one in scenarios))
    results = [measure_column(scenario, hosts, seed, folder) for scenario in scenarios]
    by_column = {result.scenario.name: result.figures() for result in results}
    values = {f"{column}_{name}": value for column, own in by_column.items() for name, value in own.items()}
    return results, values | over_columns(by_column)


def run_real(scale: real_replica.RealScale, hosts: Sequence[EmulatedHost], seed: int) -> Figures:
    """The job without emulated compute."""
    chosen = real_replica.COMPARED
    order, rows = random.Random(f"{seed} real"), []
    PROGRESS.plan(1 + scale.rounds)
    PROGRESS.step("real, its compute")
    setting = real_replica.calibrate(scale, hosts)
    say(
        f"real: {1000 * setting.compute:.1f} ms of compute, {setting.parameters} parameters, links of "
        f"{setting.mbps:.1f} Mbit/s"
    )
    for number in range(scale.rounds):
        PROGRESS.step(f"real, round {number + 1}")
        rows.append(real_replica.measure(scale, setting, order.sample(chosen, len(chosen)), hosts))
        times = "   ".join(f"{policy} {1000 * rows[-1][policy]:.1f}" for policy in chosen)
        say(f"real, round {number + 1}: ms of an iteration: {times}")
    values: Figures = {"real_compute_ms": 1000 * setting.compute, "real_mbps": setting.mbps, "real_rounds": len(rows)}
    values |= {f"real_{policy}_ms": 1000 * statistics.median(row[policy] for row in rows) for policy in chosen}
    for name, policy in (("real_x", PLAIN), ("real_over_full_x", FULL)):
        figure = PolicyFigure.of([row[policy] / row[DREAMDDP] for row in rows])
        values |= {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}
        say(f"{name}: {figure}")
    return values | {"real_x_holds": values["real_x_low"] > 1.0}


def measure(chosen: argparse.Namespace) -> Figures:
    """All parts that are chosen."""
    columns = chosen.columns or (QUICK_COLUMNS if chosen.quick else NAMES)
    parts = chosen.parts or (QUICK_PARTS if chosen.quick else PARTS)
    scenarios = [one for one in FULL_RUN if one.name in columns]
    if chosen.smoke:
        scenarios = [replace(one, compute=0.2, parameters=1 << 18, iterations=2) for one in scenarios]
    scale = real_replica.FULL_SCALE
    rounds = chosen.rounds or (1 if chosen.quick else None)
    if rounds is not None:
        scenarios, scale = [replace(one, rounds=rounds) for one in scenarios], replace(scale, rounds=rounds)
    results: list[ColumnResult] = []
    values: Figures = {}
    sleeping_replica.preload()
    if "real" in parts:
        real_replica.prepare()
    with network(range(1, REPLICAS + 1)) as hosts, tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder:
        if "emulated" in parts:
            results, values = run_emulated(scenarios, hosts, chosen.seed, chosen.output or Path(folder))
        if "real" in parts:
            values |= run_real(scale, hosts, chosen.seed)
    if "search" in parts:
        PROGRESS.step("schedules by brute force")
        values |= schedule_figures(COLUMNS[:1] if chosen.smoke else COLUMNS)
    if chosen.output is not None and results:
        from workloads.dreamddp_pictures import draw_columns, draw_period

        measured = {one.scenario.name: (one.seconds, one.plan, one.paper_overlapped) for one in results}
        draw_columns(measured, chosen.output / "columns.png")
        for one in results:
            draw_period(one.logs, one.profile.compute_ns / NANO, chosen.output / f"period_{one.scenario.name}.png")
    return values


if __name__ == "__main__":
    parser = arguments(__doc__, "one round of one column, no real job")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--columns", nargs="+", choices=NAMES)
    parser.add_argument("--rounds", type=int, help="rounds of each column, and of the real job")
    parser.add_argument("--seed", type=int, default=1, help="of the order of blocks")
    run("dreamddp", measure, parser)
