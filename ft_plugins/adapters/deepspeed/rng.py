"""The generators of a DeepSpeed rank: the process's, DeepSpeed's tracker of the model-parallel stream, and Megatron's
where a script takes its tensor-parallel layers from there.

In: the process. Out: plain values, and back, as `adapters.rng` has it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from .. import rng

_MEGATRON = "megatron.core.tensor_parallel"


def rng_state() -> dict[str, Any]:
    """The state of all generators."""
    megatron = sys.modules.get(_MEGATRON)
    streams = None if megatron is None else rng.streams(megatron.get_cuda_rng_tracker())
    return {**rng.rng_state(get_cuda_rng_tracker()), "megatron": streams}


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators. Raises ResumeError when a tracker's streams are not those that were captured."""
    megatron = sys.modules.get(_MEGATRON)
    if state["megatron"] and megatron is not None:
        rng.restore_streams(megatron.get_cuda_rng_tracker(), state["megatron"])
    rng.restore_rng(state, get_cuda_rng_tracker())
