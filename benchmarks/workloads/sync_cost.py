"""Run iterations with emulated compute, but real gradients, updates and sessions, on a throttled link.

Real: the reduction of gradients over gloo, all of PAFT (a session per mode), the update (SGD with momentum), and the
link: each rank has its own network namespace, whose outgoing rate `tc tbf` limits. Emulated: forward and backward are a
sleep, so that ranks need no core each; gradients are a constant vector, plus noise of known size for the mode that
derives its interval from noise.

In every rank, each mode has its own model, optimizer, session and iteration count, so that blocks of modes can follow
each other in any order. `SETTLE` iterations of each mode come first. After them averagings and audits fall within
blocks, and none is in flight at the end of one; still, a plain iteration that is not counted follows each block.

Invariant: all modes do the same work apart from PAFT.

In: `SyncPlan`. Out: `SyncMeasurement`; rank 0 decides on the rate.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_plugins.config import Config, launch_context
from ft_plugins.events import catalogue, read
from ft_plugins.model.inventory import Role
from ft_plugins.session import Session, attach
from harness.emulated_nodes import EmulatedHost
from harness.plain_host import PlainHost
from workloads.sync_blocks import PLAIN, next_rate

RATE = 1e-4  # learning rate
MOMENTUM = 0.9
NOISES = 16  # vectors that noise is drawn from
SETTLE = 5
CALIBRATION_BLOCKS = 5  # of each of the two modes, for one rate
BURST_BYTES = 64 << 10
MAX_MBPS = 10_000.0  # a higher rate does not throttle
MEGABIT = 1e6 / 8
ADAPTIVE = "paft_adaptive"


@dataclass(frozen=True)
class SyncPlan:
    """What to measure. `blocks`: modes, by round. `modes`: the PAFT configuration of each mode except plain."""

    modes: Mapping[str, Mapping[str, Any]]
    blocks: tuple[tuple[str, ...], ...]
    iterations: int  # of a block
    compute_seconds: float
    layers: int
    width: int  # parameters of a layer
    h: int
    target: float
    within: float  # calibration ends this close to the target
    mbps: float  # initial rate
    calibrations: int  # maximum number
    signal_to_noise: float  # length of a gradient over the length of its noise, in the adaptive mode

    @property
    def parameters(self) -> int:
        return self.layers * self.width

    def sent(self, world: int) -> float:
        """Bytes that a rank sends for one reduction of gradients, or for one averaging."""
        return 2 * (world - 1) / world * self.parameters * 4


@dataclass(frozen=True)
class SyncMeasurement:
    """The result of one rank. `seconds`: per iteration, by round and mode; `calibration`: Mbit/s, plain seconds,
    share."""

    seconds: tuple[dict[str, float], ...]
    calibration: tuple[tuple[float, float, float], ...]
    mbps: float
    intervals: tuple[int, ...]  # chosen by the adaptive mode


class Mode:
    """One mode of training, with its own state."""

    def __init__(self, name: str, rank: int, world: int, plan: SyncPlan, folder: Path) -> None:
        torch.manual_seed(1)
        self._name, self._world, self._seconds = name, world, plan.compute_seconds
        self._parameters = {f"layer{n}": torch.nn.Parameter(torch.randn(plan.width)) for n in range(plan.layers)}
        optimizer = torch.optim.SGD(list(self._parameters.values()), lr=RATE, momentum=MOMENTUM)
        gradient = torch.randn(plan.parameters)
        self._gradient, self._optimizer = gradient, optimizer
        tensors: dict[str, torch.Tensor] = dict(self._parameters)
        for key, parameter in self._parameters.items():
            parameter.grad = torch.zeros_like(parameter)
            tensors[f"{key}.momentum"] = optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        generator = torch.Generator().manual_seed(100 + rank)
        length = float(gradient.norm()) / plan.signal_to_noise if name == ADAPTIVE else 0.0
        sigma = length / math.sqrt(plan.parameters)
        self._noise = sigma * torch.randn((NOISES, plan.parameters), generator=generator)
        self._chosen = torch.Generator().manual_seed(200 + rank)
        self._flat = torch.empty_like(gradient)
        self._done = 0
        self._run_dir = folder / name
        self._session: Session | None = None
        if name != PLAIN:
            host = PlainHost(
                tensors, rank=rank, world_size=world, replicated=True,
                roles={key: Role.MOMENT for key in tensors if key.endswith(".momentum")},
                layers={key: int(key.partition(".")[0].removeprefix("layer")) for key in tensors},
                learning_rate=lambda: RATE,
                gradients=lambda: {key: one.grad for key, one in self._parameters.items() if one.grad is not None},
            )  # fmt: skip
            self._run_dir.mkdir(exist_ok=True)
            context = replace(launch_context(), run_dir=self._run_dir)
            self._session = attach(host, Config.from_json({"paft": dict(plan.modes[name])}), context)
            self._session.resume()

    def run(self, iterations: int) -> float:
        """Run iterations together with all ranks; returns the seconds of one."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(iterations):
            self._iterate()
        return (time.perf_counter() - began) / iterations

    def intervals(self) -> tuple[int, ...]:
        """The intervals at which averagings were scheduled."""
        events = read(self._run_dir / "events.jsonl")
        return tuple(
            int(one.fields["interval"]) for one in events if one.type is catalogue.REPLICAS_AVERAGED and one.rank == 0
        )

    def end(self) -> None:
        """Shut the session down."""
        if self._session is not None:
            self._session.shutdown()

    def _iterate(self) -> None:
        self._done += 1
        if self._session is not None:
            self._session.iteration_begin(self._done)
        time.sleep(self._seconds)
        self._flat.copy_(self._gradient)
        dist.all_reduce(self._flat)
        number = int(torch.randint(NOISES, (1,), generator=self._chosen))
        self._flat.div_(self._world).add_(self._noise[number])
        parts = self._flat.split([one.numel() for one in self._parameters.values()])
        for one, part in zip(self._parameters.values(), parts, strict=True):
            assert one.grad is not None
            one.grad.copy_(part)
        if self._session is not None:
            self._session.before_update(self._done)
        self._optimizer.step()
        if self._session is not None:
            self._session.after_update(self._done)
            self._session.iteration_end(self._done)


