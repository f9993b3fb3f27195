"""Where a rank stands in its data: what it has read, and how to stand there again without reading it all.

Invariant: after `write`, generators restored, and `begin_anew`, the next batch is the one that would have come next.
Three ways, the first that applies:

    state      the loader has `state_dict` and `load_state_dict`: it knows
    batches    a loader with a batch sampler: the sampler is started with the random numbers with which it was started
               then, and moved on; nothing is loaded
    reads      anything else: as many batches are read again and dropped, which takes as long as reading them took,
               and is said; refused where its order was drawn anew on the way

DeepSpeed's two loaders and torch's remember with which random numbers each epoch began, so that a later epoch is the
same too; of any other iterator only the first read is known. An epoch that a sampler is told (`set_epoch`) is the
script's business: another one than was captured is refused. A pass over a torch loader that has ended, or that nobody
holds any more, is no position: the next one begins with the generators as they were restored. What a data set's worker
processes draw themselves is not followed.

In: `deepspeed.runtime.dataloader`, right after its import, and what the engine reads. Out: plain values, and back.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any

from ...errors import ResumeError
from ...events import say
from ..loaders import (
    LoaderEpoch,
    LoaderPass,
    Passes,
    StartedSampler,
    begin_after,
    draws,
    generator_states,
    is_sampled,
    is_stateful,
    sampler_epoch,
    set_generator_states,
    set_source_generators,
)
from ..script_hooks import replace_in_deepspeed as replace

_MARK = "__ft_epoch__"
_SEVERAL = (
    "an iterator of unknown kind reads a shuffled loader for a second time; in which order that was read cannot be "
    "known after a restore, which will be refused: give the loader itself, deepspeed's RepeatingLoader around it, or "
    "an iterator with state_dict and load_state_dict, or shuffle with a torch.Generator of the loader's own"
)


class Positions:
    """The data positions of a process, of training and of evaluation. `before_read` is called before every read.

    A role is 'train' or 'eval'; a further torch loader that is read at the same time is 'train 2', and so on.
    What training and evaluation both read has one position, that of training.
    """

    def __init__(self) -> None:
        self.before_read: Callable[[Any], None] = lambda source: None
        self._passes = Passes(lambda source: self.before_read(source))
        self._sources: dict[str, Callable[[], Any]] = {}
        self._owners: dict[str, Any] = {}
        self._epochs: dict[str, LoaderEpoch] = {}  # of sources that do not keep their own
        self._several: set[str] = set()  # roles whose order was drawn anew later than at the first read
        self._pending: dict[str, Any] = {}
        self._anew: list[LoaderPass] = []

    def follow(self, module: ModuleType) -> None:
        """Have DeepSpeed's loaders remember their epochs."""
        replace(module.DeepSpeedDataLoader, "__iter__", self._beginning(lambda loader: loader))
        replace(module.DeepSpeedDataLoader, "__next__", self._next_of_loader)
        replace(module.RepeatingLoader, "__init__", self._beginning(lambda repeating, loader: loader))
        replace(module.RepeatingLoader, "__next__", self._next_of_repeating)

    def follow_torch(self) -> None:
        """Likewise torch's, where a script iterates one itself; of what it iterates already nothing is known."""
        self._passes.follow()

    def _beginning(self, owner: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def begin(loader: Any, *args: Any, **kwargs: Any) -> Any:
                owned = owner(loader, *args, **kwargs)
                setattr(loader, _MARK, LoaderEpoch.of(owned))
                self._passes.shuffled += draws(owned)
                with self._passes.within():
                    return original(loader, *args, **kwargs)

            return begin

        return wrap

    def _next_of_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(loader: Any) -> Any:
            if _epoch(loader).read < len(loader):  # else it ends, and the script does what it does between epochs
                self.before_read(loader)
                _epoch(loader).reading(loader)
            with self._passes.within():
                return original(loader)

        return __next__

    def _next_of_repeating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(loader: Any) -> Any:
            if hasattr(loader.loader, _MARK):  # DeepSpeed's own, which keeps its epochs itself
                return original(loader)
            self.before_read(loader)
            _epoch(loader).reading(loader.loader)
            with self._passes.within():
                try:
                    return next(loader.data_iter)
                except StopIteration:
                    self._passes.shuffled += draws(loader.loader)
                    setattr(loader, _MARK, LoaderEpoch.of(loader.loader))
                    loader.data_iter = iter(loader.loader)
                    _epoch(loader).reading(loader.loader)
                    return next(loader.data_iter)

        return __next__

    # what an engine reads

    def reading(self, role: str, source: Any) -> None:
        """`source` is about to be read for `role`: 'train' or 'eval'."""
        role, source = self._known(role, source)
        if role in self._pending:
            around = generator_states()
            self._put(role, self._pending.pop(role))
            for late in self._anew:  # begun when the generators were restored already, but for its own
                set_generator_states(late.epoch.began)
            self.begin_anew()
            set_generator_states(around)
        if _kept(source) is None:
            owner = _owner(source)
            self._epochs.setdefault(role, LoaderEpoch.of(owner)).reading(owner)

    @contextmanager
    def around(self, role: str, source: Any) -> Iterator[None]:
        """`source` is read for `role` in here."""
        self.reading(role, source)
        role, source = self._known(role, source)
        before = self._passes.shuffled
        yield
        epoch = self._epochs.get(role)  # of what does not keep its own
        later = epoch is not None and epoch.read > 1 and self._passes.shuffled != before
        if later and role not in self._several and not is_stateful(source) and _sampled(source) is None:
            self._several.add(role)
            say(f"data position of '{role}': {_SEVERAL}")

    def expect(self, role: str, source: Any) -> None:
        """`source` will be read next for `role`; its position may be put in place."""
        self._known(role, source)

    def _known(self, role: str, source: Any) -> tuple[str, Any]:
        source = _keeper(source)
        shared = next((place for place, known in self._sources.items() if known() is source), None)
        if shared is not None and (role != "train" or shared.startswith("train")):
            return shared, source
        role = self._place(role, source)
        if shared is not None:  # evaluation has read it until now; from now on its position is that of training
            del self._sources[shared], self._owners[shared]
            self._sources[role] = _held(source)
            self._owners[role] = _owner(source)
            self._epochs.pop(role, None)
            self._several.discard(role)
            if shared in self._epochs:
                self._epochs[role] = self._epochs.pop(shared)
            if shared in self._several:
                self._several.remove(shared)
                self._several.add(role)
            return role, source
        known = self._sources.get(role)
        if known is None or known() is not source:
            self._sources[role] = _held(source)
            self._owners[role] = _owner(source)
            self._epochs.pop(role, None)
            self._several.discard(role)
        return role, source

    def _place(self, role: str, source: Any) -> str:
        """The role with the number of the loader: its own, else the first that is free."""
        if not isinstance(source, LoaderPass):
            return role
        numbered = [role]
        while (place := numbered[-1]) in self._sources:
            if self._owners[place] is source.loader:
                return place
            numbered.append(f"{role} {len(numbered) + 1}")
        return next((each for each in numbered if not self._goes_on(each)), numbered[-1])

    def _goes_on(self, role: str) -> bool:
        source = self._sources[role]() if role in self._sources else None
        return isinstance(source, LoaderPass) and not source.ended

    def read(self) -> dict[str, Any]:
        """The positions, for the codec."""
        found = {role: self._state(role, source()) for role, source in self._sources.items()}
        return {**found, **self._pending}

    def write(self, saved: Mapping[str, Any]) -> None:
        """Put the positions in place; of a source that is not there yet, when it is first read."""
        self._pending = dict(saved)
        for role in [role for role in self._pending if role in self._sources]:
            self._put(role, self._pending.pop(role))

    def begin_anew(self) -> None:
        """The generators are restored: passes that stand at no position begin with them."""
        anew, self._anew = self._anew, []
        for source in anew:
            source.begin()

    def _state(self, role: str, source: Any) -> dict[str, Any]:
        owner = self._owners[role]
        if is_stateful(owner):
            return {"kind": "state", "state": owner.state_dict()}
        now = generator_states(owner)["own"]
        if source is None or (isinstance(source, LoaderPass) and source.ended):
            return {"kind": "ended", "own": now}
        if role in self._several:
            return {"kind": "several", "own": now}
        epoch = _kept(source) or self._epochs.get(role) or LoaderEpoch.of(owner)
        first = epoch.first if epoch.read else None
        same = first is not None and _equal(first, epoch.began)
        return {
            "kind": "batches" if _sampled(source) is not None else "reads",
            "read": epoch.read,
            "again": epoch.reused_workers,
            "began": epoch.began,
            "first": None if same else first,
            "own": now,
            "epoch": sampler_epoch(owner),
        }

    def _put(self, role: str, saved: Mapping[str, Any]) -> None:
        source, owner = self._sources[role](), self._owners[role]
        if source is None:
            return
        if saved["kind"] == "several":
            raise ResumeError(f"data position of '{role}': {_SEVERAL}; start with --ftp-resume fresh")
        if (saved["kind"] == "state") != is_stateful(owner):
            raise ResumeError(
                f"the data of '{role}' come from a {type(owner).__name__}, the captured position is of another kind "
                f"('{saved['kind']}'): resume with the loader of the captured job"
            )
        if saved["kind"] == "state":
            owner.load_state_dict(saved["state"])
            if isinstance(source, LoaderPass):
                source.begin()
            elif source is not owner:
                with self._passes.within():
                    source.data_iter = iter(owner)
            return
        if saved["kind"] == "ended":
            set_source_generators(owner, saved["own"])
            if isinstance(source, LoaderPass):
                self._anew.append(source)
            return
        _require_epoch(role, owner, saved["epoch"])
        epoch = LoaderEpoch(saved["began"], saved["first"] or saved["began"], saved["read"], saved["again"])
        with self._passes.within():
            if saved["kind"] != "batches" or not _restart(source, epoch):
                self._read_again(role, source, epoch)
        set_source_generators(owner, saved["own"])

    def _read_again(self, role: str, source: Any, epoch: LoaderEpoch) -> None:
        began = time.perf_counter()
        if isinstance(source, LoaderPass):
            source.read_to(epoch)
        elif epoch.read:
            set_generator_states(epoch.first or epoch.began, _owner(source))
            batches: Iterator[Any] = source.data_iter if hasattr(source, "data_iter") else iter(source)
            for _ in islice(batches, epoch.read):
                pass
        if epoch.read:
            seconds = time.perf_counter() - began
            say(
                f"data position of '{role}': {epoch.read} batches were read again and dropped, {seconds:.1f} s; an "
                "iterator with state_dict and load_state_dict, or a loader with a sampler, is put in place at once"
            )
        if hasattr(source, _MARK):
            setattr(source, _MARK, epoch)
        elif not isinstance(source, LoaderPass):
            self._epochs[role] = epoch


def _epoch(loader: Any) -> LoaderEpoch:
    found: LoaderEpoch | None = getattr(loader, _MARK, None)
    if found is None:
        found = LoaderEpoch.of(_owner(loader))
        setattr(loader, _MARK, found)
    return found


def _kept(source: Any) -> LoaderEpoch | None:
    return source.epoch if isinstance(source, LoaderPass) else getattr(source, _MARK, None)


def _keeper(source: Any) -> Any:
    """The object that keeps the position: in a loader that only repeats DeepSpeed's own, that one."""
    inside = getattr(source, "loader", None)
    return inside if hasattr(inside, _MARK) else source


def _held(source: Any) -> Callable[[], Any]:
    """A pass that nobody else holds any more is no position."""
    return weakref.ref(source) if isinstance(source, LoaderPass) else lambda: source


def _owner(source: Any) -> Any:
    """What is iterated: samplers and state are its."""
    return source.loader if isinstance(source, LoaderPass) or hasattr(source, "data_iter") else source


def _equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return repr(_plain(left)) == repr(_plain(right))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _require_epoch(role: str, owner: Any, captured: int | None) -> None:
    found = sampler_epoch(owner)
    if found != captured:
        raise ResumeError(
            f"the script has told the sampler of its data ('{role}') epoch {found}, captured was epoch {captured}: "
            "begin the loop at the epoch that engine.global_steps is in"
        )


def _sampled(source: Any) -> str | None:
    """The name of the method of `_restart` that knows this source."""
    if isinstance(source, LoaderPass):
        return "pass" if is_sampled(source.loader) else None
    if hasattr(source, "_create_dataloader") and not getattr(source, "curriculum_learning_enabled", False):
        return "deepspeed"
    if is_sampled(getattr(source, "loader", None)):
        return "torch"
    if hasattr(source, "_sampler_iter") and getattr(source, "_num_workers", 1) == 0:
        return "iterator"
    return None


def _restart(source: Any, epoch: LoaderEpoch) -> bool:
    """Begin the epoch again, with its random numbers, behind the batches that were read. False: not of this kind."""
    owner = _owner(source)
    set_generator_states(epoch.began, owner)
    match _sampled(source):
        case "pass":
            return bool(source.skip_to(epoch))
        case "deepspeed":
            sampler = source.data_sampler
            started = StartedSampler(sampler, epoch.read * source.batch_size)
            source.data_sampler = started
            try:
                iter(source)
            finally:
                source.data_sampler = sampler
        case "torch":
            source.data_iter, started = begin_after(owner, epoch, iter)
        case "iterator":
            started = StartedSampler(source._sampler_iter, epoch.read)
            source._num_yielded += epoch.read
        case _:
            return False
    if epoch.read:
        set_generator_states(epoch.first or epoch.began, owner)
        started.start()
    if hasattr(source, _MARK):
        setattr(source, _MARK, epoch)
    return True
