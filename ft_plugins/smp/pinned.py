"""What one node keeps for the node tier: which slots of its ranks are pinned, which parity, and what counts here.

Invariant: a version counts here only when all ranks of this node and its vault have it, pinned; what counted before is
let go of after that. Pins stand in shared memory, what counts stands in a file of the run directory: pins alone do not
tell what counts from what may come to. So an SMP that replaces this one goes on with both.

In: versions that others have decided on. Out: pins; whether a version that is to be sent is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import ProtocolError
from ..intake import read_json
from ..snapshot.segment import Segment
from ..snapshot.slots import Mark, Pin, Slot, SlotState, Version
from .agreement import Directive
from .parity_store import Vault
from .protection import Protection
from .readers import told, written
from .requests import VERSION

_FILE = "counted.json"  # in the run directory


class Kept:
    """One node's. `segments` are the SMP's own, by rank; called under the tier's lock."""

    def __init__(self, run_dir: Path, segments: Mapping[int, Segment]) -> None:
        self._path = run_dir / _FILE
        self._segments = segments
        self._ranks: Sequence[int] = ()
        self._vault: Vault | None = None
        self._base: Version | None = None  # what this incarnation restored
        self._counted_before: Version | None = None  # on any node, when it did
        self.counted: Version | None = None  # on this node, as far as it has heard

    def go_on(self, told_now: Protection, vault: Vault) -> bool:
        """Go on as all is found. False where the segment of a rank is missing."""
        self._ranks, self._vault = told_now.plan().ranks[told_now.position], vault
        self._base, self._counted_before = told_now.base, told_now.counted
        whole = all(rank in self._segments for rank in self._ranks)
        self.counted = self._found() if whole else None
        return whole

    def begin(self, told_now: Protection, vault: Vault) -> None:
        """Of all that an incarnation before has kept, what counts on any node stays, and what was restored.

        A node that had not heard that a version counts has let go of nothing of it.
        """
        kept = {version for version in (told_now.base, told_now.counted) if version is not None}
        vault.void_after(told_now.base)
        for segment in self._segments.values():
            for version in kept:
                segment.pin(version, Pin.NODE)
            for slot in segment.slots():
                segment.unpin(slot.index, Pin.SOURCE if slot.version in kept else Pin.NODE | Pin.SOURCE)
        if told_now.counted is not None and told_now.counted in vault.versions():
            vault.keep(told_now.counted)
            written(self._path, told(told_now.counted))
        self.go_on(told_now, vault)

    def _found(self) -> Version | None:
        """What counts by the file, if all ranks keep it and it is complete in the vault."""
        assert self._vault is not None
        try:
            counted = read_json(self._path, VERSION)
        except (OSError, ValueError, ProtocolError):
            return None
        for rank in self._ranks:
            if not any(slot.version == counted and slot.pins & Pin.NODE for slot in self._segments[rank].slots()):
                return None
        return counted if counted in self._vault.versions() else None

    def begun(self, lineage: int) -> int:
        """The newest iteration that a rank has begun to capture."""
        versions = (slot.version for rank in self._ranks for slot in self._segments[rank].slots())
        return max((v.iteration for v in versions if v is not None and v.lineage == lineage), default=0)

    def count(self, version: Version) -> bool:
        """`version` is complete on all nodes: it takes the place of what counted before. False if it is not here."""
        assert self._vault is not None
        if version not in self._vault.versions():
            return False  # a fresh node, until its part is rebuilt
        slots = {rank: self._segments[rank].pin(version, Pin.NODE) for rank in self._ranks}
        if None in slots.values():
            return False
        for rank, index in slots.items():
            for slot in self._segments[rank].slots():
                if slot.index != index:
                    self._segments[rank].unpin(slot.index, Pin.NODE)
        self._vault.keep(version)
        self.counted = version
        written(self._path, told(version))
        return True

    def mark(self, version: Version) -> Mark:
        """What a rank of this node has heard of its replicas: a verdict is one of the whole job."""
        slots = (slot for rank in self._ranks for slot in self._segments[rank].slots())
        return max((slot.mark for slot in slots if slot.version == version), default=Mark.NONE)

    def source(self, version: Version) -> bool | None:
        """Pin `version` to be sent, where it is sealed. True: on all ranks; False: it is still to come; None: it was
        missed, a rank has gone on."""
        for rank in self._ranks:
            segment = self._segments[rank]
            slots = segment.slots()
            if segment.pin(version, Pin.SOURCE) is not None:
                continue
            newest = max((slot.version for slot in slots if slot.version is not None), default=version)
            return None if newest > version and not _may_come(slots, version) else False
        return True

    def turn_to(self, directive: Directive) -> None:
        """Another version is to be sent now; an SMP before may have pinned it. What was being sent need not be kept.

        Nor what was restored, where a node cannot send it and a newer one is named: capture needs its slot.
        """
        version, base = directive.exchange, self._base
        left = version is not None and base is not None and version > base
        left = left and base not in (directive.counts, self.counted, self._counted_before)
        for segment in self._segments.values():
            for slot in segment.slots():
                if slot.version != version:
                    segment.unpin(slot.index, Pin.SOURCE)
                if left and slot.version == base:
                    segment.unpin(slot.index, Pin.NODE)

    def forget(self) -> None:
        """The end: nothing counts any more."""
        self._path.unlink(missing_ok=True)


def _may_come(slots: Sequence[Slot], version: Version) -> bool:
    """Whether `version` is being captured."""
    return any(slot.version == version and slot.state is SlotState.DIRTY for slot in slots)