def measure(rank: int, world: int, plan: SyncPlan, hosts: Sequence[EmulatedHost], folder: str) -> SyncMeasurement:
    """Run one rank: calibrate, then run all blocks."""
    modes = {name: Mode(name, rank, world, plan, Path(folder)) for name in (PLAIN, *plan.modes)}
    host, mbps = hosts[rank], plan.mbps
    host.throttle(mbps, BURST_BYTES)
    for mode in modes.values():
        mode.run(SETTLE)
    tried: list[tuple[float, float, float]] = []
    while len(tried) < plan.calibrations:
        shares, plains = [], []
        for _ in range(CALIBRATION_BLOCKS):
            plain = modes[PLAIN].run(plan.iterations // 2)
            shares.append(modes["paft_sync"].run(plan.iterations // 2) / plain - 1)
            plains.append(plain)
        medians = torch.tensor([statistics.median(plains), statistics.median(shares)], dtype=torch.float64)
        dist.broadcast(medians, 0)  # all ranks derive the rate from rank 0's figures
        plain, share = medians.tolist()
        tried.append((mbps, plain, share))
        if abs(share - plan.target) <= plan.within:
            break
        wanted = next_rate(mbps * MEGABIT, plain, share, plan.h, plan.target, plan.sent(world)) / MEGABIT
        if min(mbps, wanted) >= MAX_MBPS:  # the link is not the bottleneck
            break
        mbps = min(wanted, MAX_MBPS)
        host.throttle(mbps, BURST_BYTES)
    seconds = []
    for blocks in plan.blocks:
        round_seconds = {}
        for name in blocks:
            round_seconds[name] = modes[name].run(plan.iterations)
            modes[PLAIN].run(1)
        seconds.append(round_seconds)
    for mode in modes.values():
        mode.end()
    intervals = modes[ADAPTIVE].intervals() if ADAPTIVE in modes else ()
    return SyncMeasurement(tuple(seconds), tuple(tried), mbps, intervals)
