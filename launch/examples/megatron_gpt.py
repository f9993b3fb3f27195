"""Pretrain a small byte-level GPT on real text, with megatron-core's own model, schedule, DDP and optimizers.

    ft-run --nproc-per-node 8 launch/examples/megatron_gpt.py --tp 2 --pp 2 --bf16 --distributed-optimizer --reft
    torchrun --nproc-per-node 8 launch/examples/megatron_gpt.py --tp 2 --pp 2        (plain, with identical numbers)

`main(argv)` is one rank, from init_process_group to destroy_process_group. `train` protects the job: attach, resume,
and call the hooks at the beginning and end of each iteration.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_job import ON_CPU, Job
from megatron.core import parallel_state

import ft_plugins
from ft_plugins.adapters.megatron.core import MegatronCoreHost
from ft_plugins.base import faults
from ft_plugins.config import Config, LaunchContext, launch_context, merge
from ft_plugins.errors import EXIT_REFUSED, FtError
from ft_plugins.model.digest import state_digest, tensor_digest
from ft_plugins.model.host import Hooks


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The job's own flags, after those of ft_plugins were removed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, type=int)
    for flag, default, meaning in (
        ("--tp", 1, "tensor parallel size"),
        ("--pp", 1, "pipeline stages"),
        ("--virtual-stages", 1, "model chunks per pipeline rank; above 1 is the interleaved schedule"),
        ("--layers", 4, "transformer layers"),
        ("--hidden", 64, "hidden size"),
        ("--heads", 4, "attention heads"),
        ("--sequence", 64, "tokens per sample"),
        ("--iterations", 20, "iterations of the whole run"),
        ("--global-batch", 16, "samples per iteration"),
        ("--micro-batch", 2, "samples per micro-batch"),
        ("--eval-at", 0, "evaluate every so many iterations; 0: never"),
        ("--eval-iterations", 1, "iterations of one evaluation"),
        ("--warmup", 2, "iterations of linear learning rate warm-up"),
        ("--seed", 1234, "of weights, dropout and data order"),
        ("--bucket-size", 50_000, "parameters per gradient bucket, with overlapped communication"),
        ("--num-distributed-optimizer-instances", 1, "parts of the data-parallel ranks, each with the whole optimizer"),
    ):
        add(flag, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--order", default="tp-cp-ep-dp-pp", help="of the parallel dimensions over the ranks")
    parser.add_argument("--data", help="any text file (default: the sources of Python's standard library)")
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam", help="sgd: with momentum")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--loss-scale", type=float, help="constant; with it an infinite gradient skips the update")
    parser.add_argument("--iterations-to-skip", type=int, nargs="+", default=[], help="skip the batches of these")
    parser.add_argument("--loss-log", help="JSON lines, appended by one rank")
    parser.add_argument("--state-digest", help="prefix of the files that describe the final state, one per rank")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true")
    precision.add_argument("--fp32", action="store_true", help="the default")
    for switch in ("--distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--sequence-parallel"):
        parser.add_argument(switch, action="store_true")
    args = parser.parse_args(argv)
    if args.overlap_param_gather and not args.distributed_optimizer:
        parser.error("--overlap-param-gather needs --distributed-optimizer; otherwise there is nothing to gather")
    if args.sequence_parallel and not any(map(find_spec, ("apex", "transformer_engine"))):
        parser.error("--sequence-parallel needs the LayerNorm of NVIDIA's apex or Transformer Engine, not torch's")
    if args.num_distributed_optimizer_instances > 1 and not args.distributed_optimizer:
        parser.error("--num-distributed-optimizer-instances needs --distributed-optimizer")
    args.overlap_grad_reduce |= args.overlap_param_gather
    return args


class Unprotected:
    """Hooks of an unprotected job."""

    iteration = 0

    def iteration_begin(self, step: int) -> None: ...
    def before_update(self, step: int) -> None: ...
    def after_update(self, step: int) -> None: ...
    def iteration_end(self, step: int) -> None: ...
    def shutdown(self) -> None: ...


def main(argv: Sequence[str]) -> None:
    """Run one rank. Raises FtError if the user has to decide something, before or after init_process_group."""
    context = launch_context()
    if context.config is None:
        config, own = Config.from_flags(argv)
    else:
        given, own = Config.from_flags(argv, whole=False)
        config = merge(context.config, given)
    args = parse(own)
    torch.set_num_threads(1)
    torch.cuda.set_device(context.local_rank)
    dist.init_process_group("gloo" if ON_CPU else "nccl")
    job = Job(args, context)
    train(job, config, context)
    dist.barrier()
    job.close()
    dist.destroy_process_group()


def train(job: Job, config: Config, context: LaunchContext) -> None:
    """The training loop, protected if a system is switched on."""
    host = job.host()
    hooks: Hooks
    if config.systems:
        hooks = session = ft_plugins.attach(host, config, context)
        done = session.resume(last=job.args.iterations)
    else:
        faults.arm(config.faults, rank=context.rank, restart=context.restart)
        hooks, done = Unprotected(), 0
        host.install(hooks)
    for step in range(done + 1, job.args.iterations + 1):
        hooks.iteration_begin(step)
        outcome = job.train_step(skip=partial(host.skip_update, hooks))
        log(job, outcome, context)
        hooks.iteration_end(step)
    if job.args.state_digest:
        write_digest(job, host)
    hooks.shutdown()


def log(job: Job, outcome: dict[str, Any], context: LaunchContext) -> None:
    """Log one line per iteration, on the first rank of the last stage. A repeated iteration is logged again."""
    ranks = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank())
    if ranks != (0, 0) or not parallel_state.is_pipeline_last_stage():
        return
    loss, norm = outcome["loss"], outcome["grad_norm"]
    shown = f"loss {loss:.4f}  gradient norm {norm:.3f}" if loss is not None and norm is not None else "update skipped"
    valid = f"  valid loss {outcome['valid_loss']:.4f}" if "valid_loss" in outcome else ""
    print(f"iteration {outcome['iteration']:>5} / {job.args.iterations}  {shown}{valid}", flush=True)
    if job.args.loss_log:
        exact = {f"{key}_hex": float(outcome[key]).hex() for key in _EXACT if outcome.get(key) is not None}
        line = {**outcome, **exact, "restart": context.restart, "time": time.time()}
        with open(job.args.loss_log, "a") as lines:
            lines.write(json.dumps(line, default=float) + "\n")


_EXACT = ("loss", "grad_norm", "valid_loss")


def write_digest(job: Job, host: MegatronCoreHost) -> None:
    """Write digests of this rank's final state and of its gathered model parameters."""
    digest = state_digest(host)
    with job.gathered():
        digest["parameters"] = {
            f"chunk{index}.{name}": tensor_digest(parameter)
            for index, chunk in enumerate(job.chunks)
            for name, parameter in chunk.named_parameters()
        }
    Path(f"{job.args.state_digest}{host.rank:05d}.json").write_text(json.dumps(digest, indent=1))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_REFUSED)
