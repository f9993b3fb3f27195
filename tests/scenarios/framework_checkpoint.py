"""A rank of the GPT example without protection, which can begin from and end with a checkpoint of Megatron's own.

What a job at another data-parallel size has to do in the same way: tensors by megatron.core.dist_checkpointing, the
rest as Megatron-LM keeps it, of the first replica of each place in the model.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[2] / "launch" / "examples"
sys.path.insert(0, str(EXAMPLES))

import megatron_gpt  # noqa: E402
from gpt_job import Job  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402

from ft_plugins.adapters.megatron.replay import restore_rng, rng_state  # noqa: E402
from ft_plugins.base import faults  # noqa: E402
from ft_plugins.config import Config, launch_context  # noqa: E402

# `fully_reshardable` of core 0.16 loses elements at the end of a padded buffer (it says so), as small models have them
SHARDING = {"distrib_optim_sharding_type": "dp_reshardable"}


def main(argv):
    context = launch_context()
    config, words = Config.from_flags(argv)
    parser = argparse.ArgumentParser()
    parser.add_argument("--from-checkpoint", type=Path)
    parser.add_argument("--to-checkpoint", type=Path)
    parser.add_argument("--stop-at", type=int)
    own, words = parser.parse_known_args(words)
    args = megatron_gpt.parse(words)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(args, context)
    host = job.host()
    host.inventory()  # the optimizer's state is there before it is loaded or saved
    faults.arm(config.faults, rank=context.rank, restart=context.restart)
    host.install(megatron_gpt.Unprotected())
    if own.from_checkpoint:
        load(job, own.from_checkpoint)
    for _ in range(job.iteration + 1, (own.stop_at or args.iterations) + 1):
        outcome = job.train_step(skip=partial(host.skip_update, megatron_gpt.Unprotected()))
        megatron_gpt.log(job, outcome, context)
    if own.to_checkpoint:
        save(job, own.to_checkpoint)
    if args.state_digest:
        megatron_gpt.write_digest(job, host)
    dist.barrier()
    job.close()
    dist.destroy_process_group()


def sharded(job, loading):
    model = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(job.chunks)}
    whole = {key: value for state in model.values() for key, value in state.items()}
    optimizer = job.optimizer.sharded_state_dict(whole, is_loading=loading, metadata=SHARDING)
    return {**model, "optimizer": optimizer}


def place(folder):
    stage, tensor = (
        parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    )  # fmt: skip
    return folder / f"place-{stage}-{tensor}.pt"


def save(job, folder):
    if dist.get_rank() == 0:
        (folder / "tensors").mkdir(parents=True)
    dist.barrier()
    with job.gathered():
        dist_checkpointing.save(sharded(job, False), str(folder / "tensors"))
    if parallel_state.get_data_parallel_rank() == 0:
        rest = {
            "counters": [job.iteration, job.consumed_samples, job.skipped_updates],
            "scheduler": job.scheduler.state_dict(),
            "positions": [sampler and sampler.position for sampler in (*job.train, *job.valid)],
            "rng": rng_state(),
        }
        torch.save(rest, place(folder))
    dist.barrier()


def load(job, folder):
    found = dist_checkpointing.load(sharded(job, True), str(folder / "tensors"))
    for index, chunk in enumerate(job.chunks):
        chunk.load_state_dict(found[f"model{index}"], strict=False)  # without the empty `_extra_state` of its parts
    job.optimizer.load_state_dict(found["optimizer"])
    for group in job.optimizer.param_groups:
        group.pop("step", None)  # Megatron leaves the checkpoint's there for optimizers that read it; torch's do not
    rest = torch.load(place(folder), weights_only=False)
    job.iteration, job.consumed_samples, job.skipped_updates = rest["counters"]
    job.scheduler.load_state_dict(rest["scheduler"])
    for sampler, position in zip((*job.train, *job.valid), rest["positions"], strict=True):
        if sampler is not None:
            sampler.position = position
    restore_rng(rest["rng"])
