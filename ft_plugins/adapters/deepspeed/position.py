"""Where a rank stands in its data: what it has read, and how to stand there again without reading it all.

Invariant: after `write` the next batch is the one that would have come next. Three ways, the first that applies:

    state      the iterator has `state_dict` and `load_state_dict`: it knows
    batches    a loader with a batch sampler: the sampler is started with the random numbers with which it was started
               then, and moved on; nothing is loaded
    reads      anything else: as many batches are read again and dropped, which takes as long as reading them took,
               and is said

DeepSpeed's two loaders remember with which random numbers each epoch began, so that a later epoch is the same too; of
an iterator that a script has made itself only the first read is known. What a data set's worker processes draw
themselves is not followed.

In: `deepspeed.runtime.dataloader`, right after its import, and what the engine reads. Out: plain values, and back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ...errors import ResumeError
from .wrapping import replace

_MARK = "__ft_epoch__"
Random = dict[str, Any]


def drawn() -> Random:
    """The generators from which loaders draw."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def redraw(state: Mapping[str, Any]) -> None:
    """Set them."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


@dataclass
class Epoch:
    """One pass over a loader: the generators when it began and at its first read, and how many batches were read."""

    began: Random = field(default_factory=drawn)
    first: Random | None = None
    read: int = 0

    def reading(self) -> None:
        """A batch is about to be read."""
        if not self.read:
            self.first = drawn()
        self.read += 1


class StartedSampler:
    """A sampler that has given `skip` of what it gives."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler, self._skip = sampler, skip
        self._rest: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """Move on; once."""
        if self._rest is None:
            self._rest = iter(self._sampler)
            for _ in islice(self._rest, self._skip):
                pass
        return self._rest

    def __iter__(self) -> Iterator[Any]:
        yield from self.start()  # when the first is asked for, as the original would

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skip)


class Positions:
    """The data positions of a process, of training and of evaluation. `reading` is called before every read."""

    def __init__(self) -> None:
        self.before_read: Callable[[Any], None] = lambda source: None
        self._sources: dict[str, Any] = {}
        self._epochs: dict[str, Epoch] = {}  # of sources that do not keep their own
        self._pending: dict[str, Any] = {}

    def follow(self, module: ModuleType) -> None:
        """Have DeepSpeed's loaders remember their epochs."""
        replace(module.DeepSpeedDataLoader, "__iter__", _beginning)
        replace(module.DeepSpeedDataLoader, "__next__", self._next_of_loader)
        replace(module.RepeatingLoader, "__init__", _beginning)
        replace(module.RepeatingLoader, "__next__", self._next_of_repeating)

    def _next_of_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(loader: Any) -> Any:
            self.before_read(loader)
            _epoch(loader).reading()
            return original(loader)

        return __next__

    def _next_of_repeating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(loader: Any) -> Any:
            if hasattr(loader.loader, _MARK):  # DeepSpeed's own, which keeps its epochs itself
                return original(loader)
            self.before_read(loader)
            _epoch(loader).reading()
            try:
                return next(loader.data_iter)
            except StopIteration:
                setattr(loader, _MARK, Epoch())
                loader.data_iter = iter(loader.loader)
                _epoch(loader).reading()
                return next(loader.data_iter)

        return __next__

    # what an engine reads

    def reading(self, role: str, source: Any) -> None:
        """`source` is about to be read for `role`: 'train' or 'eval'."""
        source = _keeper(source)
        if self._sources.get(role) is not source:
            self._sources[role] = source
            self._epochs.pop(role, None)
        if role in self._pending:
            around = drawn()
            self._put(role, self._pending.pop(role))
            redraw(around)
        if not hasattr(source, _MARK):
            self._epochs.setdefault(role, Epoch()).reading()

    def expect(self, role: str, source: Any) -> None:
        """`source` will be read next for `role`; its position may be put in place."""
        source = _keeper(source)
        if self._sources.get(role) is not source:
            self._sources[role] = source
            self._epochs.pop(role, None)

    def read(self) -> dict[str, Any]:
        """The positions, for the codec."""
        found = {role: self._state(role, source) for role, source in self._sources.items()}
        return {**found, **self._pending}

    def write(self, saved: Mapping[str, Any]) -> None:
        """Put the positions in place; of a source that is not there yet, when it is first read."""
        self._pending = dict(saved)
        for role in [role for role in self._pending if role in self._sources]:
            self._put(role, self._pending.pop(role))

    def _state(self, role: str, source: Any) -> dict[str, Any]:
        if _is_stateful(source):
            return {"kind": "state", "state": source.state_dict()}
        epoch = getattr(source, _MARK, None) or self._epochs.get(role) or Epoch()
        first = epoch.first if epoch.read else None
        same = first is not None and torch.equal(first["torch"], epoch.began["torch"])
        kind = "batches" if _sampled(source) is not None else "reads"
        return {"kind": kind, "read": epoch.read, "began": epoch.began, "first": None if same else first}

    def _put(self, role: str, saved: Mapping[str, Any]) -> None:
        source = self._sources[role]
        if (saved["kind"] == "state") != _is_stateful(source):
            raise ResumeError(
                f"the data of '{role}' come from a {type(source).__name__}, the captured position is of another kind "
                f"('{saved['kind']}'): resume with the loader of the captured job"
            )
        if saved["kind"] == "state":
            source.load_state_dict(saved["state"])
            return
        epoch = Epoch(saved["began"], saved["first"] or saved["began"], saved["read"])
        if saved["kind"] == "batches" and _restart(source, epoch):
            return
        self._read_again(role, source, epoch)

    def _read_again(self, role: str, source: Any, epoch: Epoch) -> None:
        began = time.perf_counter()
        if epoch.read:
            redraw(epoch.first or epoch.began)
            batches: Iterator[Any] = source.data_iter if hasattr(source, "data_iter") else iter(source)
            for _ in islice(batches, epoch.read):
                pass
            seconds = time.perf_counter() - began
            print(
                f"ft_plugins: data position of '{role}': {epoch.read} batches were read again and dropped, "
                f"{seconds:.1f} s; an iterator with state_dict and load_state_dict, or DeepSpeed's own loader, "
                "is put in place at once",
                flush=True,
            )
        if hasattr(source, _MARK):
            setattr(source, _MARK, epoch)
        else:
            self._epochs[role] = epoch


