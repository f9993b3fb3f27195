"""A training loop of torch alone whose replicas can be corrupted, for tests of what makes them one again."""

import torch
import torch.distributed as dist
import xxhash

from ft_plugins.base import faults
from ft_plugins.collective import Collective
from ft_plugins.config import PaftConfig
from ft_plugins.events import Events
from ft_plugins.model.inventory import Role
from ft_plugins.systems.paft import Paft
from harness.plain_host import PlainHost

LAYERS = (64, 128, 64, 8)  # 17,096 parameters


def digest_of(tensors):
    found = xxhash.xxh3_64()
    for name in sorted(tensors):
        found.update(tensors[name].detach().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class Training:
    """One replica: a small network, real optimizer, data of its own, gradients averaged over all ranks."""

    def __init__(self, rank, world, optimizer="adam", rate=0.01, recomputes=True):
        torch.manual_seed(3)
        self.rank, self.world = rank, world
        sizes = zip(LAYERS, LAYERS[1:], strict=False)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in sizes))
        self.named = dict(self.model.named_parameters())
        kinds = {
            "adam": lambda those: torch.optim.AdamW(those, lr=rate),
            "sgd": lambda those: torch.optim.SGD(those, lr=rate),
            "momentum": lambda those: torch.optim.SGD(those, lr=rate, momentum=0.9),
        }
        self.optimizer = kinds[optimizer](self.named.values())
        tensors, roles, layers = {}, {}, {}
        for name, parameter in self.named.items():
            tensors[name], layers[name] = parameter, int(name.split(".")[0])
            keys = {"adam": ("exp_avg", "exp_avg_sq", "step"), "momentum": ("momentum_buffer",), "sgd": ()}[optimizer]
            for key in keys:
                moment = torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
                self.optimizer.state[parameter][key] = moment
                tensors[f"{name}.{key}"], roles[f"{name}.{key}"] = moment, Role.MOMENT
                layers[f"{name}.{key}"] = layers[name]
        self.tensors = tensors
        self.recomputed = []
        self.host = PlainHost(
            tensors, rank=rank, world_size=world, replicated=True, roles=roles, layers=layers,
            learning_rate=lambda: self.optimizer.param_groups[0]["lr"],
            gradients=lambda: {name: p.grad for name, p in self.named.items() if p.grad is not None},
            recompute=self._recompute if recomputes else None,
        )  # fmt: skip

    def backward(self, step):
        """Gradients of iteration `step`, the mean over ranks; no random number but those of rank and step."""
        torch.manual_seed(1000 * step + self.rank)
        x, y = torch.randn(16, LAYERS[0]), torch.randn(16, LAYERS[-1])
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), y).backward()
        self._reduce(None, self.world)

    def _reduce(self, group, count):
        """The mean over a group's ranks."""
        gradients = [parameter.grad for parameter in self.named.values() if parameter.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, (flat / count).split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _recompute(self, step):
        self.recomputed.append(step)
        self.backward(step)

    def digest(self):
        """Of all tensors, parameters and optimizer state."""
        return digest_of(self.tensors)

    def parameters(self):
        """A digest of the parameters alone."""
        return digest_of(self.named)

    def copy(self):
        return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def load(self, saved):
        with torch.no_grad():
            for name, tensor in saved.items():
                self.tensors[name].copy_(tensor)


class Watched:
    """A replica with PAFT: `events` by name, digests of parameters at each hook."""

    def __init__(self, training, config, completed=0, state=None):
        self.training = training
        self.written = []
        self.fenced = {}  # parameters right before each update
        self.versions = {}  # all tensors after each update
        self.completed = completed
        self.paft = None
        if config is not None:
            events = Events("n", training.rank)
            events.subscribe(self.written.append)
            self.paft = Paft(training.host, config, events)
            self.paft.connect(Collective())
            self.paft.begin(completed, state)

    def run(self, until):
        for step in range(self.completed + 1, until + 1):
            if self.paft:
                self.paft.iteration_begin(step)
            self.training.backward(step)
            if self.paft:
                self.paft.before_update(step)
            self.fenced[step] = self.training.parameters()
            self.training.optimizer.step()
            if self.paft:
                self.paft.after_update(step)
            self.versions[step] = self.training.digest()
            self.completed = step
        return self

    def events(self, name):
        return [event.fields for event in self.written if event.name == name]

    def end(self):
        """The orderly end; what a test wants to know."""
        if self.paft:
            self.paft.shutdown()
            self.paft.shutdown()
        names = sorted({event.name for event in self.written})
        return {
            "fenced": self.fenced,
            "versions": self.versions,
            "events": {name: self.events(name) for name in names},
            "recomputed": self.training.recomputed,
            "finite": all(bool(tensor.isfinite().all()) for tensor in self.training.named.values()),
        }


def train(rank, world, block, until, armed="", options=None):
    """A run from the start: `block` is that of PAFT, None for none."""
    faults.arm(armed, rank=rank)
    config = None if block is None else PaftConfig(**block)
    return Watched(Training(rank, world, **(options or {})), config).run(until).end()
