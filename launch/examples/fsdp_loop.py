"""A plain torch loop over a model that `fully_shard` has sharded (FSDP2): a small GPT that learns text byte by byte.

    ft-run --nproc-per-node 4 launch/examples/fsdp_loop.py --reft
    ft-run --nproc-per-node 4 launch/examples/fsdp_loop.py --local --reft --sync-policy edit --sync-tau 4
    torchrun --nproc-per-node 4 launch/examples/fsdp_loop.py --unprotected       (plain, with identical numbers)

Ranks are a mesh of replicas, each divided over `--shards` ranks. With `--local` FSDP averages gradients over the shards
of a replica alone, and ft_plugins synchronises the replicas; otherwise FSDP averages over all ranks (HSDP).

`main(argv)` is one rank. Three parts of `train` protect the job: host, attach, and the loop over `session.iterations`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byte_text import VOCABULARY, Sampler, Text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import ft_plugins
from ft_plugins.errors import EXIT_REFUSED, FtError
from ft_plugins.model.digest import readable


class Block(torch.nn.Module):
    """Attention and MLP."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        output: torch.Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.before_mlp(x)))))
        return output


class Gpt(torch.nn.Module):
    """Predicts the next byte from all bytes before it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, args.hidden)
        self.place = torch.nn.Parameter(torch.zeros(args.sequence, args.hidden))
        self.blocks = torch.nn.ModuleList(Block(args.hidden, args.heads, args.dropout) for _ in range(args.layers))
        self.norm = torch.nn.LayerNorm(args.hidden)
        self.head = torch.nn.Linear(args.hidden, VOCABULARY, bias=False)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        if not args.untied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""
        x = self.embedding(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The job's own flags. ft-run has removed those of ft_plugins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2, help="ranks over which a replica is divided")
    parser.add_argument("--local", action="store_true", help="reduce no gradients over replicas: for local SGD")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; parameters stay in fp32")
    parser.add_argument("--untied", action="store_true", help="the head has a weight of its own")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=32, help="bytes per sample")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=4, help="samples per iteration on each rank")
    parser.add_argument("--iterations", type=int, default=20, help="iterations of the whole run")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=8, help="iterations in which the learning rate grows")
    parser.add_argument("--eval-at", type=int, default=0, help="evaluate after each multiple; 0: never")
    parser.add_argument("--seed", type=int, default=1234, help="of weights, dropout and data order")
    parser.add_argument("--data", help="any text file (default: the sources of Python's standard library)")
    parser.add_argument("--unprotected", action="store_true", help="without ft_plugins")
    parser.add_argument("--loss-log", help="JSON lines, appended by rank 0")
    parser.add_argument("--state-digest", help="prefix of the files that describe the final state, one per rank")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run one rank. Raises FtError if the user has to decide something."""
    args = parse(argv)
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    replicas = dist.get_world_size() // args.shards
    train(args, init_device_mesh(device, (replicas, args.shards), mesh_dim_names=("sync", "shard")))
    dist.barrier()
    dist.destroy_process_group()


def sharded(args: argparse.Namespace, mesh: DeviceMesh) -> torch.nn.Module:
    """The model, built from the same seed on all ranks; each block is gathered and reduced on its own."""
    torch.manual_seed(args.seed)
    model = Gpt(args).to(mesh.device_type)
    over = mesh["shard"] if args.local else mesh
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": over, "mp_policy": policy if args.bf16 else MixedPrecisionPolicy()}
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def train(args: argparse.Namespace, mesh: DeviceMesh) -> None:
    """The training loop."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=args.warmup)
    text = Text.read(args.data)
    parts = text.split(0.05, args.sequence)
    sizes = {"sequence": args.sequence, "micro_batch": args.batch, "replica": rank, "replicas": world}
    batches, valid = (Sampler(part, seed=args.seed, **sizes) for part in parts)
    torch.manual_seed(args.seed + rank)  # each rank's own dropout

    steps: Iterable[int] = range(1, args.iterations + 1)
    if not args.unprotected:
        facts = {"seed": args.seed, "batch": args.batch, "bf16": args.bf16, "data": text.fingerprint()}
        host = ft_plugins.FsdpHost(
            model, optimizer, scheduler, batches, mesh=mesh, fingerprint=facts,
            get_state=valid.state_dict, set_state=valid.load_state_dict,
        )  # fmt: skip
        steps = ft_plugins.attach(host).iterations(args.iterations)

    for step in steps:
        tokens, labels = (part.to(mesh.device_type) for part in next(batches))
        loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        numbers = {"loss": loss.item()}
        if args.eval_at and step % args.eval_at == 0:
            numbers["valid_loss"] = evaluate(model, valid, mesh.device_type)
        if rank == 0:
            log(args, step, numbers)
    if args.state_digest:
        write_digest(Path(f"{args.state_digest}{rank:05d}.json"), model, optimizer, scheduler)


@torch.no_grad()
def evaluate(model: torch.nn.Module, valid: Sampler, device: str) -> float:
    """The loss of this rank's next validation batch, without dropout."""
    model.eval()
    tokens, labels = (part.to(device) for part in next(valid))
    loss = model(tokens, labels).item()
    model.train()
    return float(loss)


def log(args: argparse.Namespace, step: int, numbers: dict[str, float]) -> None:
    """Log one line per iteration. A repeated iteration is logged again."""
    print(f"iteration {step:>5} / {args.iterations}  loss {numbers['loss']:.4f}", flush=True)
    if args.loss_log:
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        with open(args.loss_log, "a") as lines:
            lines.write(json.dumps({"iteration": step, **numbers, "restart": restart, "time": time.time()}) + "\n")


def write_digest(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Write digests of this rank's shards at the end, for comparing two runs."""
    items = dict(model.state_dict())  # of sharded parameters
    for name, parameter in model.named_parameters():
        items |= {f"{name}:{key}": value for key, value in optimizer.state[parameter].items()}
    local = {name: one.to_local() if hasattr(one, "to_local") else one for name, one in items.items()}
    small = {"scheduler": readable(scheduler.state_dict()), "rng": readable(torch.get_rng_state())}
    path.write_text(json.dumps({"items": readable(local), **small}, indent=1))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_REFUSED)
