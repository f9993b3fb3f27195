"""The data position of a plain torch loop: read at the version point, set after a restore.

Invariant: after the position and the generators are restored, the next batch is the one that would have come next. A
batch must be read in the iteration that trains on it; otherwise the position at the version point is not that of
training, and ConfigError is raised.

    own state   an object with `state_dict` and `load_state_dict`: torchdata's StatefulDataLoader, a custom sampler
    loader      a torch DataLoader: the epoch of its sampler, the generators at the begin of the pass, and the number
                of batches read. After a restore the first pass skips these; nothing is loaded twice

In: what the loop reads from. Out: plain values, and back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader

from ..errors import ConfigError, ResumeError
from .loaders import (
    LoaderEpoch,
    LoaderPass,
    Passes,
    generator_states,
    is_sampled,
    is_stateful,
    parts,
    sampler_epoch,
    set_epoch,
    set_generator_states,
    set_source_generators,
)


class DataPosition(Protocol):
    """The position in the training data."""

    def read(self) -> Any:
        """The position, as values for the codec."""
        ...

    def write(self, saved: Any) -> None:
        """Return to a saved position. Raises ResumeError."""
        ...

    def require_read(self) -> None:
        """Called before an update. Raises ConfigError if no batch has been read so far."""
        ...


def position_of(source: Any, training: Callable[[], bool]) -> DataPosition:
    """The position of `source`; `training()` says whether an iteration is under way.

    Raises ConfigError if the position of `source` cannot be determined.
    """
    kind = type(source).__name__
    if is_stateful(source):
        return OwnState(source)
    if not isinstance(source, DataLoader):
        raise ConfigError(
            f"sampler: a {kind} has no state_dict and load_state_dict; pass the torch DataLoader that draws from it, "
            "or save the position in get_state and set_state"
        )
    if not is_sampled(source):
        raise ConfigError(
            f"sampler: the position of a {kind} over an IterableDataset is unknown; pass torchdata's "
            "StatefulDataLoader, or save the position in get_state and set_state"
        )
    inside = [type(part).__name__ for _, part in parts(source) if is_stateful(part)]
    if inside:
        raise ConfigError(
            f"sampler: the {kind} draws from a {inside[0]}, which keeps its own position: pass that one"
            + (" (without worker processes, which read ahead)" if source.num_workers else "")
        )
    return LoaderPosition(source, training)


class OwnState:
    """The position of an object that keeps it itself."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self) -> Any:
        return self._source.state_dict()

    def write(self, saved: Any) -> None:
        self._source.load_state_dict(saved)

    def require_read(self) -> None:
        """Does nothing: reads of the object are not observed."""


class LoaderPosition:
    """The position of a torch DataLoader with a sampler. Makes this one loader iterate by `LoaderPass`es."""

    def __init__(self, loader: Any, training: Callable[[], bool]) -> None:
        self._loader, self._training = loader, training
        self._passes = Passes(self._reading)
        self._current: Callable[[], LoaderPass | None] = lambda: None
        self._pending: Mapping[str, Any] | None = None  # restored position at which the next pass begins
        self._was_read = False
        self._initial_numbers = _numbers(loader)
        self._numbers_at_begin: dict[str, Any] = {}  # those that samplers had changed when the pass began
        kind = type(loader)
        follow = {"__iter__": lambda loader: self._begin(kind.__iter__), "__module__": kind.__module__}
        loader.__class__ = type(kind.__name__, (kind,), follow)  # Python looks up __iter__ on the class

    def _begin(self, original: Callable[[Any], Any]) -> LoaderPass:
        saved, self._pending = self._pending, None
        before = generator_states()
        self._numbers_at_begin = self._changed_numbers()
        begun = LoaderPass(self._loader, original, self._passes)
        if saved is not None:
            self._move(begun, saved)
            set_generator_states(before)
        self._current = weakref.ref(begun)
        return begun

    def _reading(self, source: LoaderPass) -> None:
        if not self._training():
            raise ConfigError(
                "a batch was read outside of an iteration, so that the data position would not match the snapshot: "
                "read it in the iteration that trains on it (next(batches) in `for step in session.iterations(...)`)"
            )
        if source is not self._current():
            raise ConfigError(
                "a batch was read from a pass over the training data after another pass had begun, so that the data "
                "position of training is unknown; give evaluation a loader of its own"
            )
        self._was_read = True

    def require_read(self) -> None:
        if not self._was_read:
            raise ConfigError(
                "an update came before any batch was read from the loader passed as sampler, so that the data position "
                "is unknown; iterate that same loader object, or save the position in get_state and set_state"
            )

    def read(self) -> Any:
        if self._pending is not None:
            return dict(self._pending)
        current = self._current()
        epoch = None if current is None else current.epoch
        return {
            "epoch": sampler_epoch(self._loader),
            "own": generator_states(self._loader)["own"],
            "numbers": {"began": self._numbers_at_begin, "now": self._changed_numbers()},
            "pass": None
            if epoch is None
            else {"began": epoch.began, "first": epoch.first, "read": epoch.read, "again": epoch.reused_workers},
        }

    def write(self, saved: Any) -> None:
        if saved["epoch"] is not None:
            set_epoch(self._loader, saved["epoch"])
        set_source_generators(self._loader, saved["own"])
        _set_numbers(self._loader, saved["numbers"]["now"])
        if saved["pass"] is None:
            return
        current = self._current()
        if current is None:
            self._pending = saved
        else:
            self._move(current, saved)

    def _move(self, begun: LoaderPass, saved: Mapping[str, Any]) -> None:
        epoch, captured = sampler_epoch(self._loader), saved["epoch"]
        if epoch != captured:
            raise ResumeError(
                f"the sampler's epoch was set to {epoch}, but epoch {captured} was captured: start the loop over "
                "epochs at `sampler.epoch`, which is restored before the first iteration"
            )
        at = saved["pass"]
        self._numbers_at_begin = dict(saved["numbers"]["began"])
        _set_numbers(self._loader, {**self._initial_numbers, **self._numbers_at_begin})
        begun.skip_to(LoaderEpoch(at["began"], at["first"], at["read"], at["again"]))
        set_source_generators(self._loader, saved["own"])
        _set_numbers(self._loader, saved["numbers"]["now"])

    def _changed_numbers(self) -> dict[str, Any]:
        """Numbers of samplers that changed since the host was built, such as a count of passes."""
        return {
            path: value
            for path, value in _numbers(self._loader).items()
            if path not in self._initial_numbers or self._initial_numbers[path] != value
        }


def _numbers(loader: Any) -> dict[str, Any]:
    """Plain numbers that custom samplers keep, by attribute path, without the epoch."""
    return {
        f"{path}{name}": value
        for path, part in parts(loader)
        if path and not type(part).__module__.startswith("torch.")
        for name, value in vars(part).items()
        if type(value) in (int, float, bool) and name != "epoch"
    }


def _set_numbers(loader: Any, numbers: Mapping[str, Any]) -> None:
    for path, part in parts(loader):
        for name, value in numbers.items():
            if path and name.startswith(path) and "." not in name.removeprefix(path):
                setattr(part, name.removeprefix(path), value)
