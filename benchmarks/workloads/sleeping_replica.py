"""Train one replica with emulated compute, but real gradients, updates, collectives and sessions, on a throttled link.

Real: DistributedDataParallel with its buckets, overlapped with the backward; `ft_plugins.attach` with the policy; the
update (SGD with momentum); the link, whose outgoing rate `tc tbf` limits in a network namespace of each rank. Emulated:
the forward and the backward of each layer are a sleep, so that ranks need no core each; the update takes a given time;
gradients are a constant vector of the replica; a straggler sleeps before its forward.

Each block has its own model, optimizer and session, and begins shortly before a synchronisation, so that all of a
window has the state of training under way.

Invariant: all policies do the same work apart from the synchronisation.

In: `LocalBlock`. Out: `StepLog`."""

from __future__ import annotations

import gc
import json
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ft_plugins import TorchHost
from ft_plugins.config import Config
from ft_plugins.session import attach
from ft_plugins.sync.rounds.synchronisation import Synchronisation
from harness.emulated_nodes import EmulatedHost
from harness.gang import gang
from workloads.emulated_rank import Sleeper, StageSpec
from workloads.local_blocks import LaneSpan, StepLog
from workloads.local_bounds import Stragglers, laggard, next_link_rate

RATE, MOMENTUM = 1e-6, 0.9  # so small that no change is clipped
FORWARD, UPDATE = 1 / 3, 0.05  # of the compute of an iteration; the rest is the backward
SETTLE = 3  # iterations of a block before its first synchronisation
BURST_BYTES = 64 << 10
QUEUE_MS = 5000  # longer than any wait of a packet: none is dropped
MAX_MBPS = 10_000.0  # a higher rate does not throttle
COMPUTE, EXCHANGE, LAG = "compute", "exchange", "lag"  # lanes


@dataclass(frozen=True)
class LayeredModel:
    """An emulated model: by layer in the order of the forward its float32 parameters, and the seconds of its forward
    and backward; seconds of an update. Gradients are reduced in buckets of at most `bucket_bytes`, or one layer."""

    widths: tuple[int, ...]
    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    update: float
    bucket_bytes: int

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def parameters(self) -> int:
        return sum(self.widths)

    @property
    def compute(self) -> float:
        """Seconds of an iteration."""
        return sum(self.forwards) + sum(self.backwards) + self.update

    def sent(self, replicas: int) -> float:
        """Bytes that a replica sends for one reduction of gradients, and for one exchange of parameters."""
        return 2 * (replicas - 1) / replicas * self.parameters * 4


@dataclass(frozen=True)
class SleepingModel:
    """An emulated model of equal layers: `layers` of `width` float32 parameters, of which `bucketed` are reduced
    together; `compute`: seconds of an iteration."""

    layers: int
    width: int
    bucketed: int
    compute: float

    @property
    def parameters(self) -> int:
        return self.layers * self.width

    @property
    def forward(self) -> float:
        """Seconds."""
        return FORWARD * self.compute

    @property
    def update(self) -> float:
        """Seconds."""
        return UPDATE * self.compute

    @property
    def backward(self) -> float:
        """Seconds."""
        return self.compute - self.forward - self.update

    def sent(self, replicas: int) -> float:
        """Bytes that a replica sends for one reduction of gradients, and for one exchange of parameters."""
        return self.layered.sent(replicas)

    @property
    def layered(self) -> LayeredModel:
        """The same, layer by layer."""
        each = (self.forward / self.layers, self.backward / self.layers)
        forwards, backwards = ((seconds,) * self.layers for seconds in each)
        return LayeredModel(
            (self.width,) * self.layers, forwards, backwards, self.update, self.bucketed * self.width * 4
        )


@dataclass(frozen=True)
class LocalBlock:
    """One block of one policy. `config`: the `sync` block as JSON, '' for plain. `first`: its first iteration; `last`:
    the last one, at which iterations of all replicas together have come to so many for each. `groups`: of which each
    bucket of gradients takes the next, so that several are reduced at the same time; 0: one after another."""

    policy: str
    config: str
    first: int
    last: int
    model: LayeredModel
    stragglers: Stragglers
    lag: float
    seed: int
    records: bool = False  # the timeline
    groups: int = 0


