"""A rank of the Megatron example as it would be without ft_plugins: under torchrun, with checkpoints of megatron-core.

    torchrun ... own_checkpoint_megatron.py --checkpoints DIR --every K <arguments of launch/examples/megatron_gpt.py>

Every K iterations the ranks save together with `megatron.core.dist_checkpointing` (torch_dist, as Megatron-LM does);
after a start they load the newest complete checkpoint. Model, optimizer, scheduler, counters and data positions
continue; random number generators do not, which costs no time.

In: the folder. Out: the loss log of the example; `saves.jsonl` in the folder, with the seconds of each save.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch" / "examples"))

import megatron_gpt  # type: ignore[import-not-found]  # noqa: E402
from gpt_job import Job  # type: ignore[import-not-found]  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402

from ft_plugins.config import launch_context  # noqa: E402

_SHARDING = {"distrib_optim_sharding_type": "dp_reshardable"}  # the default of Megatron-LM
_NEWEST = "latest.json"


def main(argv: Sequence[str]) -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--every", type=int, required=True)
    own, words = parser.parse_known_args(argv)
    args, context = megatron_gpt.parse(words), launch_context()
    torch.set_num_threads(1)
    torch.cuda.set_device(context.local_rank)
    dist.init_process_group("gloo")
    job, hooks = Job(args, context), megatron_gpt.Unprotected()
    job.host().inventory()  # creates the optimizer's state, which is loaded or saved next
    if (own.checkpoints / _NEWEST).exists():
        load(job, own.checkpoints)
    while job.iteration < args.iterations:
        outcome = job.train_step(skip=partial(job.host().skip_update, hooks))
        megatron_gpt.log(job, outcome, context)
        if job.iteration % own.every == 0:
            save(job, own.checkpoints)
    dist.barrier()
    job.close()
    dist.destroy_process_group()


def save(job: Job, folder: Path) -> None:
    """Save together. The checkpoint is there once `latest.json` names it."""
    began = time.monotonic()
    name = f"iteration-{job.iteration:06d}"
    if dist.get_rank() == 0:
        (folder / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(job, False), str(folder / name))
    torch.save(_rest(job), folder / f"{name}-rank-{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "new").write_text(json.dumps(name))
        (folder / "new").replace(folder / _NEWEST)
        with (folder / "saves.jsonl").open("a") as lines:
            lines.write(json.dumps(time.monotonic() - began) + "\n")


def load(job: Job, folder: Path) -> None:
    """Load the newest checkpoint together."""
    name = json.loads((folder / _NEWEST).read_text())
    found = dist_checkpointing.load(_sharded(job, True), str(folder / name))
    for index, chunk in enumerate(job.chunks):
        chunk.load_state_dict(found[f"model{index}"], strict=False)  # without the empty `_extra_state` of its parts
    job.optimizer.load_state_dict(found["optimizer"])
    for group in job.optimizer.param_groups:
        group.pop("step", None)
    rest = torch.load(folder / f"{name}-rank-{dist.get_rank()}.pt", weights_only=False)
    job.iteration, job.consumed_samples, job.skipped_updates = rest["counters"]
    job.scheduler.load_state_dict(rest["scheduler"])
    for sampler, position in zip((*job.train, *job.valid), rest["positions"], strict=True):
        if sampler is not None:
            sampler.position = position


def _sharded(job: Job, loading: bool) -> dict[str, Any]:
    model = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(job.chunks)}
    whole = {key: value for state in model.values() for key, value in state.items()}
    return {**model, "optimizer": job.optimizer.sharded_state_dict(whole, is_loading=loading, metadata=_SHARDING)}


def _rest(job: Job) -> dict[str, Any]:
    return {
        "counters": [job.iteration, job.consumed_samples, job.skipped_updates],
        "scheduler": job.scheduler.state_dict(),
        "positions": [sampler and sampler.position for sampler in (*job.train, *job.valid)],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
