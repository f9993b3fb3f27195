"""The counters of a script's own loops, from version to version: they must be the same when the restored loop begins.

In: the stack, what a version has of it. Out: plain values for the next version; what is wrong, or None; a remark."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from .loop_counters import LoopCounters, decided_otherwise, loop_counters, not_continued

_ROOM = 32 << 10  # bytes of what `loop_counters` finds at most, twice


class OwnCounters:
    """`bounded`: what the loops iterate over says how long they run, and may differ after a restart."""

    def __init__(self, bounded: bool = True) -> None:
        self._bounded = bounded
        self._first = self._last = LoopCounters()
        self._saved: Mapping[str, Any] | None = None
        self._begun = False
        self._within = False  # whether it was captured in the middle of a pass over the data
        self.remark = ""  # after `begin`: what else is not what it was

    def _now(self) -> LoopCounters:
        now = loop_counters()
        return now if self._bounded else replace(now, bounds={})

    def captured(self) -> dict[str, Any]:
        """At the version point, right before the next iteration or after the loop: what a version has of them."""
        now = self._now()
        self._last = now or self._last
        reserve = {} if self._begun else {"reserve": bytes(_ROOM)}  # asked for the size
        return {
            **{"first": vars(self._first), "last": vars(self._last), "ended": not now, **reserve},
            "ranks": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        }

    def restored(self, saved: Mapping[str, Any] | None, within: bool) -> None:
        """The counters of the restored version, None if it has none; whether the rest of a pass comes next."""
        self._saved, self._within = saved, within

    def begin(self, restored: bool, ignored: Collection[str], set_back: Collection[str] = ()) -> str | None:
        """Before the first iteration of this incarnation: what shows that the loop did not continue, None for nothing.
        Another number of ranks may have epochs of another length. `set_back`: variables of which the script restores
        what cannot be compared."""
        self._first = self._last = now = self._now()
        self._begun = True
        saved, self._saved = self._saved, None
        if not restored or saved is None:
            return None
        self._first = LoopCounters(**saved["first"])
        version = LoopCounters(**saved["last"])
        if saved["ranks"] != self.captured()["ranks"]:
            return None
        changed = decided_otherwise(self._first, version, now, self._within, ignored, set_back)
        self.remark = "" if changed is None else f"after the restore {changed}"
        return not_continued(self._first, version, now, saved["ended"], ignored, self._within)

    @property
    def cuts(self) -> bool:
        """Whether the loops end a pass over the data by a count from its beginning."""
        return bool(self._first.cut)
