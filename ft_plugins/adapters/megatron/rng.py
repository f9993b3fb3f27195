"""The generators of a Megatron rank: the process's, and Megatron's tracker of the tensor- and expert-parallel streams.

In: the process. Out: plain values, and back, as `adapters.rng` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from .. import rng


def rng_state() -> dict[str, Any]:
    """The state of all generators."""
    return rng.rng_state(get_cuda_rng_tracker())


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators. Raises ResumeError when the tracker's streams are not those that were captured."""
    rng.restore_rng(state, get_cuda_rng_tracker())
