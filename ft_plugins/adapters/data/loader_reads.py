"""What the loop reads in each iteration, of the loaders that the host was given and of others.

Invariant: an update that trains on no batch of a given loader, or also on one of a loader that was not given, raises
ConfigError, in a run without failures too: after a restart such a loop would train on other data.

    no read       `itertools.cycle` repeats what it has stored, a batch is used for several iterations, or it was read
                  in the iteration before
    fewer reads   than in the first iteration of this process, in which a loop that reads ahead reads more; unless
                  iterations before that one read other numbers of batches
    other loader  read before the update of an iteration, with gradients enabled and the model in training mode; other
                  reads are an evaluation's

In: reads, as they happen. Out: errors at the update.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader

from ...errors import ConfigError
from ..script.script_hooks import replace

_ENDLESS = "write `while True: yield from loader` in a generator function, and read from that"
_observers: weakref.WeakSet[LoopReads] = weakref.WeakSet()


class LoopReads:
    """The reads of one loop. `iteration()` is 0 before the first; `trains()`: whether the model is in training mode."""

    def __init__(self, iteration: Callable[[], int], trains: Callable[[], bool]) -> None:
        self.iteration = iteration
        self._trains = trains
        self._thread = threading.get_ident()
        self._present = 0  # the iteration that `_count` and the next two are of
        self._count = 0
        self._boundary = False  # a pass began or ended
        self._other = ""  # data set of a loader that was not given
        self._first: tuple[int, int] | None = None  # the first iteration with reads, and their number
        self.usual: int | None = None  # reads of each iteration of the job that was compared; 0: they vary
        self.within: list[Callable[[], bool]] = []  # whether a given loader is read right now
        self.required = False  # reads are seen, so that an update without one is an error

    def observe_others(self) -> None:
        """Notice reads of loaders that were not given, from now on."""
        replace(dataloader._BaseDataLoaderIter, "__next__", _observing, framework="torch", tested="2.13.0")
        _observers.add(self)

    def reading(self, source: Any) -> None:
        """Before each read of a pass over a given loader. Raises ConfigError."""
        if threading.get_ident() != self._thread:
            raise ConfigError(
                "a batch was read by another thread, which reads ahead, so that the data position would not match the "
                "snapshot: read in the loop itself, with num_workers for speed"
            )
        if not self.iteration():
            raise ConfigError(
                "a batch was read outside of an iteration, so that the data position would not match the snapshot: "
                "read it in the iteration that trains on it (next(batches) in `for step in session.iterations(...)`)"
            )
        self._turn()
        self._count += 1

    def boundary(self, was_read: bool = False) -> None:
        """A pass over a given loader begins or ends. `was_read`: `reading` was called, but there was no batch."""
        self._turn()
        self._boundary = True
        self._count -= was_read

    def require(self) -> None:
        """Before the update of an iteration. Raises ConfigError."""
        if not self.required:
            return
        self._turn()
        step, count = self._present, self._count
        if not count:
            raise ConfigError(
                f"iteration {step}: an update came without a batch read from the loader that was given as sampler, so "
                "that the data position is not that of training: read a batch of that loader object in every iteration "
                "that trains, from an iterator begun after the host is built. If itertools.cycle repeats it: "
                + _ENDLESS
            )
        if self._other:
            raise ConfigError(
                f"iteration {step}: before the update a batch was also read from another DataLoader (over a "
                f"{self._other}), whose position would be lost: give both, TorchHost(model, optimizer, scheduler, "
                "[loader, other]). If it is an evaluation, read it under torch.no_grad() or after the update"
            )
        if self._first is None:
            self._first = step, count
        if step == self._first[0] or self._boundary:
            return
        if self._first[1] > count and self.usual in (None, count):
            raise ConfigError(
                f"iteration {step} read {count} batches, but iteration {self._first[0]}, the first one of this start, "
                f"{self._first[1]}: a loop that reads ahead would skip batches after a restart; read a batch in the "
                "iteration that trains on it"
            )
        self.usual = count if self.usual in (None, count) else 0

    def other(self, iterator: Any) -> None:
        """Before a read of any torch loader."""
        if any(one() for one in self.within) or threading.get_ident() != self._thread:
            return
        if self.iteration() and torch.is_grad_enabled() and self._trains():
            self._turn()
            self._other = type(iterator._dataset).__name__

    def _turn(self) -> None:
        if self._present != self.iteration():
            self._present, self._count, self._boundary, self._other = self.iteration(), 0, False, ""


def _observing(original: Callable[..., Any], iterator: Any) -> Any:
    for one in _observers:
        one.other(iterator)
    return original(iterator)
