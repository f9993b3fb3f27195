"""What of Megatron cannot be followed yet, by name: found at start, before anything is captured.

Invariant: a job that passes has only state that `state` inventories, and only updates that go through
`optimizer.step`. In: model chunks and optimizers. Out: one sentence per feature that is in the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from ...errors import UnsupportedError

_FOLLOWED = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)


def flat(optimizer: Any) -> tuple[Any, ...]:
    """The Megatron optimizers in `optimizer`: itself, or what a ChainedOptimizer chains."""
    if hasattr(optimizer, "chained_optimizers"):
        return tuple(part for chained in optimizer.chained_optimizers for part in flat(chained))
    return (optimizer,)


def is_stub(optimizer: Any) -> bool:
    """Whether this rank has nothing to update in `optimizer` (all its parameters are frozen or elsewhere)."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def require_supported(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any], rank: int) -> None:
    """Raises UnsupportedError that names every feature in use that cannot be followed."""
    found = [*_of_model(chunks), *(problem for optimizer in optimizers for problem in _of_optimizer(optimizer))]
    if found:
        raise UnsupportedError(f"rank {rank}: cannot protect this job: {'; '.join(dict.fromkeys(found))}")


def _of_model(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in chunks:
        config, ddp = getattr(chunk, "config", None), getattr(chunk, "ddp_config", None)
        if getattr(config, "overlap_moe_expert_parallel_comm", False):
            yield "combined 1F1B (--overlap-moe-expert-parallel-comm) bypasses the schedule"
        scope = getattr(config, "cuda_graph_scope", None) or ()
        if getattr(config, "cuda_graph_impl", "none") == "local" and "full_iteration" in str(scope):
            yield "full-iteration CUDA graphs (--cuda-graph-scope full_iteration) hide the iteration"
        for precision in ("fp8", "fp4"):
            if getattr(config, precision, None):
                yield f"{precision} parameters (--{precision}-format) keep scaling state outside of the optimizer"
        if getattr(config, "qk_clip", False):
            yield "QK clipping (--qk-clip) changes parameters and masters after the update, each by itself"
        if getattr(ddp, "use_megatron_fsdp", False):
            yield "Megatron FSDP (--use-megatron-fsdp) has no contiguous buffers to gather from"
        if getattr(ddp, "num_distributed_optimizer_instances", 1) > 1:
            yield "several distributed optimizer instances (--num-distributed-optimizer-instances)"


def _of_optimizer(optimizer: Any) -> Iterator[str]:
    if not isinstance(optimizer, _FOLLOWED):
        yield f"the optimizer {type(optimizer).__name__} is unknown"
        return
    if is_stub(optimizer):
        return
    if getattr(optimizer.config, "use_precision_aware_optimizer", False):
        yield "the precision-aware optimizer (--use-precision-aware-optimizer) keeps its masters inside FusedAdam"
    if getattr(optimizer.config, "optimizer_cpu_offload", False):
        yield "optimizer CPU offload (--optimizer-cpu-offload) keeps masters of its own"
    for group in optimizer.optimizer.param_groups:
        if group.get("momentum"):
            yield f"{type(optimizer.optimizer).__name__} with momentum creates its state in its first step only"
        if group.get("amsgrad"):
            yield "amsgrad"
