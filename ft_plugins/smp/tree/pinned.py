"""Pin the versions that one node keeps for the node tier: slots of its ranks, parity, and which version is committed.

Invariant: a version is committed here only if all ranks of this node and its parity store hold it, pinned; only then is
the previously committed one unpinned. Pins are in shared memory. The committed version is also in a file of the run
directory, because pins do not distinguish it from one that is still being sent. A replacement SMP continues with both.

In: the coordinator's decisions. Out: pins; whether a version to be sent is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import read_json
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import SHARED, Mark, Pin, SlotState, Version
from ...transport.protocol import packed
from ..exchange.parity_store import ParityStore
from .agreement import ExchangeDecision, Sealing
from .protection import PackedVersion, Protection

_FILE = "committed.json"  # in the run directory
_VERSION: TypeAdapter[Version] = TypeAdapter(PackedVersion)


class PinnedVersions:
    """The pinned versions of one node. `segments` are the SMP's own, by rank. Call under the tier's lock."""

    def __init__(self, run_dir: Path, segments: Mapping[int, Segment]) -> None:
        self._path = run_dir / _FILE
        self._segments = segments
        self._ranks: Sequence[int] = ()
        self._store: ParityStore | None = None
        self._base: Version | None = None  # the version that this incarnation restored
        self._committed_before: Version | None = None  # on any node, before that
        self.committed: Version | None = None  # on this node

    def resume(self, protection: Protection, store: ParityStore) -> bool:
        """Continue with the pins and the file as they are. False if the segment of a rank is missing."""
        self._ranks, self._store = protection.plan().ranks[protection.position], store
        self._base, self._committed_before = protection.base, protection.committed
        whole = all(rank in self._segments for rank in self._ranks)
        self.committed = self._recorded() if whole else None
        return whole

    def begin(self, protection: Protection, store: ParityStore) -> None:
        """Unpin the versions of previous incarnations, except the one committed on any node and the restored one.

        A node that was not yet notified of a commit still has that version pinned.
        """
        keep = {version for version in (protection.base, protection.committed) if version is not None}
        store.void_after(protection.base)
        for segment in self._segments.values():
            for version in keep:
                segment.pin(version, Pin.NODE, idle=True)
            for slot in segment.slots():
                segment.unpin(slot.index, Pin.SOURCE if slot.version in keep else Pin.NODE | Pin.SOURCE)
            segment.keep_parity(protection.committed)
        if protection.committed is not None and protection.committed in store.versions():
            store.pin(protection.committed)
            files.write_json(self._path, packed(protection.committed))
        self.resume(protection, store)

    def _recorded(self) -> Version | None:
        """The committed version in the file, if all ranks have it pinned and it is complete in the parity store."""
        assert self._store is not None
        try:
            committed = read_json(self._path, _VERSION)
        except (OSError, ValueError):
            return None
        for rank in self._ranks:
            segment = self._segments[rank]
            pinned = any(slot.version == committed and slot.pins & Pin.NODE for slot in segment.slots())
            if not pinned or not segment.has_parity(committed):
                return None
        return committed if committed in self._store.versions() else None

    def begun(self, lineage: int) -> int:
        """The newest iteration that a rank has begun to capture, or has left out."""
        segments = [self._segments[rank] for rank in self._ranks]
        versions = (slot.version for segment in segments for slot in segment.slots())
        begun = max((v.iteration for v in versions if v is not None and v.lineage == lineage), default=0)
        own = (one for one in segments if one.free < SHARED and one.header.opened.lineage == lineage)
        return max([begun, *(one.header.completed for one in own)])

    def commit(self, version: Version) -> bool:
        """Make `version`, which is complete on all nodes, the committed version. False if it is not here."""
        assert self._store is not None
        segments = [self._segments[rank] for rank in self._ranks]
        if version not in self._store.versions() or not all(segment.has_parity(version) for segment in segments):
            return False  # a new node, until its part is rebuilt
        slots = {rank: self._segments[rank].pin(version, Pin.NODE) for rank in self._ranks}
        if None in slots.values():
            return False
        for rank, index in slots.items():
            self._segments[rank].keep_parity(version)
            for slot in self._segments[rank].slots():
                if slot.index != index:
                    self._segments[rank].unpin(slot.index, Pin.NODE)
        self._store.pin(version)
        self.committed = version
        files.write_json(self._path, packed(version))
        return True

    def mark(self, version: Version) -> Mark:
        """The audit's verdict on `version`, if any rank of this node has it: it applies to the whole job."""
        slots = (slot for rank in self._ranks for slot in self._segments[rank].slots())
        return max((slot.mark for slot in slots if slot.version == version), default=Mark.NONE)

    def pin_sealed(self, version: Version) -> Sealing:
        """Pin `version` for sending, on each rank that has sealed it."""
        for rank in self._ranks:
            segment = self._segments[rank]
            slots = segment.slots()
            for slot in slots:  # pinned by a trainer that had not yet read that another one is sent
                if slot.pins & Pin.SOURCE and slot.version != version:
                    segment.unpin(slot.index, Pin.SOURCE)
            newest = max((slot.version for slot in slots if slot.version is not None), default=version)
            if segment.pin(version, Pin.SOURCE) is None:
                captured = any(slot.version == version and slot.state is SlotState.DIRTY for slot in slots)
                return Sealing.MISSED if newest > version and not captured else Sealing.PENDING
            if not segment.has_parity(version):
                # parity is sealed before data; that of the restored version before the next capture
                return Sealing.PENDING if version == self._base and newest == version else Sealing.MISSED
        return Sealing.DONE

    def switch_to(self, decision: ExchangeDecision) -> None:
        """Unpin the version that was sent before; the next one may have been pinned by a previous SMP.

        Also unpin the restored version if a node cannot send it and a newer one was announced: capture needs its slot.
        """
        version, base = decision.exchange, self._base
        passed = version is not None and base is not None and version > base
        passed = passed and base not in (decision.committed, self.committed, self._committed_before)
        for segment in self._segments.values():
            if version is not None:
                segment.header.await_version(version)
            for slot in segment.slots():
                if slot.version != version:
                    segment.unpin(slot.index, Pin.SOURCE)
                if passed and slot.version == base:
                    segment.unpin(slot.index, Pin.NODE)

    def forget(self) -> None:
        """Remove the record of the committed version: protection has ended."""
        self._path.unlink(missing_ok=True)
