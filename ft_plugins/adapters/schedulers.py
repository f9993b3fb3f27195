"""Restore schedulers: of the learning rate by its own `load_state_dict`, and of a curriculum.

Invariant: after `load` its state is the given one. The scheduler of Megatron-DeepSpeed adds the loaded number of steps
to its own, and DeepSpeed, a client and a restore may each load it.

In: a scheduler, right after it was built; an engine. Out: the same scheduler, restored; the state of its curriculum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InventoryError, ResumeError, UnsupportedError
from ..snapshot.capture import codec

_PLAIN = (bool, int, float, str, type(None))
DIFFICULTY = "current_difficulty"  # of a curriculum's state


class SchedulerRestore:
    """Loads states into a scheduler as into one that has just been built. `scheduler` may be None: there is none."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        values = getattr(scheduler, "__dict__", {})
        self._built = {name: value for name, value in values.items() if type(value) in _PLAIN}

    def load(self, saved: Mapping[str, Any], rank: int) -> None:
        """Raises ResumeError if the scheduler's state is not `saved` afterwards."""
        for name, value in self._built.items():
            setattr(self._scheduler, name, value)
        self._scheduler.load_state_dict(dict(saved))
        now = self._scheduler.state_dict()
        if codec.encode(dict(now)) != codec.encode(dict(saved)):
            raise ResumeError(
                f"rank {rank}: the learning rate scheduler {type(self._scheduler).__name__} cannot be restored: its "
                f"load_state_dict({dict(saved)}) leaves it at {now}; start with --ftp-resume fresh"
            )


def require_encodable_scheduler(scheduler: Any, rank: int) -> None:
    """Raises UnsupportedError for a learning rate scheduler whose state the codec cannot encode."""
    if scheduler is None:
        return
    try:
        codec.encode(scheduler.state_dict())
    except InventoryError as error:
        raise UnsupportedError(
            f"rank {rank}: the learning rate scheduler {type(scheduler).__name__} cannot be captured: its state_dict() "
            f"must contain only plain values, tensors and arrays ({error})"
        ) from error


def curriculum(engine: Any) -> dict[str, Any]:
    """The live state of the engine's own curriculum, up to DeepSpeed 0.18; {} without one. At its largest difficulty it
    stays there, whatever its schedule says later."""
    live: dict[str, Any] = getattr(getattr(engine, "curriculum_scheduler_legacy", None), "state", {})
    return live
