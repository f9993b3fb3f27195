"""The job at another size: what this node has of others is set aside, handed out, and dropped when nothing needs it.

Invariant: nothing that was set aside goes before the state is safe without it, or before the job has said which version
of it is taken over; what is on its way to storage of it is left off first.

In: the SMP's segments, the number of ranks that the job has now. Out: segments set aside, brought back or removed.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..events import Events, catalogue
from ..snapshot.segment import Segment
from ..snapshot.slots import SlotState, Version
from .former import Former
from .former_storage import FormerStorage
from .node import NodeTier
from .spare import Asked

_RELEASE_SECONDS = 10.0  # for a spare to answer that it has dropped what it held


class Sizes:
    """Of one node. `lock` is the SMP's, under which `segments` and `former` change."""

    def __init__(
        self,
        token: Callable[[], int],
        segments: MutableMapping[int, Segment],
        former: Former,
        tier: NodeTier,
        lock: AbstractContextManager[Any],
        events: Events,
        let_go: Callable[[Sequence[int]], None],
        storage: FormerStorage,
        asked: Asked,
    ) -> None:
        """`token` is the SMP's; `let_go` is told of the ranks whose segments leave; `asked` are other nodes' SMPs."""
        self._token = token
        self._segments = segments
        self._former = former
        self._tier = tier
        self._lock = lock
        self._events = events
        self._let_go = let_go
        self._storage = storage
        self._asked = asked
        self._world_size = max((found.world_size for found in segments.values()), default=0)  # as trainers said last

    def resize(self, world_size: int) -> bool:
        """The job has so many ranks now: what is of another size is set aside. Whether anything is."""
        self._storage.stop()
        with self._lock:
            self._world_size = world_size
            left = self._former.exchange(self._segments, world_size)
            self._let_go(left)
        if left:
            self._events.emit(catalogue.JOB_RESIZED, ranks=world_size, retained=sorted(left))
        return bool(self._former)

    def told(self) -> dict[str, Any]:
        """What of other sizes this node can hand out, and the parity that belongs to it."""
        with self._lock:
            told = {"sizes": self._former.facts(), "fingerprints": self._former.fingerprints()}
            told["marks"] = self._former.marks()
            told["damaged"] = self._former.damaged()
            return {**told, **self._tier.parity()}

    def settle(self, taken: tuple[int, Version] | None) -> None:
        """Of what is set aside keep that version of that size alone, which is taken over; nothing, if none is."""
        self._storage.stop()
        with self._lock:
            if taken is None:
                self._former.drop()
            else:
                self._former.keep(*taken)

    def drop_if_safe(self) -> None:
        """Remove what was set aside once the state is safe without it: on several nodes when a version counts, on one
        when every rank holds two versions of its own, the first of which all ranks must have."""
        if not (self._former or self._asked) or self._safe() is None:
            return
        self._storage.stop()
        with self._lock:
            counted = self._safe()  # asked again: stopping takes seconds, another incarnation may have begun
            if counted is None:
                return
            self._events.emit(catalogue.RESIZE_FINISHED, segments=self._former.drop())
            if not self._protected:  # at this size nodes do not protect each other: parity of the other one is left
                self._tier.unprotect()
        self._asked.release(counted.lineage, _RELEASE_SECONDS)

    @property
    def _protected(self) -> bool:
        """Whether what the tier tells is of this very incarnation."""
        return self._tier.token == self._token() and self._tier.ranks == self._world_size

    def _safe(self) -> Version | None:
        """The version of this incarnation by which its state is safe without what was set aside."""
        return self._tier.counted if self._protected else self._went_on()

    def _went_on(self) -> Version | None:
        """The oldest version of this incarnation, where every rank has a newer one as well."""
        held = [
            [slot.version for slot in found.slots()
             if slot.state is SlotState.CLEAN and slot.version is not None and slot.version.lineage == found.lineage]
            for found in list(self._segments.values()) if found.lineage_token == self._token()
        ]  # fmt: skip
        if len(held) < max(1, len(self._segments)) or min(map(len, held)) < 2:
            return None
        return min(version for versions in held for version in versions)
