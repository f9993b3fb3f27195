"""To storage with what is set aside for another size of the job, where nobody may come any more who takes it over.

Invariant: it becomes a checkpoint of the job at its own size, as any other: complete or not there, loaded by that size
alone, and older than all that a job which took it over captures. Only at the end of protection and never by its turn:
what runs now has the interval. It is left off when what is set aside is about to change.

In: what is set aside, where the job's storage is. Out: what a `Persister` does, one for each size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import FtError
from ..events import Events, catalogue
from ..snapshot.retention import Storage
from ..snapshot.slots import SlotState
from .alarms import Alarms
from .former import Former
from .persister import Persister


class FormerStorage:
    """Of one node. Guards the persisters; what is set aside changes only after `stop`."""

    def __init__(
        self,
        run_dir: Path,
        job: str,
        node: str,
        former: Former,
        storage: Callable[[], Storage | None],
        events: Events,
        alarms: Alarms | None = None,
    ) -> None:
        """`storage` tells where the checkpoints of the job go, None for nowhere."""
        self._run_dir = run_dir
        self._job = job
        self._node = node
        self._former = former
        self._storage = storage
        self._events = events
        self._alarms = alarms or Alarms(run_dir)
        self._lock = threading.Lock()
        self._running: dict[int, Persister] = {}

    def request(self, reason: str, seconds: float) -> dict[str, Any]:
        """Have the newest version of each size written, and wait up to `seconds`; the outcome as of a `Persister`, that
        of the newest lineage. A size that cannot be read is an event, and ends nothing else."""
        storage, deadline = self._storage(), time.monotonic() + seconds
        if storage is None:
            return {"state": "off"}
        found: dict[str, Any] = {"state": "nothing"}
        with self._lock:
            for size in sorted(self._former.sizes()):
                try:
                    if size not in self._running and self._has_version(size):
                        self._running[size] = self._begin(replace(storage, interval=0, world_size=size))
                except (FtError, OSError) as error:
                    found = {"state": "failed", "reason": f"what {size} ranks left cannot be read: {error}"}
                    self._events.emit(catalogue.CHECKPOINT_FAILED, reason=found["reason"])
            running = list(self._running.values())
        for persister in running:
            outcome = persister.request(reason, max(0.0, deadline - time.monotonic()))
            if outcome["state"] != "nothing" and outcome.get("lineage", 0) >= found.get("lineage", 0):
                found = outcome
        return found

    def _has_version(self, size: int) -> bool:
        held = self._former.sizes()[size].values()
        return any(slot.state is SlotState.CLEAN for found in held for slot in found.slots())

    def _begin(self, storage: Storage) -> Persister:
        size = storage.world_size
        persister = Persister(
            self._run_dir, self._job, f"{self._node}.of{size}", self._events, memory=f"storage-of{size}.json",
            alarms=self._alarms,
        )  # fmt: skip
        persister.write_for(storage, {rank: found.path for rank, found in self._former.sizes()[size].items()})
        return persister

    @property
    def busy(self) -> bool:
        """Whether something is being written, completed or was called for."""
        return any(persister.busy for persister in list(self._running.values()))

    def stop(self) -> None:
        """What is set aside is about to change, or the SMP ends: what is being written is left off."""
        with self._lock:
            running, self._running = self._running, {}
        for persister in running.values():
            persister.stop()
