"""Passes over a torch DataLoader that can be moved while a script iterates them, and the generators of a loader.

Invariant: a pass yields what torch's own iterator yields, in the same order. It can be restarted with other random
numbers, or after batches already read, without a new iterator for the script. Only passes that begin after `follow` are
followed; those of loaders inside DeepSpeed's are not.

In: `torch.utils.data.DataLoader` and its subclasses. Out: `LoaderPass`es; generator states, read and set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ...errors import ResumeError, StateChangedError
from ..rng import process_state, set_process_state
from ..script.script_hooks import replace
from .data_parts import data_parts, generators_of, parts

GeneratorStates = dict[str, Any]
_LATER = "made later"  # among the states of a source's generators: those that were made after it
_MADE = "__ft_made__"  # attribute of a source: by path, what was in place of a generator that a restore has made


# ---- random numbers ----


def generator_states(source: Any = None) -> GeneratorStates:
    """The states of the process's generators (CPU), and of those that `source` owns."""
    return {**process_state(), "own": {path: state_of(one) for path, one in generators_of(source).items()}}


def set_generator_states(state: Mapping[str, Any], source: Any = None) -> None:
    """Set the generators. Raises ResumeError if `source` owns other generators than those captured."""
    set_process_state(state)
    if source is not None:
        set_source_generators(source, state["own"])


class OwnGenerators:
    """The generators that a source owns. One that it makes later than itself, in an attribute, is made at a restore."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self._owners, self._first = set(_owners(source)), set(generators_of(source))
        self._later: set[str] = set()

    def states(self) -> dict[str, Any]:
        """Raises StateChangedError for one that could not be made at a restore."""
        generators = generators_of(self.source)
        for path in generators.keys() - self._first - self._later:
            owner, _, name = path.rpartition(".")
            if owner not in self._owners or vars(_owners(self.source)[owner]).get(name) is not generators[path]:
                raise StateChangedError(
                    f"the loader draws from {path}, which was made after the loader, in an object or a container that "
                    "a restart would not have yet: make it where the loader is made, or as an attribute of what is"
                )
            self._later.add(path)
        states = {path: state_of(one) for path, one in generators.items()}
        return {**states, _LATER: sorted(self._later & states.keys())} if self._later else states


def _owners(source: Any) -> dict[str, Any]:
    return {path[:-1]: one for path, one in (*parts(source), *data_parts(source)) if hasattr(one, "__dict__")}


def _make_later_ones(source: Any, states: Mapping[str, Any], later: Collection[str]) -> None:
    """Make the generators that the source makes `later`, and take away those that it had not made yet."""
    owners, present = _owners(source), generators_of(source)
    made = vars(source).setdefault(_MADE, {}) if hasattr(source, "__dict__") else {}
    for path in present.keys() ^ states.keys():
        owner, _, name = path.rpartition(".")
        if path in made and path in present:
            before = made.pop(path)
            vars(owners[owner]).update(before) if before else vars(owners[owner]).pop(name)
        elif path in later and owner in owners and vars(owners[owner]).get(name) is None:
            made[path] = {key: one for key, one in vars(owners[owner]).items() if key == name}
            vars(owners[owner])[name] = _made(states[path])


def _made(state: Any) -> Any:
    """A generator of the kind that has such a state."""
    match state:
        case torch.Tensor():
            return torch.Generator()
        case Mapping():
            kinds = {kind.__name__: kind() for kind in np.random.BitGenerator.__subclasses__()}
            return np.random.Generator(kinds[state["bit_generator"]])
        case [str(), *_]:
            return np.random.RandomState()
    return random.Random()


def set_source_generators(source: Any, states: Mapping[str, Any]) -> None:
    """Set the generators that `source` owns. Raises ResumeError if they are not those captured."""
    later, states = states.get(_LATER, ()), {path: one for path, one in states.items() if path != _LATER}
    if set(generators_of(source)) != set(states):
        _make_later_ones(source, states, later)
    generators = generators_of(source)
    if set(generators) != set(states):
        raise ResumeError(
            f"the loader draws from {sorted(generators) or 'no generator of its own'}, the captured one from "
            f"{sorted(states) or 'none'}: resume with the loader of the captured job"
        )
    for path, generator in generators.items():
        set_state_of(generator, states[path])


def state_of(generator: Any) -> Any:
    """What one of `GENERATORS` draws from."""
    match generator:
        case torch.Generator() | np.random.RandomState():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
    return generator.bit_generator.state


def set_state_of(generator: Any, state: Any) -> None:
    """Let one of `GENERATORS` draw from there."""
    match generator:
        case torch.Generator() | np.random.RandomState():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)
        case _:
            generator.bit_generator.state = state


def sampler_epoch(source: Any) -> int | None:
    """The epoch that the script set on the sampler with `set_epoch`; None if no sampler has one."""
    for _, part in parts(source):
        if callable(getattr(part, "set_epoch", None)) and isinstance(getattr(part, "epoch", None), int):
            return int(part.epoch)
    return None


def set_epoch(source: Any, epoch: int) -> None:
    for _, part in parts(source):
        if callable(getattr(part, "set_epoch", None)) and isinstance(getattr(part, "epoch", None), int):
            part.set_epoch(epoch)
            return


def draws(loader: Any) -> bool:
    """Whether a pass over `loader` takes its order from the process's generators, as far as can be determined."""
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    sampler = getattr(loader, "data_sampler", None) if sampler is None else sampler
    ordered = isinstance(sampler, SequentialSampler | DistributedSampler)
    ordered = ordered and (batches is None or type(batches) is BatchSampler)
    return not ordered and not generators_of(loader, data=False)


