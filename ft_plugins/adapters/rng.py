"""Every random number generator that a rank draws from, as plain values, and back.

Invariant: after `restore_rng(rng_state())` each generator continues with the number it would have drawn next. Nothing
may draw between the restore and the first iteration, so it comes last.

In: the process's generators (Python, NumPy, torch's default one, the current CUDA device's) and a framework's tracker
of the streams of model parallelism. Out: a dictionary of tuples, arrays and byte tensors.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import ResumeError


class Tracker(Protocol):
    """Named streams of random numbers, as Megatron and DeepSpeed keep them: byte tensors, or generators."""

    def get_states(self) -> dict[str, Any]: ...
    def set_states(self, states: dict[str, Any]) -> None: ...


def rng_state(tracker: Tracker) -> dict[str, Any]:
    """The state of all generators. On a CPU under the device shim the CUDA entry is the default generator's."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": streams(tracker),
    }


def restore_rng(state: Mapping[str, Any], tracker: Tracker) -> None:
    """Set all generators. Raises ResumeError when the tracker's streams are not those that were captured."""
    require_same_streams(tracker, state["tracker"])
    restore_generators(state)
    restore_streams(tracker, state["tracker"])


def restore_generators(state: Mapping[str, Any]) -> None:
    """Those of the process and of its device, not the tracker's."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def streams(tracker: Tracker) -> dict[str, torch.Tensor]:
    """The tracker's streams by name, copied."""
    return {name: _bytes_of(state) for name, state in tracker.get_states().items()}


def require_same_streams(tracker: Tracker, captured: Mapping[str, torch.Tensor]) -> None:
    """Raises ResumeError when the tracker's streams are not those that were captured."""
    found = tracker.get_states()
    if set(found) != set(captured):
        raise ResumeError(
            f"the RNG tracker holds the streams {sorted(found)}, captured were {sorted(captured)}: "
            "resume with the parallel sizes and the random seed settings of the captured job"
        )


def restore_streams(tracker: Tracker, captured: Mapping[str, torch.Tensor]) -> None:
    """Set the tracker's streams. Raises ResumeError when they are not those that were captured."""
    require_same_streams(tracker, captured)
    found = tracker.get_states()
    tracker.set_states({name: _stream(found[name], state) for name, state in captured.items()})


def _bytes_of(stream: torch.Tensor | torch.Generator) -> torch.Tensor:
    """The tracker keeps byte tensors, or generators where CUDA graphs are in use."""
    return stream.get_state() if isinstance(stream, torch.Generator) else stream.clone()


def _stream(current: torch.Tensor | torch.Generator, captured: torch.Tensor) -> torch.Tensor | torch.Generator:
    if isinstance(current, torch.Generator):
        current.set_state(captured)
        return current
    return captured.clone()
