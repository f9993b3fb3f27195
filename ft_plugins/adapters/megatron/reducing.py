"""Reduce gradients over all replicas of a Megatron job, or inside one replica only, for local SGD.

    optimizer                           a replica's shard group    what reduces between replicas
    fp32, bf16/fp16                     this rank alone            the data-parallel group of each bucket group
    distributed, N > 1 instances        an instance                the group between instances of each bucket group

LOCAL puts a group of this rank alone in the place of the group between replicas, and the factor of an average over the
shard group in the place of `gradient_scaling_factor`. With per-token loss Megatron sums gradients and divides them by
the tokens of all replicas in `finalize_model_grads`; LOCAL passes it the shard group to count tokens over.

Not touched: reductions over tensor, sequence and pipeline parallelism, and those that keep tied embeddings equal; they
stay inside a replica. Gradient norms and the agreement on infinities do as well, which `prepare_reduction` checks.

Invariant: ALL has the objects that Megatron made, so that warm-up is ordinary training bit for bit. Launches stay
Megatron's own, overlapped or not: a bucket group asserts that it was launched.

In: a rank. Out: `model.reduction.ReductionControl`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from ...errors import UnsupportedError
from ...model.inventory import Role
from ...model.reduction import ModuleEdges, ReducedOver
from ..module_edges import follow_places
from ..rules import MEGATRON, refuse
from ..rules.megatron import OTHERWISE, cuda_graphs
from ..script.script_hooks import around, is_within
from . import forward_modules
from .rank import MegatronRank, has_experts, instance_of, same_shard

_PARAMETERS = (Role.PARAMETER, Role.MAIN_PARAMETER)


@dataclass(frozen=True)
class ReplicaPlacement:
    """Where one rank's replica is. `replica`: its ranks; `peers`, `expert_peers`: the ranks that hold the same dense
    parameters or shards, the same experts; `context`, `experts`: context- and expert-parallel group; `agreeing`: ranks
    that compute one gradient norm and decide together whether to skip an update."""

    distributed: bool
    replica: frozenset[int]
    peers: tuple[int, ...]
    expert_peers: tuple[int, ...]
    context: tuple[int, ...]
    experts: tuple[int, ...]
    agreeing: tuple[int, ...]


def unsuitable(placement: ReplicaPlacement) -> Iterator[str]:
    """Why gradients cannot be kept inside the replica."""
    if not placement.replica.issuperset(placement.context):
        more = (
            " in an instance" if placement.distributed else ", except inside an instance of the distributed optimizer"
        )
        yield f"context parallelism (--context-parallel-size) over more ranks than a replica has{more}"
    if not placement.replica.issuperset(placement.experts):
        yield "experts divided over the ranks of several replicas (--expert-model-parallel-size)"
    elif placement.expert_peers != placement.peers:
        yield (
            f"experts with replicas on ranks {list(placement.expert_peers)}, where other parameters have theirs on "
            f"ranks {list(placement.peers)} (--expert-tensor-parallel-size)"
        )
    if not placement.replica.issuperset(placement.agreeing):
        yield f"gradient norms over ranks {list(placement.agreeing)} of several replicas"


def local_factor(factor: float, replicas: int, members: int, averages: bool) -> float:
    """The factor of gradients for an average over `members` ranks, given that over `replicas`. `averages`: not by this
    factor, but in the collective or by tokens. Raises UnsupportedError for another factor than Megatron's."""
    if averages:
        return factor
    if factor != 1.0 / replicas:
        raise UnsupportedError(
            f"gradients are scaled by {factor} before their reduction over {replicas} ranks, expected 1/{replicas}: "
            "this version of megatron-core averages in another way"
        )
    return 1.0 / members


