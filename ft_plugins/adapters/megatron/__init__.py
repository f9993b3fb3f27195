"""Megatron as a host: `prepare` and `prepare_launched` patch it, `install` follows Megatron-LM's training loop.

Invariant: they only register import hooks, so they must run before anything imports megatron, and cost nothing in a
script that never does. In: the process. Out: Megatron with our flags, on the device that its job asks for, followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

from ... import events
from ...config import LaunchContext
from ...config.neox_yaml import settings_in_arguments
from ...patches import MegatronPackage, apply_cpu, importable_package, is_applied, untested
from ..script.script_hooks import load_below, on_import
from . import device


def prepare(device_count: int = 1) -> bool:
    """Patch torch and Megatron for the CPU if no CUDA device is visible. Call it in your own script, before it imports
    megatron; omit it in a script that is meant for GPUs.

    `device_count` is what torch.cuda.device_count() returns then: the number of local ranks. Returns whether torch.cuda
    stands for the CPU in this process, so that its backend is gloo. Raises PatchError, naming file, symbol and version,
    if a patch does not apply.
    """
    on_import("megatron.training.arguments", _extend_flags)
    apply_cpu(on_import, load_below, device_count)
    return is_applied()


def prepare_launched(context: LaunchContext, arguments: Sequence[str]) -> None:
    """Prepare a rank of ft-run for the import of megatron: add our flags to Megatron-LM's `--help`, and patch for the
    CPU if configuration or `arguments` ask for it. Rank 0 reports the patches, and an untested version of Megatron in a
    protected job.

    In a protected job that has no CUDA device and does not ask for the CPU, importing a module of Megatron raises
    ConfigError; a script that only checks whether Megatron is installed still runs. Raises PatchError.
    """
    package = importable_package()
    if package is MegatronPackage.MEGATRON_LM:
        on_import("megatron.training.arguments", _extend_flags)
    protected = context.config is not None and bool(context.config.systems)
    neox = package is MegatronPackage.GPT_NEOX
    asked = device.asked_by(arguments, context.config, settings_in_arguments(arguments, Path()) if neox else None)
    has_device = is_applied() or torch.cuda.is_available()  # applied: the script called `prepare`
    match device.decide(has_device, bool(asked), protected):
        case device.Decision.REFUSE:
            load_below("megatron", _refuse)
        case device.Decision.PATCH:
            apply_cpu(on_import, load_below, context.local_world_size, package)
    patched = device.report(asked, package) if is_applied() else ""

    def report(module: ModuleType) -> None:
        known = package is MegatronPackage.MEGATRON_LM and protected
        remarks = (patched, untested("Megatron", module.__version__) if known else "")
        if any(remarks):
            events.say(". ".join(filter(None, remarks)))

    if context.rank == 0:
        on_import("megatron" if neox else "megatron.core", report)


def _refuse(spec: ModuleSpec) -> None:
    if not is_applied():  # the script may have called `prepare` meanwhile
        raise device.refusal()


def install() -> None:
    """Protect Megatron-LM's training loop when the script imports it, as ft-run's flags say. Call it once."""
    on_import("megatron.training.arguments", _check_arguments)
    on_import("megatron.training.training", _follow)


def _extend_flags(module: ModuleType) -> None:
    from .arguments import extend

    extend(module)


def _check_arguments(module: ModuleType) -> None:
    from .arguments import check_validated

    check_validated(module)


def _follow(module: ModuleType) -> None:
    from .training import TrainingHooks

    TrainingHooks().follow(module)


__all__ = ["install", "prepare", "prepare_launched"]
