"""DeepSpeed without a CUDA device: compile nothing at start, and detach ZeRO's flat buffers.

deepspeed/comm/torch.py compiles shared-memory collectives for CPUs when the process group is set up. The build needs a
C++ compiler and takes tens of seconds, and if it is killed it leaves a lock on which the next start hangs. gloo
computes the same numbers.

deepspeed/runtime/zero/stage_1_and_2.py (ZeRO-1 and ZeRO-2), from 0.18.7 to 0.18.9, flattens parameters with their
autograd graph if the device has memory for it, which a CPU always has; the first step then fails with 'Output 0 of
SplitBackward0 is a view and is being modified inplace'. 0.19 detaches the buffer; before 0.18.7 it had no graph.

deepspeed/runtime/engine.py builds FusedAdam for `"optimizer": {"type": "AdamW"}`, which on a CPU compiles an operator
for minutes. torch's Adam is used, as with `torch_adam`, where it takes the same parameters: the same formula with other
roundings, so a line says so. `"torch_adam": false` builds FusedAdam.
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


def _no_operator() -> None:
    """build_shm_op that builds none: torch's collectives are used."""


_ADAM = {"lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode"}  # what torch's takes, of the configuration


def with_torch_adam(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """_configure_basic_optimizer that builds torch's Adam or AdamW in place of FusedAdam."""
    parameters = engine.optimizer_params() or {}
    if engine.optimizer_name() in ("adam", "adamw") and not engine.zero_use_cpu_optimizer() and {*parameters} <= _ADAM:
        engine._config.optimizer_params = {**parameters, "torch_adam": True}
        if engine.global_rank == 0:
            say(
                "on a CPU the optimizer is that of torch.optim, not FusedAdam, which would be compiled first: its "
                "numbers are rounded differently from a GPU's; write \"torch_adam\" in the optimizer's params to choose"
            )
    return original(engine, *args, **kwargs)


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
        *("deepspeed", "deepspeed.runtime.engine", "DeepSpeedEngine._configure_basic_optimizer", DEEPSPEED),
        reason="FusedAdam is compiled for minutes",
        replace=around(with_torch_adam),
        parameters=("self", "model_parameters"),
    ),
)
