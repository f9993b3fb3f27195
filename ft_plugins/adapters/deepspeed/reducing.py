"""Average the gradients of a DeepSpeed job over all replicas of local SGD, or over the ranks of one.

    optimizer                       over one replica (LOCAL)                   over all (ALL)
    torch's: fp32 without ZeRO      over the inner group of several ranks       DeepSpeed's own
    FP16_Optimizer (bf16 too)       the same                                   DeepSpeed's own
    BF16_Optimizer                  the same                                   DeepSpeed's own
    ZeRO-1, 2, 3                    DeepSpeed's own, over the inner group      and then over the sync group, before the
                                                                               update

`shard_groups` explains the groups. Where DeepSpeed reduces over all replicas itself, ALL is exactly what it does
without local SGD; with ZeRO the sum is in another order. Pipelines do not use `pipeline_enable_backward_allreduce`:
with it fp16 agrees on overflows over all replicas, and parameters without a gradient are treated differently.

Invariant: what decides an update in a local iteration comes from this replica alone: gradients, their norm (DeepSpeed
clips fp32 gradients without ZeRO by the mean of all norms; here by the mean over the inner group, whose norms are
equal) and overflows. Two agreements remain, and let replicas wait for each other:

    PipelineEngine.train_batch       averages the loss that it reports over all replicas
    FP16_Optimizer, legacy_fusion    skips an update if any rank of the job overflowed

In: an engine, its `ShardGroups`. Out: `model.reduction.ReductionControl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ...errors import UnsupportedError
from ...model.inventory import Role
from ...model.reduction import ModuleEdges, ReducedOver
from ..script.script_hooks import replace_in_deepspeed as replace
from ..script.script_hooks import replaced
from .module_forwards import calls_of, in_forward_order, module_in
from .rank import DeepSpeedRank
from .shard_groups import ShardGroups, divide

STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
_ZERO = ("DeepSpeedZeroOptimizer", STAGE3)
SHARDED = ("BF16_Optimizer", *_ZERO)
_MODULES = (Role.PARAMETER, Role.MAIN_PARAMETER)


class DeepSpeedReduction(DeepSpeedRank):
    """The part of a DeepSpeed host that controls the reduction of gradients."""

    _reduced_over = ReducedOver.ALL
    _averages_shards = False  # whether ALL needs more than DeepSpeed's own reduction

    def prepare_reduction(self) -> None:
        """Take control. A collective. Raises UnsupportedError that names every feature that is in the way."""
        engine = self.engine
        require_local_gradients(engine, self.rank, self._shards)
        if self._shards is None:
            self._shards = divide(engine.seq_data_parallel_group, 1)
        self._averages_shards = type(engine.optimizer).__name__ in _ZERO
        if not self._averages_shards:
            replace(engine, "_reduce_non_expert_gradients", self._reducing)
            replace(engine, "clip_fp32_gradients", self._clipping)
        if type(engine.optimizer).__name__ == STAGE3 and self._shards.inner[0] != self._shards.whole[0]:
            # every replica would write files of the same names: the first one's are saved
            replace(engine, "_save_checkpoint", _leave_to_first_replica)

    def reduce_over(self, replicas: ReducedOver) -> None:
        """Raises UnsupportedError for ALL after LOCAL in fp16, if loss scales may differ."""
        rejoins = (self._reduced_over, replicas) == (ReducedOver.LOCAL, ReducedOver.ALL)
        if rejoins and self.engine.fp16_enabled() and self.engine.dynamic_loss_scale():
            raise UnsupportedError(
                f"rank {self.rank}: after local iterations each replica has its own loss scale, so gradients of all "
                "replicas cannot be averaged: set a constant fp16.loss_scale, or use bf16"
            )
        self._reduced_over = replicas

    def require_own_pace(self) -> None:
        """DeepSpeed couples replicas: always raises."""
        raise UnsupportedError(
            "--sync-policy a_edit is not supported with DeepSpeed, whose replicas agree in each iteration (the loss "
            "of a pipeline, overflows, the norm for clipping in fp32) and have one iteration in common: choose "
            "--sync-policy edit, or a loop of plain torch with fully_shard"
        )

    def shard_group(self) -> tuple[int, ...]:
        """The ranks of this replica that share its part of the model."""
        return (self.rank,) if self._shards is None else self._shards.inner

    def modules(self) -> Mapping[str, str]:
        """The module of each parameter or master; `module_forwards` explains how modules are named."""
        model = self.engine.module
        names = [item.name for item in self.inventory().items if item.role in _MODULES]
        modules = {name: module_in(model, name.removesuffix(":main")) for name in names}
        order = {module: at for at, module in enumerate(self.forward_order())}
        return dict(sorted(modules.items(), key=lambda pair: order[pair[1]]))

    def forward_order(self) -> Sequence[str]:
        model = self.engine.module
        return in_forward_order(model, [module_in(model, name) for name, _ in model.named_parameters()])

    def before_modules(self, call: Callable[[str], None]) -> None:
        """Follow forwards. Raises UnsupportedError for a module without a forward of its own, and with ZeRO-3."""
        if type(self.engine.optimizer).__name__ == STAGE3:
            raise UnsupportedError(
                f"rank {self.rank}: ZeRO-3 gathers parameters ahead of the forwards that read them, and keeps some "
                "gathered, so that shards written right before a forward may not reach it: choose --sync-apply update "
                "or wait"
            )
        calls_of(self.rank, self.engine.module, set(self.forward_order())).before_modules(call)

    def follow_modules(self, edges: ModuleEdges) -> None:
        """Report edges, whatever the optimizer holds. Raises UnsupportedError for a module without a forward."""
        calls_of(self.rank, self.engine.module, set(self.modules().values())).follow_modules(edges)

    def complete_reduction(self) -> None:
        """Average ZeRO's shards of the gradients over all replicas, if ALL is wanted. A collective of the sync group,
        once between the last backward and the update."""
        if self._averages_shards and self._reduced_over is ReducedOver.ALL and self._shards is not None:
            engine, shards = self.engine, self._shards
            for gradients in _shards_of_gradients(engine.optimizer):
                _average(gradients, shards.sync_group, len(shards.sync), engine.zero_reduce_bucket_size())

    # DeepSpeed's methods

    def _reducing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._reduced_over is ReducedOver.ALL:
            return original(*args, **kwargs)
        if self._shards is not None and len(self._shards.inner) > 1:
            with _data_parallel_group(self.engine, self._shards.inner_group):
                return original(*args, **kwargs)
        return None

    def _clipping(self, original: Callable[..., Any]) -> Any:
        if self._reduced_over is ReducedOver.ALL or self._shards is None:
            return original()
        with _data_parallel_group(self.engine, self._shards.inner_group):
            return original()


def _leave_to_first_replica(*args: Any, **kwargs: Any) -> None:
    """`_save_checkpoint` of another replica: with ZeRO-3 it would write the first one's files, too."""


