"""A source of batches whose passes and reads are followed: the parts of a data position that all kinds have.

Invariant: the position at a version point is that of the batches which training has read; what the script does at the
begin of the restored pass (its epoch, numbers and values of its samplers and data) must be what it did in the captured
one, or is refused or named.

In: what the loop reads from, its reads. Out: the position but for `_place`; the restored pass, continued.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ...errors import ConfigError, ResumeError
from .left_passes import LeftPasses
from .loader_order import hook_iteration
from .loader_reads import LoopReads
from .loader_values import LoaderValues
from .loaders import (
    LoaderPass,
    OwnGenerators,
    Passes,
    generator_states,
    sampler_epoch,
    set_epoch,
    set_generator_states,
    set_source_generators,
)
from .worker_draws import watched

_NEW_PASS = (StopIteration, NameError, AttributeError, TypeError)  # handled where a loop lacks an iterator
_OVER = (
    "the job resumed after the last batch of a pass over the loader, so that the pass that was begun now has no more: "
    "begin the next one where it ends (`try: batch = next(batches)`, `except StopIteration: batches = iter(loader)`), "
    "or loop over the loader"
)


class FollowedSource:
    """A source whose passes and reads are observed: the parts of a position that all kinds have."""

    def __init__(self, source: Any, reads: LoopReads) -> None:
        self._source, self._reads = source, reads
        self._passes = Passes(self._reading, self._finished)
        self._current: Callable[[], LoaderPass | None] = lambda: None
        self._pending: Mapping[str, Any] | None = None  # restored position at which the next pass begins
        self._over: Callable[[], LoaderPass | None] = lambda: None  # the restored pass, if all of it was read
        self._unplaced: Callable[[], LoaderPass | None] = lambda: None  # begun before a restore, to begin again
        self._values = LoaderValues(source if isinstance(source, DataLoader) else None)
        self._generators = OwnGenerators(source)
        self._began: dict[str, bytes] = {}  # values that had changed when the pass began
        self._ended = True  # no pass is under way, or the last one was read to its end
        self._lengths = LeftPasses()
        self._hooked = hook_iteration(source, self._begin)
        reads.within.append(lambda: self._passes.inside)
        if isinstance(source, DataLoader):
            reads.required = True
            reads.observe_others()

    # ---- a pass ----

    def _begin(self, source: Any, original: Callable[[Any], Any]) -> Any:
        if self._passes.inside:  # as a part of itself
            return original(source)
        saved, self._pending = self._pending, None
        if saved is not None and saved["pass"]["over"] and isinstance(sys.exc_info()[1], _NEW_PASS):
            saved = None  # the script lacks an iterator where one had ended
            self._discard()
        self._reads.required = True
        if saved is None:
            self._begin_anew()
        else:
            self._require_continued(saved)
        before, present = generator_states(self._source), self._values.changed()  # also what the loop has set since
        begin = watched(original) if isinstance(self._source, DataLoader) else original
        begun = LoaderPass(source, begin, self._passes)
        self._current = weakref.ref(begun)
        if saved is not None:
            self._continue(begun, saved, made_before=False)
            set_generator_states(before, self._source)
            self._values.put(present)
        return begun

    def _begin_anew(self) -> None:
        self._lengths.begin()
        self._ended = False
        self._began = self._values.changed()
        self._reads.boundary()

    def _require_continued(self, saved: Mapping[str, Any]) -> None:
        epoch, captured = sampler_epoch(self._source), saved["epoch"]
        if epoch != captured:
            raise ResumeError(
                f"the sampler's epoch was set to {epoch}, but epoch {captured} was captured: start the loop over "
                "epochs at `sampler.epoch`, which is restored before the first iteration"
            )

    def _reading(self, source: LoaderPass) -> None:
        self._reads.reading(source)
        if source is not self._current():
            raise ConfigError(
                "a batch was read from a pass over the training data after another pass had begun, so that the data "
                "position of training is unknown; give evaluation a loader of its own"
            )
        if source is self._unplaced():
            self._unplaced = lambda: None
            self._begin_anew()
            source.begin()
        self._lengths.reading()

    def _finished(self, source: LoaderPass, was_read: bool) -> None:
        self._reads.boundary(was_read)
        self._ended = True
        self._lengths.ended()
        over, self._over = self._over(), lambda: None
        if source is over:
            raise StopIteration(_OVER)

    # ---- the position ----

    def require_read(self) -> None:
        """Called before an update. Raises ConfigError if the iteration did not read what the position is of."""
        current = self._current()
        if current is not None and current.ended:
            self._reads.boundary()
        self._reads.require()

    def read(self) -> Any:
        """The position, as values for the codec. Raises StateChangedError."""
        if self._pending is not None:
            return dict(self._pending)
        first = not self._reads.iteration()  # only the size is asked for
        values = self._values.changed()
        return {
            "kind": type(self).__name__,
            "epoch": sampler_epoch(self._source),
            "own": self._generators.states(),
            "usual": self._reads.usual,
            "left": self._lengths.left,
            "values": {
                **{"began": self._began, "now": values},
                "reserve": bytes(2 * self._values.size() * first),
            },
            "numbers": {"built": self._values.built()},
            **self._place(first),
        }

    def _place(self, first: bool) -> dict[str, Any]:
        """The position itself: 'pass' is None if none is under way."""
        raise NotImplementedError

    def write(self, saved: Any) -> None:
        """Return to a saved position. Raises ResumeError."""
        if not isinstance(saved, Mapping) or saved.get("kind") != type(self).__name__:
            raise ResumeError(
                f"a {type(self._source).__name__} was given as sampler, but another kind of one was captured: resume "
                "with the loader of the captured job, or start with --ftp-resume fresh"
            )
        self._values.require_built(saved["numbers"]["built"])
        if saved["epoch"] is not None:
            set_epoch(self._source, saved["epoch"])
        set_source_generators(self._source, saved["own"])
        self._values.put(saved["values"]["now"])
        self._reads.usual = saved["usual"]
        self._began = dict(saved["values"]["began"])
        self._load(saved)
        current = self._current()
        if saved["pass"] is None:
            if current is not None:
                self._unplaced = weakref.ref(current)
        elif current is not None:
            self._continue(current, saved, made_before=True)
        elif self._hooked:
            self._pending = saved

    def _continue(self, begun: LoaderPass, saved: Mapping[str, Any], made_before: bool) -> None:
        self._move(begun, saved, made_before)
        self._lengths.restored(saved["left"], saved["pass"]["read"])
        if saved["pass"]["over"]:
            self._over = weakref.ref(begun)

    def _load(self, saved: Mapping[str, Any]) -> None:
        """Take over a state that the source keeps itself."""

    def _discard(self) -> None:
        """Forget a state that the source would use in the next pass."""

    def _move(self, begun: LoaderPass, saved: Mapping[str, Any], made_before: bool) -> None:
        """Continue the captured pass. `made_before`: `begun` was made before the restore."""
        raise NotImplementedError

    def _as_it_began(self, saved: Mapping[str, Any], begin: Callable[[], object]) -> None:
        """Call `begin` with the values with which the captured pass began, and return to the captured ones."""
        self._values.put(saved["values"]["began"])
        begin()
        set_source_generators(self._source, saved["own"])
        self._values.put(saved["values"]["now"])
