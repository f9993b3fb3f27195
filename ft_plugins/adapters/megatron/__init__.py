"""Megatron as a host. `prepare...` comes before anything imports megatron; `install()` follows Megatron-LM's own loop.

Invariant: these only register what happens *when* a module is imported; a script that never imports Megatron pays for
a few dictionary entries. In: the process. Out: Megatron on the device that its job asks for, with our flags, followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from ... import events
from ...config import LaunchContext
from ...patches import apply_cpu, is_applied, untested
from ..script_hooks import load_below, on_import
from . import device


def prepare(device_count: int = 1) -> bool:
    """Ask for the CPU where no CUDA device is visible: torch and Megatron are patched for it. For a script of your own,
    before it imports megatron; one that is meant for GPUs leaves it out.

    `device_count` is what torch.cuda.device_count() shall answer: the number of local ranks. Returns whether patches
    were applied now. Raises PatchError naming file, symbol and version where one no longer applies.
    """
    on_import("megatron.training.arguments", _extend_flags)
    return apply_cpu(on_import, load_below, device_count)


def prepare_launched(context: LaunchContext, arguments: Sequence[str]) -> None:
    """For a rank of ft-run, when its script imports megatron: patch it for the CPU where configuration or `arguments`
    ask for that. Rank 0 says what was patched, and of a protected job that its version of Megatron is untested. Our
    flags are in Megatron-LM's `--help`, whether a system is on or not.

    The first module of Megatron raises ConfigError in a protected job without a CUDA device that does not ask for the
    CPU: a script that only looks whether Megatron is there is not refused. Raises PatchError.
    """
    on_import("megatron.training.arguments", _extend_flags)
    protected = context.config is not None and bool(context.config.systems)
    asked = device.asked_by(arguments, context.config)
    has_device = is_applied() or torch.cuda.is_available()  # applied: the script has asked for itself
    match device.decide(has_device, bool(asked), protected):
        case device.Decision.REFUSE:
            load_below("megatron", _refuse)
        case device.Decision.PATCH:
            apply_cpu(on_import, load_below, context.local_world_size)
    patched = device.report(asked) if is_applied() else ""

    def report(module: ModuleType) -> None:
        remarks = (patched, untested("Megatron", module.__version__) if protected else "")
        if any(remarks):
            events.say(". ".join(filter(None, remarks)))

    if context.rank == 0:
        on_import("megatron.core", report)


def _refuse(spec: ModuleSpec) -> None:
    if not is_applied():  # by the script itself, in the meantime
        raise device.refusal()


def install() -> None:
    """Follow Megatron-LM's training loop once the script imports it: protect it as ft-run was told. Call it once."""
    on_import("megatron.training.training", _follow)


def _extend_flags(module: ModuleType) -> None:
    from .arguments import extend

    extend(module)


def _follow(module: ModuleType) -> None:
    from .training import TrainingHooks

    TrainingHooks().follow(module)


__all__ = ["install", "prepare", "prepare_launched"]
