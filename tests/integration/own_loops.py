"""Loops that users write: `gan`, two optimizers over two networks; `lora`, adapters of a frozen network under FSDP2.

    ft-run --nproc-per-node 2 own_loops.py gan PREFIX --reft
    torchrun --nproc-per-node 2 own_loops.py gan PREFIX unprotected

The final state of each rank is written to PREFIX and its rank.
"""

from __future__ import annotations

import json
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

import ft_plugins
from ft_plugins.adapters.host_parts import local_part
from ft_plugins.model.digest import readable

ITERATIONS = 12
Loop = tuple[nn.Module, list[torch.optim.Optimizer], Callable[[], Any], Callable[[], None]]


def gan() -> Loop:
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)))
    discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1)))
    model = nn.ModuleDict({"g": generator, "d": discriminator})
    opt_g = torch.optim.Adam(generator.parameters(), 0.01)
    opt_d = torch.optim.SGD(discriminator.parameters(), 0.05, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.95) for one in (opt_g, opt_d)]

    def iterate() -> None:
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

    return model, [opt_g, opt_d], lambda: ft_plugins.TorchHost(model, [opt_g, opt_d], schedulers), iterate


class Adapted(nn.Module):
    """A frozen layer, and a product of two small ones that is trained."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.up(self.dropout(self.down(x))))


def lora() -> Loop:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(Adapted(6) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.01)

    def iterate() -> None:
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, [optimizer], lambda: ft_plugins.FsdpHost(model, optimizer, mesh=mesh), iterate


def main(kind: str, prefix: str, *words: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model, optimizers, host, iterate = {"gan": gan, "lora": lora}[kind]()
    torch.manual_seed(50 + dist.get_rank())
    steps: Any = range(ITERATIONS)
    if "unprotected" not in words:
        steps = ft_plugins.attach(host()).iterations(ITERATIONS)
    for _ in steps:
        iterate()
    state = {
        "model": {name: local_part(one) for name, one in model.state_dict().items()},
        "moments": [[{k: local_part(v) for k, v in s.items()} for s in one.state.values()] for one in optimizers],
        "rates": [group["lr"] for one in optimizers for group in one.param_groups],
        "rng": torch.get_rng_state(),
    }
    Path(f"{prefix}{dist.get_rank()}").write_text(json.dumps(readable(state)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
