"""Pretrain a small byte-level GPT on real text with DeepSpeed: a PipelineModule, or an engine without pipeline.

    ft-run --nproc-per-node 8 launch/examples/deepspeed_gpt.py --tp 2 --pp 2 --deepspeed_config ds.json
    torchrun --nproc-per-node 8 launch/examples/deepspeed_gpt.py --tp 2 --pp 2 --deepspeed_config ds.json

The block `"ft_plugins": {"reft": {}}` in ds.json protects the job. The script only needs what DeepSpeed's own
checkpoints need: a loop that continues from `engine.global_steps`. `main(argv)` is one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from byte_text import Sampler, Text
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed_layers import Block, Cut, Embedding, Norm, Plain, Sizes, logits, loss


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The job's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, type=int)
    for flag, default, meaning in (
        ("--tp", 1, "tensor parallel size"),
        ("--pp", 1, "pipeline stages; 0: an engine without pipeline"),
        ("--layers", 4, "transformer layers"),
        ("--hidden", 64, "hidden size"),
        ("--heads", 4, "attention heads"),
        ("--sequence", 64, "tokens per sample"),
        ("--iterations", 20, "iterations of the whole run"),
        ("--eval-at", 0, "evaluate every so many iterations; 0: never"),
        ("--seed", 1234, "of weights, dropout and data order"),
        ("--local_rank", int(os.environ.get("LOCAL_RANK", 0)), "given by DeepSpeed's launcher"),
    ):
        add(flag, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--deepspeed_config", required=True, help="DeepSpeed's JSON file")
    parser.add_argument("--data", help="any text file (default: the sources of Python's standard library)")
    parser.add_argument(
        "--axes", default="pipe-data-model", help="order of the ranks, last axis adjacent (default %(default)s)"
    )
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--loss-log", help="JSON lines, appended by one rank")
    parser.add_argument("--state-digest", help="prefix of the files that describe the final state, one per rank")
    return parser.parse_args(argv)


class Windows(torch.utils.data.Dataset):
    """The windows of a text, for DeepSpeed's own loader."""

    def __init__(self, text: Text, sequence: int) -> None:
        self._content, self._sequence = text.content, sequence

    def __len__(self) -> int:
        return (len(self._content) - 1) // self._sequence

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._sequence
        window = torch.from_numpy(self._content[start : start + self._sequence + 1].astype(np.int64))
        return window[:-1], window[1:]


def main(argv: Sequence[str]) -> None:
    """Run one rank."""
    args = parse(argv)
    torch.set_num_threads(1)
    if torch.cuda.is_available():  # else two runs of the same job differ there, protected or not
        torch.use_deterministic_algorithms(True)
    deepspeed.init_distributed()
    train, valid = Text.read(args.data).split(0.05, args.sequence)
    sizes = Sizes(args.layers, args.hidden, args.heads, args.sequence, args.dropout)
    steps = plain(args, sizes, train) if args.pp == 0 else pipeline(args, sizes, train, valid)
    engine = next(steps)["engine"]
    for outcome in steps:
        log(args, engine, outcome)
    if args.state_digest:
        write_digest(args, engine)
    dist.barrier()
    get_cuda_rng_tracker().reset()
    dist.destroy_process_group()


