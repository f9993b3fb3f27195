"""The data position of a plain torch loop: read at the version point, set after a restore.

Invariant: after the position and the generators are restored, the next batch is the one that would have come next. A
batch must be read in the iteration that trains on it (`loader_reads`); otherwise the position at the version point is
not that of training, and ConfigError is raised.

    own state   an object with `state_dict` and `load_state_dict`: torchdata's StatefulDataLoader, a custom sampler
    loader      a torch DataLoader: the generators at the begin of the pass, and the number of batches read. After a
                restore the first pass skips these; nothing is loaded twice, unless worker processes draw random
                numbers, or count: then the pass is read again up to there. Workers that outlive a pass, and do,
                cannot be brought there

With both go the sampler's epoch, and what samplers and data keep in attributes (`loader_values`) and in generators of
their own.

In: what the loop reads from. Out: plain values, and back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from ...errors import ConfigError, InventoryError, ResumeError
from ...events import say
from ...snapshot.capture import codec
from ..believed_state import BelievedState
from .data_parts import data_parts, parts
from .followed_source import FollowedSource
from .loader_order import require_repeatable, watch_draws
from .loader_reads import LoopReads
from .loaders import (
    LoaderEpoch,
    LoaderPass,
    generator_states,
    is_sampled,
    is_stateful,
    set_generator_states,
)
from .worker_draws import draws_of, watched

_OUTLIVING = (
    "the loader's worker processes {changes}, and outlive a pass (persistent_workers), so that what they load may "
    "depend on all passes before: leave out persistent_workers, or let __getitem__ draw from a generator that it seeds "
    "by the index"
)
_STREAMING = (
    "a second pass over the data begins: worker processes that outlive a pass (persistent_workers) may begin each pass "
    "after a restart where a restored streaming data set was placed: leave out persistent_workers"
)
_DRAWN = (
    "the loader's worker processes draw random numbers, which its state_dict does not have, so "
    "a restart would draw others: let __getitem__ draw from a generator that it seeds by the index, or leave out "
    "num_workers"
)


def position_of(source: Any, iteration: Callable[[], int], trains: Callable[[], bool]) -> DataPosition:
    """The position of `source`, or of the several in a list. `iteration()` is 0 before the first; `trains()` says
    whether the model is in training mode.

    Raises ConfigError if the position of `source` cannot be determined.
    """
    reads = LoopReads(iteration, trains)
    if isinstance(source, list | tuple):
        return SeveralPositions([_position_of(one, reads) for one in source], reads)
    return _position_of(source, reads)


def _position_of(source: Any, reads: LoopReads) -> FollowedSource:
    kind = type(source).__name__
    if is_stateful(source):
        if isinstance(source, DataLoader):
            require_repeatable(source)
        return OwnState(source, reads)
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
    return LoaderPosition(source, reads)


class OwnState(FollowedSource):
    """The position of an object that keeps it itself.

    A StatefulDataLoader uses a loaded state in the next `iter`. Its `state_dict` makes it use that at once, before the
    generators are restored. A data set in this process may keep a loaded state, and begin every later pass there, as a
    streaming one of `datasets` does within one epoch. So what it keeps is set back when the next pass begins.
    """

    _said = False
    _kept: Sequence[tuple[Any, str, Any, bytes]] = ()  # object, attribute, its value before, the loaded state

    def __init__(self, source: Any, reads: LoopReads) -> None:
        super().__init__(source, reads)
        self._believed = BelievedState(source, "sampler", partial(say, alarm=True))

    def _place(self, first: bool) -> dict[str, Any]:
        before = generator_states(self._source)
        unused = isinstance(self._source, DataLoader) and getattr(self._source, "_iterator", None) is None
        state = self._state()
        if first and unused:  # `state_dict` has begun a pass
            self._source.load_state_dict(state)
            set_generator_states(before, self._source)
        current, known = self._current(), draws_of(self._source)
        if not first:
            self._believed.look(self._reads.iteration(), state, 0 if current is None else current.epoch.read)
        drawing = known is not None and known.draw
        if drawing and not self._said:
            self._said = True
            say(f"{_DRAWN}; a restart will be refused", alarm=True)
        if current is None or current.finished:
            return {"state": state, "pass": None, "dropped": not self._ended, "drawing": drawing}
        place = {"read": current.epoch.read, "over": current.ended}
        return {"state": state, "pass": place, "dropped": False, "drawing": drawing}

    def _state(self) -> Any:
        """What `state_dict` returns, which begins a pass if none has begun."""
        read = lambda loader: loader.state_dict()  # noqa: E731
        return (watched(read) if isinstance(self._source, DataLoader) else read)(self._source)

    def _load(self, saved: Mapping[str, Any]) -> None:
        if saved.get("drawing"):
            raise ResumeError(f"{_DRAWN}; start with --ftp-resume fresh")
        source, used_at_once = self._source, isinstance(self._source, DataLoader)
        stateful = [one for _, one in data_parts(source) if is_stateful(one) and hasattr(one, "__dict__")]
        values_before = [dict(vars(one)) for one in stateful]

        def load() -> None:
            source.load_state_dict(saved["state"])
            if used_at_once:
                self._state()

        self._as_it_began(saved, load)
        self._kept = [
            (one, name, before[name], loaded)
            for one, before in zip(stateful, values_before, strict=True)
            for name, value in vars(one).items()
            if name in before and value is not before[name] and (loaded := _encoded(value)) is not None
        ]
        if saved["dropped"]:
            self._discard()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        if (
            self._reads.iteration() > 1
            and getattr(self._source, "persistent_workers", False)
            and not is_sampled(self._source)
        ):
            raise ConfigError(_STREAMING)
        for one, name, before, loaded in self._kept:
            if _encoded(getattr(one, name, None)) == loaded:  # else it moves with the pass
                setattr(one, name, before)
        self._kept = ()

    def _discard(self) -> None:
        if isinstance(self._source, DataLoader):
            with self._passes.within():
                iter(self._source)

    def _move(self, begun: LoaderPass, saved: Mapping[str, Any], made_before: bool) -> None:
        if made_before and isinstance(self._source, DataLoader):
            begun.begin()
        begun.epoch.read = saved["pass"]["read"]


def _encoded(state: Any) -> bytes | None:
    """A state as bytes; None if it is no mapping, or cannot be captured."""
    with suppress(InventoryError):
        return codec.encode(state) if isinstance(state, Mapping) else None
    return None


class LoaderPosition(FollowedSource):
    """The position of a torch DataLoader with a sampler. Makes this one loader iterate by `LoaderPass`es."""

    def __init__(self, source: Any, reads: LoopReads) -> None:
        super().__init__(source, reads)
        self._said = False
        watch_draws(source)

    def _place(self, first: bool) -> dict[str, Any]:
        current, outliving = self._current(), ""
        known = draws_of(self._source)
        changes = "" if known is None else known.changes
        at = None if current is None or current.finished else current.epoch
        if changes and self._source.persistent_workers and (at is None or at.reused_workers):
            problem = _OUTLIVING.format(changes=changes)
            outliving = problem if known is not None and known.draw else ""
            if not self._said:
                fate = "a restart will be refused" if outliving else "else a restart loads other samples"
                say(f"{problem}; {fate}", alarm=True)
            self._said = True
        if at is None or current is None:
            return {"pass": None, "outliving": outliving}
        place = {"began": at.began, "first": at.first, "read": at.read, "again": at.reused_workers, "workers": changes}
        return {"pass": {**place, "over": current.ended}, "outliving": outliving}

    def _load(self, saved: Mapping[str, Any]) -> None:
        if saved["outliving"]:
            raise ResumeError(f"{saved['outliving']}; start with --ftp-resume fresh")

    def _move(self, begun: LoaderPass, saved: Mapping[str, Any], made_before: bool) -> None:
        at = saved["pass"]
        again = at["read"] if at["workers"] and (not at["over"] or self._source.persistent_workers) else 0
        epoch = LoaderEpoch(at["began"], at["first"], at["read"] - again, at["again"])
        self._as_it_began(saved, lambda: begun.skip_to(epoch))
        if again:
            started = time.perf_counter()
            begun.drop(again)
            seconds = time.perf_counter() - started
            problem = f"whose worker processes {at['workers']} were read again and dropped in {seconds:.1f} s"
            say(f"data position: {again} batches of a data set {problem}")


class SeveralPositions:
    """The positions of several loaders, of which an iteration reads at least one."""

    def __init__(self, positions: Sequence[FollowedSource], reads: LoopReads) -> None:
        self._positions, self._reads = positions, reads

    def read(self) -> Any:
        return [one.read() for one in self._positions]

    def write(self, saved: Any) -> None:
        if not isinstance(saved, list) or len(saved) != len(self._positions):
            raise ResumeError(
                f"{len(self._positions)} loaders were given as sampler, but the captured job had another number: "
                "resume with the loaders of the captured job, or start with --ftp-resume fresh"
            )
        for one, position in zip(self._positions, saved, strict=True):
            one.write(position)

    def require_read(self) -> None:
        self._positions[0].require_read()


DataPosition = FollowedSource | SeveralPositions