class EmulatedDevice(Sleeper):
    """Sleeps instead of computing."""

    def update(self, work: Callable[[], Any], seconds: float) -> Any:
        """An update that takes `seconds`, the work included. If that takes longer, because all ranks share a few cores,
        the rest is taken off the next sleep."""
        began = self._clock()
        excess = max(0.0, self._excess - (began - self._ended))
        try:
            return work()
        finally:
            left = seconds - excess - (self._clock() - began)
            self._sleep(max(0.0, left))
            self._ended = self._clock()
            self._excess = max(0.0, -left)


class EmulatedSgd(torch.optim.SGD):
    """SGD with momentum, whose updates take the time of the emulated model's."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], device: EmulatedDevice, seconds: float) -> None:
        super().__init__(parameters, lr=RATE, momentum=MOMENTUM)
        self.device, self.seconds = device, seconds

    def step(self, closure: Any = None) -> Any:
        """Calls hooks once: if the process has made another SGD, torch has wrapped that class's step to call them."""
        step: Any = torch.optim.SGD.step
        update = step.__wrapped__ if getattr(step, "hooked", False) else step
        return self.device.update(partial(update, self), self.seconds)


class _Recorder:
    """The timeline of a replica, if it is wanted."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.spans: list[LaneSpan] = []

    @contextmanager
    def span(self, lane: str, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.on:
            self.spans.append(LaneSpan(lane, what, began, time.perf_counter()))

    @contextmanager
    def exchanges(self) -> Iterator[None]:
        """Record what runs on the thread of synchronisations."""
        original = Synchronisation.exchange
        if self.on:

            def recorded(one: Synchronisation, name: str) -> float:
                with self.span(EXCHANGE, name):
                    return original(one, name)

            Synchronisation.exchange = recorded  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Synchronisation.exchange = original  # type: ignore[method-assign]


class _Pass(torch.autograd.Function):
    """Takes the seconds of a layer's forward, and of its backward, which gives its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: SleepingLayer, weight: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        layer.sleep(layer.forward_seconds, "forward")
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        layer = ctx.layer
        layer.sleep(layer.backward_seconds, "backward")
        return gradient, None, layer.gradient


class SleepingLayer(torch.nn.Module):
    """A layer that sleeps instead of computing."""

    def __init__(self, model: LayeredModel, sleeper: Sleeper, recorder: _Recorder, rank: int, number: int) -> None:
        super().__init__()
        width = model.widths[number]
        self.weight = torch.nn.Parameter(torch.randn(width))
        self.forward_seconds, self.backward_seconds = model.forwards[number], model.backwards[number]
        made = torch.Generator().manual_seed(1000 * rank + number)
        self.__dict__["gradient"] = torch.randn(width, generator=made)  # no buffer: DDP would broadcast it
        self._sleeper, self._recorder = sleeper, recorder

    def sleep(self, seconds: float, what: str) -> None:
        with self._recorder.span(COMPUTE, what):
            self._sleeper.sleep(seconds)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(hidden, self, self.weight)  # type: ignore[no-any-return]


