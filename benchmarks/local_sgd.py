"""Measure iteration times of local SGD, with stragglers and on slow links, in the settings of the EDiT paper.

    python benchmarks/local_sgd.py [--quick] [--scenarios NAME ...] [--output DIR]

8 replicas of one rank, each in a network namespace with a link throttled by `tc` (needs root); sessions, collectives,
gradients and updates are real. Compute is a sleep, so that 2 cores are enough; workloads/sleeping_replica.py lists what
is real. Ratios are those of the paper's testbed (table 6; an iteration of 4.75 s): on the normal link, which is
calibrated first, a plain iteration takes 1.052 times its compute (A-EDiT 237.45 TFLOPS, plain 225.75); a straggler lags
by 0.95 of a plain iteration; with 40 times the traffic a plain iteration takes 2.65 times as long (225.75, 85.18), to
which the slow link is calibrated.

    plain           gradients reduced in every iteration by DistributedDataParallel, overlapped with the backward
    post_local_sgd  training waits for the mean of the parameters
    diloco          and for an outer optimizer
    co2_like        diloco behind the whole next iteration, applied before its update: full overlap, of parameters that
                    are one iteration old, as in CO2, which allows a whole period for it. CO2's own stalls (clipping and
                    the outer step over all parameters at once) are here, too; gathers of sharded outer state, which
                    cost CO2* 300 ms in the paper, are not
    edit            module by module, each behind the forward of the one before
    a_edit          the same, synchronised by the clock; replicas at their own pace

    even         no straggler, normal link
    consistent   one replica lags in every iteration
    random       one replica, drawn for each iteration, lags
    traffic      no straggler, slow link

Each round has a block per policy, in random order; a gain is the throughput of all replicas over that of the round's
plain block. Medians over rounds, with 95% bootstrap intervals. Bounds follow from the setting
(workloads/local_bounds.py); `_of_bound` is a measured value over its bound. In scenarios other than `even` the second
round has only the policies that claims are about.

Claims: edit_stall_x <= 0.125 (stall at a synchronisation over that of post_local_sgd), a_edit_straggler_x >= 1.8,
edit_random_straggler_x >= 1.7, edit_traffic_x >= 2.7; gains within 5% of their bounds.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from figures import ProcessorUse, line
from ft_plugins.config import Config
from ft_plugins.errors import ConfigError, FtError
from ft_plugins.testing.emulated_nodes import EmulatedHost, network
from ft_plugins.testing.gang import gang
from workloads import sleeping_replica
from workloads.local_blocks import PLAIN, PolicyFigure, StepLog, gains, stalls
from workloads.local_bounds import LinkLoad, own_pace_gain, periodic_gain
from workloads.local_scenarios import (
    A_EDIT,
    EDIT,
    FULL,
    LAG_OF_PLAIN,
    MODEL,
    PLAIN_OF_COMPUTE,
    POLICIES,
    POST_LOCAL,
    QUICK,
    REPLICAS,
    TRAFFIC_OF_PLAIN,
    LocalScenario,
    configured,
    plain_block,
)  # fmt: skip
from workloads.sleeping_replica import FORWARD

WITHIN, TRIES = 0.01, 6  # of a calibration
CALIBRATION = 8  # iterations
STALL_MOST, STRAGGLER_LEAST, RANDOM_LEAST, TRAFFIC_LEAST, OF_BOUND = 0.125, 1.8, 1.7, 2.7, 0.95
MEGABIT = 1e6 / 8
BOUND = 400.0  # seconds for one round
Figures = dict[str, float | bool]


class ScenarioResult:
    """The rounds of one scenario: seconds of an iteration and stalls, by policy; the timeline of the first round."""

    def __init__(self, scenario: LocalScenario) -> None:
        self.scenario = scenario
        self.seconds: list[dict[str, float]] = []
        self.stalls: list[dict[str, float]] = []
        self.logs: dict[str, list[StepLog]] = {}  # by policy, of the first round

    def add(self, logs: Mapping[str, list[StepLog]]) -> None:
        """One more round: the logs of all replicas by policy."""
        tau = self.scenario.tau
        self.logs = self.logs or dict(logs)
        self.seconds.append({policy: self.scenario.seconds(policy, each) for policy, each in logs.items()})
        in_step = {policy: each for policy, each in logs.items() if policy not in (PLAIN, A_EDIT)}
        self.stalls.append({policy: statistics.median(stalls(each, tau)) for policy, each in in_step.items()})

    def gain(self, policy: str) -> PolicyFigure | None:
        """Throughput over that of plain; None if the policy was not measured."""
        values = gains(self.seconds, policy)
        return PolicyFigure.of(values) if values else None

    def middle(self, policy: str, rows: Sequence[Mapping[str, float]] | None = None) -> float:
        """The median over rounds of an iteration's seconds, or of `rows`."""
        return statistics.median(row[policy] for row in rows or self.seconds if policy in row)

    @property
    def policies(self) -> list[str]:
        return [policy for policy in POLICIES if any(policy in row for row in self.seconds)]


