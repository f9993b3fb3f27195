"""Masters and moments that the inner optimizer keeps in forms of its own: those of Megatron's precision-aware
optimizer, and of its optimizer CPU offload.

    precision-aware     Transformer Engine's FusedAdam keeps moments of other precisions. If it keeps masters too, it
                        updates this rank's shards of the parameters themselves: next to a shard in bf16 it has the 16
                        bits by which the master is longer, or the whole master. What it keeps in fp16 has a scale
    CPU offload         a HybridDeviceOptimizer updates copies of the shards, on the host and on the device, by
                        optimizers of its own, and then copies them back

In: inner optimizers, the tensors in their groups. Out: what is updated for these, and its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ..planned_state import plan_state, planned


def offloads(inner: Any) -> bool:
    """Whether it is a HybridDeviceOptimizer."""
    return hasattr(inner, "sub_optimizers")


def keeps(inner: Any) -> bool:
    """Whether it keeps masters."""
    return offloads(inner) or bool(getattr(inner, "master_weights", False))


def kind(inner: Any) -> str:
    """Its class; of what it offloads also how much, because host and device count updates in different places."""
    return f"{type(inner).__name__} {inner.offload_fraction}" if offloads(inner) else type(inner).__name__


def updated(inner: Any, held: torch.Tensor) -> torch.Tensor:
    """What it updates for `held`, a tensor in its groups: that, or the copy of it."""
    return inner.param_to_inner_param[held] if offloads(inner) else held  # type: ignore[no-any-return]


def keeper(inner: Any, held: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """The optimizer that keeps state of what is updated for `held`, and the tensor under which it does."""
    if not offloads(inner):
        return inner, held
    copy = inner.param_to_inner_param[held]
    return next(one for one in inner.sub_optimizers if copy in planned(one) or copy in one.state), copy


def scaled(inner: Any) -> bool:
    """Whether it keeps state in fp16, whose scales are of the shards of this number of ranks."""
    return torch.float16 in getattr(inner, "name_to_dtype_map", {}).values()


def scales(inner: Any, held: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The scales, of one element, of its state for `held` in fp16, by key. Those of state in bf16 are never read."""
    found = getattr(inner, "_scales", {}).get(held, {})
    return {key: scale for key, scale in found.items() if inner.state[held][key].dtype == torch.float16}


def plan(inner: Any) -> None:
    """Find out what it keeps. Where Transformer Engine's FusedAdam does, with masters and scales, its own function for
    it makes that, as its first update would. Raises UnsupportedError."""
    for part in inner.sub_optimizers if offloads(inner) else (inner,):
        initialize = getattr(part, "initialize_state", None)
        if initialize is None:
            plan_state(part)
            continue
        short = getattr(part, "store_param_remainders", None)  # older versions of Transformer Engine have none
        for one in (one for group in part.param_groups for one in group["params"] if not part.state[one]):
            initialize(one, *(() if short is None else (short and one.dtype == torch.bfloat16,)))
    took_over(inner)


def took_over(inner: Any) -> None:
    """State of its parts was made."""
    if offloads(inner):
        inner._sync_sub_optimizers_state_to_hdo()


def counted(optimizer: Any) -> Any:
    """Something with the groups of a Megatron optimizer, and those in which a part of its inner one counts updates."""
    inner = getattr(optimizer, "optimizer", None)
    fused = getattr(inner, "gpu_optimizer", None)
    return SimpleNamespace(param_groups=[*optimizer.param_groups, *(fused.param_groups if fused else ())])


def copy_back(inner: Any) -> None:
    """Copy what it updates to what it updates them for, as it does after an update."""
    for held, copy in inner.param_to_inner_param.items() if offloads(inner) else ():
        if copy is not held:
            held.data.copy_(copy.data)
