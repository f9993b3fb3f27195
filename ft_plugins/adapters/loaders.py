"""Passes over a torch DataLoader that a script iterates itself, and what such a loader draws random numbers from.

Invariant: a pass gives what torch's own iterator gives, in the same order; it can be begun again, with other random
numbers or behind batches that were read, under the feet of whoever holds it. Only loaders that are iterated after
`follow` are seen, and none of those that DeepSpeed's loaders keep inside.

In: `torch.utils.data.DataLoader` and its subclasses. Out: `LoaderPass`es; generators, read and set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ..errors import ResumeError
from .script_hooks import replace

GeneratorStates = dict[str, Any]
_PARTS = ("loader", "batch_sampler", "sampler", "data_sampler")
_DRAWING = ("dataset", "datasets", "collate_fn", "transform", "transforms", "target_transform", "__self__")


# ---- random numbers ----


def generator_states(source: Any = None) -> GeneratorStates:
    """The generators of the process, and those that `source` keeps for itself."""
    own = {place: _state_of(generator) for place, generator in _generators(source).items()}
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "own": own,
    }


def set_generator_states(state: Mapping[str, Any], source: Any = None) -> None:
    """Set them. Raises ResumeError when `source` keeps others than those that were captured."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if source is not None:
        set_source_generators(source, state["own"])


def set_source_generators(source: Any, states: Mapping[str, Any]) -> None:
    """Those of `source` alone. Raises ResumeError as above."""
    found = _generators(source)
    if set(found) != set(states):
        raise ResumeError(
            f"the loader draws from {sorted(found) or 'no generator of its own'}, captured was one with "
            f"{sorted(states) or 'none'}: resume with the loader of the captured job"
        )
    for place, generator in found.items():
        _set_state_of(generator, states[place])


def parts(source: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """`source`, its samplers and theirs, by where they are found."""
    if source is None:
        return
    yield place, source
    for name in _PARTS:
        part = getattr(source, "__dict__", {}).get(name)
        if part is not None:
            yield from parts(part, f"{place}{name}.")


def _drawing(source: Any, place: str = "", depth: int = 6) -> Iterator[tuple[str, Any]]:
    """What makes samples and batches: the data set, those inside of it, transforms, the function that collates."""
    for name in _DRAWING if depth else ():
        part = getattr(source, name, None) if name == "__self__" else getattr(source, "__dict__", {}).get(name)
        several = list(enumerate(part)) if isinstance(part, list | tuple) else [("", part)]
        for number, one in several:
            if one is not None:
                at = f"{place}{name}{number}."
                yield at, one
                yield from _drawing(one, at, depth - 1)


def _generators(source: Any, data: bool = True) -> dict[str, Any]:
    """By where they are found; those that the order alone is drawn from, without `data`."""
    kinds = torch.Generator | random.Random | np.random.RandomState | np.random.Generator
    found: dict[str, Any] = {}
    for place, part in [*parts(source), *(_drawing(source) if data else ())]:
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, kinds) and all(value is not other for other in found.values()):
                found[f"{place}{name}"] = value
    return found


def _state_of(generator: Any) -> Any:
    match generator:
        case torch.Generator() | np.random.RandomState():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
    return generator.bit_generator.state


def _set_state_of(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator() | np.random.RandomState():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)
        case _:
            generator.bit_generator.state = state


def sampler_epoch(source: Any) -> int | None:
    """What a script has told the sampler by `set_epoch`, where it has such a thing."""
    for _, part in parts(source):
        if callable(getattr(part, "set_epoch", None)) and isinstance(getattr(part, "epoch", None), int):
            return int(part.epoch)
    return None


def set_epoch(source: Any, epoch: int) -> None:
    """Set the sampler's epoch, where it has such a thing."""
    for _, part in parts(source):
        if callable(getattr(part, "set_epoch", None)) and isinstance(getattr(part, "epoch", None), int):
            part.set_epoch(epoch)
            return


def draws(loader: Any) -> bool:
    """Whether a pass over it takes its order from the generators of the process, as far as is known."""
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    sampler = getattr(loader, "data_sampler", None) if sampler is None else sampler
    ordered = isinstance(sampler, SequentialSampler | DistributedSampler)
    ordered = ordered and (batches is None or type(batches) is BatchSampler)
    return not ordered and not _generators(loader, data=False)


# ---- an epoch ----


@dataclass
class LoaderEpoch:
    """One pass over a loader: the generators when it began and at its first read, and how many batches were read."""

    began: GeneratorStates
    first: GeneratorStates | None = None
    read: int = 0
    reused_workers: bool = False  # by workers that stayed from the pass before, which draws one random number less

    @classmethod
    def of(cls, source: Any) -> LoaderEpoch:
        """A pass over `source` that is about to begin."""
        return cls(generator_states(source), reused_workers=getattr(source, "_iterator", None) is not None)

    def reading(self, source: Any = None) -> None:
        """A batch of `source` is about to be read."""
        if not self.read:
            self.first = generator_states(source)
        self.read += 1


