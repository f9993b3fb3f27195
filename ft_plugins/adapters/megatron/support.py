"""Refuse Megatron features and options that are not supported, by name, before anything is captured.

Invariant: an accepted job has only state that `state` lists, and only updates that go through `optimizer.step`. An
option that a version does not have is not in use.

Versions name CUDA graphs differently:

    0.14           enable_cuda_graph or external_cuda_graph; cuda_graph_scope 'full_iteration' with the former
    0.15 to 0.17   cuda_graph_impl 'local' or 'transformer_engine'; cuda_graph_scope with 'full_iteration' and 'local'
    0.18 and newer cuda_graph_impl 'full_iteration' as well; the scope is migrated to it

In: model chunks and optimizers; Megatron-LM's arguments after validation, or configurations of megatron.core. Out:
UnsupportedError with one sentence per feature or option in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from ...errors import UnsupportedError

_SUPPORTED = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
REMEDY = "Drop the option, or run without protection"
_WHOLE = "full_iteration"
_ARGUMENTS = {
    "overlap_moe_expert_parallel_comm": "combined 1F1B bypasses the schedule",
    "perform_rl_step": "rollouts have no data position",
    "skip_train": "there is nothing to protect",
    "inprocess_restart": "it builds the model again in the same process",
    "hybrid_context_parallel": "its packing of samples keeps its own data position",
    "fim_data": "its data set draws from a random generator that cannot be restored",
    "use_torch_fsdp2": "torch shards its parameters",
    "moe_use_upcycling": "it ends after saving, or trains a converted model",
    "error_injection_rate": "injected errors are not repeated after a resume",
    "optimizer_cuda_graph": "a captured update replays without the hooks around it",
}


def flat(optimizer: Any) -> tuple[Any, ...]:
    """The Megatron optimizers in `optimizer`: itself, or those that a ChainedOptimizer chains."""
    if hasattr(optimizer, "chained_optimizers"):
        return tuple(part for chained in optimizer.chained_optimizers for part in flat(chained))
    return (optimizer,)


def is_stub(optimizer: Any) -> bool:
    """Whether this rank updates nothing with `optimizer` (all its parameters are frozen or on other ranks)."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def require_supported(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any], rank: int) -> None:
    """Raises UnsupportedError that names every unsupported feature in use."""
    problems = [*_of_model(chunks), *(problem for optimizer in optimizers for problem in _of_optimizer(optimizer))]
    if problems:
        named = "; ".join(dict.fromkeys(problems))
        raise UnsupportedError(f"rank {rank}: cannot protect this job: {named}. {REMEDY}")


def _of_model(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in chunks:
        yield from of_model(getattr(chunk, "config", None))
        yield from of_ddp(getattr(chunk, "ddp_config", None))


def _of_optimizer(optimizer: Any) -> Iterator[str]:
    if not isinstance(optimizer, _SUPPORTED):
        yield f"the optimizer {type(optimizer).__name__} is not supported"
        return
    if is_stub(optimizer):
        return
    yield from of_optimizer(optimizer.config)
    for group in optimizer.optimizer.param_groups:
        if group.get("amsgrad"):
            yield "amsgrad"


# ---- options ----


def of_arguments(args: Any) -> Iterator[str]:
    """Unsupported options of Megatron-LM's training loop."""
    for name, reason in _ARGUMENTS.items():
        if getattr(args, name, None):
            yield f"--{name.replace('_', '-')}: {reason}"
    if getattr(args, "dataloader_type", None) == "external":
        yield "--dataloader-type external: its data position is unknown"
    if captures_iteration(args):
        yield f"{_graph_flag(args)} full_iteration: full-iteration CUDA graphs hide the iteration"
    yield from _of_numbers(args)
    yield from of_ddp(args)
    yield from of_optimizer(args)


def of_model(config: Any) -> Iterator[str]:
    """Unsupported options of a TransformerConfig."""
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        yield "combined 1F1B (--overlap-moe-expert-parallel-comm) bypasses the schedule"
    if captures_iteration(config):
        yield f"full-iteration CUDA graphs ({_graph_flag(config)} full_iteration) hide the iteration"
    yield from _of_numbers(config)


def _of_numbers(config: Any) -> Iterator[str]:
    """Unsupported options of precision and clipping, of arguments or a TransformerConfig."""
    for precision in ("fp8", "fp4"):
        if getattr(config, precision, None):
            yield f"{precision} parameters (--{precision}-format) keep scaling state outside of the optimizer"
    if getattr(config, "qk_clip", False):
        yield "QK clipping (--qk-clip) changes parameters and masters separately after the update"


def of_ddp(config: Any) -> Iterator[str]:
    """Unsupported options of a DistributedDataParallelConfig."""
    if getattr(config, "use_megatron_fsdp", False):
        yield "Megatron FSDP (--use-megatron-fsdp) has no contiguous buffers to gather from"


def of_local_steps(config: Any) -> Iterator[str]:
    """Options of a TransformerConfig with which replicas cannot train on their own."""
    if getattr(config, "moe_router_enable_expert_bias", False):
        yield "the router's bias (--moe-router-enable-expert-bias) follows the tokens of all replicas in each iteration"
    balancing = getattr(config, "moe_router_load_balancing_type", None) or ()
    if "global_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing):
        yield "the global auxiliary loss (--moe-router-load-balancing-type) reads all replicas in each forward"
    if getattr(config, "mtp_num_layers", None):
        yield "multi-token prediction (--mtp-num-layers) numbers its layers as the decoder does"


def of_optimizer(config: Any) -> Iterator[str]:
    """Unsupported options of an OptimizerConfig."""
    if getattr(config, "use_precision_aware_optimizer", False):
        yield "the precision-aware optimizer (--use-precision-aware-optimizer) keeps its masters inside FusedAdam"
    if getattr(config, "optimizer_cpu_offload", False):
        yield "optimizer CPU offload (--optimizer-cpu-offload) keeps its own masters"


def cuda_graphs(options: Any) -> str:
    """How CUDA graphs are captured: 'none', 'local', 'transformer_engine' or 'full_iteration'."""
    implementation = getattr(options, "cuda_graph_impl", None) or "none"
    if implementation == "none" and getattr(options, "enable_cuda_graph", False):
        implementation = "local"
    if implementation == "none" and getattr(options, "external_cuda_graph", False):
        implementation = "transformer_engine"
    if implementation == "local" and _WHOLE in _scopes(options):
        implementation = _WHOLE
    return str(implementation)


def captures_iteration(options: Any) -> bool:
    """Whether one CUDA graph replays a whole iteration."""
    return cuda_graphs(options) == _WHOLE


def _scopes(options: Any) -> list[str]:
    """The names in `cuda_graph_scope`: a comma-separated string, or a list of strings or enum members."""
    given = getattr(options, "cuda_graph_scope", None) or ()
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    return [str(getattr(part, "name", part)).rpartition(".")[2] for part in parts]


def _graph_flag(options: Any) -> str:
    return "--cuda-graph-impl" if getattr(options, "cuda_graph_impl", None) == _WHOLE else "--cuda-graph-scope"