def _beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin(loader: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(loader, _MARK, Epoch())
        return original(loader, *args, **kwargs)

    return begin


def _epoch(loader: Any) -> Epoch:
    found: Epoch | None = getattr(loader, _MARK, None)
    if found is None:
        found = Epoch()
        setattr(loader, _MARK, found)
    return found


def _keeper(source: Any) -> Any:
    """The object that keeps the position: in a loader that only repeats DeepSpeed's own, that one."""
    inside = getattr(source, "loader", None)
    return inside if hasattr(inside, _MARK) else source


def _is_stateful(source: Any) -> bool:
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


def _sampled(source: Any) -> str | None:
    """The name of the method of `_restart` that knows this source."""
    if hasattr(source, "_create_dataloader") and not getattr(source, "curriculum_learning_enabled", False):
        return "deepspeed"
    loader = getattr(source, "loader", None)
    if isinstance(loader, torch.utils.data.DataLoader) and loader.batch_sampler is not None:
        return "torch"
    if hasattr(source, "_sampler_iter") and getattr(source, "_num_workers", 1) == 0:
        return "iterator"
    return None


def _restart(source: Any, epoch: Epoch) -> bool:
    """Begin the epoch again, with its random numbers, behind the batches that were read. False: not of this kind."""
    match _sampled(source):
        case "deepspeed":
            sampler = source.data_sampler
            started = StartedSampler(sampler, epoch.read * source.batch_size)
            source.data_sampler = started
            redraw(epoch.began)
            try:
                iter(source)
            finally:
                source.data_sampler = sampler
        case "torch":
            loader = source.loader
            sampler = loader.batch_sampler
            started = StartedSampler(sampler, epoch.read)
            object.__setattr__(loader, "batch_sampler", started)  # DataLoader forbids it; it is put back at once
            redraw(epoch.began)
            try:
                source.data_iter = iter(loader)
            finally:
                object.__setattr__(loader, "batch_sampler", sampler)
        case "iterator":
            started = StartedSampler(source._sampler_iter, epoch.read)
            source._num_yielded += epoch.read
        case _:
            return False
    if epoch.read:
        redraw(epoch.first or epoch.began)
        started.start()
    if hasattr(source, _MARK):
        setattr(source, _MARK, epoch)
    return True
