"""Point Megatron's RNG tracker at the CPU's default generator, from which dropout draws here.

Upstream file: megatron/core/tensor_parallel/random.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedError
from .declared import Patch
from .versions import MEGATRON

MODULE = "megatron.core.tensor_parallel.random"
WARNING = "CPU RNG state changed within GPU RNG context"


def get_state(original: object) -> Callable[..., torch.Tensor]:
    """_get_cuda_rng_state: a copy of the generator's state."""

    def _get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        if graph_safe:
            raise UnsupportedError("an RNG tracker for CUDA graphs needs a CUDA device; run without CUDA graphs")
        return torch.default_generator.get_state()

    return _get_cuda_rng_state


def set_state(original: object) -> Callable[..., None]:
    """_set_cuda_rng_state: copies the state into the generator."""

    def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        if graph_safe:
            raise UnsupportedError("an RNG tracker for CUDA graphs needs a CUDA device; run without CUDA graphs")
        torch.default_generator.set_state(new_state)

    return _set_cuda_rng_state


def quiet_logging(original: Any) -> Any:
    """The module's `logging`, with a filter for a warning that every fork would cause here."""
    logger = original.getLogger(MODULE)
    logger.addFilter(_is_not_the_warning)
    return original


def _is_not_the_warning(record: logging.LogRecord) -> bool:
    return record.getMessage() != WARNING


def patches() -> tuple[Patch, ...]:
    """The patches of the tracker's access to the device's generator, and of its warning."""
    reason = "the tracker must fork the generator that dropout draws from: on the CPU the default one"
    return (
        Patch(
            *("megatron-core", MODULE, "_get_cuda_rng_state", MEGATRON, reason, get_state),
            parameters=("device", "clone", "graph_safe"),
        ),
        Patch(
            *("megatron-core", MODULE, "_set_cuda_rng_state", MEGATRON, reason, set_state),
            parameters=("new_state", "device", "graph_safe"),
        ),
        Patch(
            *("megatron-core", MODULE, "logging", MEGATRON),
            reason=f"fork() warns '{WARNING}' at every fork, as there is one generator",
            replace=quiet_logging,
        ),
    )
