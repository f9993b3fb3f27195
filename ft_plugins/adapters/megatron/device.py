"""Decide whether Megatron is patched for the CPU: only if its job asks for it.

Invariant: a missing CUDA device alone never causes a patch, because a node with a broken driver looks the same. A
protected job without a device that does not ask for the CPU raises ConfigError; an unprotected one is left to Megatron.

In: the job's configuration, its arguments, torch's devices. Out: a decision; the line that reports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch

from ...config import Config
from ...errors import ConfigError
from ...patches import MegatronPackage, cpu_patches

_BACKEND = "--distributed-backend"
_SWITCH = "--ftp-cpu"


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