@contextmanager
def _data_parallel_group(engine: Any, group: Any) -> Iterator[None]:
    """DeepSpeed's functions find `group` as the data-parallel group within this context."""
    from deepspeed.utils import groups

    with ExitStack() as stack:
        for owner, name in (
            (groups, "_get_data_parallel_group"),
            (groups, "_get_sequence_data_parallel_group"),
            *([(engine.mpu, "get_data_parallel_group")] if engine.mpu is not None else []),
        ):
            stack.enter_context(replaced(owner, name, lambda: group))
        yield


# with ZeRO


def _shards_of_gradients(optimizer: Any) -> Iterator[list[torch.Tensor]]:
    """This rank's shards of the averaged gradients, by parameter group or sub-group."""
    for gradients in optimizer.averaged_gradients.values():
        flat = getattr(gradients, "flat_partition", None)
        if flat is not None:
            yield [flat]
        elif gradients is not None:
            yield list(gradients)


def _average(tensors: Sequence[torch.Tensor], group: Any, size: int, limit: int) -> None:
    """Average in place over `group`; small tensors together, up to `limit` elements."""
    for bucket in _buckets(tensors, limit):
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if alone else _flatten_dense_tensors(bucket)
        dist.all_reduce(flat.div_(size), group=group)
        if not alone:
            for tensor, average in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                tensor.copy_(average)


def _buckets(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of one dtype with at most `limit` elements, or a single larger one."""
    bucket: list[torch.Tensor] = []
    elements = 0
    for tensor in tensors:
        if bucket and (elements + tensor.numel() > limit or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    if bucket:
        yield bucket


# refusals


def require_local_gradients(engine: Any, rank: int, shards: ShardGroups | None) -> None:
    """Raises UnsupportedError that names every feature with which gradients cannot be kept within a replica."""
    problems = list(_in_the_way(engine, shards))
    if problems:
        raise UnsupportedError(f"rank {rank}: local SGD cannot reduce gradients by replica: {'; '.join(problems)}")


def _in_the_way(engine: Any, shards: ShardGroups | None) -> Iterator[str]:
    kind = type(engine.optimizer).__name__
    if getattr(engine, "sequence_parallel_size", 1) > 1:
        yield "sequence parallelism reduces them over its own ranks as well"
    if getattr(engine, "has_moe_layers", False):
        yield "MoE layers reduce those of experts over expert groups"
    if kind not in SHARDED:
        return
    if shards is None:
        yield (
            f"{kind} was built over all data-parallel ranks before --sync was known: give --sync to ft-run, or pass "
            "the configuration to deepspeed.initialize as a file or a dictionary"
        )
    elif any(
        tuple(sorted(dist.get_process_group_ranks(group))) != shards.inner for group in _sharded_over(engine.optimizer)
    ):
        yield f"{kind} shards over other ranks than {list(shards.inner)}: this version of DeepSpeed is not supported"


def _sharded_over(optimizer: Any) -> list[Any]:
    """The groups over which an optimizer shards."""
    if type(optimizer).__name__ != STAGE3:
        return list(optimizer.real_dp_process_group)
    own = {id(one.ds_process_group): one.ds_process_group for group in optimizer.fp16_groups for one in group}
    return [optimizer.dp_process_group, *own.values()]
