"""A plain torch training loop on real text: predicts the next byte, with dropout and a shuffled data order.

    ft-run --nproc-per-node 2 launch/examples/torch_loop.py --reft
    torchrun --nproc-per-node 2 launch/examples/torch_loop.py --unprotected        (plain, with identical numbers)

`main(argv)` is one rank, from init_process_group to destroy_process_group. Three parts of `train` protect the job:
host, attach, and the loop over `session.iterations`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byte_text import VOCABULARY, Text
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ft_plugins
from ft_plugins.errors import EXIT_REFUSED, FtError
from ft_plugins.model.digest import readable

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr),
    "adamw-amsgrad": lambda parameters, lr: torch.optim.AdamW(parameters, lr, amsgrad=True),
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr),
    "sgd-momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
}
_COMMUTES = 2  # the gradients of up to two ranks sum to the same bits in any order


class Windows(Dataset[tuple[int, torch.Tensor]]):
    """The first `count` windows of a text, each with its number."""

    def __init__(self, text: Text, count: int, sequence: int) -> None:
        self._text, self._count, self._length = text.content, count, sequence + 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        window = self._text[index * self._length : (index + 1) * self._length]
        return index, torch.from_numpy(window.copy()).long()


def network(hidden: int, dropout: float) -> torch.nn.Module:
    """A network that predicts the next byte from each byte."""
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, hidden),
        torch.nn.Linear(hidden, 4 * hidden),
        torch.nn.GELU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(4 * hidden, VOCABULARY),
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The job's own flags. ft-run has removed those of ft_plugins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--iterations", type=int, default=20, help="iterations of the whole run")
    parser.add_argument("--windows", type=int, default=96, help="samples per epoch, over all ranks")
    parser.add_argument("--batch", type=int, default=8, help="samples per iteration on each rank")
    parser.add_argument("--sequence", type=int, default=32, help="bytes per sample")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1234, help="of weights, dropout and data order")
    parser.add_argument("--data", help="any text file (default: the sources of Python's standard library)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="ranks share the devices of a node")
    parser.add_argument("--unprotected", action="store_true", help="without ft_plugins")
    parser.add_argument("--loss-log", help="JSON lines, appended by rank 0")
    parser.add_argument("--state-digest", help="prefix of the files that describe the final state, one per rank")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run one rank. Raises FtError if the user has to decide something."""
    args = parse(argv)
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    backend = "gloo"
    if args.device == "cuda":
        torch.use_deterministic_algorithms(True)  # else two runs of the same job differ, protected or not
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count():
            backend = "nccl"  # which wants a device for each rank
    distributed = world > 1 or backend == "nccl"
    if distributed:
        dist.init_process_group(backend)
    train(args, rank, world)
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


def train(args: argparse.Namespace, rank: int, world: int) -> None:
    """The training loop."""
    torch.manual_seed(args.seed)
    windows = Windows(Text.read(args.data), args.windows, args.sequence)
    sampler: DistributedSampler[Any] = DistributedSampler(windows, world, rank, seed=args.seed)
    loader = DataLoader(windows, args.batch, sampler=sampler, drop_last=True)
    model = network(args.hidden, args.dropout).to(args.device)
    if dist.is_initialized():  # find_unused_parameters fixes the order in which gradients are summed
        model = DistributedDataParallel(model, find_unused_parameters=world > _COMMUTES)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iterations)
    torch.manual_seed(args.seed + rank)  # each rank's own dropout

    steps: Iterable[int] = range(1, args.iterations + 1)
    if not args.unprotected:
        facts = {"seed": args.seed, "batch": args.batch, "data": Text.read(args.data).fingerprint()}
        host = ft_plugins.TorchHost(model, optimizer, scheduler, loader, fingerprint=facts)
        steps = ft_plugins.attach(host).iterations(args.iterations)

    batches = endless(loader, sampler)
    for step in steps:
        samples, window = next(batches)
        window = window.to(args.device)
        scores = model(window[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0:
            log(args, step, loss.item(), samples.tolist())
    if args.state_digest:
        write_digest(Path(f"{args.state_digest}{rank:05d}.json"), model, optimizer, scheduler)


def endless(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    """Batches of one epoch after another. Starts at the first `next`, after the sampler's epoch is restored."""
    for epoch in count(sampler.epoch):
        sampler.set_epoch(epoch)
        yield from loader


def log(args: argparse.Namespace, step: int, loss: float, samples: list[int]) -> None:
    """Log one line per iteration. A repeated iteration is logged again."""
    print(f"iteration {step:>5} / {args.iterations}  loss {loss:.4f}", flush=True)
    if args.loss_log:
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        line = {"iteration": step, "loss": loss, "loss_hex": loss.hex(), "samples": samples}
        with open(args.loss_log, "a") as lines:
            lines.write(json.dumps({**line, "restart": restart, "time": time.time()}) + "\n")


def write_digest(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Write digests of this rank's final state, for comparing two runs."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    states = {name: readable(dict(state)) for name, state in states.items()}
    states["rng"] = readable(torch.get_rng_state())
    if torch.cuda.is_initialized():
        states["device_rng"] = readable(torch.cuda.get_rng_state())
    path.write_text(json.dumps(states, indent=1))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_REFUSED)
