"""Restore the engine's learning rate scheduler, however often and whatever else loads it.

Some schedulers add what they load to what they have (Megatron-DeepSpeed's takes that many steps more), and a restart
may load one several times: with the version in memory, by `engine.load_checkpoint`, and again with the version if that
is the newer one. So each load begins with the numbers that the scheduler was built with.

A script may also step schedulers of torch itself, over the optimizer of an engine that has none. They are found among
the objects of the process, if there is one of each class.

Invariant: after `restore` the scheduler's state is the captured one, and so it is when training begins; else the job
ends. In: a scheduler, or None; an optimizer; states. Out: restored schedulers; ResumeError."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...errors import InventoryError, ResumeError
from ...snapshot.capture import codec

_PLAIN = (int, float, str, type(None))


class Schedule:
    """The scheduler of one engine. Build it before anything is restored."""

    def __init__(self, scheduler: Any, rank: int) -> None:
        self._scheduler, self._rank = scheduler, rank
        self._built = {name: copy.deepcopy(value) for name, value in _attributes(scheduler).items() if _is_plain(value)}
        self._restored: bytes | None = None

    def begin_again(self) -> None:
        """Set the numbers with which the scheduler was built, before it is loaded."""
        _attributes(self._scheduler).update(copy.deepcopy(self._built))
        self._restored = None

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Load a captured state. Raises ResumeError if the scheduler does not take it."""
        if self._scheduler is None or saved is None:
            return
        self.begin_again()
        self._scheduler.load_state_dict(copy.deepcopy(dict(saved)))
        self._restored = codec.encode(dict(saved))
        self._require_restored("does not take the state that it gave", "pass one whose load_state_dict does")

    def begin(self) -> None:
        """Before the first iteration. Raises ResumeError if the script has changed what was restored."""
        self._require_restored(
            "was changed after it was restored, before the first batch",
            "leave loading and stepping it to DeepSpeed: engine.load_checkpoint restores it",
        )
        self._restored = None

    def _require_restored(self, what: str, advice: str) -> None:
        if self._restored is not None and codec.encode(dict(self._scheduler.state_dict())) != self._restored:
            raise ResumeError(
                f"rank {self._rank}: the learning rate scheduler {type(self._scheduler).__name__} {what}: "
                f"{codec.decode(self._restored)} became {self._scheduler.state_dict()}; {advice}, or start with "
                "--ftp-resume fresh"
            )


def own_schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The live schedulers of an optimizer, by class; {} if two are of one class, or one cannot be captured."""
    found = [one for one in gc.get_objects() if isinstance(one, LRScheduler) and one.optimizer is optimizer]
    named = {type(one).__name__: one for one in found}
    try:
        codec.encode({name: one.state_dict() for name, one in named.items()})
    except InventoryError:
        return {}
    return named if len(named) == len(found) else {}


def restore_own(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], rank: int) -> None:
    """Restore the script's schedulers. Raises ResumeError if there is none of a class."""
    live = own_schedulers(optimizer)
    for name, captured in saved.items():
        if name not in live:
            raise ResumeError(
                f"rank {rank}: the captured job stepped a {name} of its own over the engine's optimizer, and now there "
                f"is none, or there are several: make it before the first batch, or pass it to "
                "deepspeed.initialize(lr_scheduler=...)"
            )
        live[name].load_state_dict(copy.deepcopy(dict(captured)))


def _attributes(scheduler: Any) -> dict[str, Any]:
    return getattr(scheduler, "__dict__", {})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for entry in value.items() for part in entry)
    return isinstance(value, _PLAIN)