# ---- an epoch ----


@dataclass
class LoaderEpoch:
    """One pass over a loader: generator states at its begin and at its first read, and the number of batches read."""

    began: GeneratorStates
    first: GeneratorStates | None = None
    read: int = 0
    reused_workers: bool = False  # persistent workers of the previous pass: begins with one random number less

    @classmethod
    def of(cls, source: Any) -> LoaderEpoch:
        """The pass over `source` that is about to begin."""
        return cls(generator_states(source), reused_workers=getattr(source, "_iterator", None) is not None)

    def reading(self, source: Any = None) -> None:
        """Count a batch of `source` that is about to be read."""
        if not self.read:
            self.first = generator_states(source)
        self.read += 1


class StartedSampler:
    """A sampler whose first pass starts after `skip` elements; later passes are complete."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self.original, self._skip = sampler, skip
        self._rest: Iterator[Any] | None = None
        self._iterated = False

    def start(self) -> Iterator[Any]:
        """Skip the elements, once; returns the rest."""
        if self._rest is None:
            self._rest = iter(self.original)
            for _ in islice(self._rest, self._skip):
                pass
        return self._rest

    def __iter__(self) -> Iterator[Any]:
        first, self._iterated = not self._iterated, True  # set at the first element, as the original would be
        yield from self.start() if first else self.original

    def __len__(self) -> int:
        return len(self.original) - (0 if self._iterated else min(self._skip, len(self.original)))


def is_sampled(loader: Any) -> bool:
    """Whether a sampler decides what the loader loads, so that batches can be skipped without loading them."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def begin_after(loader: Any, epoch: LoaderEpoch, begin: Callable[[Any], Any]) -> tuple[Any, StartedSampler]:
    """`begin(loader)` with a sampler that skips the batches read in `epoch` once it is started; returns both."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    started = StartedSampler(getattr(loader, name), epoch.read)
    # a pass that used workers of an earlier one drew no seed for them: this one must use those that are there by now
    persistent = getattr(loader, "_iterator", None) if epoch.reused_workers else None
    if persistent is None:
        loader._iterator = None
        with _replaced(loader, name, started):
            return begin(loader), started
    with _replaced(persistent, "_index_sampler", started):
        return begin(loader), started


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of `owner` for the time of the context, even if `owner` forbids assignment."""
    before = getattr(owner, name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        object.__setattr__(owner, name, before)


# ---- passes ----


def is_stateful(source: Any) -> bool:
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


class LoaderPass:
    """An iterator over `loader`, made by `begin`, which reports its reads to `passes`."""

    def __init__(self, loader: Any, begin: Callable[[Any], Any], passes: Passes) -> None:
        self.loader = loader
        self.epoch = LoaderEpoch.of(loader)
        self.finished = False  # it has raised StopIteration
        self._passes, self._begin = passes, begin
        self._batches = self._begun()

    def _begun(self) -> Any:
        with self._passes.within():
            return self._begin(self.loader)

    def __iter__(self) -> LoaderPass:
        return self

    def __next__(self) -> Any:
        reading = not self.ended
        if reading:
            self._passes.reading(self)
            self.epoch.reading(self.loader)
        try:
            with self._passes.within():
                return next(self._batches)
        except StopIteration:
            self.finished = True
            self._passes.finished(self, reading)
            raise

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)

    @property
    def ended(self) -> bool:
        """Whether all batches were read; False if that cannot be determined."""
        try:
            return is_sampled(self.loader) and self.epoch.read >= len(self.loader)
        except TypeError:  # a sampler without length
            return False

    def begin(self) -> None:
        """Restart from the first batch, with the current state of the generators."""
        self.epoch, self.finished = LoaderEpoch.of(self.loader), False
        self._batches = self._begun()

    def skip_to(self, epoch: LoaderEpoch) -> bool:
        """Continue after the batches read in `epoch`, without loading them. Returns False if that is not possible."""
        if not is_sampled(self.loader):
            return False
        set_generator_states(epoch.began, self.loader)
        self._batches, started = begin_after(self.loader, epoch, lambda loader: self._begun())
        if epoch.read:
            set_generator_states(epoch.first or epoch.began, self.loader)
            started.start()
        self.epoch, self.finished = epoch, False
        return True

    def drop(self, batches: int) -> None:
        """Read and drop batches."""
        with self._passes.within():
            for _ in islice(self._batches, batches):
                self.epoch.read += 1

    def read_to(self, epoch: LoaderEpoch) -> None:
        """Continue after the batches read in `epoch`, by loading and dropping them."""
        set_generator_states(epoch.began, self.loader)
        self.begin()
        set_generator_states(epoch.first or epoch.began, self.loader)
        for _ in islice(self._batches, epoch.read):
            pass
        self.epoch = epoch


