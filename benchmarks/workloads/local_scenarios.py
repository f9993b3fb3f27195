"""What `local_sgd.py` runs: the emulated model, the policies, the scenarios and their blocks. Pure.

Ratios are those of the EDiT paper's testbed (table 6; an iteration of 4.75 s).

Invariant: in one scenario every policy meets the same stragglers in the same iterations, those of its window.

In: policies, lag, seed. Out: `LocalBlock`s; seconds of an iteration, from the logs of a block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workloads.local_blocks import PLAIN, StepLog, seconds_at_own_pace, seconds_in_step
from workloads.local_bounds import Stragglers, lagging
from workloads.sleeping_replica import SETTLE, LocalBlock, SleepingModel

REPLICAS = 8
MODEL = SleepingModel(layers=16, width=32768, bucketed=4, compute=0.19)
PLAIN_OF_COMPUTE = 237.45 / 225.75  # A-EDiT over plain, lag 0
LAG_OF_PLAIN = 0.95
TRAFFIC_OF_PLAIN = 225.75 / 85.18  # plain, 40 times the traffic
POST_LOCAL, DILOCO, CO2, EDIT, A_EDIT = "post_local_sgd", "diloco", "co2_like", "edit", "a_edit"
POLICIES: dict[str, dict[str, Any]] = {  # the `sync` block, without the interval
    PLAIN: {},
    POST_LOCAL: {"policy": "post_local_sgd", "apply": "wait"},
    DILOCO: {"policy": "diloco", "apply": "wait"},
    CO2: {"policy": "diloco", "apply": "update"},
    EDIT: {"policy": "edit", "apply": "forward"},
    A_EDIT: {"policy": "a_edit", "apply": "forward"},
}


def configured(policy: str, tau: int) -> dict[str, Any]:
    """The `sync` block of a policy; empty for plain. By the clock the interval is the compute of `tau` iterations."""
    if policy == PLAIN:
        return {}
    return POLICIES[policy] | ({"seconds": tau * MODEL.compute} if policy == A_EDIT else {"tau": tau})


@dataclass(frozen=True)
class LocalScenario:
    """A block has `periods` of `tau` iterations, with plain `iterations`, at their own pace `paced` periods.
    `repeated`: the policies of later rounds."""

    name: str
    tau: int
    periods: int
    paced: int
    iterations: int
    rounds: int
    stragglers: Stragglers = Stragglers.NONE
    slow: bool = False
    repeated: tuple[str, ...] = tuple(POLICIES)

    def blocks(self, policies: Sequence[str], lag: float, seed: int, records: bool = False) -> list[LocalBlock]:
        """A block for each policy. Blocks of policies that keep in step begin before the synchronisation at tau; what
        is measured begins after iteration tau with all policies."""
        made = []
        for policy in policies:
            first, last = self.tau - SETTLE + 1, self.tau * (self.periods + 1) + 2
            if policy == PLAIN:
                last = self.tau + self.iterations + 1
            if policy == A_EDIT:
                first, last = self.tau + 1, self.tau * (self.paced + 1)
            block = configured(policy, self.tau)
            config = json.dumps(block) if block else ""
            made.append(LocalBlock(policy, config, first, last, MODEL, self.stragglers, lag, seed, records))
        return made

    def seconds(self, policy: str, logs: Sequence[StepLog]) -> float:
        """Seconds of an iteration of all replicas, from the logs of a block."""
        if policy == A_EDIT:
            return seconds_at_own_pace(logs)
        iterations = self.iterations if policy == PLAIN else self.tau * self.periods
        return seconds_in_step(logs, self.tau + 1, self.tau + 1 + iterations)

    def lagging(self, seed: int) -> list[list[int]]:
        """In how many iterations each replica lags, for each period of the window."""
        starts = range(self.tau + 1, self.tau * (self.periods + 1) + 1, self.tau)
        return [lagging(self.stragglers, range(start, start + self.tau), REPLICAS, seed) for start in starts]


def plain_block(iterations: int) -> LocalBlock:
    """A block that calibrates a link."""
    return LocalBlock(PLAIN, "", 1, SETTLE + iterations + 1, MODEL, Stragglers.NONE, 0.0, 0)


FULL = (
    LocalScenario("even", 5, 4, 4, 20, 4),
    LocalScenario("consistent", 64, 1, 2, 16, 2, Stragglers.CONSISTENT, repeated=(PLAIN, A_EDIT)),
    LocalScenario("random", 64, 1, 2, 16, 2, Stragglers.RANDOM, repeated=(PLAIN, EDIT, A_EDIT)),
    LocalScenario("traffic", 64, 1, 2, 12, 2, slow=True, repeated=(PLAIN, EDIT, A_EDIT)),
)
QUICK = (
    LocalScenario("even", 5, 1, 1, 5, 1),
    LocalScenario("consistent", 8, 1, 1, 5, 1, Stragglers.CONSISTENT),
    LocalScenario("random", 8, 1, 1, 5, 1, Stragglers.RANDOM),
    LocalScenario("traffic", 8, 1, 1, 5, 1, slow=True),
)
