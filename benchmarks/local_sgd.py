"""Measure iteration times of local SGD, with stragglers and on slow links, in the settings of the EDiT paper.

    python benchmarks/local_sgd.py [--quick] [--scenarios NAME ...] [--output FOLDER]

8 replicas of one rank, each in a network namespace with a link throttled by `tc` (needs root); sessions, collectives,
gradients and updates are real. Compute is a sleep, so that 2 cores are enough; workloads/sleeping_replica.py lists what
is real. Ratios are those of the paper's testbed (table 6; an iteration of 4.75 s). On the normal link an exchange of
all parameters takes 0.2 of an iteration's compute; of a reduction one of four buckets is exposed, so that a plain
iteration takes about 1.052 times its compute, as in the paper (A-EDiT 237.45 TFLOPS, plain 225.75). A straggler lags by
0.95 of a plain iteration. The slow link is calibrated: with 40 times the traffic a plain iteration takes 2.65 times as
long (225.75, 85.18).

    plain           gradients reduced in every iteration by DistributedDataParallel, overlapped with the backward
    post_local_sgd  training waits for the mean of the parameters
    diloco          and for an outer optimizer
    co2_like        diloco behind the whole next iteration, applied before its update: full overlap, of parameters that
                    are one iteration old, as in CO2, which allows a whole period for it. CO2's outer step over all
                    parameters at once is here, too; gathers of sharded outer state, which cost CO2* 300 ms in the
                    paper, are not
    edit            module by module, each behind the forward of the one before
    a_edit          the same, synchronised by the clock; replicas at their own pace

    even         no straggler, normal link, tau 4, all policies. Iterations are longer than elsewhere, so that
                 the processor time of 8 ranks weighs less in a stall
    consistent   one replica lags in every iteration
    random       one replica, drawn for each iteration, lags
    traffic      no straggler, slow link
    consistent_1.5, _2.5, _3.5, random_1.5, ..., traffic_10, _20, _30
                 the rest of table 6: shorter lags (of its 4.75 s), less traffic; one round each

`POLICY_bytes`: per parameter, of tensors that a session holds between synchronisations.
Replicas of one rank hold all of them; replicas that shard their parameters share them out.

Each round has a block per policy, in random order; a gain is the throughput of all replicas over that of the round's
plain block. Medians over rounds, with 95% bootstrap intervals. Bounds follow from the setting
(workloads/local_bounds.py); `_of_bound` is a measured value over its bound. `stolen_share` and `others_share` are the
shares of the processors' time that this run did not have: if large, plain iterations take longer than they are to
(`_calibrated` is false), and so do stalls.

Claims: edit_stall_x <= 0.125 (stall at a synchronisation over that of post_local_sgd), a_edit_straggler_x >= 1.8,
edit_random_straggler_x >= 1.7, edit_traffic_x >= 2.7; gains within 5% of their bounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ft_plugins.config import Config
from ft_plugins.errors import ConfigError
from harness.emulated_nodes import EmulatedHost, network
from harness.gang import gang
from workloads import sleeping_replica
from workloads.local_blocks import PLAIN, StepLog, gains, stalls
from workloads.local_bounds import LinkLoad, own_pace_gain, periodic_gain
from workloads.local_scenarios import (
    A_EDIT,
    EDIT,
    FULL,
    POLICIES,
    POST_LOCAL,
    QUICK,
    REPLICAS,
    SMOKE,
    TABLE_6,
    LinkSetting,
    LocalScenario,
    model_of,
    sync_block,
)
from workloads.running import PROGRESS, Figures, arguments, run, say
from workloads.sync_blocks import PolicyFigure

WITHIN, TRIES = 0.01, 6  # of a calibration
CALIBRATED = 0.03  # closer than this to what it is to be
CALIBRATION = 8  # iterations
STALL_MOST, STRAGGLER_LEAST, RANDOM_LEAST, TRAFFIC_LEAST, OF_BOUND = 0.125, 1.8, 1.7, 2.7, 0.95
MEGABIT = 1e6 / 8
BOUND = 400.0  # seconds for one round
ALL = FULL + TABLE_6


@dataclass(frozen=True)
class CalibratedLink:
    """The rate of a link, and the seconds of a plain iteration on it, without stragglers."""

    mbps: float
    plain: float

    def load(self, compute: float) -> LinkLoad:
        """What one exchange of all parameters is to the link."""
        model = model_of(compute)
        return LinkLoad(model.layers, model.sent(REPLICAS) / (self.mbps * MEGABIT), model.forward)


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
    known = [PLAIN]
    for policy in POLICIES.keys() - {PLAIN}:
        try:
            Config.from_json({"sync": sync_block(policy, 5, 1.0)})
            known.append(policy)
        except ConfigError as error:
            say(f"{policy}: left out, because this version of ft_plugins does not have it: {error}")
    return known


def calibrate(setting: LinkSetting, hosts: Sequence[EmulatedHost], mbps: float) -> CalibratedLink:
    """Measure a plain iteration at `mbps`; for the slow link find the rate at which it takes what it is to take."""
    tries = TRIES if setting.slow else 1
    arguments = (setting.block(CALIBRATION), mbps, setting.floor, setting.target, WITHIN, tries, hosts)
    tried = gang(sleeping_replica.calibrate_link, REPLICAS, *arguments, hosts=hosts, seconds=BOUND)[0]
    link = f"{setting.traffic:.2f} x" if setting.slow else "normal"
    for rate, seconds in tried:
        share = f"{seconds / setting.compute:.3f} of the compute, wanted {setting.target / setting.compute:.3f}"
        say(f"calibration, {link} link: {rate:7.1f} Mbit/s   plain {1000 * seconds:6.1f} ms, {share}")
    return CalibratedLink(*min(tried, key=lambda each: abs(each[1] / setting.target - 1)))


def measure_scenario(
    scenario: LocalScenario, known: Sequence[str], hosts: Sequence[EmulatedHost], mbps: float, lag: float, seed: int
) -> ScenarioResult:
    """Run all rounds of one scenario."""
    result, order = ScenarioResult(scenario), random.Random(seed)
    for number in range(scenario.rounds):
        PROGRESS.step(f"{scenario.name}, round {number + 1}", scenario.block_seconds(number))
        chosen = [policy for policy in scenario.chosen(number) if policy in known]
        blocks = [scenario.block(policy, lag, seed, number == 0) for policy in order.sample(chosen, len(chosen))]
        result.add(sleeping_replica.run_round(blocks, mbps, hosts, BOUND))
        times = "   ".join(f"{policy} {1000 * result.seconds[-1][policy]:.1f}" for policy in chosen)
        say(f"{scenario.name}, round {number + 1}: ms of an iteration: {times}")
    return result


def bound_of(name: str, scenario: LocalScenario, links: Mapping[LinkSetting, CalibratedLink], seed: int) -> float:
    """What the setting of a scenario allows for a figure."""
    compute, tau, link = scenario.compute, scenario.tau, links[scenario.link]
    stall, periods = link.load(compute).layered_stall, scenario.lagging(seed)
    if name == "edit_stall_x":
        return link.load(compute).stall_ratio
    lag = scenario.lag * link.plain
    if name.startswith("edit"):
        return periodic_gain(compute, link.plain, lag, periods, tau, stall)
    shares = [sum(counts) / (tau * len(periods)) for counts in zip(*periods, strict=True)]
    return own_pace_gain(compute, link.plain, lag, shares, stall / (tau * compute + stall))


def claims(results: Mapping[str, ScenarioResult], links: Mapping[LinkSetting, CalibratedLink], seed: int) -> Figures:
    """The figures that claims are about, with their bounds, and those of A-EDiT next to EDiT's."""
    values: Figures = {}

    def add(name: str, scenario: str, value: PolicyFigure | None, wanted: float) -> None:
        if value is None:
            return
        bound = bound_of(name, results[scenario].scenario, links, seed)
        holds = value.value <= wanted if name == "edit_stall_x" else value.value >= max(wanted, OF_BOUND * bound)
        values[name], values[f"{name}_low"], values[f"{name}_high"] = value.value, value.low, value.high
        values[f"{name}_bound"], values[f"{name}_of_bound"] = bound, value.value / bound
        if wanted:
            values[f"{name}_holds"] = holds
        say(f"{name}: {value}   bound {bound:.4g}, measured {value.value / bound:.3f} of it")

    if "even" in results:
        rows = results["even"].stalls
        values |= {f"{policy}_stall_ms": 1000 * results["even"].middle(policy, rows) for policy in rows[0]}
        held = {policy: each[0].held for policy, each in results["even"].logs.items()}
        parameters = model_of(results["even"].scenario.compute).parameters
        values |= {f"{policy}_bytes": nbytes / parameters for policy, nbytes in held.items() if policy != PLAIN}
        add("edit_stall_x", "even", PolicyFigure.of([row[EDIT] / row[POST_LOCAL] for row in rows]), STALL_MOST)
    for name, scenario, policy, wanted in (
        ("a_edit_straggler_x", "consistent", A_EDIT, STRAGGLER_LEAST),
        ("edit_straggler_x", "consistent", EDIT, 0.0),
        ("edit_random_straggler_x", "random", EDIT, RANDOM_LEAST),
        ("a_edit_random_straggler_x", "random", A_EDIT, 0.0),
        ("edit_traffic_x", "traffic", EDIT, TRAFFIC_LEAST),
        ("a_edit_traffic_x", "traffic", A_EDIT, 0.0),
        *((f"{one.policies[1]}_{one.name}_x", one.name, one.policies[1], 0.0) for one in TABLE_6),
    ):
        if scenario in results:
            add(name, scenario, results[scenario].gain(policy), wanted)
    return values


