"""One rank of the FSDP2 example, its model sharded over all ranks of the job.

A mesh of one dimension is the default group: the example's own mesh would make a group for each shard, which takes
longer with many ranks than training does.
"""

import torch
import torch.distributed as dist
from fsdp_loop import parse, train
from torch.distributed.device_mesh import init_device_mesh


def main(argv):
    """Run one rank. Raises FtError if the user has to decide something."""
    args = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))
    dist.barrier()
    dist.destroy_process_group()
