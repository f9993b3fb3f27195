"""Loops that users write:

    gan          two optimizers over two networks
    lora         adapters of a frozen network under FSDP2
    accumulated  two batches for an update, of workers that augment; a rate by the loss of an epoch; the best weights
    scaled       a GradScaler whose update is skipped once, batch norm, an average of the weights
    curriculum   growing batches, a data set with a generator of its own, warm-up; one network trains every other time
    sized        an optimizer that keeps more of large tensors, and has empty state of all before its first update
    apart        ranks that train on their own

    ft-run --nproc-per-node 2 own_loops.py gan PREFIX --reft
    torchrun --nproc-per-node 2 own_loops.py gan PREFIX unprotected

The final state of each rank is written to PREFIX and its rank.
"""

import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import ft_plugins
from ft_plugins.adapters.host_parts import local_part
from ft_plugins.model.digest import readable

ITERATIONS = 12
Loop = tuple[nn.Module, list[torch.optim.Optimizer], Callable[[], Any], Callable[[], None], Callable[[], Any]]


def gan():
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)))
    discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1)))
    model = nn.ModuleDict({"g": generator, "d": discriminator})
    opt_g = torch.optim.Adam(generator.parameters(), 0.01)
    opt_d = torch.optim.SGD(discriminator.parameters(), 0.05, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.95) for one in (opt_g, opt_d)]

    def iterate():
        with torch.no_grad():
            fake = generator(torch.randn(8, 4))
        opt_d.zero_grad()
        scores = discriminator(torch.cat([fake, torch.randn(8, 6).sin()]))
        (scores[:8].mean() - scores[8:].mean() + scores.square().mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        (-discriminator(generator(torch.randn(8, 4))).mean()).backward()
        opt_g.step()
        for scheduler in schedulers:
            scheduler.step()

    return model, [opt_g, opt_d], lambda: ft_plugins.TorchHost(model, [opt_g, opt_d], schedulers), iterate, dict


class Adapted(nn.Module):
    """A frozen layer, and a product of two small ones that is trained."""

    def __init__(self, width, rank=2):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return torch.relu(self.base(x) + self.up(self.dropout(self.down(x))))


def lora():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(Adapted(6) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.01)

    def iterate():
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, [optimizer], lambda: ft_plugins.FsdpHost(model, optimizer, mesh=mesh), iterate, dict


class Noisy(Dataset[Any]):
    """Draws in its process, and from a generator of its own."""

    def __init__(self):
        self.jitter = random.Random(3)

    def __len__(self):
        return 22

    def __getitem__(self, index):
        x = torch.arange(4.0).sin() * index / 10
        return x + 0.1 * torch.randn(4) + 0.01 * self.jitter.random(), x.sum().reshape(1)


def endless(loader):
    while True:
        yield from loader


def accumulated():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loader = DataLoader(Noisy(), 2, shuffle=True, num_workers=2)
    track = {"step": 0, "best": 1e9, "loss": 0.0, "weights": copy.deepcopy(model.state_dict())}
    batches = endless(loader)

    def iterate():
        optimizer.zero_grad()
        for _ in range(2):
            x, y = next(batches)
            loss = (model(x) - y).square().mean() / 2
            loss.backward()
            track["loss"] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        track["step"] += 1
        if track["step"] % 3 == 0:
            scheduler.step(track["loss"])
            if track["loss"] < track["best"]:
                track.update(best=track["loss"], weights=copy.deepcopy(model.state_dict()))
            track["loss"] = 0.0

    own = {"get_state": lambda: track, "set_state": track.update}
    return (
        model, [optimizer], lambda: ft_plugins.TorchHost(model, optimizer, scheduler, loader, **own), iterate,
        lambda: {**track, "scheduler": scheduler.state_dict()},
    )  # fmt: skip


def scaled():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True)
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    loader = DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(3), drop_last=True)
    batches, at = endless(loader), {"step": 0}

    def iterate():
        at["step"] += 1
        x, y = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - y).square().mean()
        scaler.scale(loss * float("inf") if at["step"] == 5 else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        ema.update_parameters(model.module)

    def get_state():
        return {"ema": dict(ema.state_dict()), "scaler": scaler.state_dict(), "at": at}

    def set_state(state):
        ema.load_state_dict(state["ema"])
        scaler.load_state_dict(state["scaler"])
        at.update(state["at"])

    own = {"get_state": get_state, "set_state": set_state}
    return (
        model, [optimizer], lambda: ft_plugins.TorchHost(model, optimizer, None, loader, **own), iterate, get_state,
    )  # fmt: skip


def curriculum():
    generator = DistributedDataParallel(nn.Linear(3, 4))
    judge = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.LeakyReLU(), nn.Linear(6, 1)), find_unused_parameters=True
    )
    model = nn.ModuleDict({"g": generator, "d": judge})
    optimizers = {
        "g": torch.optim.Adam(generator.parameters(), 0.01, betas=(0.5, 0.9)),
        "d": torch.optim.RMSprop(judge.parameters(), 0.005),
    }
    schedulers = {
        name: torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 5))
        for name, one in optimizers.items()
    }
    loader = DataLoader(Noisy(), 1, shuffle=True)
    batches = endless(loader)

    def iterate():
        step = schedulers["g"].last_epoch + 1
        real = torch.cat([next(batches)[0] for _ in range(1 + step // 4)])
        optimizers["d"].zero_grad()
        fake = generator(torch.randn(len(real), 3)).detach()
        (judge(fake).mean() - judge(real).mean() + 0.1 * judge(real).square().mean()).backward()
        optimizers["d"].step()
        if step % 2 == 0:
            optimizers["g"].zero_grad()
            (-judge(generator(torch.randn(len(real), 3))).mean()).backward()
            optimizers["g"].step()
        for one in schedulers.values():
            one.step()

    host = lambda: ft_plugins.TorchHost(model, optimizers, schedulers, loader)  # noqa: E731
    return model, list(optimizers.values()), host, iterate, lambda: [one.state_dict() for one in schedulers.values()]


class BySize(torch.optim.Optimizer):
    """Averages gradients; corrects the average of large tensors for its beginning."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        _ = [self.state[one] for group in self.param_groups for one in group["params"]]  # as a lookup makes it

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["mean"] = torch.zeros_like(one)
                    if one.numel() >= 100:
                        state["updates"] = torch.zeros(())
                mean = state["mean"].mul_(0.9).add_(one.grad, alpha=0.1)
                if "updates" in state:
                    state["updates"] += 1
                    mean = mean / (1 - 0.9 ** float(state["updates"]))
                one.sub_(mean, alpha=group["lr"])


def sized():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.2), nn.Linear(30, 1)))
    return _regression(model, BySize(model.parameters(), 0.1))


def apart():
    model = nn.Linear(4, 3)
    return _regression(model, torch.optim.SGD(model.parameters(), 0.1))


def _regression(model, optimizer):
    def iterate():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    return model, [optimizer], lambda: ft_plugins.TorchHost(model, optimizer), iterate, dict


KINDS = {one.__name__: one for one in (gan, lora, accumulated, scaled, curriculum, sized, apart)}


def main(kind, prefix, *words):
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    random.seed(5)
    model, optimizers, host, iterate, more = KINDS[kind]()
    torch.manual_seed(50 + dist.get_rank())
    steps = range(ITERATIONS)
    if "unprotected" not in words:
        steps = ft_plugins.attach(host()).iterations(ITERATIONS)
    for _ in steps:
        iterate()
    state = {
        "model": {name: local_part(one) for name, one in model.state_dict().items()},
        "moments": [[{k: local_part(v) for k, v in s.items()} for s in one.state.values()] for one in optimizers],
        "rates": [group["lr"] for one in optimizers for group in one.param_groups],
        "rng": torch.get_rng_state(),
        "more": {"": more()},
    }
    Path(f"{prefix}{dist.get_rank()}").write_text(json.dumps(readable(state)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
