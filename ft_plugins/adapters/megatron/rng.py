"""Every random number generator that a Megatron rank draws from, as plain values, and back.

Invariant: after `restore_rng(rng_state())` each generator continues with the number it would have drawn next. Nothing
may draw between the restore and the first iteration, so it comes last.

In: the process's generators (Python, NumPy, torch's default one, the current CUDA device's, Megatron's tracker of the
tensor- and expert-parallel streams). Out: a dictionary of tuples, arrays and byte tensors.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from ...errors import ResumeError


def rng_state() -> dict[str, Any]:
    """The state of all generators. On a CPU under the device shim the CUDA entry is the default generator's."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": {name: _bytes_of(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators. Raises ResumeError when the tracker's streams are not those that were captured."""
    tracker = get_cuda_rng_tracker()
    streams = tracker.get_states()
    if set(streams) != set(state["tracker"]):
        raise ResumeError(
            f"the RNG tracker holds the streams {sorted(streams)}, captured were {sorted(state['tracker'])}: "
            "resume with the parallel sizes and the random seed settings of the captured job"
        )
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    tracker.set_states({name: _stream(streams[name], captured) for name, captured in state["tracker"].items()})


def _bytes_of(stream: torch.Tensor | torch.Generator) -> torch.Tensor:
    """The tracker keeps byte tensors, or generators where CUDA graphs are in use."""
    return stream.get_state() if isinstance(stream, torch.Generator) else stream.clone()


def _stream(current: torch.Tensor | torch.Generator, captured: torch.Tensor) -> torch.Tensor | torch.Generator:
    if isinstance(current, torch.Generator):
        current.set_state(captured)
        return current
    return captured.clone()