@dataclass(frozen=True)
class BucketReduction:
    """How the gradients of a bucket group are reduced, both ways: the group in `attribute`, the factors by bucket."""

    bucket_group: Any
    attribute: str
    groups: Mapping[ReducedOver, Any]
    factors: Mapping[ReducedOver, Sequence[float]]

    @classmethod
    def of(
        cls, bucket_group: Any, attribute: str, alone: Any, factor: Callable[[float], float], rank: int
    ) -> BucketReduction:
        """`alone`: a group of this rank; `factor`: that of LOCAL by that of ALL. Raises UnsupportedError."""
        present = getattr(bucket_group, attribute, None)
        if present is None:
            raise UnsupportedError(
                f"rank {rank}: a bucket group of this version of megatron-core has no '{attribute}', so that the "
                "reduction of its gradients cannot be kept inside a replica"
            )
        factors = [bucket.gradient_scaling_factor for bucket in bucket_group.buckets]
        return cls(
            bucket_group,
            attribute,
            {ReducedOver.ALL: present, ReducedOver.LOCAL: alone},
            {ReducedOver.ALL: factors, ReducedOver.LOCAL: [factor(one) for one in factors]},
        )

    def reduce_over(self, replicas: ReducedOver) -> None:
        setattr(self.bucket_group, self.attribute, self.groups[replicas])
        for bucket, factor in zip(self.bucket_group.buckets, self.factors[replicas], strict=True):
            bucket.gradient_scaling_factor = factor