def known_policies() -> list[str]:
    """The policies that the installed package has; says which ones it lacks."""
    known = []
    for policy in POLICIES:
        try:
            Config.from_json({"sync": configured(policy, 5)} if policy != PLAIN else {})
            known.append(policy)
        except ConfigError as error:
            print(f"{policy}: left out, because this version of ft_plugins does not have it: {error}", flush=True)
    return known


def calibrate(
    name: str, hosts: Sequence[EmulatedHost], mbps: float, floor: float, target: float
) -> tuple[float, float]:
    """The rate in Mbit/s at which a plain iteration takes `target` seconds, and what it takes at that rate."""
    arguments = (plain_block(CALIBRATION), mbps, floor, target, WITHIN, TRIES, hosts)
    tried = gang(sleeping_replica.calibrate_link, REPLICAS, *arguments, hosts=hosts, seconds=BOUND)[0]
    for rate, seconds in tried:
        print(f"calibration, {name} link: {rate:7.1f} Mbit/s   plain {1000 * seconds:6.1f} ms", flush=True)
    return min(tried, key=lambda each: abs(each[1] / target - 1))


def measure(
    scenario: LocalScenario, policies: Sequence[str], hosts: Sequence[EmulatedHost], mbps: float, lag: float, seed: int
) -> ScenarioResult:
    """Run all rounds of one scenario."""
    result, order = ScenarioResult(scenario), random.Random(seed)
    for number in range(scenario.rounds):
        chosen = [policy for policy in policies if number == 0 or policy in scenario.repeated]
        blocks = scenario.blocks(order.sample(chosen, len(chosen)), lag, seed, records=number == 0)
        logs = gang(sleeping_replica.run_blocks, REPLICAS, blocks, mbps, hosts, hosts=hosts, seconds=BOUND)
        by_block = zip(*logs, strict=True)
        result.add({block.policy: list(each) for block, each in zip(blocks, by_block, strict=True)})
        times = "   ".join(f"{policy} {1000 * result.seconds[-1][policy]:.1f}" for policy in chosen)
        print(f"{scenario.name}, round {number + 1}: ms of an iteration: {times}", flush=True)
    return result