def run_scenarios(
    scenarios: Sequence[LocalScenario], known: Sequence[str], hosts: Sequence[EmulatedHost], seed: int
) -> tuple[dict[str, ScenarioResult], Figures]:
    """Calibrate the links, and run all scenarios."""
    links: dict[LinkSetting, CalibratedLink] = {}
    results: dict[str, ScenarioResult] = {}
    values: Figures = {}
    PROGRESS.plan(sum(one.block_seconds(number) for one in scenarios for number in range(one.rounds)))
    for scenario in scenarios:
        setting = scenario.link
        if setting not in links:
            scaled = [one.mbps * known_as.compute / setting.compute for known_as, one in links.items()
                      if known_as.traffic == setting.traffic]  # fmt: skip
            links[setting] = calibrate(setting, hosts, scaled[0] if scaled else setting.first_rate / MEGABIT)
        link = links[setting]
        lag = scenario.lag * link.plain
        result = results[scenario.name] = measure_scenario(scenario, known, hosts, link.mbps, lag, seed)
        facts = {"compute_ms": 1000 * scenario.compute, "calibrated_plain_ms": 1000 * link.plain, "mbps": link.mbps}
        values[f"{scenario.name}_calibrated"] = abs(link.plain / setting.target - 1) <= CALIBRATED
        facts |= {f"{policy}_ms": 1000 * result.middle(policy) for policy in result.policies}
        values |= {f"{scenario.name}_{fact}": value for fact, value in facts.items()}
    return results, values | claims(results, links, seed)


