"""Name the ranks of a distributed optimizer instance, and the ranks that hold one shard in all instances.

With `--num-distributed-optimizer-instances N` Megatron cuts a data-parallel group, in its order, into N instances. Each
divides the optimizer over its ranks: gradients are scattered inside an instance, then reduced between the ranks with
equal place in theirs. Parameters are gathered and gradient norms computed inside an instance.

    8 ranks, N = 2    instances 0 1 2 3 and 4 5 6 7; the same shard is on 0 and 4, 1 and 5, 2 and 6, 3 and 7

Invariant: with one instance, or without the distributed optimizer, all ranks are one instance.

In: model chunks, replica sets of the topology. Out: ranks, ascending. Raises TopologyError if Megatron's groups differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from ...errors import TopologyError


def has_experts(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether any parameter belongs to an expert. Megatron marks these by `allreduce = False`."""
    return any(not getattr(parameter, "allreduce", True) for parameter in parameters)


def number_of(chunks: Sequence[Any]) -> int:
    """The number of instances of the distributed optimizer."""
    configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    return max((getattr(config, "num_distributed_optimizer_instances", 1) for config in configs), default=1)


def instance_of(rank: int, replicas: Sequence[int], number: int) -> tuple[int, ...]:
    """The ranks of the instance of `rank` among `replicas`, which are ascending."""
    size = len(replicas) // number
    first = replicas.index(rank) // size * size
    return tuple(replicas[first : first + size])


def same_shard(rank: int, replicas: Sequence[int], number: int) -> tuple[int, ...]:
    """The ranks that hold the shard of `rank`, one in each instance."""
    size = len(replicas) // number
    return tuple(replicas[replicas.index(rank) % size :: size])


def require_megatrons_instances(
    rank: int, number: int, dense: Sequence[int], experts: Sequence[int], parameters: Iterable[torch.nn.Parameter]
) -> None:
    """Raises TopologyError if Megatron's groups inside and between instances are not those computed here. `dense`,
    `experts`: the replica sets of `rank`; `parameters`: of its model."""
    if number == 1:
        return
    found = {
        "inside an instance": parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        ),
        "between instances": parallel_state.get_inter_distributed_optimizer_instance_group(),
    }
    expected = {
        "inside an instance": {instance_of(rank, dense, number)},
        "between instances": {same_shard(rank, dense, number)}
        | ({same_shard(rank, experts, number)} if has_experts(parameters) else set()),
    }
    for place, group in found.items():
        ranks = tuple(sorted(torch.distributed.get_process_group_ranks(group)))
        if expected[place] != {ranks}:
            wanted = " and ".join(str(list(one)) for one in sorted(expected[place]))
            raise TopologyError(
                f"rank {rank}: with {number} distributed optimizer instances Megatron's group {place} is "
                f"{list(ranks)}, expected {wanted}: drop --num-distributed-optimizer-instances, or use the order "
                "tp-cp-ep-dp-pp"
            )
