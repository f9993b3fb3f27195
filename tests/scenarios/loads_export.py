"""One rank of a job that loads an exported checkpoint with megatron.core alone, and tells what it holds then.

    <folder of the checkpoint> <prefix of the files that are written> <flags of the GPT example>

As Megatron-LM's load_checkpoint does it: the common state first, then model, optimizer and generators by their sharded
state. Nothing of ft_plugins reads the checkpoint; its host only makes the digests that are compared.
"""

import random

import numpy as np
import torch
import torch.distributed as dist
from gpt_job import Job
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.utils import unwrap_model
from megatron_gpt import parse, write_digest

from ft_plugins.config import launch_context


def main(argv):
    folder, prefix, *words = argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(parse([*words, "--state-digest", prefix]), launch_context())
    load(job, folder)
    write_digest(job, job.host())
    dist.barrier()
    job.close()
    dist.destroy_process_group()


def load(job, folder):
    """Model, optimizer, scheduler, counters, generators. The tensor and pipeline parallel sizes are the writer's."""
    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wanted = {
        f"model{index}": chunk.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(unwrap_model(job.chunks))
    }
    wanted["optimizer"] = job.optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    groups = (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    )
    sizes, at = tuple(group.size() for group in groups), tuple(group.rank() for group in groups)
    replica = parallel_state.get_data_parallel_rank()
    wanted["rng_state"] = ShardedObject("rng_state", None, sizes, at, replica_id=replica)
    loaded = dist_checkpointing.load(wanted, folder, strict="raise_all")  # neither a key too few nor one too many
    for index, chunk in enumerate(unwrap_model(job.chunks)):
        chunk.load_state_dict(loaded[f"model{index}"])
    job.optimizer.load_state_dict(loaded["optimizer"])
    job.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    for name, value in loaded["counters"].items():
        setattr(job, name, value)
    [rng] = loaded["rng_state"]
    random.setstate(rng["random_rng_state"])
    np.random.set_state(rng["np_rng_state"])
    torch.set_rng_state(rng["torch_rng_state"])
    torch.cuda.set_rng_state(rng["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["rng_tracker_states"])
