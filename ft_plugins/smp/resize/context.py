"""What a resize reads and changes of its node's SMP, as one object; and state of previous sizes, written to storage.

Invariant: what `PreviousStorage` writes is an ordinary checkpoint of the job at its previous size. Only a job of that
size loads it, and it is older than any version that the job captures after the resize. It is written only when
protection ends before that state was restored at the current size, never at a checkpoint interval, which belongs to the
current size. Writing is abandoned before the segments change.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...errors import FtError
from ...events import catalogue
from ...snapshot.capture.retention import Storage
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import SlotState
from ..serve.node_context import NodeContext
from ..storage.persister import Persister
from ..tree.node import NodeTier


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
        smp, memory = replace(self._smp, node=f"{self._smp.node}.of{size}"), f"storage-of{size}.json"
        persister = Persister(smp, memory=memory, lease=self._persister.lease)
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


class TokenHolder(Protocol):
    """Knows the fencing token of the incarnation that runs now; it changes when another one begins."""

    token: int


@dataclass(frozen=True)
class ResizeContext(NodeContext):
    """The SMP's parts that a resize needs. Hold `lock` to change `segments` or `previous`.

    Call `persister.release` for segments that leave, and `previous_storage.stop` before those in `previous` change: a
    thread that writes a checkpoint has mappings of its own.
    """

    incarnation: TokenHolder
    previous_storage: PreviousStorage
    persister: Persister
    tier: NodeTier
    lock: AbstractContextManager[Any]

    @property
    def token(self) -> int:
        """The fencing token now. Read it again after waiting: another incarnation may have begun."""
        return self.incarnation.token

    def segments_of_other_sizes(self, world_size: int) -> list[Segment]:
        """Segments that still have their own names, of a job that had not `world_size` ranks."""
        return [segment for segment in self.segments.values() if segment.world_size not in (0, world_size)]
