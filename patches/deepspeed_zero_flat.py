"""DeepSpeed's flat buffers of ZeRO-1 and ZeRO-2 carry no history of how they were made.

Upstream file: deepspeed/runtime/zero/stage_1_and_2.py. From 0.18.7 to 0.18.9 parameters are flattened as they are, with
their autograd graph, where the device has memory for it, and a CPU always has; the first step then fails with 'Output 0
of SplitBackward0 is a view and is being modified inplace'. 0.19 detaches the buffer; before 0.18.7 it had no graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .declared import Patch
from .versions import DEEPSPEED

MODULE = "deepspeed.runtime.zero.stage_1_and_2"


def detached(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """flatten_dense_tensors_aligned whose buffer is its own beginning: the same memory, without a graph."""

    @functools.wraps(original)
    def flatten_dense_tensors_aligned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs).detach()

    return flatten_dense_tensors_aligned


def patches() -> tuple[Patch, ...]:
    """For processes without a CUDA device."""
    return (
        Patch(
            *("deepspeed", MODULE, "DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned", DEEPSPEED),
            reason="a flat buffer with an autograd graph cannot be updated in place",
            replace=detached,
        ),
    )
