"""Replicas that train on their own on real ranks, and one process that simulates them all one after another."""

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from ft_plugins.adapters.module_edges import EdgeReporter
from ft_plugins.model.inventory import Role
from ft_plugins.model.reduction import ReducedOver
from harness.plain_host import PlainHost

SIZES = (12, 16, 16, 4)
GARBAGE = 50.0  # by which the data of a bad replica is multiplied


def network():
    torch.manual_seed(3)
    layers = [torch.nn.Linear(a, b) for a, b in zip(SIZES, SIZES[1:], strict=False)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


def optimizer_of(model, kind):
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05)


def gradients(model, step, replica, bad=None):
    """Those of one replica in iteration `step`; `bad`: replicas whose data is garbage, in which iterations."""
    made = torch.Generator().manual_seed(1000 * step + replica)
    x, y = torch.randn(8, SIZES[0], generator=made), torch.randn(8, SIZES[-1], generator=made)
    first, last = (bad or {}).get(replica, (1, 0))
    if first <= step <= last:
        y = GARBAGE * y
    model.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()


class ReducedHost(PlainHost):
    """A loop that reduces its gradients by itself, as `over` says, and announces the forward of its layers."""

    over = ReducedOver.ALL

    def __init__(self, model, *arguments, **fields):
        super().__init__(*arguments, **fields)
        self._model = model

    def prepare_reduction(self):
        pass

    def reduce_over(self, replicas):
        self.over = replicas

    def require_own_pace(self):
        """Nothing couples its replicas in an iteration."""

    def shard_group(self):
        return (self.rank,)

    def modules(self):
        return {name: name.split(".")[0] for name, _ in self._model.named_parameters()}

    def before_modules(self, call):
        for name, layer in self._model.named_children():
            if list(layer.parameters()):
                layer.register_forward_pre_hook(lambda layer, given, name=name: call(name))

    def follow_modules(self, edges):
        reporter = EdgeReporter(edges)
        for name, layer in self._model.named_children():
            if parameters := list(layer.parameters()):
                reporter.follow(layer, {name: parameters})


class LocalTraining:
    """One replica on a rank of its own."""

    def __init__(self, rank, world, kind="sgd", bad=None):
        self.rank, self.world, self.bad = rank, world, bad
        self.model = network()
        self.named = dict(self.model.named_parameters())
        self.optimizer = optimizer_of(self.model, kind)
        self.tensors = dict(self.named)
        roles = {}
        for name, parameter in self.named.items():
            for key in ("exp_avg", "exp_avg_sq", "step") if kind == "adam" else ():
                moment = torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
                self.optimizer.state[parameter][key] = moment
                self.tensors[f"{name}.{key}"], roles[f"{name}.{key}"] = moment, Role.MOMENT
        self.host = ReducedHost(
            self.model, self.tensors, rank=rank, world_size=world, replicated=True, roles=roles,
            learning_rate=lambda: self.optimizer.param_groups[0]["lr"],
        )  # fmt: skip

    def backward(self, step):
        gradients(self.model, step, self.rank, self.bad)
        if self.host.over is ReducedOver.ALL:
            for parameter in self.named.values():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world

    def digest(self, moments=True):
        """Of all tensors, or of the parameters alone."""
        digest = xxhash.xxh3_64()
        for name, tensor in sorted((self.tensors if moments else self.named).items()):
            digest.update(name.encode() + tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def parameters(self):
        return self.digest(moments=False)


class Simulation:
    """All replicas in one process. `combine(changes, anchor)` gives the target of one module from the parameters of all
    replicas, one flat float32 array each."""

    def __init__(self, replicas, kind="sgd", bad=None):
        self.models = [network() for _ in range(replicas)]
        self.optimizers = [optimizer_of(model, kind) for model in self.models]
        self.bad = bad
        self.anchors = self.modules(0)
        self.outer_optimizers = {}

    def modules(self, replica):
        """Flat parameters of one replica by layer."""
        return {
            name: np.concatenate([p.detach().numpy().reshape(-1) for p in layer.parameters()])
            for name, layer in self.models[replica].named_children()
            if list(layer.parameters())
        }

    def write(self, name, values):
        for model in self.models:
            at = 0
            for parameter in model.get_submodule(name).parameters():
                part = values[at : at + parameter.numel()]
                parameter.data.copy_(torch.from_numpy(part.copy()).view_as(parameter))
                at += parameter.numel()

    def backward(self, step, together):
        for replica, model in enumerate(self.models):
            gradients(model, step, replica, self.bad)
        if together:
            for same in zip(*(model.parameters() for model in self.models), strict=True):
                total = same[0].grad.clone()
                for other in same[1:]:
                    total += other.grad
                for one in same:
                    one.grad.copy_(total / len(same))

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def remember(self):
        self.anchors = self.modules(0)

    def mean(self, name):
        """The mean of a layer over replicas: summed in float64, rounded once."""
        rows = [self.modules(replica)[name].astype(np.float64) for replica in range(len(self.models))]
        return (sum(rows) / len(rows)).astype(np.float32)

    def outer(self, name, target, rate, momentum):
        """torch's Nesterov SGD on the pseudo-gradient, as DiLoCo has it."""
        if name not in self.outer_optimizers:
            anchor = torch.nn.Parameter(torch.from_numpy(self.anchors[name].copy()))
            optimizer = torch.optim.SGD([anchor], lr=rate, momentum=momentum, nesterov=True)
            self.outer_optimizers[name] = anchor, optimizer
        anchor, optimizer = self.outer_optimizers[name]
        anchor.data.copy_(torch.from_numpy(self.anchors[name]))
        anchor.grad = torch.from_numpy(self.anchors[name] - target)
        optimizer.step()
        return anchor.detach().numpy().copy()

    def digests(self):
        """Of the parameters of each replica, as `LocalTraining.digest(moments=False)`."""
        digests = []
        for model in self.models:
            digest = xxhash.xxh3_64()
            for name, tensor in sorted(dict(model.named_parameters()).items()):
                digest.update(name.encode() + tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
            digests.append(digest.hexdigest())
        return digests
