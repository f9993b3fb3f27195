"""Read and restore every random number generator that a rank draws from.

Invariant: after `restore_rng(rng_state())` each generator continues with the number that it would have drawn next. It
is the last step of a restore, because nothing may draw before the first iteration.

In: the process's generators (Python, NumPy, torch's default one, the current CUDA device's) and the framework's tracker
of model-parallel streams. Out: a dictionary of tuples, arrays and byte tensors.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import ResumeError


class Tracker(Protocol):
    """Named streams of random numbers of Megatron or DeepSpeed: byte tensors, or generators if CUDA graphs are used."""

    def get_states(self) -> dict[str, Any]: ...
    def set_states(self, states: dict[str, Any]) -> None: ...


def process_state() -> dict[str, Any]:
    """The states of the generators on the CPU."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_process_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def rng_state(tracker: Tracker) -> dict[str, Any]:
    """The state of all generators. Under the CPU shim the CUDA entry is the default generator's."""
    return {
        **process_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": streams(tracker),
    }


def restore_rng(state: Mapping[str, Any], tracker: Tracker) -> None:
    """Set all generators. Raises ResumeError if the tracker's streams are not those captured."""
    _require_same_streams(tracker, state["tracker"])
    set_process_state(state)
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    restore_streams(tracker, state["tracker"])


def numbers_drawn(device: bool = True) -> tuple[Any, ...]:
    """Values that stay equal as long as nothing draws from the process's generators. `device`: also from CUDA's."""
    numpy: Any = np.random.get_state()
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if device and torch.cuda.is_available() else None
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes(), cuda


def streams(tracker: Tracker) -> dict[str, torch.Tensor]:
    """The tracker's streams by name, copied."""
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in tracker.get_states().items()
    }


def _require_same_streams(tracker: Tracker, captured: Mapping[str, torch.Tensor]) -> None:
    present = tracker.get_states()
    if set(present) != set(captured):
        raise ResumeError(
            f"the RNG tracker holds the streams {sorted(present)}, but {sorted(captured)} were captured: "
            "resume with the parallel sizes and the random seed settings of the captured job"
        )


def restore_streams(tracker: Tracker, captured: Mapping[str, torch.Tensor]) -> None:
    """Set the tracker's streams. Raises ResumeError if they are not those captured."""
    _require_same_streams(tracker, captured)
    present = tracker.get_states()
    tracker.set_states({name: _stream(present[name], state) for name, state in captured.items()})


def _stream(current: torch.Tensor | torch.Generator, captured: torch.Tensor) -> torch.Tensor | torch.Generator:
    if isinstance(current, torch.Generator):
        current.set_state(captured)
        return current
    return captured.clone()
