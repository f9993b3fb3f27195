"""Megatron as a host: `prepare` and `prepare_launched` patch it, `install` follows Megatron-LM's training loop.

Invariant: they only register import hooks, so they must run before anything imports megatron, and cost nothing in a
script that never does. Megatron is patched for the CPU only if its job asks for it: a missing CUDA device alone never
causes a patch, because a node with a broken driver looks the same. A protected job without a device that does not ask
raises ConfigError; an unprotected one is left to Megatron.

In: the process. Out: Megatron with our flags, on the device that its job asks for, followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ... import events
from ...config import Config, LaunchContext
from ...config.neox_yaml import settings_in_arguments
from ...errors import ConfigError
from ...patches import MegatronPackage, apply_cpu, cpu_patches, importable_package, is_applied, untested
from ..script.script_hooks import load_below, on_import

_BACKEND = "--distributed-backend"
_SWITCH = "--ftp-cpu"


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
    asked = asked_by(arguments, context.config, settings_in_arguments(arguments, Path()) if neox else None)
    has_device = is_applied() or torch.cuda.is_available()  # applied: the script called `prepare`
    match decide(has_device, bool(asked), protected):
        case Decision.REFUSE:
            load_below("megatron", _refuse)
        case Decision.PATCH:
            apply_cpu(on_import, load_below, context.local_world_size, package)
    patched = report(asked, package) if is_applied() else ""

    def say(module: ModuleType) -> None:
        known = package is MegatronPackage.MEGATRON_LM and protected
        remarks = (patched, untested("Megatron", module.__version__) if known else "")
        if any(remarks):
            events.say(". ".join(filter(None, remarks)))

    if context.rank == 0:
        on_import("megatron" if neox else "megatron.core", say)


def _refuse(spec: ModuleSpec) -> None:
    if not is_applied():  # the script may have called `prepare` meanwhile
        raise refusal()


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


# ---- the device ----


class Decision(Enum):
    """What to do with Megatron in this process."""

    LEAVE = auto()
    PATCH = auto()
    REFUSE = auto()


def asked_by(arguments: Sequence[str], config: Config | None, settings: Mapping[str, Any] | None = None) -> str:
    """The option that asks for the CPU, or ''. If several backends are given, Megatron uses the last. `settings`: those
    of a gpt-neox job."""
    if config is not None and config.cpu:
        return _SWITCH
    backend = ""
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == _BACKEND:
            backend = value if equals else "".join(arguments[index + 1 : index + 2])
    if (settings or {}).get("distributed_backend") == "gloo":
        return '"distributed_backend": "gloo"'
    return f"{_BACKEND} gloo" if backend == "gloo" else ""


def decide(has_device: bool, asked: bool, protected: bool) -> Decision:
    """The decision, a pure function of these facts."""
    if has_device:
        return Decision.LEAVE
    if asked:
        return Decision.PATCH
    return Decision.REFUSE if protected else Decision.LEAVE


def refusal() -> ConfigError:
    """The error of a protected job on a node without a CUDA device."""
    return ConfigError(
        f"no CUDA device is visible on this node (torch: {_cuda_status()}), and Megatron needs one. If this job is "
        f"meant for a CPU, give {_BACKEND} gloo or {_SWITCH}; else repair the driver, or drain this node"
    )


def report(asked: str, package: MegatronPackage = MegatronPackage.MEGATRON_LM) -> str:
    """The line that says what is patched, by module."""
    modules = ", ".join(dict.fromkeys(patch.module for patch in cpu_patches(package=package)))
    return (
        f"running {package.value} on the CPU ({asked or 'the script asks for it'}; no CUDA device is visible). Patched "
        f"if imported: {modules}. Without triton its kernels are left out"
    )


def _cuda_status() -> str:
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition(". ")[0].partition("\n")[0]
    return f"{torch.cuda.device_count()} devices"
