"""The state of a Hugging Face Trainer besides model, optimizer and data: what its loop and its callbacks count.

Invariant: after `write(read())` the loop logs, evaluates, saves and stops as it would have. Objects keep their
identity, because callbacks and the script refer to them. What follows from the arguments (`max_steps`, intervals) is
captured only if something has changed it.

In: a Trainer. Out: plain values for the codec, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...errors import ResumeError
from .log_history import LogHistory, expected_bytes
from .plain_attributes import PlainAttributes

_HISTORY = "log_history"
_OF_THE_RANK = ("is_local_process_zero", "is_world_process_zero")
_DERIVED = (
    "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs",
    "is_hyper_param_search", "trial_name", "trial_params",
)  # fmt: skip
_ELSEWHERE = ("state", "control", "args", "optimizer", "lr_scheduler", "model", "model_wrapped", "deepspeed")
_TRAINER = "trainer"
_GROWTH = 256 << 10  # bytes by which the rest may grow: the data position, what callbacks keep


class TrainerProgress:
    """What one Trainer's loop counts. Built when its loop has been set up."""

    def __init__(self, trainer: Any, exportable: type) -> None:
        """`exportable`: the class of objects with `state()`."""
        self._trainer, self._exportable = trainer, exportable
        self.begun = False  # whether its loop has begun
        self._history = LogHistory()
        self._derived = {name: getattr(trainer.state, name) for name in _DERIVED}
        own = [kind for kind in type(trainer).__mro__ if kind.__module__.startswith("transformers.")]
        self._names = {name for kind in own for one in vars(kind).values() for name in _names_in(one)}
        self._attributes = PlainAttributes(self._owners, self._is_known, trainer.is_world_process_zero())

    def read(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {one.name: getattr(trainer.state, one.name) for one in fields(trainer.state)}
        left_out = {_HISTORY, *_OF_THE_RANK} | {name for name, value in self._derived.items() if state[name] == value}
        return {
            "state": {name: value for name, value in state.items() if name not in left_out},
            "history": self._history.read(trainer.state.log_history),
            "control": {**vars(trainer.control)},
            "callbacks": [one.state() for one in self._exportables()],
            "attributes": self._attributes.read(),
        }

    def expected_bytes(self) -> int:
        """By how many bytes `read` may grow."""
        args, state = self._trainer.args, self._trainer.state
        evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
        return _GROWTH + expected_bytes(state.max_steps, state.logging_steps, state.eval_steps if evaluates else None)

    def write_state(self, saved: Mapping[str, Any]) -> None:
        """Set the TrainerState; what follows may read it."""
        state = self._trainer.state
        for name, value in saved["state"].items():
            setattr(state, name, copy.deepcopy(value))
        self._history.write(saved["history"], state.log_history)

    def write(self, saved: Mapping[str, Any]) -> None:
        """Set everything, right before an iteration, when callbacks have seen that training and its epoch begin."""
        self.write_state(saved)
        vars(self._trainer.control).update(saved["control"])
        self._attributes.write(saved["attributes"])
        exportables = self._exportables()
        if len(exportables) != len(saved["callbacks"]):
            raise ResumeError(
                f"this Trainer has {len(exportables)} callbacks with a state, the captured one had "
                f"{len(saved['callbacks'])}: resume with the captured job's callbacks, or start with --ftp-resume fresh"
            )
        for one, its in zip(exportables, saved["callbacks"], strict=True):
            for name, value in its["attributes"].items():
                setattr(one, name, copy.deepcopy(value))

    def _exportables(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, self._exportable)]

    def _owners(self) -> dict[str, Any]:
        """The Trainer, and its callbacks, without those of transformers that have no state."""
        callbacks = enumerate(self._trainer.callback_handler.callbacks)
        own = {
            f"callbacks[{number}] {type(one).__name__}": one
            for number, one in callbacks
            if isinstance(one, self._exportable) or not type(one).__module__.startswith("transformers.")
        }
        return {_TRAINER: self._trainer, **own}

    def _is_known(self, owner: str, name: str) -> bool:
        return owner == _TRAINER and (name in _ELSEWHERE or name in self._names)


def _names_in(one: Any) -> tuple[str, ...]:
    code = getattr(one, "__code__", None)
    return () if code is None else code.co_names
