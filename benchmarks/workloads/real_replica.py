"""Train a small ResNet on scikit-learn's digits on replicas with throttled links: nothing of it is emulated but links.

Each of 4 ranks has a network namespace with a link throttled by `tc`. The model is `wide_digits` of `learners`; the
loop is a user's own: DistributedDataParallel, `TorchHost`, `attach`, `session.iterations`. Its buckets are a tenth of
the model, so that it overlaps well. First iterations of purely local training are timed (`calibrate`); from these
follows the rate at which all parameters pass in RATIO times the compute.

    plain       without a session: DistributedDataParallel's own overlap
    full        post_local_sgd, tau = H
    dreamddp    H iterations; profiles by itself, so that its first periods are those of equal numbers of layers

All ranks share the machine's cores, so the processor time of an exchange competes with the compute of others.

Invariant: all blocks of a round have one link, one model and one number of iterations; what is measured begins after
SETTLE iterations.

In: a scale. Out: seconds of an iteration by policy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ft_plugins import TorchHost
from ft_plugins.config import Config
from ft_plugins.session import attach
from harness.emulated_nodes import EmulatedHost
from harness.gang import gang
from workloads import learners
from workloads.dreamddp_scenarios import DREAMDDP, FULL, MEGABIT
from workloads.local_blocks import PLAIN
from workloads.sleeping_replica import BURST_BYTES, MAX_MBPS, QUEUE_MS, preload
from workloads.trained import optimizer_of

RANKS, H = 4, 5
RATIO = 3.0  # of communication to compute
LEARNER, BUCKETS, SEED = "wide_digits", 10, 1
LOCAL = "local"  # local training without any synchronisation
COMPARED = (PLAIN, FULL, DREAMDDP)
BOUND = 300.0  # seconds of a round


@dataclass(frozen=True)
class RealScale:
    """How long blocks are: iterations that settle, which are whole periods, and whole periods that are measured."""

    settle: int
    periods: int
    rounds: int

    @property
    def iterations(self) -> int:
        """Of a block; the last one is not measured."""
        return self.settle + H * self.periods + 1


FULL_SCALE = RealScale(settle=6 * H, periods=8, rounds=5)


@dataclass(frozen=True)
class RealSetting:
    """What was calibrated: seconds of an iteration's compute, parameters of the model, the link's rate."""

    compute: float
    parameters: int
    mbps: float


def sync_of(policy: str, last: int) -> dict[str, Any]:
    """The `sync` block of a policy; empty for plain. `last`: the block's last iteration, which is not measured: where
    nothing else synchronises all layers at once, this does."""
    return {
        PLAIN: {},
        LOCAL: {"policy": "post_local_sgd", "tau": last},
        FULL: {"policy": "post_local_sgd", "apply": "wait", "tau": H},
        DREAMDDP: {"policy": "dreamddp", "h": H, "tau": last},
    }[policy]


def prepare() -> None:
    """Read the data and import what ranks need, before they are forked. Raises ConfigError without scikit-learn."""
    learners.prepare([LEARNER])
    preload()


def _iterations(
    policy: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, count: int
) -> Iterable[int]:
    if policy == PLAIN:
        return range(1, count + 1)
    config = Config.from_json({"sync": sync_of(policy, count)})
    return attach(TorchHost(model, optimizer), config).iterations(count)


def _train(rank: int, world: int, policy: str, count: int) -> list[float]:
    """When each iteration began."""
    one = learners.learner(LEARNER, SEED)
    parameters = list(one.model.parameters())
    megabytes = sum(each.nbytes for each in parameters) / BUCKETS / (1 << 20)
    model = DistributedDataParallel(one.model, bucket_cap_mb=megabytes)  # type: ignore[arg-type]
    optimizer, begins = optimizer_of(one.optimizer, parameters), []
    dist.barrier()
    for step in _iterations(policy, model, optimizer, count):
        begins.append(time.perf_counter())
        for group in optimizer.param_groups:
            group["lr"] = one.peak_rate
        optimizer.zero_grad()
        one.loss(model, step, rank).backward()
        optimizer.step()
    dist.barrier()
    return begins


def run_blocks(
    rank: int, world: int, policies: Sequence[str], count: int, mbps: float, hosts: Sequence[EmulatedHost]
) -> list[list[float]]:
    """Run a block of each policy on one rank."""
    hosts[rank].throttle(mbps, BURST_BYTES, QUEUE_MS)
    return [_train(rank, world, policy, count) for policy in policies]


def job_times(begins: Sequence[Sequence[float]]) -> list[float]:
    """When each iteration of the job began: when its last rank began it."""
    return [max(times) for times in zip(*begins, strict=True)]


def calibrate(scale: RealScale, hosts: Sequence[EmulatedHost]) -> RealSetting:
    """Time local training, and derive the link."""
    times = gang(run_blocks, RANKS, [LOCAL], scale.iterations, MAX_MBPS, hosts, hosts=hosts[:RANKS], seconds=BOUND)
    begins = job_times([own[0] for own in times])[scale.settle : -1]
    compute = statistics.median(after - before for before, after in pairwise(begins))
    parameters = sum(each.numel() for each in learners.learner(LEARNER, SEED).model.parameters())
    sent = 2 * (RANKS - 1) / RANKS * 4 * parameters
    return RealSetting(compute, parameters, min(MAX_MBPS, sent / (RATIO * compute) / MEGABIT))


def measure(
    scale: RealScale, setting: RealSetting, policies: Sequence[str], hosts: Sequence[EmulatedHost]
) -> dict[str, float]:
    """One round: seconds of an iteration by policy, over whole periods."""
    arguments = (policies, scale.iterations, setting.mbps, hosts)
    times = gang(run_blocks, RANKS, *arguments, hosts=hosts[:RANKS], seconds=BOUND)
    by_block = ([own[number] for own in times] for number in range(len(policies)))
    return {policy: seconds_of(scale, job_times(each)) for policy, each in zip(policies, by_block, strict=True)}


def seconds_of(scale: RealScale, begins: Sequence[float]) -> float:
    """Seconds of an iteration of the window, from when iterations of the job began."""
    return (begins[-1] - begins[scale.settle]) / (H * scale.periods)
