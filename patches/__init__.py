"""Run-time changes to upstream frameworks: the CPU device shim for Megatron, and what DeepSpeed needs without CUDA.

Invariant: nothing changes if there is a CUDA device. Every change is a declared `Patch` (upstream module, symbol,
checked versions, reason); if one no longer applies, importing its module raises PatchError. Applying twice has no
further effect. The adapters decide whether a job runs on the CPU.

In: two functions that register import hooks (adapters.script.script_hooks), so that modules are patched right after
they execute and before any other module imports names from them. Out: upstream modules that run on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from . import (
    deepspeed_cpu,
    megatron_core,
    megatron_forks,
    megatron_missing,
    megatron_optimizers,
    python_stdlib,
    torch_cuda,
    torch_dataloader,
    torch_factories,
)
from .declared import APPLIED, Patch
from .megatron_packages import MegatronPackage, importable_package, package_in
from .versions import untested

OnImport = Callable[[str, Callable[[ModuleType], None]], None]
LoadBelow = Callable[[str, Callable[[ModuleSpec], Loader | None]], None]


def cpu_patches(
    device_count: int = 1, package: MegatronPackage = MegatronPackage.MEGATRON_LM
) -> tuple[Patch, ...]:
    """The shim's patches for that program, in the order in which they are registered."""
    of_torch = (*torch_cuda.patches(device_count), *torch_factories.PATCHES, *torch_dataloader.PATCHES)
    match package:
        case MegatronPackage.MEGATRON_LM:
            return (*python_stdlib.PATCHES, *of_torch, *megatron_core.PATCHES, *megatron_optimizers.PATCHES)
        case MegatronPackage.MEGATRON_DEEPSPEED:  # asks DeepSpeed for its device
            return (*python_stdlib.PATCHES, *megatron_forks.MEGATRON_DEEPSPEED)
        case MegatronPackage.GPT_NEOX:
            return (*python_stdlib.PATCHES, *of_torch, *megatron_forks.GPT_NEOX)


def is_applied() -> bool:
    """Whether the shim is active in this process, so that torch.cuda stands for the CPU."""
    return "is_available" in torch.cuda.__dict__.get(APPLIED, ())


def apply_cpu(
    on_import: OnImport,
    load_below: LoadBelow,
    device_count: int = 1,
    package: MegatronPackage = MegatronPackage.MEGATRON_LM,
) -> bool:
    """Make Megatron, or a fork, run on the CPU, with `device_count` emulated devices on this node (one per local rank).

    Returns False, and changes nothing, if there is a CUDA device or the shim is active already. Raises PatchError if a
    patch does not apply to a module that is imported already; other modules raise it when they are imported.
    """
    if is_applied() or torch.cuda.is_available():
        return False
    if package is not MegatronPackage.MEGATRON_LM:
        megatron_forks.prepare(device_count)
        on_import("deepspeed", megatron_forks.with_compression)
    missing = [name for name in megatron_missing.NAMES if importlib.util.find_spec(name) is None]
    if missing:
        load_below("megatron", partial(megatron_missing.loader, missing))
    for patch in cpu_patches(device_count, package):
        if patch.distribution in ("torch", "python"):
            importlib.import_module(patch.module)
        on_import(patch.module, patch.apply)
    return True


def apply_deepspeed_cpu(on_import: OnImport) -> bool:
    """Make DeepSpeed build nothing at start, and detach its flat buffers.

    Returns False, and changes nothing, if there is a CUDA device.
    """
    if torch.cuda.is_available() and not is_applied():
        return False
    for patch in deepspeed_cpu.PATCHES:
        on_import(patch.module, patch.apply)
    return True


__all__ = [
    "MegatronPackage",
    "Patch",
    "apply_cpu",
    "apply_deepspeed_cpu",
    "cpu_patches",
    "importable_package",
    "is_applied",
    "package_in",
    "untested",
]
