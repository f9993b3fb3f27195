"""Where a loop stands in the data that it trains on: read at the version point, and put in place after a restore.

Invariant: once the position is written and the generators are restored, the next batch is the one that would have come
next. A batch is read in the iteration that trains on it; anything else is refused, for then the position at the version
point is not that of training.

    own state   an object with `state_dict` and `load_state_dict`: torchdata's StatefulDataLoader, a sampler of your own
    loader      a torch DataLoader: the epoch of its sampler, the generators with which the pass over it began, and how
                many batches were read. After a restore the first pass begins behind them; nothing is loaded twice

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


class Position(Protocol):
    """Of the training data."""

    def read(self) -> Any:
        """For the codec."""
        ...

    def write(self, saved: Any) -> None:
        """Stand there again. Raises ResumeError."""
        ...

    def require_read(self) -> None:
        """An update follows. Raises ConfigError where no batch has been read so far."""
        ...


def position_of(source: Any, training: Callable[[], bool]) -> Position:
    """The position of `source`; `training()` says whether an iteration is under way. Raises ConfigError by name."""
    kind = type(source).__name__
    if is_stateful(source):
        return OwnState(source)
    if not isinstance(source, DataLoader):
        raise ConfigError(
            f"sampler: a {kind} has no state_dict and load_state_dict; give the torch DataLoader that draws from it, "
            "or carry the position by get_state and set_state"
        )
    if not is_sampled(source):
        raise ConfigError(
            f"sampler: where a {kind} over an IterableDataset stands cannot be known; give torchdata's "
            "StatefulDataLoader, or carry the position by get_state and set_state"
        )
    inside = [type(part).__name__ for _, part in parts(source) if is_stateful(part)]
    if inside:
        raise ConfigError(
            f"sampler: the {kind} draws from a {inside[0]}, which keeps its own position: give that one"
            + (" (without worker processes, which read ahead)" if source.num_workers else "")
        )
    return LoaderPosition(source, training)


class OwnState:
    """Of an object that knows where it is."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self) -> Any:
        return self._source.state_dict()

    def write(self, saved: Any) -> None:
        self._source.load_state_dict(saved)

    def require_read(self) -> None:
        """It knows."""


class LoaderPosition:
    """Of a torch DataLoader that a sampler moves. From now on this one loader is iterated by `LoaderPass`es."""

    def __init__(self, loader: Any, training: Callable[[], bool]) -> None:
        self._loader, self._training = loader, training
        self._passes = Passes(self._reading)
        self._current: Callable[[], LoaderPass | None] = lambda: None
        self._pending: Mapping[str, Any] | None = None  # where the next pass begins
        self._was_read = False
        self._at_first = _numbers(loader)
        self._at_begin: dict[str, Any] = {}  # numbers that samplers had changed when the pass began
        kind = type(loader)
        follow = {"__iter__": lambda loader: self._begin(kind.__iter__), "__module__": kind.__module__}
        loader.__class__ = type(kind.__name__, (kind,), follow)  # of this loader alone: Python looks there for __iter__

    def _begin(self, original: Callable[[Any], Any]) -> LoaderPass:
        saved, self._pending = self._pending, None
        around = generator_states()
        self._at_begin = self._changed()
        begun = LoaderPass(self._loader, original, self._passes)
        if saved is not None:
            self._stand(begun, saved)
            set_generator_states(around)
        self._current = weakref.ref(begun)
        return begun

    def _reading(self, source: LoaderPass) -> None:
        if not self._training():
            raise ConfigError(
                "a batch is read while no iteration is under way: read it in the iteration that trains on it (`for "
                "step in session.iterations(...)`: next(batches)), or its position would not be that of the snapshot"
            )
        if source is not self._current():
            raise ConfigError(
                "a pass over the training data is read after another one has begun: where training stands cannot be "
                "known; give evaluation a loader of its own"
            )
        self._was_read = True

    def require_read(self) -> None:
        if not self._was_read:
            raise ConfigError(
                "an update without a batch from the loader that was given as sampler: nothing is known of where "
                "training stands; iterate this very loader, or carry the position by get_state and set_state"
            )

    def read(self) -> Any:
        if self._pending is not None:
            return dict(self._pending)
        current = self._current()
        epoch = None if current is None else current.epoch
        return {
            "epoch": sampler_epoch(self._loader),
            "own": generator_states(self._loader)["own"],
            "numbers": {"began": self._at_begin, "now": self._changed()},
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
            self._stand(current, saved)

    def _stand(self, begun: LoaderPass, saved: Mapping[str, Any]) -> None:
        found, captured = sampler_epoch(self._loader), saved["epoch"]
        if found != captured:
            raise ResumeError(
                f"the sampler's epoch was set to {found}, captured was epoch {captured}: begin the loop over epochs at "
                "`sampler.epoch`, which is restored before the first iteration"
            )
        of = saved["pass"]
        self._at_begin = dict(saved["numbers"]["began"])
        _set_numbers(self._loader, {**self._at_first, **self._at_begin})
        begun.skip_to(LoaderEpoch(of["began"], of["first"], of["read"], of["again"]))
        set_source_generators(self._loader, saved["own"])
        _set_numbers(self._loader, saved["numbers"]["now"])

    def _changed(self) -> dict[str, Any]:
        """Numbers of samplers that are not what they were when the host was built: counts of passes, say."""
        return {
            place: value
            for place, value in _numbers(self._loader).items()
            if place not in self._at_first or self._at_first[place] != value
        }


def _numbers(loader: Any) -> dict[str, Any]:
    """Plain numbers that samplers of one's own keep, by where they are found; the epoch is followed in its own way."""
    return {
        f"{place}{name}": value
        for place, part in parts(loader)
        if place and not type(part).__module__.startswith("torch.")
        for name, value in vars(part).items()
        if type(value) in (int, float, bool) and name != "epoch"
    }


def _set_numbers(loader: Any, numbers: Mapping[str, Any]) -> None:
    for place, part in parts(loader):
        for name, value in numbers.items():
            if place and name.startswith(place) and "." not in name.removeprefix(place):
                setattr(part, name.removeprefix(place), value)
