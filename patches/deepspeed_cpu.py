"""DeepSpeed without a CUDA device: compile nothing at start, and detach ZeRO's flat buffers.

deepspeed/comm/torch.py compiles shared-memory collectives for CPUs when the process group is set up. The build needs a
C++ compiler and takes tens of seconds, and if it is killed it leaves a lock on which the next start hangs. gloo
computes the same numbers.

deepspeed/runtime/zero/stage_1_and_2.py (ZeRO-1 and ZeRO-2), from 0.18.7 to 0.18.9, flattens parameters with their
autograd graph if the device has memory for it, which a CPU always has; the first step then fails with 'Output 0 of
SplitBackward0 is a view and is being modified inplace'. 0.19 detaches the buffer; before 0.18.7 it had no graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .declared import Patch
from .versions import DEEPSPEED


def detached(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """flatten_dense_tensors_aligned that returns the same memory without a graph."""

    @functools.wraps(original)
    def flatten_dense_tensors_aligned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs).detach()

    return flatten_dense_tensors_aligned


def _no_operator() -> None:
    """build_shm_op that builds none: torch's collectives are used."""


def patches() -> tuple[Patch, ...]:
    """For processes without a CUDA device."""
    zero = "deepspeed.runtime.zero.stage_1_and_2"
    return (
        Patch(
            *("deepspeed", "deepspeed.comm.torch", "build_shm_op", DEEPSPEED),
            reason="a build at start needs a compiler, and a killed one hangs the next start",
            replace=lambda _: _no_operator,
            parameters=(),
        ),
        Patch(
            *("deepspeed", zero, "DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned", DEEPSPEED),
            reason="a flat buffer with an autograd graph cannot be updated in place",
            replace=detached,
        ),
    )
