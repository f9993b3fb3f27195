"""Refuse Megatron features and options that are not supported, by name, before anything is captured.

Invariant: an accepted job has only state that `state` lists, and only updates that go through `optimizer.step`. What is
refused is in `adapters.rules.megatron`; what only modules show of fp8, in `fp8_scaling`.

In: model chunks and optimizers. Out: UnsupportedError, one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from ..rules import MEGATRON, refuse
from ..rules.megatron import OTHERWISE
from . import fp8_scaling, fsdp, inner_masters

_SUPPORTED = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
_DIVIDED_BY = "__ft_divided_by__"  # attribute of an optimizer that a layer-wise one chains: that one


def flat(optimizer: Any) -> tuple[Any, ...]:
    """The Megatron optimizers in `optimizer`: itself, or those that a ChainedOptimizer chains."""
    if not hasattr(optimizer, "chained_optimizers"):
        return (optimizer,)
    parts = tuple(part for chained in optimizer.chained_optimizers for part in flat(chained))
    if hasattr(optimizer, "dp_cp_params_list"):
        for part in parts:
            setattr(part, _DIVIDED_BY, optimizer)
    return parts


def layer_wise(optimizer: Any) -> Any:
    """The layer-wise optimizer that gave this one its parameters; None for others. See `state`."""
    return getattr(optimizer, _DIVIDED_BY, None)


def is_stub(optimizer: Any) -> bool:
    """Whether this rank updates nothing with `optimizer` (all its parameters are frozen or on other ranks)."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def require_supported(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any], rank: int) -> None:
    """Raises UnsupportedError that names every unsupported feature in use."""
    settings = (*_configurations(chunks, optimizers), {"built": facts(chunks, optimizers)})
    refuse(MEGATRON, OTHERWISE, *settings, who=f"rank {rank}: ")


def _configurations(chunks: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[Any]:
    """The configurations of megatron.core that a job was built with."""
    for chunk in chunks:
        yield from (getattr(chunk, "config", None), getattr(chunk, "ddp_config", None))
    yield from (one.config for one in optimizers if isinstance(one, _SUPPORTED) and not is_stub(one))


def facts(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> dict[str, Any]:
    """What only chunks and optimizers show, or several of their configurations together."""

    def given(*names: str) -> bool:
        found = _configurations(chunks, optimizers)
        return any(getattr(one, name, None) for one in found for name in names)

    known = [one for one in optimizers if isinstance(one, _SUPPORTED)]
    inner = [one.optimizer for one in known if not is_stub(one)]
    groups = [group for one in inner for group in one.param_groups]
    return {
        "optimizers": sorted({type(one).__name__ for one in optimizers if not isinstance(one, _SUPPORTED)}),
        "layer_wise": any(layer_wise(one) for one in optimizers),
        "amsgrad": any(group.get("amsgrad") for group in groups),
        "masters": any(map(inner_masters.keeps, inner)),
        "delayed_scaling": fp8_scaling.in_use(chunks),
        "fp8_parameters": given("fp8") and given("fp8_param", "fp8_param_gather"),
        "fsdp": given("use_megatron_fsdp") or any(fsdp.is_shard(one) for each in chunks for one in each.parameters()),
    }
