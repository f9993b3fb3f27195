"""Write state of previous sizes to storage when a job ends before it has restored that state at its current size.

Invariant: the result is an ordinary checkpoint of the job at its previous size. Only a job of that size loads it, and
it is older than any version that the job captures after the resize. It is written only when protection ends, never at a
checkpoint interval, which belongs to the current size. Writing is abandoned before the segments change.

In: segments of previous sizes, the job's storage settings. Out: checkpoints, by one `Persister` for each size.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from ...errors import FtError
from ...events import catalogue
from ...snapshot.capture.retention import Storage
from ...snapshot.segment.slots import SlotState
from ..serve.node_context import NodeContext
from ..storage.persister import Persister


class PreviousStorage:
    """The storage tier of one node for previous sizes. Call `stop` before their segments change."""

    def __init__(self, smp: NodeContext, persister: Persister) -> None:
        """`persister` is that of the current size; checkpoints of previous sizes go to the same place."""
        self._smp, self._previous, self._events = smp, smp.previous, smp.events
        self._persister = persister
        self._lock = threading.Lock()
        self._running: dict[int, Persister] = {}

    def request(self, reason: str, seconds: float) -> dict[str, Any]:
        """Have the newest version of each size written, and wait up to `seconds`.

        Returns the outcome of the newest lineage, as `Persister.request` does. A size that cannot be read emits an
        event; the others are still written."""
        storage, deadline = self._persister.storage, time.monotonic() + seconds
        if storage is None:
            return {"state": "off"}
        newest: dict[str, Any] = {"state": "nothing"}
        with self._lock:
            for size in sorted(self._previous.by_size()):
                try:
                    if size not in self._running and self._has_version(size):
                        self._running[size] = self._begin(replace(storage, interval=0, world_size=size))
                except (FtError, OSError) as error:
                    newest = {"state": "failed", "reason": f"state of {size} ranks cannot be read: {error}"}
                    self._events.emit(catalogue.CHECKPOINT_FAILED, reason=newest["reason"])
            running = list(self._running.values())
        for persister in running:
            outcome = persister.request(reason, max(0.0, deadline - time.monotonic()))
            if outcome["state"] != "nothing" and outcome.get("lineage", 0) >= newest.get("lineage", 0):
                newest = outcome
        return newest

    def _has_version(self, size: int) -> bool:
        segments = self._previous.by_size()[size].values()
        return any(slot.state is SlotState.CLEAN for segment in segments for slot in segment.slots())

    def _begin(self, storage: Storage) -> Persister:
        size = storage.world_size
        persister = Persister(replace(self._smp, node=f"{self._smp.node}.of{size}"), memory=f"storage-of{size}.json")
        persister.write_for(storage, {rank: one.path for rank, one in self._previous.by_size()[size].items()})
        return persister

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is requested, being written or being completed."""
        return any(persister.busy for persister in list(self._running.values()))

    def stop(self) -> None:
        """Abandon what is being written."""
        with self._lock:
            running, self._running = self._running, {}
        for persister in running.values():
            persister.stop()