def pipeline(args: argparse.Namespace, sizes: Sizes, train: Text, valid: Text) -> Iterator[dict[str, Any]]:
    """Train as a pipeline. Yields first the engine, then the values to log per iteration."""
    replicas = max(1, dist.get_world_size() // (args.tp * args.pp))
    dims = {"pipe": args.pp, "data": replicas, "model": args.tp}
    axes = args.axes.split("-")
    topology = ProcessTopology(axes=axes, dims=[dims[axis] for axis in axes])
    at = topology.get_coord(dist.get_rank())
    seed(args.seed + 100 * at.pipe, args.seed + 2718 + 100 * at.pipe + at.model)
    cut = Cut(tensor_group(topology))
    layers = [
        TiedLayerSpec("embedding", Embedding, sizes),
        *(LayerSpec(Block, sizes, cut) for _ in range(sizes.layers)),
        LayerSpec(Norm, sizes.hidden),
        TiedLayerSpec("embedding", Embedding, sizes, forward_fn=logits),
    ]
    module = PipelineModule(layers, topology=topology, loss_fn=loss, seed_layers=False, partition_method="type:Block")
    engine, *_ = deepspeed.initialize(args=args, model=module, model_parameters=list(module.parameters()))
    replica = {"replica": at.data, "replicas": replicas}
    shape = {"sequence": args.sequence, "micro_batch": engine.train_micro_batch_size_per_gpu()}
    samplers = [Sampler(text, seed=args.seed, **replica, **shape) for text in (train, valid)]
    yield {"engine": engine}
    while engine.global_steps < args.iterations:
        outcome = {"loss": float(engine.train_batch(data_iter=samplers[0]))}
        if args.eval_at and engine.global_steps % args.eval_at == 0:
            outcome["valid_loss"] = float(engine.eval_batch(data_iter=samplers[1]))
        yield outcome


def plain(args: argparse.Namespace, sizes: Sizes, train: Text) -> Iterator[dict[str, Any]]:
    """Train with DeepSpeed's engine and loader. Yields first the engine, then the values to log per iteration."""
    seed(args.seed, args.seed + 2718)
    module = Plain(sizes)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=module, model_parameters=module.parameters(), training_data=Windows(train, args.sequence)
    )
    yield {"engine": engine}
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    while engine.global_steps < args.iterations:
        before, total = engine.global_steps, torch.zeros((), device=engine.device)
        while engine.global_steps == before:
            tokens, labels = next(batches)
            mean = engine(tokens.to(engine.device), labels.to(engine.device))
            engine.backward(mean)
            engine.step()
            total += mean.detach().float() / engine.gradient_accumulation_steps()
        dist.all_reduce(total)
        yield {"loss": float(total) / dist.get_world_size()}


def seed(everywhere: int, here: int) -> None:
    """Seed random numbers that tensor-parallel ranks share with `everywhere`, those of each rank with `here`."""
    random.seed(everywhere)
    np.random.seed(everywhere)
    torch.manual_seed(everywhere)
    get_cuda_rng_tracker().reset()
    get_cuda_rng_tracker().add("model-parallel-rng", here)


def tensor_group(topology: ProcessTopology) -> Any:
    """This rank's tensor-parallel group; None without tensor parallelism."""
    if topology.get_dim("model") == 1:
        return None
    own = None
    for ranks in topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        own = group if dist.get_rank() in ranks else own
    return own


def log(args: argparse.Namespace, engine: Any, outcome: dict[str, Any]) -> None:
    """Log one line per iteration, on rank 0. A repeated iteration is logged again."""
    if dist.get_rank() != 0:
        return
    valid = f"  valid loss {outcome['valid_loss']:.4f}" if "valid_loss" in outcome else ""
    print(f"iteration {engine.global_steps:>5} / {args.iterations}  loss {outcome['loss']:.4f}{valid}", flush=True)
    if args.loss_log:
        norm = engine.get_global_grad_norm()
        outcome |= {} if norm is None else {"grad_norm": float(norm)}
        exact = {f"{key}_hex": value.hex() for key, value in outcome.items()}
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        line = {"iteration": engine.global_steps, **outcome, **exact, "restart": restart, "time": time.time()}
        with open(args.loss_log, "a") as lines:
            lines.write(json.dumps(line) + "\n")


def write_digest(args: argparse.Namespace, engine: Any) -> None:
    """Write digests of this rank's final state, for comparing two runs."""
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost
    from ft_plugins.model.digest import state_digest, tensor_digest

    digest = state_digest(DeepSpeedHost(engine))
    digest["parameters"] = {
        name: tensor_digest(getattr(parameter, "ds_tensor", parameter).detach())
        for name, parameter in engine.module.named_parameters()
    }
    Path(f"{args.state_digest}{dist.get_rank():05d}.json").write_text(json.dumps(digest, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