def measure(chosen: argparse.Namespace) -> Figures:
    """Run the chosen scenarios."""
    sizes = SMOKE if chosen.smoke else QUICK if chosen.quick and not chosen.scenarios else ALL
    scenarios = [one for one in sizes if one.name in (chosen.scenarios or [one.name])]
    if chosen.rounds is not None:
        scenarios = [replace(one, rounds=chosen.rounds) for one in scenarios]
    known = known_policies()
    sleeping_replica.preload()
    with network(range(1, REPLICAS + 1)) as hosts:
        results, values = run_scenarios(scenarios, known, hosts, chosen.seed)
    if chosen.output is not None:
        from workloads.local_pictures import draw_iterations, draw_synchronisation

        draw_iterations({name: one.seconds for name, one in results.items()}, chosen.output / "iterations.png")
        if "even" in results:
            draw_synchronisation(results["even"].logs, chosen.output / "synchronisation.png")
    return values


if __name__ == "__main__":
    parser = arguments(__doc__, "one round of two scenarios, and the policies that claims compare in them")
    parser.add_argument("--scenarios", nargs="+", choices=[scenario.name for scenario in ALL])
    parser.add_argument("--rounds", type=int, help="rounds of each scenario")
    parser.add_argument("--seed", type=int, default=1, help="of the order of blocks and of random stragglers")
    run("local_sgd", measure, parser)
