"""Whether Megatron is patched for the CPU: only where its job asks for that.

Invariant: a node whose driver is broken looks like a machine without GPUs, so the absence of a CUDA device alone
changes nothing. A protected job that has no device and does not ask for the CPU is refused, with the remedy; an
unprotected one is Megatron's own business.

In: the job's configuration, its arguments, what torch says. Out: a decision; the line that reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch

from ...config import Config
from ...errors import ConfigError
from ...patches import cpu_patches

_BACKEND = "--distributed-backend"
_SWITCH = "--ftp-cpu"


class Decision(Enum):
    """What becomes of Megatron in this process."""

    LEAVE = auto()
    PATCH = auto()
    REFUSE = auto()


def asked_by(arguments: Sequence[str], config: Config | None) -> str:
    """The option by which a job asks for the CPU; '' where it does not. The last of several backends is Megatron's."""
    if config is not None and config.cpu:
        return _SWITCH
    backend = ""
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == _BACKEND:
            backend = value if equals else "".join(arguments[index + 1 : index + 2])
    return f"{_BACKEND} gloo" if backend == "gloo" else ""


def decide(has_device: bool, asked: bool, protected: bool) -> Decision:
    """See above."""
    if has_device:
        return Decision.LEAVE
    if asked:
        return Decision.PATCH
    return Decision.REFUSE if protected else Decision.LEAVE


def refusal() -> ConfigError:
    """Of a protected job on a node without a CUDA device."""
    return ConfigError(
        f"no CUDA device is visible on this node (torch: {_torch_says()}), and Megatron needs one. If this job is "
        f"meant for a CPU, give {_BACKEND} gloo or {_SWITCH}; else mend the driver, or drain this node"
    )


def report(asked: str) -> str:
    """What is patched, by module."""
    modules = ", ".join(dict.fromkeys(patch.module for patch in cpu_patches()))
    return (
        f"running Megatron on the CPU ({asked or 'the script asks for it'}; no CUDA device is visible). Patched, as "
        f"far as they are imported: {modules}; and triton's kernels are left out where triton is not installed"
    )


def _torch_says() -> str:
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition(". ")[0].partition("\n")[0]
    return f"{torch.cuda.device_count()} devices"
