"""Restore schedulers: of the learning rate by its own `load_state_dict`, and an engine's own schedules.

The scheduler of Megatron-DeepSpeed adds the loaded number of steps to its own, and DeepSpeed, a client and a restore
may each load it: each load begins with the values that it was built with. A script may also step schedulers of torch
over the optimizer of an engine that has none: they are found among the objects of the process, and several of one class
are known by the script's variables.

Invariant: after `load` its state is the given one, and so it is when training begins; else the job ends.

In: a scheduler, right after it was built; an optimizer; an engine. Out: the same ones, restored."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..errors import ResumeError, StateChangedError, UnsupportedError
from ..snapshot.capture import codec
from .script.script_names import named, namespaces

_PLAIN = (bool, int, float, str, type(None))
_ENCODABLE = "state_dict() must contain only plain values, tensors and arrays: "
_PASS = "or pass a scheduler to deepspeed.initialize(lr_scheduler=...)"
DIFFICULTY = "current_difficulty"  # of a curriculum's state


class SchedulerRestore:
    """Loads states into a scheduler as into one that has just been built. `scheduler` may be None: there is none."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        values = getattr(scheduler, "__dict__", {})
        self._built = {name: copy.deepcopy(value) for name, value in values.items() if _is_plain(value)}
        self._loaded: bytes | None = None

    def begin_again(self) -> None:
        """Set the values that the scheduler was built with, before something else loads it."""
        getattr(self._scheduler, "__dict__", {}).update(copy.deepcopy(self._built))
        self._loaded = None

    def load(self, saved: Mapping[str, Any], rank: int) -> None:
        """Raises ResumeError if the scheduler's state is not `saved` afterwards."""
        self.begin_again()
        self._scheduler.load_state_dict(copy.deepcopy(dict(saved)))
        now = self._scheduler.state_dict()
        self._loaded = codec.encode(dict(saved))
        if codec.encode(dict(now)) != self._loaded:
            raise ResumeError(
                f"rank {rank}: the learning rate scheduler {type(self._scheduler).__name__} cannot be restored: its "
                f"load_state_dict({dict(saved)}) leaves it at {now}; start with --ftp-resume fresh"
            )

    def require_unchanged(self, rank: int) -> None:
        """Before the first iteration. Raises ResumeError if the script has changed what was loaded."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and codec.encode(dict(self._scheduler.state_dict())) != loaded:
            raise ResumeError(
                f"rank {rank}: the learning rate scheduler {type(self._scheduler).__name__} was changed after it was "
                f"restored, before the first batch: {codec.decode(loaded)} became {self._scheduler.state_dict()}; "
                "leave loading and stepping it to DeepSpeed, whose engine.load_checkpoint restores it, or start with "
                "--ftp-resume fresh"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for entry in value.items() for part in entry)
    return type(value) in _PLAIN


def own_schedulers(optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """The live schedulers of an optimizer that a script made: by class, and by the script's name where several are of
    one class. Raises StateChangedError if one of those has no name, or a state that cannot be captured."""
    found = _schedulers_of(optimizer)
    if len(set(map(type, found))) < len(found):
        found.clear()
        gc.collect()  # some of them may be garbage
        found = _schedulers_of(optimizer)
    of_class = Counter(type(one).__name__ for one in found)
    names = named(namespaces()) if len(of_class) < len(found) else {}
    own: dict[str, Any] = {}
    for one in found:
        kind = type(one).__name__
        if of_class[kind] > 1:
            if id(one) not in names:
                raise StateChangedError(
                    f"rank {rank}: the script has {of_class[kind]} schedulers of class {kind} over the engine's "
                    "optimizer, and no variable of a running function holds one of them, so a restart could mix "
                    f"them up: keep each in a variable, a list or an attribute, {_PASS}"
                )
            name = names[id(one)].name
            kind = f"{kind} '{name.expression}' ({name.place})"
        what = f"rank {rank}: the script's own scheduler {kind} cannot be captured: its {_ENCODABLE}"
        codec.require_encodable(one.state_dict(), StateChangedError, what, f"; change that, {_PASS}")
        own[kind] = one
    return own


def _schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """But for those inside of others, whose state has theirs."""
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler) and one.optimizer is optimizer]
    inside = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    return [one for one in found if id(one) not in inside]


def restore_own(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Restore the script's schedulers, and return them. Raises ResumeError if they are not those captured."""
    live = own_schedulers(optimizer, rank)
    for name, captured in saved.items():
        if name not in live:
            raise ResumeError(
                f"rank {rank}: the captured job stepped a {name} of its own over the engine's optimizer, and now there "
                f"is {' and '.join(live) or 'none'}: make the same ones before the first batch, {_PASS}"
            )
        live[name].load_state_dict(copy.deepcopy(dict(captured)))
    return live


def require_encodable_scheduler(scheduler: Any, rank: int) -> None:
    """Raises UnsupportedError for a learning rate scheduler whose state the codec cannot encode."""
    if scheduler is not None:
        what = f"rank {rank}: the learning rate scheduler {type(scheduler).__name__} cannot be captured: its "
        codec.require_encodable(scheduler.state_dict(), UnsupportedError, what + _ENCODABLE)


def schedules(engine: Any) -> dict[str, Any]:
    """What an engine's own schedules have come to, as plain values. A curriculum stays at its largest difficulty, and
    random-LTD at its largest length, whatever settings say later; a progressive layer drop is one update behind."""
    length, drop = getattr(engine, "random_ltd_scheduler", None), getattr(engine, "progressive_layer_drop", None)
    return {
        "curriculum": _curriculum(engine).get(DIFFICULTY),
        "random_ltd": None if length is None else length.state_dict(),
        "layer_drop": None if drop is None else float(drop.current_theta),
    }


def restore_schedules(engine: Any, saved: Mapping[str, Any]) -> None:
    """Set them; None for what the captured engine had not."""
    if saved["curriculum"] is not None:
        _curriculum(engine)[DIFFICULTY] = saved["curriculum"]
    if saved["random_ltd"] is not None:
        engine.random_ltd_scheduler.load_state_dict(saved["random_ltd"])
    if saved["layer_drop"] is not None:
        engine.progressive_layer_drop.current_theta = saved["layer_drop"]


def _curriculum(engine: Any) -> dict[str, Any]:
    """The live state of the engine's own curriculum, up to DeepSpeed 0.18; {} without one."""
    live: dict[str, Any] = getattr(getattr(engine, "curriculum_scheduler_legacy", None), "state", {})
    return live
