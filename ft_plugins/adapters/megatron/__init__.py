"""Megatron as a host. `prepare()` comes before anything imports megatron; `install()` follows Megatron-LM's own loop.

Invariant: both only register what happens *when* a module is imported; a script that never imports Megatron pays for
a few dictionary entries. In: the process. Out: Megatron on this machine's device, with our flags, and followed.
"""

from __future__ import annotations

from types import ModuleType

from ...patches import apply_cpu
from ..imports import instead_of_import, on_import


def prepare(device_count: int = 1) -> bool:
    """Apply the CPU device shim where there is no CUDA device; call it before anything imports megatron.

    `device_count` is what torch.cuda.device_count() shall answer: the number of local ranks. Returns whether the shim
    was applied now. Raises PatchError naming file, symbol and version where a patch no longer applies.
    Also shows our flags in Megatron-LM's `--help`, whether a system is on or not.
    """
    on_import("megatron.training.arguments", _extend_flags)
    return apply_cpu(on_import, instead_of_import, device_count)


def install() -> None:
    """Follow Megatron-LM's training loop once the script imports it: protect it as ft-run was told. Call it once."""
    on_import("megatron.training.training", _follow)


def _extend_flags(module: ModuleType) -> None:
    from .flags import extend

    extend(module)


def _follow(module: ModuleType) -> None:
    from .training import TrainingHooks

    TrainingHooks().follow(module)


__all__ = ["install", "prepare"]
