"""What one rank of a Megatron job holds: model chunks, optimizers, their state items, and the ranks that hold the same.

In: what the training script has built. Out: the base of `core.MegatronCoreHost` and of its parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ...errors import TopologyError
from ...model.topology import Topology
from ..host_parts import FrameworkHost
from . import fsdp, inner_masters, instances, naming, state
from .replay import MegatronReplay
from .support import facts, flat, is_stub, layer_wise, require_supported


class MegatronRank(FrameworkHost[MegatronReplay]):
    """See `MegatronCoreHost` for the arguments."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        topology: Topology,
        completed: Callable[[], int],
        arguments: argparse.Namespace | None,
    ) -> None:
        self.rank = torch.distributed.get_rank()
        self.chunks, self.optimizer, self.optimizers = tuple(chunks), optimizer, flat(optimizer)
        self._topology, self._completed, self._arguments = topology, completed, arguments
        fsdp.keep_in_place(self.chunks)
        self._names = state.parameter_names(self.chunks)
        self._instances = instances.number_of(self.chunks)
        require_supported(self.chunks, self.optimizers, self.rank)
        self._require_megatrons_layout()

    @cached_property
    def _checkpoint_names(self) -> Mapping[str, Any]:
        for optimizer in self.optimizers:
            state.create_optimizer_state(optimizer)
        if self.sharded:
            return fsdp.without_names(self.chunks)
        try:
            return naming.names(self.chunks, self.optimizers, self.rank, self._replicas, self._arguments)
        except Exception as error:  # a user's model may raise anything; the job is protected, but cannot be exported
            return {"framework": "megatron", "problem": f"{type(error).__name__}: {error}".replace("\n", " ")}

    @cached_property
    def _state_items(self) -> list[state.StateItem]:
        _ = self._checkpoint_names  # first: making its sharded state, a bf16 model converts its routers' biases to fp32
        return state.state_items(self.chunks, self.optimizers, self.rank, self._replicas, self._same_shard)

    @property
    def sharded(self) -> bool:
        """Whether FSDP divides the parameters."""
        return any(map(fsdp.is_shard, self._names))

    @property
    def built(self) -> Mapping[str, Any]:
        """What only the built job shows, for the rules."""
        return {"built": {**facts(self.optimizers), "fsdp": self.sharded}}

    def _replicas(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        """The replica set of `parameter`. Megatron marks parameters of experts by `allreduce = False`."""
        if fsdp.is_shard(parameter):
            return (self.rank,)
        is_expert = not getattr(parameter, "allreduce", True)
        return self._topology.expert_replicas(self.rank) if is_expert else self._topology.replicas(self.rank)

    def _same_shard(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        """The ranks that hold this rank's shard of `parameter`, one in each instance of the distributed optimizer."""
        return instances.same_shard(self.rank, self._replicas(parameter), self._instances)

    def _require_megatrons_layout(self) -> None:
        """Raises TopologyError if the replica sets are not the groups over which Megatron reduces gradients."""
        members = torch.distributed.get_process_group_ranks
        dense = members(parallel_state.get_data_parallel_group(with_context_parallel=True))
        experts = members(parallel_state.get_expert_data_parallel_group())
        named = self._topology.replicas(self.rank), self._topology.expert_replicas(self.rank)
        if (tuple(sorted(dense)), tuple(sorted(experts))) != named:
            raise TopologyError(
                f"rank {self.rank}: Megatron's data-parallel group is {sorted(dense)} and that of experts "
                f"{sorted(experts)}, but the given topology says {list(named[0])} and {list(named[1])}: "
                "build the topology from Megatron's sizes and order"
            )
        instances.require_megatrons_instances(self.rank, self._instances, *named, self._names)

    @torch.no_grad()
    def _rebuild_derived(self) -> None:
        """Copy masters to model parameters, then gather the shards of the other ranks. Parameters in mxfp8 are cast
        from what is gathered, in the gradients' buffer."""
        gathered = False  # by the distributed optimizer
        for optimizer in self.optimizers:
            if not is_stub(optimizer) and hasattr(optimizer, "_copy_main_params_to_model_params"):
                inner_masters.copy_back(optimizer.optimizer)
                if getattr(optimizer.config, "reuse_grad_buf_for_mxfp8_param_ag", False):
                    optimizer._copy_main_params_to_param_buffer()
                else:
                    optimizer._copy_main_params_to_model_params()
            gathered = gathered or isinstance(optimizer, DistributedOptimizer)
        for divided in dict.fromkeys(filter(None, map(layer_wise, self.optimizers))):
            if getattr(divided, "use_buffer_param_sync", False):  # its parameters are in DDP's buffers
                gathered = True
            else:
                divided.allgather_params()
        if self.sharded:
            fsdp.follow_shards(self.chunks)
        elif gathered:
            for chunk in self.chunks:
                _gather(chunk)


def _gather(chunk: Any) -> None:
    """Gather the parameters of a chunk. Where that overlaps the forward, a forced gather of fp8 parameters leaves out
    what has to follow it in some versions; so it is begun and finished here."""
    if not (chunk.ddp_config.overlap_param_gather and getattr(chunk.ddp_config, "fp8_param_gather", False)):
        chunk.start_param_sync(force_sync=True)
        return
    chunk.start_param_sync(force_dispatch=True)
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.finish_param_sync(skip_next_bucket_dispatch=True)