class StartedSampler:
    """A sampler of which a first pass has given `skip` of what it gives; further passes are whole."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler, self._skip = sampler, skip
        self._rest: Iterator[Any] | None = None
        self._given = False

    def start(self) -> Iterator[Any]:
        """Move on; once."""
        if self._rest is None:
            self._rest = iter(self._sampler)
            for _ in islice(self._rest, self._skip):
                pass
        return self._rest

    def __iter__(self) -> Iterator[Any]:
        first, self._given = not self._given, True  # when the first is asked for, as the original would
        yield from self.start() if first else self._sampler

    def __len__(self) -> int:
        return len(self._sampler) - (0 if self._given else min(self._skip, len(self._sampler)))


def is_sampled(loader: Any) -> bool:
    """Whether what a loader loads is what a sampler says, so that it can be moved on without loading."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def begin_after(loader: Any, epoch: LoaderEpoch, begin: Callable[[Any], Any]) -> tuple[Any, StartedSampler]:
    """What `begin(loader)` gives, with a sampler that has given the batches of `epoch` once it is started."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    started = StartedSampler(getattr(loader, name), epoch.read)
    stayed = getattr(loader, "_iterator", None) if epoch.reused_workers else None
    if stayed is None:
        loader._iterator = None
        with _instead(loader, name, started):
            return begin(loader), started
    with _instead(stayed, "_index_sampler", started):
        return begin(loader), started


@contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`value` as an attribute of `owner`, which need not allow it."""
    before = getattr(owner, name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        object.__setattr__(owner, name, before)


# ---- passes ----


def is_stateful(source: Any) -> bool:
    """Whether it knows where it is."""
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


class LoaderPass:
    """An iterator over `loader`, made by `begin`. What it asks of `passes` is in `Passes`."""

    def __init__(self, loader: Any, begin: Callable[[Any], Any], passes: Passes) -> None:
        self.loader = loader
        self.epoch = LoaderEpoch.of(loader)
        self._passes, self._begin = passes, begin
        self._batches = self._begun()

    def _begun(self) -> Any:
        with self._passes.within():
            return self._begin(self.loader)

    def __iter__(self) -> LoaderPass:
        return self

    def __next__(self) -> Any:
        if not self.ended:
            self._passes.reading(self)
            self.epoch.reading(self.loader)
        with self._passes.within():
            return next(self._batches)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)

    @property
    def ended(self) -> bool:
        """Whether all batches were read; False while that cannot be known."""
        try:
            return is_sampled(self.loader) and self.epoch.read >= len(self.loader)
        except TypeError:  # a sampler without length
            return False

    def begin(self) -> None:
        """Begin anew, with the random numbers as they are now."""
        self.epoch = LoaderEpoch.of(self.loader)
        self._batches = self._begun()

    def skip_to(self, epoch: LoaderEpoch) -> bool:
        """Stand behind the batches that `epoch` has read, without loading any. False: that cannot be done."""
        if not is_sampled(self.loader):
            return False
        set_generator_states(epoch.began, self.loader)
        self._batches, started = begin_after(self.loader, epoch, lambda loader: self._begun())
        if epoch.read:
            set_generator_states(epoch.first or epoch.began, self.loader)
            started.start()
        self.epoch = epoch
        return True

    def read_to(self, epoch: LoaderEpoch) -> None:
        """Stand there by reading."""
        set_generator_states(epoch.began, self.loader)
        self.begin()
        set_generator_states(epoch.first or epoch.began, self.loader)
        for _ in islice(self._batches, epoch.read):
            pass
        self.epoch = epoch


class Passes:
    """Has loaders give `LoaderPass`es, but for those that are iterated `within` another one.

    `reading` is called before each read that will give a batch (of a loader without length: or the end).
    """

    def __init__(self, reading: Callable[[LoaderPass], None]) -> None:
        self.reading = reading
        self.shuffled = 0  # how many passes, made in whichever way, took their order from the generators of the process
        self._depth = 0

    def follow(self, kind: type[Any] = DataLoader) -> None:
        """From now on: all loaders of `kind`; also those that know their state and iterate in a way of their own."""
        if kind is DataLoader or ("__iter__" in vars(kind) and is_stateful(kind)):
            replace(kind, "__iter__", self._iterating, framework="torch", tested="2.13.0")
        for derived in kind.__subclasses__():
            self.follow(derived)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Loaders that are iterated in here belong to somebody else."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _iterating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __iter__(loader: Any) -> Any:
            self.shuffled += not self._depth and draws(loader)
            return original(loader) if self._depth else LoaderPass(loader, original, self)

        return __iter__
