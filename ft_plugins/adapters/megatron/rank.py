"""What one rank of a Megatron job holds: model chunks, optimizers, their state items, and the ranks that hold the same;
and its replica operations: gradients, copies, recompute.

    optimizer                 gradients, by item                       copies
    FP32Optimizer             of the parameter (main_grad)             none: parameters are items
    Float16Optimizer...       of the parameter, under its master       the parameters, cast from their masters
    DistributedOptimizer      the part of main_grad that this rank     the parameters, cast and gathered; of fp32 ones
                              updates, under its shard                 each rank's shard is a view of its part

Gradients are multiplied by the loss scale; clipping and unscaling come after `before_update`, in the update.

With `--num-distributed-optimizer-instances N` Megatron cuts a data-parallel group, in its order, into N instances. Each
divides the optimizer over its ranks: gradients are scattered inside an instance, then reduced between the ranks with
equal place in theirs. Parameters are gathered and gradient norms computed inside an instance.

    8 ranks, N = 2    instances 0 1 2 3 and 4 5 6 7; the same shard is on 0 and 4, 1 and 5, 2 and 6, 3 and 7

Invariant: only facts and Megatron's own operations; policies decide elsewhere. Nothing is recorded and no function of
Megatron replaced before `keep_iterations` or `before_reduction` is called. With one instance, or without the
distributed optimizer, all ranks are one instance.

In: what the training script has built. Out: the base of `core.MegatronCoreHost` and of its parts, which implements
`model.host.ReplicaOperations`, but for `scalars`. Raises TopologyError if Megatron's groups differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ...errors import TopologyError, UnsupportedError
from ...model.inventory import Inventory
from ...model.topology import Topology
from ..host_parts import FrameworkHost, StateItem, groups
from ..rules import refuse
from ..rules.megatron import COMPARED, OTHERWISE
from ..script.script_hooks import wrap
from . import fp8_scaling, fsdp, inner_masters, naming, state
from .replay import MegatronReplay
from .support import facts, flat, is_stub, layer_wise, require_supported


class MegatronRank(FrameworkHost[MegatronReplay]):
    """See `MegatronCoreHost` for the arguments."""

    _skipping = False  # whether the loop skips the batch of the present iteration

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
        self._instances = number_of(self.chunks)
        require_supported(self.chunks, self.optimizers, self.rank)
        self._require_megatrons_layout()

    @cached_property
    def _checkpoint_names(self) -> Mapping[str, Any]:
        for optimizer in self.optimizers:
            state.plan_optimizer_state(optimizer)
        fp8_scaling.create(self.chunks, self.rank)
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

    def allocate(self, absent: Collection[str]) -> None:
        for optimizer in self.optimizers:
            state.allocate_optimizer_state(optimizer, self._names, absent)

    @property
    def sharded(self) -> bool:
        """Whether FSDP divides the parameters."""
        return any(map(fsdp.is_shard, self._names))

    @property
    def built(self) -> Mapping[str, Any]:
        """What only the built job shows, for the rules."""
        return {"built": facts(self.chunks, self.optimizers)}

    def _replicas(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        """The replica set of `parameter`. Megatron marks parameters of experts by `allreduce = False`."""
        if fsdp.is_shard(parameter):
            return (self.rank,)
        is_expert = not getattr(parameter, "allreduce", True)
        return self._topology.expert_replicas(self.rank) if is_expert else self._topology.replicas(self.rank)

    def _same_shard(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        """The ranks that hold this rank's shard of `parameter`, one in each instance of the distributed optimizer."""
        return same_shard(self.rank, self._replicas(parameter), self._instances)

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
        require_megatrons_instances(self.rank, self._instances, *named, self._names)

    @torch.no_grad()
    def _rebuild_derived(self) -> None:
        """Copy masters to model parameters, then gather the shards of the other ranks. Parameters in mxfp8 are cast
        from what is gathered, in the gradients' buffer."""
        gathered = any(isinstance(one, DistributedOptimizer) for one in self.optimizers)
        with fp8_scaling.as_cast_last(self.chunks):
            for optimizer in self.optimizers:
                if not is_stub(optimizer) and hasattr(optimizer, "_copy_main_params_to_model_params"):
                    inner_masters.copy_back(optimizer.optimizer)
                    if getattr(optimizer.config, "reuse_grad_buf_for_mxfp8_param_ag", False):
                        optimizer._copy_main_params_to_param_buffer()
                    else:
                        optimizer._copy_main_params_to_model_params()
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

    # ---- replica operations ----

    def keep_iterations(self, discarded: Callable[[], bool] = lambda: False) -> None:
        self._require_replicas()
        buffers = list(state.buffers(self.chunks, self.rank))
        self._start_replay(lambda: MegatronReplay(self.chunks, self.optimizer, buffers, self._completed, discarded))

    def recompute(self, step: int) -> None:
        """Recompute iteration `step`; nothing if the loop skips its batch, so that there are no gradients."""
        replay = self._required_replay()
        if replay.number == step:
            replay.run()
        elif not self._skipping:
            raise UnsupportedError(
                f"rank {self.rank}: iteration {step} cannot be recomputed: Megatron's schedules last computed "
                f"{replay.number}; wait for the audit before the forward (--paft-audit-at forward)"
            )

    def learning_rate(self) -> float:
        """The largest of the parameter groups, set by Megatron's scheduler; 0 on a rank that updates nothing."""
        inner = (optimizer for optimizer in self.optimizers if not is_stub(optimizer))
        return max((float(group["lr"]) for one in inner for group in groups(one)), default=0.0)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The reduced gradients of what this rank updates."""
        gradients: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers:
            for one in state.trained(optimizer, self._names):
                gradient: torch.Tensor = one.parameter.main_grad  # type: ignore[attr-defined]  # set by Megatron's DDP
                if one.piece is not None:
                    gradient = gradient.view(-1)[one.piece[0] : one.piece[1]]
                gradients[one.item] = gradient
        return gradients

    def before_reduction(self, call: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """Call `call` right before Megatron's DDP reduces, with whole gradients by parameter name. Raises
        UnsupportedError if the reduction overlaps the backward."""
        first = self.chunks[0]
        if first.ddp_config.overlap_grad_reduce:
            raise UnsupportedError(
                f"rank {self.rank}: with --overlap-grad-reduce gradients are reduced during the backward, so that "
                "nothing can be called before the reduction"
            )

        def finish_grad_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            own = {name: p.main_grad for p, name in self._names.items() if hasattr(p, "main_grad")}
            call(self._completed() + 1, own)
            return original(*args, **kwargs)

        wrap(first, "finish_grad_sync", finish_grad_sync)  # called before the other chunks', after the backward of all

    def _require_replicas(self) -> None:
        """Raises UnsupportedError unless replicas can be compared and repaired."""
        job = {"num_distributed_optimizer_instances": self._instances, **self.built}
        refuse(COMPARED, OTHERWISE, job, systems=("paft",), who=f"rank {self.rank}: ")

    def derive(self) -> None:
        self._rebuild_derived()

    def copies(self) -> Inventory:
        """See above. Raises UnsupportedError if replicas cannot be repaired."""
        self._require_replicas()
        return super().copies()

    @cached_property
    def _copies(self) -> list[StateItem]:
        return list(state.copies(self.chunks, self.optimizers, self._replicas))

    def finish_copies(self) -> None:
        """With --overlap-param-gather they are gathered now: the next forward finds that done, and overlaps nothing."""
        for chunk in self.chunks:
            if getattr(chunk.ddp_config, "overlap_param_gather", False):
                chunk.start_param_sync(force_sync=True)


# ---- instances of the distributed optimizer ----


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


def _gather(chunk: Any) -> None:
    """Gather the parameters of a chunk. Where that overlaps the forward, a forced gather of fp8 parameters leaves out
    what has to follow it in some versions; so it is begun and finished here."""
    if not (chunk.ddp_config.overlap_param_gather and getattr(chunk.ddp_config, "fp8_param_gather", False)):
        chunk.start_param_sync(force_sync=True)
        return
    chunk.start_param_sync(force_dispatch=True)
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.finish_param_sync(skip_next_bucket_dispatch=True)