class MegatronReduction(MegatronRank):
    """The part of a Megatron host that implements `model.reduction.ReductionControl`."""

    _reductions: tuple[BucketReduction, ...] | None = None  # None: not prepared
    _reduced_over = ReducedOver.ALL
    _tokens_over: Any = None  # the group whose tokens divide gradients under LOCAL
    _finalize: Any = None  # the wrapper in the configuration that counts tokens

    @property
    def _distributed(self) -> bool:
        return any(chunk.ddp_config.use_distributed_optimizer for chunk in self.chunks)

    def prepare_reduction(self) -> None:
        """A collective. Nothing changes before `reduce_over(LOCAL)`."""
        config, ddp = self.chunks[0].config, self.chunks[0].ddp_config
        by_tokens = bool(getattr(config, "calculate_per_token_loss", False))
        refuse(MEGATRON, OTHERWISE, config, ddp, self.built, systems=("sync",), who=f"rank {self.rank}: ")
        problems = list(unsuitable(self._placement()))
        if by_tokens and "pg_collection" not in inspect.signature(finalize_model_grads).parameters:
            problems.append("per-token loss (--calculate-per-token-loss) with this version of megatron-core")
        if problems:
            raise UnsupportedError(
                f"rank {self.rank}: replicas of this job cannot train on their own: {'; '.join(problems)}. Drop the "
                "option, or drop --sync"
            )
        averages = by_tokens or bool(getattr(ddp, "average_in_collective", False))
        replicas, members = len(self._topology.replicas(self.rank)), len(self.shard_group())
        attribute = "inter_distributed_optimizer_instance_group" if self._distributed else "data_parallel_group"
        alone = _alone(self.rank)
        self._tokens_over = (
            parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
            if self._distributed
            else alone
        )
        self._reductions = tuple(
            BucketReduction.of(
                bucket_group, attribute, alone, lambda one: local_factor(one, replicas, members, averages), self.rank
            )
            for chunk in self.chunks
            for bucket_group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        )
        if by_tokens:
            for chunk in self.chunks:
                chunk.register_forward_pre_hook(lambda *args: self._follow_tokens())
            self._follow_tokens()

    def _placement(self) -> ReplicaPlacement:
        topology, rank = self._topology, self.rank
        dense = experts = topology.replicas(rank)
        divided: tuple[int, ...] = (rank,)
        if has_experts(self._names):
            experts, divided = topology.expert_replicas(rank), topology.group("ep", rank)
        agreeing: set[int] = set()
        for optimizer in self.optimizers:
            group = optimizer.get_grad_stats_parallel_group()  # None: all ranks
            agreeing.update(torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD))
        return ReplicaPlacement(
            self._distributed,
            frozenset(one for member in self.shard_group() for one in topology.group("tp-pp", member)),
            same_shard(rank, dense, self._instances),
            same_shard(rank, experts, self._instances),
            topology.group("cp", rank),
            divided,
            tuple(sorted(agreeing)),
        )

    def reduce_over(self, replicas: ReducedOver) -> None:
        if self._reductions is None:
            raise UnsupportedError(f"rank {self.rank}: reduce_over was called before prepare_reduction")
        self._reduced_over = ReducedOver(replicas)
        for one in self._reductions:
            one.reduce_over(self._reduced_over)

    def shard_group(self) -> tuple[int, ...]:
        if not self._distributed:
            return (self.rank,)
        return instance_of(self.rank, self._topology.replicas(self.rank), self._instances)

    # per-token loss

    def _follow_tokens(self) -> None:
        """Wrap what divides gradients by tokens, which a training loop may set only when it begins."""
        config = self.chunks[0].config
        given = config.finalize_model_grads_func
        if given is not None and not is_within(self._finalize, given):
            config.finalize_model_grads_func = self._finalize = around(self._counting)(given)

    def _counting(
        self, original: Callable[..., Any], model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if num_tokens is not None and self._reduced_over is ReducedOver.LOCAL:
            kwargs["pg_collection"] = self._counted_within(kwargs.get("pg_collection"))
        return original(model, num_tokens, *args, **kwargs)

    def _counted_within(self, groups: Any) -> Any:
        """The process groups that Megatron's schedule passes, with the shard group for the number of tokens."""
        if groups is None or getattr(groups, "dp_cp_gtp_remat", None) is not None:
            raise UnsupportedError(
                f"rank {self.rank}: the group over which tokens are counted is unknown, so that a replica cannot train "
                "on its own with per-token loss; drop --calculate-per-token-loss, or drop --sync"
            )
        local = copy.copy(groups)
        local.dp_cp = self._tokens_over
        return local

    # modules

    def modules(self) -> Mapping[str, str]:
        parameters = {name: parameter for parameter, name in self._names.items()}
        named = {}
        for item in (one.item for one in self._state_items):
            if item.role in _PARAMETERS:
                name = item.name.removesuffix(":main")
                tied = forward_modules.is_tied(parameters[name])
                named[item.name] = forward_modules.module_for(name, item.layer, tied)
        return forward_modules.in_forward_order(named)

    def forward_order(self) -> Sequence[str]:
        return list(dict.fromkeys(name for _, name in forward_modules.places(self.chunks)))

    def require_own_pace(self) -> None:
        """Megatron-LM couples replicas: always raises."""
        raise UnsupportedError(
            "--sync-policy a_edit is not supported with Megatron, whose replicas agree in each iteration (the logged "
            "loss, timers, exit conditions) and have one iteration in common (data, learning rate, evaluations): "
            "choose --sync-policy edit, or a loop of plain torch with fully_shard"
        )

    def before_modules(self, call: Callable[[str], None]) -> None:
        """Raises UnsupportedError with CUDA graphs, whose replay calls no hooks."""
        graphs = cuda_graphs(self.chunks[0].config)
        if graphs != "none":
            raise UnsupportedError(
                f"rank {self.rank}: modules cannot be synchronised right before their forward with CUDA graphs "
                f"({graphs}): their replay calls nothing before a layer; use --sync-apply update or wait"
            )

        def hook(name: str) -> Callable[..., None]:
            return torch.compiler.disable(lambda module, args: call(name))  # type: ignore[no-any-return]

        for module, name in list(forward_modules.places(self.chunks)):
            module.register_forward_pre_hook(hook(name))

    def follow_modules(self, edges: ModuleEdges) -> None:
        """The head's edges are those of its last layernorm and of an output layer with a weight of its own. Raises
        UnsupportedError with CUDA graphs."""
        graphs = cuda_graphs(self.chunks[0].config)
        if graphs != "none":
            raise UnsupportedError(
                f"rank {self.rank}: modules cannot be followed with CUDA graphs ({graphs}), whose replay calls no "
                "hooks: drop --cuda-graph-impl"
            )
        follow_places(self.rank, forward_modules.calling_parts(self.chunks), edges)


def _alone(rank: int) -> Any:
    """A group of this rank alone: one that Megatron has made and does not use, or a new one. A collective."""
    for group in (parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()):
        if group.size() == 1:
            return group
    return [torch.distributed.new_group([one]) for one in range(torch.distributed.get_world_size())][rank]
