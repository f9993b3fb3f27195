"""A rank's data position: what it has read, and how to return there without reading it all again.

Invariant: after `write`, restoring the generators, and `restart_unplaced`, the next batch is the one that would have
come next. There are three ways; the first that applies is used:

    state      the loader has `state_dict` and `load_state_dict`
    batches    the loader has a batch sampler: it is started with its original random numbers and advanced; no data is
               loaded
    reads      anything else: the batches are read again and dropped, which takes as long as reading them did and is
               reported; refused if the order was shuffled again in between

DeepSpeed's two loaders and torch's remember the random numbers with which each epoch began, so later epochs are the
same too; of any other iterator only the first read is known. An epoch that the script sets on a sampler (`set_epoch`)
must be the captured one. A pass over a torch loader that has ended, or that the script dropped, has no position: the
next pass begins with the restored generators. A pass whose worker processes draw random numbers, or count, is read
again from its begin. Workers that outlive a pass, or whose loader has a state of its own, cannot be brought there: that
is named, and refused at a restart.

In: `deepspeed.runtime.dataloader`, right after its import, and what the engine reads. Out: plain values, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace as replace_in
from itertools import islice
from types import ModuleType
from typing import Any

from ...errors import ResumeError, UnsupportedError
from ...events import say
from ...snapshot.capture import codec
from ..data.left_passes import LeftPasses
from ..data.loaders import (
    LoaderEpoch,
    LoaderPass,
    OwnGenerators,
    Passes,
    draws,
    generator_states,
    is_stateful,
    sampler_epoch,
    set_generator_states,
    set_source_generators,
)
from ..data.worker_draws import watched
from ..script.script_hooks import replace_in_deepspeed as replace
from .data_sources import (
    EPOCH,
    drop,
    epoch_of,
    is_curriculum,
    loader_of,
    own_epoch,
    position_holder,
    reference,
    require_epoch,
    restart,
    restart_method,
    worker_changes,
)

_RESHUFFLED = (
    "an iterator of unknown type reads a shuffled loader for a second time, so its order cannot be reproduced and a "
    "restore will be refused: pass the loader itself, deepspeed's RepeatingLoader around it, or an iterator with "
    "state_dict and load_state_dict, or shuffle with the loader's own torch.Generator"
)
_CONTINUED = (
    "a second pass over the loader goes on where the sampler of data efficiency was, in the middle of a batch: read "
    "all in one pass (data_sampling.num_epochs)"
)
_TIME = "which takes no time with state_dict and load_state_dict, or a loader with a sampler"
_EARLY, _AGAIN = "__ft_read_early__", "__ft_read_again__"  # attributes of a source, of a loader


class Positions:
    """The data positions of a process, for training and evaluation. `before_read` is called before every read,
    `found_end` after one that was only the end of a loader without length.

    A role is 'train' or 'eval'; a second torch loader that is read at the same time is 'train 2', and so on. A source
    that both read has one position, that of training.
    """

    def __init__(self) -> None:
        # until an engine is followed
        self.before_read: Callable[[Any], None] = lambda source: setattr(source, _EARLY, True)
        self.found_end: Callable[[], None] = lambda: None
        self._passes = Passes(lambda source: self.before_read(source), self._finished)
        self._passes.beginning = watched
        self._sources: dict[str, Callable[[], Any]] = {}
        self._loaders: dict[str, Any] = {}
        self._generators: dict[str, OwnGenerators] = {}  # of the loaders
        self._epochs: dict[str, LoaderEpoch] = {}  # of sources that do not track their own
        self._reshuffled: set[str] = set()  # roles whose order was shuffled again after the first read
        self._pending: dict[str, Any] = {}
        self._unplaced: list[LoaderPass] = []
        self._said: set[str] = set()  # roles whose workers were named
        self._newest: tuple[Callable[[], Any], LoaderEpoch] | None = None  # what training read last
        self._lengths: dict[str, LeftPasses] = {}  # of roles that train
        self._under_way: dict[str, LoaderEpoch | None] = {}  # the pass that they read last; None: a restored one

    def _finished(self, source: LoaderPass, was_read: bool) -> None:
        self._newest = None
        for role, known in self._sources.items():
            if role in self._lengths and known() is source:
                self._lengths[role].ended()
        if was_read:
            self.found_end()

    def follow(self, module: ModuleType) -> None:
        """Make DeepSpeed's loaders track their epochs."""
        replace(module.DeepSpeedDataLoader, "__iter__", self._beginning)
        replace(module.DeepSpeedDataLoader, "__next__", self._next_of_loader)
        replace(module.RepeatingLoader, "__init__", self._beginning)
        replace(module.RepeatingLoader, "__next__", self._next_of_repeating)

    def was_read_early(self, source: Any) -> bool:
        """Whether batches of this pass were read before an engine was followed."""
        return _EARLY in vars(source)

    def follow_torch(self) -> None:
        """Track torch loaders that the script iterates from now on."""
        self._passes.follow()

    def _beginning(self, original: Callable[..., Any], source: Any, loader: Any = None) -> Any:
        """A loader is iterated, or, if it is given, `source` is made to repeat it."""
        inner = source if loader is None else loader
        if is_curriculum(inner) and getattr(inner.data_sampler, "curriculum_step", None):
            setattr(inner, _AGAIN, True)
        setattr(source, EPOCH, LoaderEpoch.of(inner))
        self._passes.shuffled += draws(inner)
        with self._passes.within():
            return original(source) if loader is None else original(source, loader)

    def _next_of_loader(self, original: Callable[..., Any], loader: Any) -> Any:
        if epoch_of(loader).read < len(loader):  # else the epoch ends, and nothing is read
            self.before_read(loader)
            epoch_of(loader).reading(loader)
        with self._passes.within():
            return original(loader)

    def _next_of_repeating(self, original: Callable[..., Any], source: Any) -> Any:
        loader = source.loader
        if hasattr(loader, EPOCH):  # DeepSpeed's own, which tracks its epochs
            return original(source)
        self.before_read(source)
        epoch_of(source).reading(loader)
        with self._passes.within():
            try:
                return next(source.data_iter)
            except StopIteration:
                self._passes.shuffled += draws(loader)
                setattr(source, EPOCH, LoaderEpoch.of(loader))
                source.data_iter = iter(loader)
                epoch_of(source).reading(loader)
                return next(source.data_iter)

    # what an engine reads

    def reading(self, role: str, source: Any) -> None:
        """Prepare a read from `source` for `role`, 'train' or 'eval': restore a pending position."""
        role, source = self._role_of(role, source)
        if role in self._pending:
            before = generator_states()
            self._restore(role, self._pending.pop(role))
            for late in self._unplaced:  # begun after the generators were restored, except its own
                set_generator_states(late.epoch.began)
            self.restart_unplaced()
            set_generator_states(before)
        epoch = own_epoch(source)
        if epoch is None:
            loader = loader_of(source)
            self._epochs.setdefault(role, LoaderEpoch.of(loader)).reading(loader)
        elif role.startswith("train"):
            self._newest = reference(source), epoch
            if isinstance(source, LoaderPass):  # others are not left before their end
                self._count(role, epoch)

    def _count(self, role: str, epoch: LoaderEpoch) -> None:
        lengths = self._lengths.setdefault(role, LeftPasses())
        before = self._under_way.get(role, epoch)
        self._under_way[role] = epoch
        if before is not None and before is not epoch:
            lengths.begin()
        lengths.reading()

    def has_left(self) -> bool:
        """Whether the script left the pass that training read last, which did not find its end."""
        if self._newest is None:
            return False
        source, epoch = self._newest
        return source() is None or own_epoch(source()) is not epoch

    @contextmanager
    def around(self, role: str, source: Any) -> Iterator[None]:
        """A context in which `source` is read for `role`."""
        self.reading(role, source)
        role, source = self._role_of(role, source)
        before = self._passes.shuffled
        yield
        epoch = self._epochs.get(role)  # if the source does not track its own
        shuffled = epoch is not None and epoch.read > 1 and self._passes.shuffled != before
        if shuffled and role not in self._reshuffled and not is_stateful(source) and restart_method(source) is None:
            self._reshuffled.add(role)
            say(f"data position of '{role}': {_RESHUFFLED}")

    def expect(self, role: str, source: Any) -> None:
        """Register `source`, which is read next for `role`, so that `write` can restore its position."""
        self._role_of(role, source)

    def _role_of(self, role: str, source: Any) -> tuple[str, Any]:
        source = position_holder(source)
        shared = next((place for place, known in self._sources.items() if known() is source), None)
        if shared is not None and (role != "train" or shared.startswith("train")):
            return shared, source
        role = self._place(role, source)
        if shared is not None:  # evaluation has read it so far; its position becomes that of training
            del self._sources[shared], self._loaders[shared]
            self._register(role, source)
            if shared in self._epochs:
                self._epochs[role] = self._epochs.pop(shared)
            if shared in self._reshuffled:
                self._reshuffled.remove(shared)
                self._reshuffled.add(role)
            return role, source
        known = self._sources.get(role)
        if known is None or known() is not source:
            self._register(role, source)
        return role, source

    def _register(self, role: str, source: Any) -> None:
        self._sources[role] = reference(source)
        self._loaders[role] = loader_of(source)
        if role not in self._generators or self._generators[role].source is not self._loaders[role]:
            self._generators[role] = OwnGenerators(self._loaders[role])
        self._epochs.pop(role, None)
        self._reshuffled.discard(role)

    def _place(self, role: str, source: Any) -> str:
        """The numbered role of a pass: that of its loader, else the first that is free."""
        if not isinstance(source, LoaderPass):
            return role
        numbered = [role]
        while (place := numbered[-1]) in self._sources:
            if self._loaders[place] is source.loader:
                return place
            numbered.append(f"{role} {len(numbered) + 1}")
        return next((each for each in numbered if not self._is_active(each)), numbered[-1])

    def _is_active(self, role: str) -> bool:
        """Whether a pass of the role has not ended."""
        source = self._sources[role]() if role in self._sources else None
        return isinstance(source, LoaderPass) and not source.ended

    def restored_by_themselves(self) -> list[Any]:
        """Of what is read from, as far as it is known by now, what has a `state_dict`."""
        return [one for source in self._sources.values() if hasattr(one := source(), "state_dict")]

    def read(self) -> dict[str, Any]:
        return {**{role: self._state(role, source()) for role, source in self._sources.items()}, **self._pending}

    def write(self, saved: Mapping[str, Any]) -> None:
        """Restore the positions; that of an unknown source when it is first read."""
        self._pending = dict(saved)
        for role in [role for role in self._pending if role in self._sources]:
            self._restore(role, self._pending.pop(role))

    def restart_unplaced(self) -> None:
        """Start passes without a position, now that the generators are restored."""
        unplaced, self._unplaced = self._unplaced, []
        for source in unplaced:
            source.begin()

    def _state(self, role: str, source: Any) -> dict[str, Any]:
        loader = self._loaders[role]
        if hasattr(loader, _AGAIN):
            raise UnsupportedError(f"data position of '{role}': {_CONTINUED}")
        epoch = own_epoch(source) or self._epochs.get(role) or LoaderEpoch.of(loader)
        ended = source is None or (isinstance(source, LoaderPass) and source.ended)
        workers = worker_changes(source, loader, ended or epoch.reused_workers)
        self._say_lost(role, workers["lost"])
        if is_stateful(loader):
            return {"kind": "state", "state": loader.state_dict(), **workers}
        now = self._generators[role].states()
        if ended:
            return {"kind": "ended", "own": now, **workers}
        if role in self._reshuffled:
            return {"kind": "several", "own": now}
        first = epoch.first if epoch.read else None
        same = first is not None and codec.encode(first) == codec.encode(epoch.began)
        return {
            "kind": "batches" if restart_method(source) is not None else "reads",
            "read": epoch.read,
            "left": self._lengths[role].left if role in self._lengths else 0,
            "again": epoch.reused_workers,
            "began": epoch.began,
            "first": None if same else first,
            "own": now,
            "epoch": sampler_epoch(loader),
            **workers,
        }

    def _say_lost(self, role: str, lost: str) -> None:
        if lost and role not in self._said:
            self._said.add(role)
            say(f"data position of '{role}': {lost}; a restart will be refused", alarm=True)

    def _restore(self, role: str, saved: Mapping[str, Any]) -> None:
        source, loader = self._sources[role](), self._loaders[role]
        if source is None:
            return
        if saved["kind"] == "several":
            raise ResumeError(f"data position of '{role}': {_RESHUFFLED}; start with --ftp-resume fresh")
        if saved.get("lost"):
            raise ResumeError(f"data position of '{role}': {saved['lost']}; start with --ftp-resume fresh")
        if (saved["kind"] == "state") != is_stateful(loader):
            raise ResumeError(
                f"data position of '{role}': the captured kind '{saved['kind']}' does not fit a "
                f"{type(loader).__name__}: resume with the captured job's loader"
            )
        if saved["kind"] == "state":
            loader.load_state_dict(saved["state"])
            if isinstance(source, LoaderPass):
                source.begin()
            elif source is not loader:
                with self._passes.within():
                    source.data_iter = iter(loader)
            return
        if saved["kind"] == "ended":
            set_source_generators(loader, saved["own"])
            if isinstance(source, LoaderPass):
                self._unplaced.append(source)
            return
        require_epoch(role, loader, saved["epoch"])
        set_source_generators(loader, saved["own"])
        epoch = LoaderEpoch(saved["began"], saved["first"] or saved["began"], saved["read"], saved["again"])
        if role.startswith("train"):
            self._lengths.setdefault(role, LeftPasses()).restored(saved.get("left", 0), epoch.read)
            self._under_way[role] = None
        again = epoch.read if saved.get("workers") else 0
        started = time.perf_counter()
        with self._passes.within():
            if saved["kind"] != "batches" or not restart(source, replace_in(epoch, read=epoch.read - again)):
                self._skip_batches(role, source, epoch)
            elif again:
                drop(source, again)
                _say_read_again(role, again, f"because worker processes {saved['workers']}", started)
        set_source_generators(loader, saved["own"])

    def _skip_batches(self, role: str, source: Any, epoch: LoaderEpoch) -> None:
        started = time.perf_counter()
        if isinstance(source, LoaderPass):
            source.read_to(epoch)
        elif epoch.read:
            set_generator_states(epoch.first or epoch.began, loader_of(source))
            batches: Iterator[Any] = source.data_iter if hasattr(source, "data_iter") else iter(source)
            for _ in islice(batches, epoch.read):
                pass
        if epoch.read:
            _say_read_again(role, epoch.read, _TIME, started)
        if hasattr(source, EPOCH):
            setattr(source, EPOCH, epoch)
        elif not isinstance(source, LoaderPass):
            self._epochs[role] = epoch


def _say_read_again(role: str, batches: int, why: str, started: float) -> None:
    seconds = time.perf_counter() - started
    say(f"data position of '{role}': {batches} batches were read again and dropped in {seconds:.1f} s, {why}")
