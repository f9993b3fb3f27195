"""A small job of plain torch that hangs, or only seems to: for tests of what notices that.

Invariant: what happens besides training changes no number, so a run that restarted ends as one in which nothing
happened.

In: flags. Out: JSON lines in `--journal`: where each rank started, and a digest of its final state.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ft_plugins
from ft_plugins.config import launch_context

from .fills import write

_LONG = 10**6  # seconds
_CATASTROPHE = re.compile("(a*)*b"), "a" * 400  # a match that would take longer than the universe, in C, with the GIL
WAYS = (
    "sleep-forward", "sleep-loader", "stop-backward", "spin-forward", "spin-with-lock", "deadlock", "slow-evaluation",
    "slow-first", "slow-save", "slow-upload", "straggle",
)  # fmt: skip


class _Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int, disturb: Callable[[int], None]) -> None:
        self._count, self._disturb = count, disturb

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        self._disturb(index + 1)
        return torch.sin(torch.arange(8.0) * (index + 1))


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        self.before: Callable[[], None] = lambda: None

    def forward(self, inputs: torch.Tensor) -> Any:
        self.before()
        return self.layers(inputs)


def main(argv: list[str]) -> None:
    """Run one rank up to `--iterations`. In `--at`, of the first incarnation, rank 1 does `--how`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--how", choices=WAYS)
    parser.add_argument("--at", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="of what is only slow")
    parser.add_argument("--journal", type=Path, required=True)
    options = parser.parse_args(argv)
    context = launch_context()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group(), dist.new_group()]
    torch.manual_seed(7)
    network = _Model()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters())
    present = [0]

    def due(*hows: str) -> bool:
        return options.how in hows and context.restart == 0 and rank == 1 and present[0] == options.at

    def before_forward() -> None:
        if due("sleep-forward"):
            time.sleep(_LONG)
        if due("spin-forward"):
            while True:
                pass
        if due("spin-with-lock"):
            _CATASTROPHE[0].match(_CATASTROPHE[1])
        if options.how == "slow-first" and present[0] == 1:
            time.sleep(options.seconds)
        if options.how == "straggle" and rank == 1:
            time.sleep(options.seconds)

    def in_loader(number: int) -> None:
        if due("sleep-loader"):
            time.sleep(_LONG)

    network.before = before_forward
    loader = DataLoader(_Samples(options.iterations, in_loader), None)
    session = ft_plugins.attach(ft_plugins.TorchHost(model, optimizer, sampler=loader))
    batches: Iterator[torch.Tensor] | None = None
    for step in session.iterations(options.iterations):
        if batches is None:
            write(options.journal, {"rank": rank, "restart": context.restart, "from": step})
            batches = iter(loader)
        present[0] = step
        inputs = next(batches)
        loss = (model(inputs) - inputs.roll(1)).square().mean()
        if due("stop-backward"):
            os.kill(os.getpid(), signal.SIGSTOP)
        loss.backward()
        if options.how == "deadlock" and context.restart == 0 and step == options.at:
            for group in groups if rank else reversed(groups):
                dist.all_reduce(torch.zeros(1), group=group)
        optimizer.step()
        optimizer.zero_grad()
        if options.how == "slow-evaluation" and step == options.at:
            with torch.no_grad():
                for _ in range(2):
                    model.module(inputs)
                    time.sleep(options.seconds)
        if due("slow-upload"):
            _upload(options.seconds)
        if options.how == "slow-save" and step == options.at and rank == 0:
            torch.save(_Slow(options.seconds), os.devnull)
    state = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    state += [tensor.numpy().tobytes() for one in optimizer.state.values() for tensor in one.values()]
    write(options.journal, {"rank": rank, "ended": xxhash.xxh3_64_hexdigest(b"".join(state))})
    dist.destroy_process_group()


def _upload(seconds: float) -> None:
    """What the package does not see."""
    time.sleep(seconds)


class _Slow:
    """An object that takes long to save."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __reduce__(self) -> tuple[type[float], tuple[()]]:
        time.sleep(self._seconds)
        return float, ()
