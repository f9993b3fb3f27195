"""A rank's segment of shared memory: incarnations, lineages, and slots that hold versions.

Invariant: a process may die at any instruction and leaves the file consistent (`slot_header` for each slot, `header`
for the first page; `segment_file` describes the format). A value that does not match its digest is not used: its
property then has the value of a new segment, and `damaged` names it.

In: a `Shape`. Out: `create` (SMP), `Segment` (trainer, SMP and recovery).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ...base import files
from ...errors import CorruptSlotError
from .header import Constants, Header, OpenedLineage, encoded, guarded_word
from .paths import check_room
from .segment_file import SegmentFile, allocate, digest_of_ranges, extents, slot_start
from .shape import PAGE, Shape
from .slot_header import STATE_WORDS
from .slots import (
    SHARED,
    Mark,
    Pin,
    Slot,
    SlotState,
    Version,
    free_slot,
    marks_of,
    pinnable_slot,
    slot_to_claim,
    slot_to_reuse,
    voided_slots,
)

# A word of pins is read and then stored, by threads of the SMP that have mappings of their own: without one lock for
# all of them, one undoes what another one has stored meanwhile. Of other processes, only the rank's trainer stores
# pins, of the slot that it captures (`pin_awaited`), in which the SMP cannot have confirmed any.
_PINNING = threading.RLock()
NOT_COMPUTED = 0  # digest of a bucket that is not in this slot: of parity in a slot, of data in a parity slot


def create(
    path: Path, shape: Shape, rank: int, fingerprint: Mapping[str, Any], world_size: int = 0, *, lost: bool = False
) -> None:
    """Allocate a segment, with the slots that have memory from the start. `world_size` is the job's, 0 if it does not
    matter.

    `lost`: it replaces a damaged segment; that stays recorded until a lineage is opened. Raises BudgetError if there is
    not enough memory.
    """
    constants = Constants(shape, rank, world_size, encoded(fingerprint, rank))
    first = range(shape.first_slots)
    claim = f"rank {rank}: protection ({len(first)} slots of {shape.slot_room} bytes)"
    check_room(shape.first_total, claim, path.parent)
    with files.replacing(path) as fd:
        os.ftruncate(fd, shape.total)
        allocate(fd, path, extents(shape, first), rank)
        with mmap.mmap(fd, shape.total) as mapped:
            words = np.frombuffer(mapped, dtype=np.uint64)
            constants.write(words[: PAGE // 8])
            Header(words[: PAGE // 8]).begin(lost)
            Header(words[: PAGE // 8]).ranges = digest_of_ranges(words[PAGE // 8 :][: 2 * shape.buckets])
            for index in range(shape.parity_indices.stop):
                claimed = index in first or index >= shape.slots
                state = SlotState.EMPTY if claimed else SlotState.UNCLAIMED
                words[slot_start(shape, index) // 8] = STATE_WORDS[state]
            del words


class Segment(SegmentFile):
    """A mapped segment. Its constants were verified on mapping; everything else is read from shared memory: what is the
    rank's by `header`, its slots by the methods here."""

    # ---- lineages ----

    @property
    def damaged(self) -> tuple[str, ...]:
        """The parts of the header that do not match their digests, by name."""
        return (*self.header.damaged, *([] if self._ranges_fit() else ["bucket ranges"]))

    @property
    def newest_lineage(self) -> int:
        """The newest lineage that was opened, or that of a newer version in a slot: state taken over from another size
        has its own lineage."""
        captured = [slot.version.lineage for slot in self.slots() if slot.state is SlotState.CLEAN and slot.version]
        return max([self.header.opened.lineage, *captured])

    def release(self, slots: Iterable[int]) -> None:
        """Void these slots and return their memory, except for their headers, to the system."""
        for index in slots:
            if self.slot(index).state is not SlotState.UNCLAIMED:
                self._void(index)
                self._discard_pages(index)

    def open_lineage(self, lineage: int, base: Version | None, voided: Sequence[int], run: str = "") -> None:
        """Open `lineage` of `run`, which continues from `base`, and void the slots in `voided`, and the parity of newer
        versions than `base`. Idempotent.

        Slots are voided first, so a death in between leaves `base` the newest version. Without a `base`, that is
        recorded first, so a death in between leaves all versions void, on every rank.
        """
        completed = base.iteration if base else 0
        guarded_word(completed, 0)  # raises before any slot is void
        if base is None:
            self.header.opened = OpenedLineage(lineage, self.header.token, True, voiding=True, run=run)
        for index in (*voided, *voided_slots(self.parity_slots(), base)):
            self._void(index)
        self.header.completed = completed
        self.header.opened = OpenedLineage(lineage, self.header.token, base is None, run=run)

    def _void(self, index: int) -> None:
        self.unpin(index, ~Pin(0))
        self.dirty(index, None, self.header.token)

    # ---- slots ----

    def slot(self, index: int) -> Slot:
        """The slot as its header describes it; DIRTY if its seal does not match."""
        return self._slots[index].read(index, self.digests(index), self._small_area(index))

    def slots(self) -> tuple[Slot, ...]:
        return tuple(self.slot(index) for index in range(self.shape.slots))

    def sealed_in(self, version: Version) -> int | None:
        """The slot of `version`; None if it is not here."""
        slots = (slot for slot in self.slots() if slot.state is SlotState.CLEAN and slot.version == version)
        return next((slot.index for slot in slots), None)

    def parity_slots(self) -> tuple[Slot, ...]:
        return tuple(self.slot(index) for index in self.shape.parity_indices)

    def parity_of(self, version: Version) -> int | None:
        """The parity slot of `version`; None if its parity is not here."""
        slots = (slot for slot in self.parity_slots() if slot.state is SlotState.CLEAN and slot.version == version)
        return next((slot.index for slot in slots), None)

    def has_parity(self, version: Version) -> bool:
        """Whether the parity of `version` that this rank has to compute is here."""
        return not self.shape.parity_indices or self.parity_of(version) is not None

    def keep_parity(self, version: Version | None) -> None:
        """Pin the parity of `version`, the committed one, in place of that of any other. Called by the SMP alone."""
        kept = None if version is None else self.parity_of(version)
        if kept is not None:
            with _PINNING:
                self._slots[kept].pins = Pin.NODE
        for index in self.shape.parity_indices:
            if index != kept:
                self.unpin(index, Pin.NODE)

    def dirty(self, index: int, version: Version | None, token: int) -> None:
        """Make a slot DIRTY: nothing in it can be restored. `version` is about to be written, None for none."""
        self._slots[index].dirty(self.slot(index).state, version, token)

    def seal(self, index: int, version: Version, token: int, small: bytes, digests: npt.NDArray[np.uint64]) -> None:
        """Make a slot CLEAN: everything of `version` is in place."""
        self._slots[index].seal(version, token, small, digests)

    def cursor(self, index: int) -> int | None:
        """The bucket that a capture into this slot is writing, or was writing when it stopped; None for none."""
        return self._slots[index].cursor

    def set_cursor(self, index: int, bucket: int | None) -> None:
        self._slots[index].cursor = bucket

    def mark(self, version: Version, mark: Mark) -> bool:
        """Record what is known of the replicas of `version`, in one store. Returns whether a slot holds the version.

        Called by the process that may write the slots (the trainer, or an SMP without one), while no capture runs.
        """
        for slot in self.slots():
            if slot.version == version and slot.state is SlotState.CLEAN:
                self._slots[slot.index].mark(mark)
                return True
        return False

    def pins(self, index: int) -> Pin:
        """What a slot is pinned for, without reading its content."""
        return self._slots[index].pins

    @property
    def free(self) -> int:
        """How many slots are never pinned. While memory for others is lacking, only those that have it count."""
        return self.shape.free - (self.shape.slots - len(self.claimed) if self.header.short else 0)

    def slot_to_capture(self, version: Version) -> int | None:
        """The slot that a capture of `version` overwrites; None if another one is to be claimed, or there is none."""
        slots = self.slots()
        if self.header.short or slot_to_claim(slots) is None:
            return free_slot(slots, version)
        return slot_to_reuse(slots, version, self.shape.free - 1, self._until_committed)

    @property
    def _until_committed(self) -> bool:
        """Whether versions older than the committed one are needed for nothing: neither for checkpoints nor for
        verdicts on replicas."""
        return self.shape.slots <= self.shape.free + SHARED

    def pinnable(self, slots: Sequence[Slot], version: Version) -> int | None:
        """The slot of `version` among `slots`, those of this segment, if no capture can be about to overwrite it.

        Versions older than the committed one, which a capture may overwrite, are never pinned for the node tier; where
        they are for anything else, it spares them (`_until_committed`).
        """
        return pinnable_slot(slots, version, self.free)

    def pin(self, version: Version, purpose: Pin, idle: bool = False) -> int | None:
        """Pin `version` for `purpose`. Returns its slot; None if no slot holds it or a capture may overwrite it.
        `idle`: no capture can be running.

        Called by the SMP alone. Slots pinned earlier for the same purpose stay pinned until `unpin`.
        """
        with _PINNING:  # to the end: another thread may rely on a pin that is there only once it is confirmed
            slots = self.slots()
            index = pinnable_slot(slots, version, len(slots) + 1) if idle else self.pinnable(slots, version)
            if index is None:
                return None
            self._slots[index].pins = self.pins(index) | purpose
            if idle or slots[index].pins:
                return index
            if self.pinnable([replace(slot, pins=Pin(0)) for slot in self.slots()], version) == index:
                return index
            self.unpin(index, purpose)
            return None

    def pin_awaited(self, index: int, version: Version) -> None:
        """Pin the slot in which `version` is captured for sending, if it is exchanged next and capture would overwrite
        it before the SMP can pin it. Called by the trainer alone, before it seals the slot."""
        if self.free < SHARED and self.header.is_awaited(version):
            # alone: another one can only be of the version before, and the SMP is about to withdraw it
            self._slots[index].pins = Pin.SOURCE

    def unpin(self, index: int, purpose: Pin) -> None:
        """Unpin a slot for `purpose`. Called by the SMP alone."""
        with _PINNING:
            if (pins := self.pins(index)) & purpose:  # else a trainer may be pinning the slot that it captures
                self._slots[index].pins = pins & ~purpose

    # ---- content ----

    def verify(self, index: int, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Compare every bucket of a slot, or of a parity slot, with its digest.

        False if `stopped`, which is asked before each bucket, ended it. Raises CorruptSlotError.
        """
        data, digests = self.data(index), self.digests(index)
        parity = index >= self.shape.slots
        first, base = (len(self.data_ranges), self.shape.data_nbytes) if parity else (0, 0)
        ranges = self.parity_ranges if parity else self.data_ranges
        for number, (offset, nbytes) in enumerate(ranges, first):
            if stopped():
                return False
            if xxhash.xxh3_64_intdigest(data[offset - base :][:nbytes].data) != int(digests[number]):
                raise CorruptSlotError(
                    f"rank {self.rank}: bucket {number} of slot {index} ({self.slot(index).version}) "
                    "does not match its digest"
                )
        return True


def write_again(segment: Segment) -> Segment:
    """Write the memory of a segment, whose file was removed, to a new file, and map that. No process may write to the
    memory meanwhile; what was pinned for a checkpoint that is being written stays so in the old memory alone. Raises
    BudgetError, SegmentError, OSError."""
    shape, path = segment.shape, segment.path
    areas = list(extents(shape, segment.claimed))
    check_room(segment.claimed_bytes, f"rank {segment.rank}: its segment, whose file was removed,", path.parent)
    with files.replacing(path) as fd:
        os.ftruncate(fd, shape.total)
        allocate(fd, path, areas, segment.rank)
        for start, nbytes in areas:
            os.lseek(fd, start, os.SEEK_SET)
            files.write_all(fd, segment.bytes[start : start + nbytes].data)
    again = Segment(path)
    for slot in again.slots():
        again.unpin(slot.index, Pin.STORAGE)
    return again


def newest_run(segments: Iterable[Segment]) -> tuple[int, str]:
    """The newest lineage of these segments whose run is known, and that run; 0 and '' for none."""
    opened = [segment.header.opened for segment in segments]
    return max(((each.lineage, each.run) for each in opened if each.run), default=(0, ""))


def marks_in(segments: Iterable[Segment]) -> list[list[int]]:
    """The marks of the versions in some segments, as plain values: [lineage, iteration, mark]."""
    marks = marks_of((slot.version, slot.mark) for segment in segments for slot in segment.slots())
    return [[version.lineage, version.iteration, int(mark)] for version, mark in sorted(marks.items())]
