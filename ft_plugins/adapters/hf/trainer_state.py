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
from ...events import say
from ..data.loader_values import encoding
from .log_history import LogHistory, expected_bytes
from .plain_attributes import LIMIT, PlainAttributes

_HISTORY = "log_history"
_OF_THE_RANK = ("is_local_process_zero", "is_world_process_zero")
_DERIVED = (
    "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs",
    "is_hyper_param_search", "trial_name", "trial_params",
)  # fmt: skip
_LOADED = ("logging_steps", "eval_steps", "save_steps", "train_batch_size")  # as a loaded checkpoint has them
_ELSEWHERE = ("state", "control", "args", "optimizer", "lr_scheduler", "model", "model_wrapped", "deepspeed")
_TRAINER, _ARGUMENTS = "trainer", "args"
_ACCUMULATION = "gradient_accumulation_steps"
_CHANGED = f"a callback has changed args.{_ACCUMULATION}, by which the place in an epoch is found"
_LIBRARIES = ("transformers", "torch", "builtins", "abc", "typing")  # whose classes keep nothing of a job
_GROWTH = 256 << 10  # bytes by which the rest may grow: the data position, what callbacks keep


class TrainerProgress:
    """What one Trainer's loop counts. Built when its loop has been set up."""

    def __init__(self, trainer: Any, exportable: type) -> None:
        """`exportable`: the class of objects with `state()`."""
        self._trainer, self._exportable = trainer, exportable
        self.begun = False  # whether its loop has begun
        self._named: set[str] = set()  # what is not captured
        self._said = not trainer.is_world_process_zero()
        self._history = LogHistory(2 * self._history_bytes(), trainer.is_world_process_zero())
        self._derived = _derived(trainer)
        own = [kind for kind in type(trainer).__mro__ if kind.__module__.startswith("transformers.")]
        self._names = {name for kind in own for one in vars(kind).values() for name in _names_in(one)}
        self._fields = {one.name for one in fields(trainer.args)}
        self._accumulation = getattr(trainer.args, _ACCUMULATION)
        self._attributes = PlainAttributes(self._owners, self._is_known)

    def read(self) -> dict[str, Any]:
        trainer = self._trainer
        self._report_accumulation()
        state = {one.name: getattr(trainer.state, one.name) for one in fields(trainer.state)}
        left_out = {_HISTORY, *_OF_THE_RANK} | {name for name, value in self._derived.items() if state[name] == value}
        exported = [one.state() for one in self._exportables()]
        return {
            "state": self._plain("state", {name: value for name, value in state.items() if name not in left_out}),
            "history": self._history.read(trainer.state.log_history),
            "control": self._plain("control", vars(trainer.control)),
            "callbacks": [self._plain("a callback's state", one["attributes"]) for one in exported],
            "shared": [self._shared(*pair) for pair in zip(self._exportables(), exported, strict=True)],
            "attributes": self._attributes.read(),
        }

    def _plain(self, place: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that can be encoded; others are named once."""
        plain = {name: value for name, value in values.items() if encoding(value, 2 * LIMIT) is not None}
        for name in values.keys() - plain.keys() - self._named:
            self._named.add(name)
            if self._trainer.is_world_process_zero():
                kind = type(values[name]).__name__
                problem = "is not captured, being an object or too large, and begins again after a restart"
                say(f"{place}.{name} (a {kind}) {problem}", alarm=True)
        return plain

    def _shared(self, one: Any, exported: Mapping[str, Any]) -> list[str]:
        """The attributes of a callback that the TrainerState refers to, so that it changes with them."""
        known = self._known_of(one)
        return [name for name, value in exported["attributes"].items() if name in known and known[name] is value]

    def _known_of(self, one: Any) -> dict[str, Any]:
        """What the TrainerState has of the attributes of the only callback of a class."""
        known = (self._trainer.state.stateful_callbacks or {}).get(type(one).__name__)
        return known["attributes"] if isinstance(known, dict) else {}

    def _report_accumulation(self) -> None:
        """Say once that the number of batches of an update has changed: the place in an epoch does not follow it."""
        if getattr(self._trainer.args, _ACCUMULATION) != self._accumulation and not self._said:
            self._said = True
            say(f"iteration {self._trainer.state.global_step}: {_CHANGED}: a restart will be refused", alarm=True)

    def expected_bytes(self) -> int:
        """By how many bytes `read` may grow; twice that is claimed."""
        return _GROWTH + self._history_bytes()

    def _history_bytes(self) -> int:
        args, state = self._trainer.args, self._trainer.state
        evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
        return expected_bytes(state.max_steps, state.logging_steps, state.eval_steps if evaluates else None)

    def write_state(self, saved: Mapping[str, Any]) -> None:
        """Set the TrainerState; what follows may read it. Raises ResumeError."""
        if f"{_ARGUMENTS}.{_ACCUMULATION}" in saved["attributes"]:
            raise ResumeError(f"{_CHANGED}: give it the same value from the start, with --ftp-resume fresh")
        state = self._trainer.state
        for name, value in {**self._derived, **saved["state"]}.items():
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
        for one, its, shared in zip(exportables, saved["callbacks"], saved["shared"], strict=True):
            for name, value in its.items():
                setattr(one, name, copy.deepcopy(value))
            self._known_of(one).update({name: getattr(one, name) for name in shared})

    def _exportables(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, self._exportable)]

    def _owners(self) -> dict[str, Any]:
        """The Trainer, its callbacks, without those of transformers that have no state, and classes of the script."""
        callbacks = enumerate(self._trainer.callback_handler.callbacks)
        own = {
            f"callbacks[{number}] {type(one).__name__}": one
            for number, one in callbacks
            if isinstance(one, self._exportable) or not type(one).__module__.startswith("transformers.")
        }
        objects = {_TRAINER: self._trainer, _ARGUMENTS: self._trainer.args, **own}
        kinds = dict.fromkeys(kind for one in objects.values() for kind in type(one).__mro__)  # in a fixed order
        written = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES]
        return {**objects, **{f"class {kind.__module__}.{kind.__qualname__}": kind for kind in written}}

    def _is_known(self, owner: str, name: str) -> bool:
        if owner == _ARGUMENTS:
            return name not in self._fields
        return owner == _TRAINER and (name in _ELSEWHERE or name in self._names)


def _derived(trainer: Any) -> dict[str, Any]:
    """What of a TrainerState follows from the arguments, also if the Trainer has loaded another one."""
    present = trainer.state
    of_arguments = type(present)(train_batch_size=trainer._train_batch_size)
    of_arguments.compute_steps(trainer.args, present.max_steps)
    return {name: getattr(of_arguments if name in _LOADED else present, name) for name in _DERIVED}


def _names_in(one: Any) -> tuple[str, ...]:
    code = getattr(one, "__code__", None)
    return () if code is None else code.co_names
