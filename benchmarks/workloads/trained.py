"""Train replicas of a learner under a session, like a user's plain torch loop, with corrupted gradients.

    iteration t    iteration_begin, gradients, their mean over all ranks, before_update, update, after_update, _end

Invariant: a run without configuration calls nothing of the package, so the clean run is torch's own. Version T is
scored as the next update sees it: iteration T + 1 runs up to its fence (before_update), where an averaging in flight
has been applied and an audit's repair is done.

In: `TrainingRun`. Out: `TrainedRank`, by rank; events in the run directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from ft_plugins.config import Config, launch_context
from ft_plugins.errors import FtError
from ft_plugins.events import Event, read
from ft_plugins.model.inventory import Role
from ft_plugins.session import Session, attach
from harness.gang import gang
from harness.plain_host import PlainHost
from workloads.learners import learner

MOMENTUM, BETAS = 0.9, (0.9, 0.99)  # the paper's
_STATE = {"adam": ("exp_avg", "exp_avg_sq", "step"), "momentum": ("momentum_buffer",), "sgd": ()}


@dataclass(frozen=True)
class TrainingRun:
    """What to train, for how long, and with which configuration. `paft`: its JSON block; None: no session."""

    learner: str
    seed: int
    iterations: int
    paft: Mapping[str, Any] | None = None
    faults: str = ""
    evaluations: int = 10  # of the score, the last one included
    optimizer: str = ""  # '': the learner's own
    peak_rate: float = 0.0  # 0: the learner's own


@dataclass(frozen=True)
class TrainedRank:
    """The results of one rank. `divergences`: ||mean - theta||, root mean square over ranks, by iteration."""

    scores: tuple[tuple[int, float], ...]
    divergences: tuple[tuple[int, float], ...]
    digest: str  # of parameters and optimizer state
    rates: tuple[float, ...]
    dimension: int


@dataclass(frozen=True)
class TrainingOutcome:
    """The results and events of a run."""

    run: TrainingRun
    ranks: tuple[TrainedRank, ...]
    events: tuple[Event, ...] = field(repr=False)

    @property
    def scores(self) -> list[tuple[int, float]]:
        """The mean over replicas, by iteration. A non-finite replica scores NaN."""
        return [
            (points[0][0], math.fsum(score for _, score in points) / len(points))
            for points in zip(*(one.scores for one in self.ranks), strict=True)
        ]

    @property
    def score(self) -> float:
        """The score of the last version."""
        return self.scores[-1][1]

    @property
    def digests(self) -> tuple[str, ...]:
        """The final digests by rank."""
        return tuple(one.digest for one in self.ranks)

    def named(self, name: str) -> list[Event]:
        """The events of that name."""
        return [event for event in self.events if event.name == name]


class Replica:
    """One rank's model, optimizer and session."""

    def __init__(self, rank: int, world: int, run: TrainingRun, run_dir: Path) -> None:
        self._learner = learner(run.learner, run.seed)
        self._rank, self._world, self._run = rank, world, run
        self._model = self._learner.model
        self.parameters = dict(self._model.named_parameters())
        kind = run.optimizer or self._learner.optimizer
        self._peak = run.peak_rate or self._learner.peak_rate
        self._optimizer = optimizer_of(kind, list(self.parameters.values()))
        self._tensors, roles, layers = _state(self.parameters, self._optimizer, kind)
        self._session: Session | None = None
        if run.paft is not None:
            host = PlainHost(
                self._tensors, rank=rank, world_size=world, replicated=True, roles=roles, layers=layers,
                learning_rate=self._rate, gradients=self._gradients, recompute=self.gradients,
            )  # fmt: skip
            config = Config.from_json({"paft": dict(run.paft), **({"faults": run.faults} if run.faults else {})})
            context = replace(launch_context(), run_dir=run_dir)
            self._session = attach(host, config, context)
            self._session.resume()

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: one.grad for name, one in self.parameters.items() if one.grad is not None}

    def gradients(self, iteration: int) -> None:
        """Compute the gradients of an iteration, averaged over all ranks."""
        self._optimizer.zero_grad()
        self._learner.loss(self._model, iteration, self._rank).backward()
        own = list(self._gradients().values())
        flat = torch.cat([gradient.flatten() for gradient in own])
        dist.all_reduce(flat)
        for gradient, part in zip(own, (flat / self._world).split([each.numel() for each in own]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def up_to_fence(self, iteration: int) -> None:
        """Run an iteration up to its update."""
        rate = self._peak / self._learner.peak_rate * self._learner.rate(iteration, self._run.iterations)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self._session is not None:
            self._session.iteration_begin(iteration)
        self.gradients(iteration)
        if self._session is not None:
            self._session.before_update(iteration)

    def update(self, iteration: int) -> float:
        """Run the rest of the iteration; returns its learning rate."""
        self._optimizer.step()
        if self._session is not None:
            self._session.after_update(iteration)
            self._session.iteration_end(iteration)
        return self._rate()

    def end(self) -> None:
        """Shut the session down."""
        if self._session is not None:
            self._session.shutdown()

    def score(self) -> float:
        """The learner's score of this replica."""
        return self._learner.score(self._model)

    def divergence(self) -> float:
        """The root mean square distance of the replicas from their mean."""
        own = torch.cat([one.detach().flatten() for one in self.parameters.values()]).double()
        mean = own.clone()
        dist.all_reduce(mean)
        squares = (mean / self._world - own).square().sum()
        dist.all_reduce(squares)
        return math.sqrt(squares.item() / self._world)

    def digest(self) -> str:
        """The digest of parameters and optimizer state."""
        digest = xxhash.xxh3_64()
        for name in sorted(self._tensors):
            digest.update(self._tensors[name].detach().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def optimizer_of(kind: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of learners, before its learning rate is set."""
    match kind:
        case "adam":
            return torch.optim.Adam(parameters, lr=0.0, betas=BETAS)
        case "momentum":
            return torch.optim.SGD(parameters, lr=0.0, momentum=MOMENTUM)
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.0)
    raise FtError(f"optimizer '{kind}': expected one of {', '.join(_STATE)}")


def _state(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, kind: str
) -> tuple[dict[str, torch.Tensor], dict[str, Role], dict[str, int]]:
    """All tensors, with moments created as the first update would create them; roles; layers, one per module."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
    tensors: dict[str, torch.Tensor] = {}
    roles, layers = {}, {}
    for name, parameter in parameters.items():
        layer = modules.index(name.rpartition(".")[0])
        tensors[name], layers[name] = parameter, layer
        for key in _STATE[kind]:
            moment = torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
            optimizer.state[parameter][key] = moment
            own = f"{name}.{key}"
            tensors[own], roles[own], layers[own] = moment, Role.MOMENT, layer
    return tensors, roles, layers


def evaluated_at(iterations: int, evaluations: int) -> list[int]:
    """The iterations after which the score is taken: evenly spaced, the last one included."""
    return sorted({round(iterations * number / evaluations) for number in range(1, evaluations + 1)} - {0})


def _train(rank: int, world: int, run: TrainingRun, run_dir: str, every: bool) -> TrainedRank:
    replica = Replica(rank, world, run, Path(run_dir))
    points = evaluated_at(run.iterations, run.evaluations)
    scores, divergences, rates = [], [], []
    for iteration in range(1, run.iterations + 2):
        if every and iteration > 1:  # of the previous version, right after its update
            divergences.append((iteration - 1, replica.divergence()))
        replica.up_to_fence(iteration)
        if iteration - 1 in points:
            scores.append((iteration - 1, replica.score()))
            if not every:
                divergences.append((iteration - 1, replica.divergence()))
        if iteration <= run.iterations:
            rates.append(replica.update(iteration))
    dimension = sum(one.numel() for one in replica.parameters.values())
    digest = replica.digest()
    replica.end()
    return TrainedRank(tuple(scores), tuple(divergences), digest, tuple(rates), dimension)


def train(run: TrainingRun, world: int, run_dir: Path, every: bool = False, seconds: float = 300.0) -> TrainingOutcome:
    """Train on `world` forked ranks. `every`: measure divergence after each update, before any averaging, instead of
    when the score is taken. Raises RankError, TimeoutError."""
    run_dir.mkdir(parents=True)
    ranks: Sequence[TrainedRank] = gang(_train, world, run, str(run_dir), every, seconds=seconds)
    return TrainingOutcome(run, tuple(ranks), tuple(read(run_dir / "events.jsonl")))
