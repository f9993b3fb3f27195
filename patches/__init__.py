"""Changes to upstream frameworks at run time: the CPU device shim for Megatron, and what DeepSpeed needs there.

Invariant: nothing is touched where there is a CUDA device. Every change is a declared `Patch` (upstream module,
symbol, versions it was checked with, reason); one that no longer applies raises PatchError when its module is imported.
Applying twice is the same as applying once. Whether a job wants the CPU is decided by the adapters.

In: two functions that register import hooks (adapters.script_hooks), so that modules are patched right after they
execute and before any other module takes names from them. Out: upstream modules that run on the CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from . import (
    deepspeed_shm_comm,
    deepspeed_zero_flat,
    megatron_datasets,
    megatron_distrib_optimizer,
    megatron_fused_kernels,
    megatron_jit,
    megatron_optimizer,
    megatron_rng,
    megatron_schedules,
    megatron_triton,
    multiprocessing_spawn,
    torch_cuda,
    torch_dataloader,
    torch_factories,
    typing_override,
)
from .declared import APPLIED, Patch
from .versions import untested

OnImport = Callable[[str, Callable[[ModuleType], None]], None]
LoadBelow = Callable[[str, Callable[[ModuleSpec], Loader | None]], None]


def cpu_patches(device_count: int = 1) -> tuple[Patch, ...]:
    """The shim's patches, in the order in which they are registered."""
    return (
        *typing_override.patches(),
        *multiprocessing_spawn.patches(),
        *torch_cuda.patches(device_count),
        *torch_factories.patches(),
        *torch_dataloader.patches(),
        *megatron_jit.patches(),
        *megatron_rng.patches(),
        *megatron_schedules.patches(),
        *megatron_optimizer.patches(),
        *megatron_distrib_optimizer.patches(),
        *megatron_fused_kernels.patches(),
        *megatron_datasets.patches(),
    )


def deepspeed_patches() -> tuple[Patch, ...]:
    """What changes in DeepSpeed without a CUDA device: nothing pretends to be one."""
    return (*deepspeed_shm_comm.patches(), *deepspeed_zero_flat.patches())


def is_applied() -> bool:
    """Whether the shim is active in this process: torch.cuda answers for the CPU."""
    return "is_available" in torch.cuda.__dict__.get(APPLIED, ())


def apply_cpu(on_import: OnImport, load_below: LoadBelow, device_count: int = 1) -> bool:
    """Make Megatron run on the CPU, with `device_count` pretended devices on this node (one per local rank).

    False, and nothing is changed, where there is a CUDA device; False also where it was applied before.
    Raises PatchError for a module already imported that has drifted; others raise when they are imported.
    """
    if is_applied() or torch.cuda.is_available():
        return False
    if importlib.util.find_spec("triton") is None:
        load_below("megatron", megatron_triton.loader)
    for patch in cpu_patches(device_count):
        importlib.import_module(patch.module) if patch.distribution != "megatron-core" else None
        on_import(patch.module, lambda module, patch=patch: patch.apply(module) and None)  # type: ignore[misc]
    return True


def apply_deepspeed_cpu(on_import: OnImport) -> bool:
    """Have DeepSpeed build nothing at start, and detach its flat buffers.

    False, and nothing is changed, where there is a CUDA device.
    """
    if torch.cuda.is_available() and not is_applied():
        return False
    for patch in deepspeed_patches():
        on_import(patch.module, lambda module, patch=patch: patch.apply(module) and None)  # type: ignore[misc]
    return True


__all__ = ["Patch", "apply_cpu", "apply_deepspeed_cpu", "cpu_patches", "deepspeed_patches", "is_applied", "untested"]