class SleepingStack(torch.nn.Module):
    """All layers, one after another."""

    def __init__(self, model: LayeredModel, sleeper: Sleeper, recorder: _Recorder, rank: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            SleepingLayer(model, sleeper, recorder, rank, number) for number in range(len(model))
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def preload() -> None:
    """Import what DistributedDataParallel imports in every rank when it is built, before ranks are forked."""
    import torch._dynamo  # noqa: F401


def live_tensors() -> list[torch.Tensor]:
    """All tensors that Python knows of in this process."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta]


def bytes_besides(others: Iterable[torch.Tensor]) -> int:
    """Bytes of all live tensors that share no memory with `others`; those that share memory count once."""
    known = {one.untyped_storage().data_ptr() for one in others}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in live_tensors()}
    return sum(nbytes for address, nbytes in storages.items() if address not in known)


def simultaneous(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
    """Reduce a bucket while others still are in other groups. The future gradients."""
    own = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(own, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def run_block(rank: int, world: int, block: LocalBlock) -> StepLog:
    """Run one block together with all ranks."""
    before = [weakref.ref(one) for one in live_tensors()]  # an earlier block's may live on
    torch.manual_seed(1)
    model, recorder = block.model, _Recorder(block.records)
    sleeper = EmulatedDevice(StageSpec(0.0, 0.0, 0), rank)
    stack = SleepingStack(model, sleeper, recorder, rank)
    megabytes = model.bucket_bytes / (1 << 20)
    parallel = DistributedDataParallel(stack, bucket_cap_mb=megabytes)  # type: ignore[arg-type]
    groups = [dist.new_group() for _ in range(block.groups)]
    if groups:
        own = cycle(groups)
        parallel.register_comm_hook(None, lambda _, bucket: simultaneous(next(own), bucket))
    optimizer = EmulatedSgd(stack.parameters(), sleeper, model.update)
    config = Config.from_json({"sync": json.loads(block.config)}) if block.config else Config()
    hidden, begins = torch.ones(1, requires_grad=True), []
    with recorder.exchanges():
        session = attach(TorchHost(parallel, optimizer), config)
        dist.barrier()
        for step in session.iterations(block.last, block.first - 1):
            begins.append(time.perf_counter())
            if laggard(block.stragglers, step, world, block.seed) == rank:
                with recorder.span(LAG, "lag"):
                    sleeper.sleep(block.lag)
            optimizer.zero_grad()
            parallel(hidden).sum().backward()
            optimizer.step()
        ended = time.perf_counter()
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    others: list[Any] = [each for layer in stack.layers for each in (layer.weight, layer.weight.grad, layer.gradient)]
    others += [each for state in optimizer.state.values() for each in state.values()]
    others += [each for one in before if (each := one()) is not None]
    return StepLog(block.first, tuple(begins), ended, tuple(recorder.spans), bytes_besides(others))


def run_round(
    blocks: Sequence[LocalBlock], mbps: float, hosts: Sequence[EmulatedHost], seconds: float, burst: int = BURST_BYTES
) -> dict[str, list[StepLog]]:
    """Run the blocks of one round in order, on a replica for each host with a link of `mbps`; the logs by policy.
    `burst`: bytes that pass a link at once after a pause."""
    logs = gang(_run_blocks, len(hosts), blocks, mbps, hosts, burst, hosts=hosts, seconds=seconds)
    by_block = zip(*logs, strict=True)
    return {block.policy: list(each) for block, each in zip(blocks, by_block, strict=True)}


def _run_blocks(
    rank: int, world: int, blocks: Sequence[LocalBlock], mbps: float, hosts: Sequence[EmulatedHost], burst: int
) -> list[StepLog]:
    hosts[rank].throttle(mbps, burst, QUEUE_MS)
    return [run_block(rank, world, block) for block in blocks]


def calibrate_link(
    rank: int, world: int, block: LocalBlock, mbps: float, floor: float, target: float, within: float, tries: int,
    hosts: Sequence[EmulatedHost],
) -> list[tuple[float, float]]:  # fmt: skip
    """Find the rate at which an iteration of `block`, which is plain, takes `target` seconds. Returns what was tried:
    rates in Mbit/s with the seconds of an iteration."""
    tried: list[tuple[float, float]] = []
    while True:
        hosts[rank].throttle(mbps, BURST_BYTES, QUEUE_MS)
        begins = run_block(rank, world, block).begins[SETTLE:]
        seconds = torch.tensor(statistics.median(after - before for before, after in pairwise(begins)))
        dist.broadcast(seconds, 0)  # all ranks derive the rate from rank 0's figure
        tried.append((mbps, float(seconds)))
        if abs(float(seconds) / target - 1) <= within or len(tried) == tries or mbps == MAX_MBPS:
            return tried
        mbps = min(MAX_MBPS, next_link_rate(mbps, float(seconds), floor, target))
