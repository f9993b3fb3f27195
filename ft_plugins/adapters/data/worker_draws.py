"""Whether the worker processes of a loader draw random numbers, or count, while they load.

Invariant: what is loaded stays the same. A worker reports before its batch arrives, so what the loop has read is never
newer than the report. A worker whose state does not change need not load again what it loaded before a restart; one
whose state does has to, from the first batch of the pass on: its state depends on which batches it loaded.

In: a loader with worker processes, whose passes begin within `WorkerDraws.watched`. Out: what changes, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..rng import numbers_drawn
from ..script.script_hooks import replaced
from .data_parts import data_parts
from .loaders import generator_states

_DRAWS = "__ft_worker_draws__"  # attribute of a loader
_NUMBERS = (int, float, bool)
_CHANGES = ("draw random numbers", "count in their copies of the data set")


class WorkerDraws:
    """The workers of one loader."""

    def __init__(self, loader: Any) -> None:
        self._reported = torch.zeros(len(_CHANGES), dtype=torch.uint8).share_memory_() if loader.num_workers else None

    @property
    def changes(self) -> str:
        """What the workers were seen to do so far; '' for nothing."""
        reported = [] if self._reported is None else self._reported.tolist()
        return " and ".join(words for words, seen in zip(_CHANGES, reported, strict=False) if seen)

    @property
    def draw(self) -> bool:
        """Whether they were seen to draw random numbers."""
        return self._reported is not None and bool(self._reported[0])

    @contextmanager
    def watched(self, loader: Any) -> Iterator[None]:
        """Workers that are started within this context report."""
        if self._reported is None:
            yield
            return
        watch = _Watch(loader.worker_init_fn, loader.collate_fn, self._reported)
        with replaced(loader, "worker_init_fn", watch.begin), replaced(loader, "collate_fn", watch.collate):
            yield


def watched(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What begins a pass over a loader, so that `draws_of` knows its workers."""

    def begin(loader: Any) -> Any:
        known = draws_of(loader) or vars(loader).setdefault(_DRAWS, WorkerDraws(loader))
        with known.watched(loader):
            return original(loader)

    return begin


def draws_of(loader: Any) -> WorkerDraws | None:
    """What the workers of a loader do whose passes `watched` begins; None before the first one."""
    return getattr(loader, _DRAWS, None)


class _Watch:
    """In a worker."""

    def __init__(self, begin: Callable[[int], Any] | None, collate: Callable[[Any], Any], reported: Any) -> None:
        self._begin, self._collate, self._reported = begin, collate, reported
        self._states: tuple[Any, ...] = ()

    def begin(self, worker: int) -> None:
        if self._begin is not None:
            self._begin(worker)
        self._states = self._present()

    def collate(self, samples: Any) -> Any:
        """After a batch is loaded."""
        batch = self._collate(samples)
        present = self._present()
        for number, (before, now) in enumerate(zip(self._states, present, strict=True)):
            if before != now:
                self._reported[number] = 1
        self._states = present
        return batch

    def _present(self) -> tuple[Any, ...]:
        info = get_worker_info()
        source = SimpleNamespace(dataset=info.dataset if info is not None else None, collate_fn=self._collate)
        own = {name: _comparable(one) for name, one in generator_states(source)["own"].items()}
        return (numbers_drawn(device=False), own), _numbers(source)


def _numbers(source: Any) -> dict[str, Any]:
    values = ((path, getattr(part, "__dict__", {})) for path, part in data_parts(source))
    return {f"{path}{key}": one for path, each in values for key, one in each.items() if type(one) in _NUMBERS}


def _comparable(state: Any) -> Any:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)