def claims(results: Mapping[str, ScenarioResult], plain: float, slow_plain: float, rates: Mapping[bool, float],
           lag: float, seed: int) -> Figures:  # fmt: skip
    """The figures that claims are about, with their bounds. `plain`, `slow_plain`: seconds of a plain iteration on the
    normal and on the slow link, without stragglers."""
    values: Figures = {}
    compute, sent = MODEL.compute, MODEL.sent(REPLICAS)
    loads = {slow: LinkLoad(MODEL.layers, sent / (mbps * MEGABIT), MODEL.forward) for slow, mbps in rates.items()}

    def add(name: str, value: PolicyFigure, bound: float, holds: bool) -> None:
        values[name], values[f"{name}_low"], values[f"{name}_high"] = value.value, value.low, value.high
        values[f"{name}_bound"], values[f"{name}_of_bound"] = bound, value.value / bound
        values[f"{name}_holds"] = holds
        print(f"{name}: {value}   bound {bound:.4g}   of bound {value.value / bound:.3f}   holds {holds}", flush=True)

    def add_gain(name: str, scenario: str, policy: str, least: float, bound: float) -> None:
        gain = results[scenario].gain(policy) if scenario in results else None
        if gain is not None:
            add(name, gain, bound, gain.value >= least and gain.value >= OF_BOUND * bound)

    if "even" in results:
        rows = results["even"].stalls
        ratio = PolicyFigure.of([row[EDIT] / row[POST_LOCAL] for row in rows])
        add("edit_stall_x", ratio, loads[False].stall_ratio, ratio.value <= STALL_MOST)
        values |= {f"{policy}_stall_ms": 1000 * results["even"].middle(policy, rows) for policy in rows[0]}
    if "consistent" in results:
        shares = [0.0] * (REPLICAS - 1) + [1.0]
        add_gain(
            "a_edit_straggler_x", "consistent", A_EDIT, STRAGGLER_LEAST, own_pace_gain(compute, plain, lag, shares)
        )
    if "random" in results:
        scenario = results["random"].scenario
        periods = scenario.lagging(seed)
        bound = periodic_gain(compute, plain, lag, periods, scenario.tau, loads[False].layered_stall)
        add_gain("edit_random_straggler_x", "random", EDIT, RANDOM_LEAST, bound)
        shares = [sum(counts) / (scenario.tau * len(periods)) for counts in zip(*periods, strict=True)]
        bound = own_pace_gain(compute, plain, lag, shares)
        add_gain("a_edit_random_straggler_x", "random", A_EDIT, 0.0, bound)
    if "traffic" in results:
        tau = results["traffic"].scenario.tau
        stall = loads[True].layered_stall
        bound = periodic_gain(compute, slow_plain, 0.0, [[0]], tau, stall)
        add_gain("edit_traffic_x", "traffic", EDIT, TRAFFIC_LEAST, bound)
        bound = own_pace_gain(compute, slow_plain, 0.0, [0.0], stall / (tau * compute + stall))
        add_gain("a_edit_traffic_x", "traffic", A_EDIT, 0.0, bound)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of short blocks, to see that it works")
    parser.add_argument("--scenarios", nargs="+", choices=[one.name for one in FULL], default=[o.name for o in FULL])
    parser.add_argument("--rounds", type=int, help="rounds of each scenario")
    parser.add_argument("--seed", type=int, default=1, help="of the order of blocks and of random stragglers")
    parser.add_argument("--output", type=Path, help="folder for pictures and local_sgd.json")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the network is removed
    scenarios = [one for one in (QUICK if args.quick else FULL) if one.name in args.scenarios]
    policies, use = known_policies(), ProcessorUse()
    try:
        with network(range(1, REPLICAS + 1)) as hosts:
            if not all(host.namespace for host in hosts):
                raise FtError("cannot throttle links without network namespaces; run as root or with CAP_NET_ADMIN")
            results, values = run(scenarios, policies, hosts, args.seed, args.rounds)
    except FtError as error:
        sys.exit(f"local_sgd: {error}")
    values |= use.figures()
    text = line("local_sgd", values)
    if args.output is not None:
        from workloads.local_pictures import draw_iterations, draw_timeline

        args.output.mkdir(parents=True, exist_ok=True)
        draw_iterations({name: one.seconds for name, one in results.items()}, args.output / "iterations.png")
        if "even" in results:
            draw_timeline(results["even"].logs, args.output / "synchronisation.png")
        (args.output / "local_sgd.json").write_text(text + "\n")
    print(text)


def run(
    scenarios: Sequence[LocalScenario], policies: Sequence[str], hosts: Sequence[EmulatedHost], seed: int,
    rounds: int | None,
) -> tuple[dict[str, ScenarioResult], Figures]:  # fmt: skip
    """Calibrate both links, and run all scenarios."""
    sent = MODEL.sent(REPLICAS)
    target = PLAIN_OF_COMPUTE * MODEL.compute
    rates, plains = {}, {}
    for slow, wanted in ((False, target), (True, TRAFFIC_OF_PLAIN * target)):
        if slow and not any(scenario.slow for scenario in scenarios):
            continue
        hidden = (
            MODEL.compute if not slow else MODEL.compute * (FORWARD + (1 - FORWARD) * MODEL.bucketed / MODEL.layers)
        )
        guess = sent / (0.2 * MODEL.compute if not slow else wanted - hidden) / MEGABIT
        rates[slow], plains[slow] = calibrate("slow" if slow else "normal", hosts, guess, hidden, wanted)
    lag = LAG_OF_PLAIN * plains[False]
    results = {}
    for scenario in scenarios:
        if rounds is not None:
            scenario = replace(scenario, rounds=rounds)
        results[scenario.name] = measure(scenario, policies, hosts, rates[scenario.slow], lag, seed)
    values: Figures = {"plain_seconds": plains[False], "normal_mbps": rates[False], "lag_seconds": lag}
    if True in rates:
        values |= {"slow_plain_seconds": plains[True], "slow_mbps": rates[True]}
    for name, result in results.items():
        values |= {f"{name}_{policy}_ms": 1000 * result.middle(policy) for policy in result.policies}
    return results, values | claims(results, plains[False], plains.get(True, 0.0), rates, lag, seed)


if __name__ == "__main__":
    sys.exit(main())