class Passes:
    """Makes loaders return `LoaderPass`es, except for those iterated `within` another one.

    `beginning` may replace what begins a pass, followed or not. `reading` is called before each read that yields a
    batch, and of a loader without length also before the one that finds the end. `finished` is called before a pass
    raises StopIteration, with whether `reading` was called.
    """

    def __init__(
        self,
        reading: Callable[[LoaderPass], None],
        finished: Callable[[LoaderPass, bool], None] = lambda source, was_read: None,
    ) -> None:
        self.reading, self.finished = reading, finished
        self.beginning: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda original: original
        self.shuffled = 0  # passes, followed or not, that took their order from the process's generators
        self._depth = 0

    def follow(self, kind: type[Any] = DataLoader) -> None:
        """Follow all loaders of `kind` from now on, including stateful subclasses with an `__iter__` of their own."""
        if kind is DataLoader or ("__iter__" in vars(kind) and is_stateful(kind)):
            replace(kind, "__iter__", self._iterating, framework="torch", tested="2.13.0")
        for derived in kind.__subclasses__():
            self.follow(derived)

    @property
    def inside(self) -> bool:
        """Whether a followed loader is being read or begun."""
        return self._depth > 0

    @contextmanager
    def within(self) -> Iterator[None]:
        """Do not follow loaders iterated in this context: they are part of another loader."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _iterating(self, original: Callable[..., Any], loader: Any) -> Any:
        self.shuffled += not self._depth and draws(loader)
        original = self.beginning(original)
        return original(loader) if self._depth else LoaderPass(loader, original, self)
