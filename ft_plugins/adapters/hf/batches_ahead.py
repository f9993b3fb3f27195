"""The data position of a loop over a loader of accelerate, which reads one batch ahead of what it gives.

Invariant: after `write` and restoring the generators the next batch is the one that would have come next, and so are
all later ones. A batch that was read ahead is read again, with the random numbers that it was read with.

    sampled     the pass begins with its original random numbers, behind the batches that the loop has taken: nothing is
                loaded twice, unless worker processes draw or count themselves: then the pass is read again up to there
    iterable    the pass is read again up to there. Refused if its data set draws from the process's generators: what
                training drew in between is not repeated

In: a loader that `Accelerator.prepare` has made; the batches that the loop takes. Out: plain values, and back."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...errors import ResumeError
from ...events import say
from ..data.loader_order import hook_iteration, watch_draws
from ..data.loader_values import LoaderValues
from ..data.loaders import (
    LoaderEpoch,
    LoaderPass,
    OwnGenerators,
    Passes,
    generator_states,
    is_sampled,
    is_stateful,
    set_generator_states,
    set_source_generators,
)
from ..data.worker_draws import WorkerDraws
from ..rng import numbers_drawn
from ..script.script_hooks import replace
from .refusals import refuse_built

_DRAWN = (
    "its data set draws random numbers of the process while it is read, between which training draws its own, so they "
    "cannot be drawn again: let it draw from a generator of its own, in an attribute"
)


_DISPATCHER = "DataLoaderDispatcher"
AHEAD = "__ft_batches_ahead__"  # attribute of a loader that is counted


class _Pass(LoaderPass):
    """A pass of `owner`, whose first batch may be one that was read ahead."""

    owner: BatchesAhead
    again: Mapping[str, Any] | None = None  # what that batch was read with

    def __next__(self) -> Any:
        again, self.again = self.again, None
        if again is not None:
            return self._read_again(again)
        before = numbers_drawn(device=False) if self.owner.watches else None
        batch = super().__next__()
        if before is not None and not self.owner.draws and before != numbers_drawn(device=False):
            self.owner.draws = True
            say(f"the data position cannot be captured: {_DRAWN}; a restart will be refused", alarm=True)
        return batch

    def _read_again(self, read_with: Mapping[str, Any]) -> Any:
        now, values = generator_states(self.loader), self.owner.values.changed()
        set_generator_states(read_with["generators"], self.loader)
        if read_with["values"] is not None:
            self.owner.values.put(read_with["values"])
        try:
            return super().__next__()
        finally:
            set_generator_states(now, self.loader)
            self.owner.values.put(values)


class BatchesAhead:
    """The position in one loader of accelerate."""

    def __init__(self, loader: Any) -> None:
        """Follow `loader` from now on. Raises UnsupportedError if it cannot be followed."""
        kind, base = type(loader).__name__, getattr(loader, "base_dataloader", None)
        refuse_built(
            {
                "unprepared": base is None and kind,
                "dispatched": kind == _DISPATCHER and is_sampled(base),
                "persistent": getattr(base, "persistent_workers", False),
                "stateful": is_stateful(base) and type(base).__name__,
            }
        )
        self._shard, self._loader = loader, loader.base_dataloader
        self._passes = Passes(self._reading)
        self.values = LoaderValues(self._loader)
        self._generators = OwnGenerators(self._loader)
        self._taken = 0  # batches of the pass under way
        self._current: Callable[[], _Pass | None] = lambda: None
        self._last: dict[str, Any] | None = None  # what the last batch was read with
        self._began: dict[str, bytes] = {}  # values with which the pass began
        self.draws = False  # whether its data set draws from the process's generators
        self._pending: Mapping[str, Any] | None = None
        self._resuming: tuple[Any, float] | None = None  # generators and time, while a pass is read again
        self._before: Callable[[], None] = lambda: None
        self._skipped = 0  # batches that the loader of the next pass skips
        self._first = 0  # those that the pass under way has skipped
        self._workers = WorkerDraws(self._loader)
        self.watches = not (is_sampled(self._loader) or self._loader.num_workers)
        hook_iteration(self._loader, self._begin)
        if is_sampled(self._loader):
            watch_draws(self._loader)

    @property
    def is_pending(self) -> bool:
        """Whether the next pass begins where the restored one was."""
        return self._pending is not None

    @property
    def ahead(self) -> int:
        """How many batches of the pass under way were read, but not taken; 0 between passes, or if that is unknown."""
        current = self._current()
        unknown = self._resuming is not None or type(self._shard).__name__ == _DISPATCHER  # rank 0 reads for others
        return 0 if current is None or unknown else current.epoch.read - self._taken

    def skipping(self, loader: Any, batches: int) -> None:
        """The next pass is over `loader`, which skips the first `batches` of the same data."""

        self._skipped = batches
        if loader.base_dataloader is not self._loader:
            hook_iteration(loader.base_dataloader, self._begin)

    def count(self, before: Callable[[], None] = lambda: None) -> None:
        """Count what is taken: what iterates the loader is the loop. `before` is called before each batch is read."""
        self._before = before
        vars(self._shard)[AHEAD] = self
        replace(type(self._shard), "__iter__", _iterating, framework="accelerate", tested="1.15.0")

    def counted(self, begun: Iterator[Any]) -> Iterator[Any]:
        """The batches of a pass of the loader."""
        self.turning()
        self._before()
        for batch in begun:
            self.taking(1)
            yield batch
            if not self._shard.end_of_dataloader:  # else the next batch is one of another pass
                self._before()

    def turning(self) -> None:
        """The loop begins another pass."""
        self._current, self._taken = lambda: None, 0

    def taking(self, batches: int) -> None:
        """The loop takes `batches` more."""
        self._taken += batches
        if self._resuming is not None:
            self._end_reading_again(*self._resuming)

    # ---- a pass ----

    def _begin(self, source: Any, original: Callable[[Any], Any]) -> Any:
        if self._passes.inside:
            return original(source)
        saved = self._pending
        skipped, self._skipped = self._skipped, 0
        self._taken, self._last, self._began = skipped, None, self.values.changed()
        self._first = skipped
        at = LoaderEpoch(generator_states(self._loader), read=0)
        at.reused_workers = getattr(source, "_iterator", None) is not None
        if saved is not None and not is_sampled(self._loader):
            return self._begin_again(source, original, saved)
        now = generator_states()

        def watched(loader: Any) -> Any:
            with self._workers.watched(loader):
                return original(loader)

        begun = _Pass(source, watched, self._passes)
        begun.owner, begun.loader, begun.epoch = self, self._loader, at
        if skipped and is_sampled(self._loader):  # else they are read and dropped
            begun.epoch.first, begun.epoch.read = generator_states(self._loader), skipped
        self._current = weakref.ref(begun)
        if saved is not None:
            self._move(begun, saved, now)
        return begun

    def _move(self, begun: _Pass, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Continue the captured pass behind the batches that the loop has taken, and return to the generators `now`."""
        self._pending, at = None, saved["pass"]
        self.values.put(at["values"])
        set_source_generators(self._loader, at["began"]["own"])
        kept = at["skipped"] if at["workers"] else at["taken"]  # what is not loaded
        begun.skip_to(LoaderEpoch(at["began"], at["first"], kept, at["again"]))
        self._taken, self._began, self._first = at["taken"], dict(at["values"]), at["skipped"]
        if at["workers"] and at["taken"] > kept:
            started = time.perf_counter()
            begun.drop(at["taken"] - kept)
            self._say_read_again(at["taken"] - kept, f"whose worker processes {at['workers']}", started)
        set_generator_states(now)
        set_source_generators(self._loader, saved["own"])
        self.values.put(saved["values"])
        if at["read"] > at["taken"]:
            begun.again = at["last"]

    def _reading(self, source: LoaderPass) -> None:
        values = None if self._loader.num_workers else self.values.changed()
        self._last = {"generators": generator_states(self._loader), "values": values}

    # ---- iterable data sets ----

    def _begin_again(self, source: Any, original: Callable[[Any], Any], saved: Mapping[str, Any]) -> Any:
        at = saved["pass"]
        if at["draws"]:
            raise ResumeError(f"the data position cannot be restored: {_DRAWN}; start with --ftp-resume fresh")
        self._resuming = generator_states(), time.perf_counter()
        self.values.put(at["values"])
        set_source_generators(self._loader, at["began"]["own"])
        set_generator_states(at["began"])
        begun = _Pass(source, original, self._passes)
        begun.owner, begun.loader = self, self._loader
        begun.epoch = LoaderEpoch(at["began"], reused_workers=at["again"])
        self._shard.skip_batches, self._taken, self._began = at["taken"], at["taken"], dict(at["values"])
        self._current = weakref.ref(begun)
        return begun

    def _end_reading_again(self, now: Mapping[str, Any], began: float) -> None:
        set_generator_states(now)
        self._say_read_again(self._shard.skip_batches, "that is iterable", began)
        self._shard.skip_batches, self._pending, self._resuming = 0, None, None

    def _say_read_again(self, batches: int, why: str, began: float) -> None:
        seconds = time.perf_counter() - began
        say(f"data position: {batches} batches of a data set {why} were read again and dropped in {seconds:.1f} s")

    # ---- the position ----

    def read(self) -> dict[str, Any]:
        """The position, as values for the codec. Raises StateChangedError."""
        if self._pending is not None:
            return dict(self._pending)
        current, place = self._current(), None
        if current is not None and self._taken:
            at = current.epoch
            place = {
                "began": at.began, "first": at.first, "read": at.read, "again": at.reused_workers,
                "taken": self._taken, "last": self._last, "values": self._began, "draws": self.draws,
                "skipped": self._first, "workers": self._workers.changes,
            }  # fmt: skip
        return {
            "own": self._generators.states(),
            "values": self.values.changed(),
            "iteration": self._shard.iteration,
            "kind": "sampled" if is_sampled(self._loader) else "iterable",
            "pass": place,
        }

    def write(self, saved: Mapping[str, Any]) -> None:
        """Return to a saved position in the next pass. Raises ResumeError."""
        kind = "sampled" if is_sampled(self._loader) else "iterable"
        if saved["kind"] != kind:
            raise ResumeError(
                f"the data are {kind}, those of the captured job {saved['kind']}: resume with the captured job's data, "
                "or start with --ftp-resume fresh"
            )
        set_source_generators(self._loader, saved["own"])
        self.values.put(saved["values"])
        self._shard.iteration = saved["iteration"]
        self._taken, self._pending = 0, saved if saved["pass"] is not None else None


def _iterating(original: Callable[..., Any], loader: Any) -> Iterator[Any]:
    ahead = vars(loader).get(AHEAD)
    return original(loader) if ahead is None else ahead.counted(original(loader))

