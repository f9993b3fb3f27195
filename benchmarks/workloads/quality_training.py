"""Train replicas of a learner with DistributedDataParallel, under a session with local SGD or without one.

The loop is a user's own: `TorchHost`, `attach`, `session.iterations`. Each rank evaluates its share of the held-out
examples right after a synchronisation, whose forward also ends it where it is applied module by module. Where replicas
are never equal, it evaluates their mean, and trains on with its own parameters.

Invariant: a run of plain data parallelism calls nothing of the package.

Where the number of replicas changes, other ranks are forked, which begin with the model and optimizer of replica 0.

In: `QualityRun`. Out: `QualityOutcome`; it is also what a line of a file of results holds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.adapters.torch.torch_reduction import module_of, modules_of
from ft_plugins.config import Config, launch_context
from ft_plugins.events import catalogue, read
from ft_plugins.session import attach
from ft_plugins.sync.layers.layer_profile import LayerProfile, LayerTimes, write_profile
from harness.gang import gang
from workloads.learners import Learner, learner
from workloads.quality_runs import RANKS, QualityOutcome, QualityRun, QualityScale, SynchronisationRecord
from workloads.trained import evaluated_at, optimizer_of

DREAMDDP, COMMUNICATION = "dreamddp", 3.0
STRIDE = 11  # iterations between two measurements of divergence, no multiple of H: all parts of a period as often
Losses = tuple[tuple[int, float], ...]


def _iterations(
    rank: int,
    world: int,
    run: QualityRun,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    run_dir: str,
    first: int,
    last: int,
) -> Iterable[int]:
    if not run.sync:
        return range(first, last + 1)
    context = replace(launch_context(), run_dir=Path(run_dir))
    sync = dict(run.sync)
    if sync.get("policy") == DREAMDDP:
        sync["profile"] = str(path := Path(run_dir) / "profile.json")
        if rank == 0:
            write_profile(profile_by_size(dict(model.module.named_parameters()), world), path)
        dist.barrier()
    session = attach(TorchHost(model, optimizer), Config.from_json({"sync": sync}), context)
    return session.iterations(last, first - 1)


def profile_by_size(parameters: Mapping[str, torch.Tensor], replicas: int) -> LayerProfile:
    """A profile in which the times of a module are in proportion to its parameters, and communication takes
    COMMUNICATION times the compute: schedules are the same in each run."""
    nbytes: Counter[str] = Counter()
    for name, module in modules_of(parameters).items():
        nbytes[module] += parameters[name].nbytes
    every = sum(nbytes.values())
    layers = [
        LayerTimes(module, size / every / 3, 2 * size / every / 3, COMMUNICATION * size / every, size)
        for module, size in nbytes.items()
    ]
    return LayerProfile(tuple(layers), replicas)


@contextmanager
def mean_of_replicas(model: torch.nn.Module, world: int) -> Iterator[None]:
    """The mean of all replicas in place of each one's parameters."""
    own = [one.detach().clone() for one in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.div_(world)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), own, strict=True):
                parameter.copy_(before)


def divergence(model: torch.nn.Module, world: int) -> float:
    """Mean over replicas of the squared distance of their parameters from their mean."""
    own = torch.cat([one.detach().flatten() for one in model.parameters()]).double()
    mean = own.clone()
    dist.all_reduce(mean)
    apart = (own - mean / world).square().sum()
    dist.all_reduce(apart)
    return apart.item() / world


def _held_out(one: Learner, rank: int, world: int) -> float:
    """The mean loss over all held-out examples, if replicas are equal."""
    sums = torch.tensor(one.held_out(one.model, rank, world), dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def _train(rank: int, world: int, run: QualityRun, run_dir: str, first: int, last: int) -> tuple[Losses, int, Losses]:
    """The losses, the number of modules, the divergences, of some of the iterations."""
    one = learner(run.learner, run.seed)
    optimizer = optimizer_of(one.optimizer, list(one.model.parameters()))
    handed_on = Path(run_dir).parent / f"{run.seed}.pt"
    if first > 1:
        model_state, optimizer_state = torch.load(handed_on)
        one.model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    model = DistributedDataParallel(one.model)
    points = evaluated_at(run.scale.iterations, run.scale.evaluations)
    losses, divergences = [], []
    for iteration in _iterations(rank, world, run, model, optimizer, run_dir, first, last):
        for group in optimizer.param_groups:
            rate = one.rate(iteration, run.scale.iterations) if len(run.worlds) == 1 else one.peak_rate
            group["lr"] = run.rate * rate
        optimizer.zero_grad()
        loss = one.garbage if run.is_garbage(iteration, rank) else one.loss
        loss(model, iteration, rank).backward()
        optimizer.step()
        if run.averaged and iteration > run.scale.warmup and iteration % STRIDE == 0:
            divergences.append((iteration, divergence(one.model, world)))
        if iteration in points:
            with mean_of_replicas(one.model, world) if run.averaged else nullcontext():
                losses.append((iteration, _held_out(one, rank, world)))
    if rank == 0 and last < run.scale.iterations:
        torch.save((one.model.state_dict(), optimizer.state_dict()), handed_on)
    modules = {module_of(name) for name, _ in one.model.named_parameters()}
    return tuple(losses), len(modules), tuple(divergences)


def train_quality(run: QualityRun, run_dir: Path, seconds: float = 1800.0) -> QualityOutcome:
    """Train on forked ranks. Raises RankError, TimeoutError."""
    losses: Losses = ()
    divergences: Losses = ()
    records: list[SynchronisationRecord] = []
    modules = 0
    for world, (before, last) in zip(run.worlds, pairwise(run.bounds), strict=True):
        folder = run_dir / str(last)
        folder.mkdir(parents=True)
        results = gang(_train, world, run, str(folder), before + 1, last, seconds=seconds)
        losses, modules, divergences = losses + results[0][0], results[0][1], divergences + results[0][2]
        records += [
            SynchronisationRecord(*(event.fields[name] for name in ("iteration", "left_out", "rolled_back", "clipped")))
            for event in read(folder / "events.jsonl")
            if event.name == catalogue.REPLICAS_SYNCHRONISED.name and event.rank == 0
        ]
    return QualityOutcome(run, losses, modules, tuple(records), divergences)


def to_line(outcome: QualityOutcome) -> str:
    """A line of a file of results."""
    return json.dumps(asdict(outcome))


def from_line(line: str) -> QualityOutcome:
    """The inverse of `to_line`."""
    fields: dict[str, Any] = json.loads(line)
    run = fields["run"]
    run |= {"scale": QualityScale(**run["scale"]), "garbage": tuple(run["garbage"]) if run["garbage"] else None}
    run["worlds"] = tuple(run.get("worlds", (RANKS,)))
    records = tuple(SynchronisationRecord(**one) for one in fields["synchronisations"])
    losses, apart = (tuple((at, value) for at, value in fields.get(name, ())) for name in ("losses", "divergences"))
    return QualityOutcome(QualityRun(**run), losses, fields["modules"], records, apart)
