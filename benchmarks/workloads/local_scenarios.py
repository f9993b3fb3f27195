"""What `local_sgd.py` runs: the emulated model, the policies, the scenarios and their blocks. Pure.

Ratios are those of the EDiT paper's testbed (table 6; an iteration of 4.75 s).

Invariant: in one scenario every policy meets the same stragglers in the same iterations, those of its window.

In: policies, lag, seed. Out: `LocalBlock`s; seconds of an iteration, from the logs of a block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workloads.local_blocks import PLAIN, StepLog, seconds_at_own_pace, seconds_in_step
from workloads.local_bounds import Stragglers, lagging
from workloads.sleeping_replica import SETTLE, LocalBlock, SleepingModel

REPLICAS = 8
PLAIN_OF_COMPUTE = 237.45 / 225.75  # A-EDiT over plain, lag 0
ITERATION = 4.75  # seconds, of the paper
LAGS = (1.5, 2.5, 3.5)  # seconds that a straggler lags by, of such an iteration; FULL has 4.5
TRAFFIC = {repeats: 225.75 / plain for repeats, plain in ((10, 205.71), (20, 136.64), (30, 105.06), (40, 85.18))}
POST_LOCAL, DILOCO, CO2, EDIT, A_EDIT = "post_local_sgd", "diloco", "co2_like", "edit", "a_edit"
POLICIES: dict[str, dict[str, Any]] = {  # the `sync` block, without the interval
    PLAIN: {},
    POST_LOCAL: {"policy": "post_local_sgd", "apply": "wait"},
    DILOCO: {"policy": "diloco", "apply": "wait"},
    CO2: {"policy": "diloco", "apply": "update"},
    EDIT: {"policy": "edit", "apply": "forward"},
    A_EDIT: {"policy": "a_edit", "apply": "forward"},
}
TABLE = (PLAIN, EDIT, A_EDIT)  # what table 6 has


def model_of(compute: float) -> SleepingModel:
    """The emulated model, with that many seconds of compute in an iteration."""
    return SleepingModel(layers=16, width=32768, bucketed=4, compute=compute)


def sync_block(policy: str, tau: int, compute: float) -> dict[str, Any]:
    """The `sync` block of a policy; empty for plain. By the clock, the interval is the compute of `tau` iterations."""
    if policy == PLAIN:
        return {}
    return POLICIES[policy] | ({"seconds": tau * compute} if policy == A_EDIT else {"tau": tau})


@dataclass(frozen=True)
class LocalScenario:
    """One setting. `compute`: seconds of an iteration, `tau` iterations of a period. A block has `periods` of them, at
    their own pace `paced` periods, plain `iterations`. `lag`: of a straggler, in plain iterations; `traffic`: by what
    factor its repetition lengthens a plain iteration. `later`: the policies of later rounds; None: all."""

    name: str
    compute: float
    tau: int
    periods: int
    paced: int
    iterations: int
    rounds: int
    stragglers: Stragglers = Stragglers.NONE
    lag: float = 4.5 / ITERATION
    traffic: float = 1.0
    policies: tuple[str, ...] = TABLE
    later: tuple[str, ...] | None = None

    @property
    def link(self) -> LinkSetting:
        return LinkSetting(self.compute, self.traffic)

    def chosen(self, number: int) -> tuple[str, ...]:
        """The policies of a round."""
        return self.policies if self.later is None or number == 0 else self.later

    def block(self, policy: str, lag: float, seed: int, records: bool = False) -> LocalBlock:
        """The block of a policy. Blocks of policies that keep in step begin before the synchronisation at tau; what is
        measured begins after iteration tau with all policies."""
        first, last = self.tau - SETTLE + 1, self.tau * (self.periods + 1) + 2
        if policy == PLAIN:
            last = self.tau + self.iterations + 1
        if policy == A_EDIT:
            first, last = self.tau + 1, self.tau * (self.paced + 1)
        config = sync_block(policy, self.tau, self.compute)
        return LocalBlock(
            policy, json.dumps(config) if config else "", first, last, model_of(self.compute).layered, self.stragglers,
            lag, seed, records,
        )  # fmt: skip

    def seconds(self, policy: str, logs: Sequence[StepLog]) -> float:
        """Seconds of an iteration of all replicas, from the logs of a block."""
        if policy == A_EDIT:
            return seconds_at_own_pace(logs)
        iterations = self.iterations if policy == PLAIN else self.tau * self.periods
        return seconds_in_step(logs, self.tau + 1, self.tau + 1 + iterations)

    def block_seconds(self, number: int) -> float:
        """About how long the blocks of a round take, without their start: iterations by their compute."""
        blocks = (self.block(policy, 0.0, 0) for policy in self.chosen(number))
        lengthened = 1.0 if self.stragglers is Stragglers.NONE else 1 + self.lag
        return self.compute * lengthened * sum(block.last - block.first + 1 for block in blocks)

    def lagging(self, seed: int) -> list[list[int]]:
        """In how many iterations each replica lags, for each period of the window."""
        starts = range(self.tau + 1, self.tau * (self.periods + 1) + 1, self.tau)
        return [lagging(self.stragglers, range(start, start + self.tau), REPLICAS, seed) for start in starts]


@dataclass(frozen=True)
class LinkSetting:
    """The normal link, on which an exchange takes a fifth of the compute, or a slow one, on which a plain iteration
    takes `traffic` times as long; it is calibrated to those seconds."""

    compute: float
    traffic: float

    @property
    def slow(self) -> bool:
        return self.traffic > 1

    @property
    def target(self) -> float:
        """Seconds that a plain iteration is to take."""
        return self.compute * PLAIN_OF_COMPUTE * self.traffic

    @property
    def floor(self) -> float:
        """Seconds that it would take if the reduction took none; on the slow link, those before the first bucket is
        reduced, as the link is busy from then on."""
        model = model_of(self.compute)
        return model.forward + model.update + model.backward * (model.bucketed / model.layers if self.slow else 1.0)

    @property
    def first_rate(self) -> float:
        """Bytes per second; of the slow link, those to begin with."""
        return model_of(self.compute).sent(REPLICAS) / (self.target - self.floor if self.slow else 0.2 * self.compute)

    def block(self, iterations: int) -> LocalBlock:
        """What is measured for a calibration."""
        last = SETTLE + iterations + 1
        return LocalBlock(PLAIN, "", 1, last, model_of(self.compute).layered, Stragglers.NONE, 0.0, 0)


FULL = (
    LocalScenario("even", 0.95, 4, 2, 2, 8, 2, policies=tuple(POLICIES)),
    LocalScenario("consistent", 0.285, 64, 1, 2, 16, 2, Stragglers.CONSISTENT, later=(PLAIN, A_EDIT)),
    LocalScenario("random", 0.285, 128, 1, 1, 16, 2, Stragglers.RANDOM),
    LocalScenario("traffic", 0.285, 128, 1, 1, 12, 1, traffic=TRAFFIC[40]),
)
TABLE_6 = (  # the rest of it, of each kind the policy that the paper recommends
    *(replace(FULL[1], name=f"consistent_{lag}", paced=1, rounds=1, policies=(PLAIN, A_EDIT), later=None,
              lag=lag / ITERATION) for lag in LAGS),
    *(replace(FULL[2], name=f"random_{lag}", rounds=1, policies=(PLAIN, EDIT), lag=lag / ITERATION) for lag in LAGS),
    *(replace(FULL[3], name=f"traffic_{repeats}", policies=(PLAIN, EDIT), traffic=TRAFFIC[repeats])
      for repeats in (10, 20, 30)),
)  # fmt: skip
SMOKE = (replace(FULL[0], compute=0.15, periods=1, paced=1, iterations=4, rounds=1, policies=TABLE + (POST_LOCAL,)),)
QUICK = (
    replace(FULL[0], rounds=1, policies=(PLAIN, POST_LOCAL, EDIT)),
    replace(FULL[1], rounds=1, policies=(PLAIN, A_EDIT), paced=1),
)
