"""DeepSpeed without a CUDA device: compile nothing at start, and detach ZeRO's flat buffers.

deepspeed/comm/torch.py compiles shared-memory collectives for CPUs when the process group is set up. The build needs a
C++ compiler and takes tens of seconds, and if it is killed it leaves a lock on which the next start hangs. gloo
computes the same numbers.

deepspeed/runtime/zero/stage_1_and_2.py (ZeRO-1 and ZeRO-2), from 0.18.7 to 0.18.9, flattens parameters with their
autograd graph if the device has memory for it, which a CPU always has; the first step then fails with 'Output 0 of
SplitBackward0 is a view and is being modified inplace'. 0.19 detaches the buffer; before 0.18.7 it had no graph.

deepspeed/ops/adam/fused_adam.py compiles its kernel for minutes when an optimizer is made: the usual one for "Adam" and
"AdamW" in a configuration without "torch_adam", and gpt-neox's. torch's computes the same formula with other roundings,
so a line says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..events import say
from .declared import Patch, around
from .versions import DEEPSPEED


def detached(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """flatten_dense_tensors_aligned that returns the same memory without a graph."""
    return original(*args, **kwargs).detach()


_REMARK = (
    "on a CPU the optimizer is that of torch.optim, not FusedAdam, which would be compiled first: its numbers are "
    "rounded differently from a GPU's"
)


def with_torch_adam(fused: type[torch.optim.Optimizer]) -> type:
    """FusedAdam without a kernel: making one makes torch's AdamW, or Adam, where these take the same settings."""

    class FusedAdam:
        def __new__(  # type: ignore[misc]
            cls, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Any = (0.9, 0.999),
            eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
            set_grad_none: bool = True,
        ) -> torch.optim.Optimizer:  # fmt: skip
            if not bias_correction or amsgrad:
                return fused(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad)  # type: ignore[arg-type, call-arg]
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                say(_REMARK)
            kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
            return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    return FusedAdam


def _no_operator() -> None:
    """build_shm_op that builds none: torch's collectives are used."""


_ZERO = "deepspeed.runtime.zero.stage_1_and_2"
PATCHES = (  # none imitates a CUDA device
    Patch(
        *("deepspeed", "deepspeed.comm.torch", "build_shm_op", DEEPSPEED),
        reason="a build at start needs a compiler, and a killed one hangs the next start",
        replace=lambda _: _no_operator,
        parameters=(),
    ),
    Patch(
        *("deepspeed", _ZERO, "DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned", DEEPSPEED),
        reason="a flat buffer with an autograd graph cannot be updated in place",
        replace=around(detached),
    ),
    Patch(
        *("deepspeed", "deepspeed.ops.adam.fused_adam", "FusedAdam", DEEPSPEED),
        reason="its kernel is compiled for minutes, in every rank at once",
        replace=with_torch_adam,
    ),
)
