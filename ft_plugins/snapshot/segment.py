"""A rank's named shared memory: one header, slots, each with its own header, digests, small state and data.

Invariant: a slot's header is the truth about the slot. It says DIRTY before the first byte changes, and CLEAN only
after everything else is in place, with a seal over version, digests and small state written last; so a process that
dies at any instruction leaves the old version or none, never a torn one. A header that does not match its seal is read
as DIRTY, and as damaged where no writer can have left it so. What the header page says is believed by digests of its
own (`header`); its constants are verified once, when a segment is mapped.

    file   = header page | bucket ranges | slot 0 | slot 1 | slot 2 | one slot more for each purpose of a pin
    slot   = header page (state, version, token, small size, seal; cursor; pins; mark) | digest table | small | data
    data   = the captured share | parity that its rank has computed of other nodes' shares, if nodes protect each other
    table  = digest of each bucket, of data and of parity | digest of each source of the parity, as its rank saw it

State, cursor and pins are words that carry a digest of their own value, "never used" is one of the states: zeros, as a
lost page reads, say nothing. The seal of a DIRTY slot covers the version that is being written, that of a CLEAN one all
of it. A mark fits one seal.

In: a `Shape`. Out: `create` (SMP), `Segment` (trainer, SMP and recovery).
Files in /dev/shm are mapped directly: multiprocessing.shared_memory would unlink them behind our back.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from .. import files
from ..bubbles.gate import GATE_BYTES
from ..errors import BudgetError, CorruptHeaderError, CorruptSlotError, SegmentError
from .header import GATE, Constants, Header, Incarnation, Opened, believed, constants_of, encoded, guarded
from .room import check_room
from .shape import PAGE, Shape
from .slots import Mark, Pin, Slot, SlotState, Version, check_transition, marks_of, may_pin

# Words of a slot's header page, each 8 bytes: a store of one is indivisible.
_SLOT = {
    name: index
    for index, name in enumerate(["state", "lineage", "iteration", "token", "small", "seal", "cursor", "pins", "mark"])
}
_SEALED = slice(_SLOT["state"], _SLOT["seal"] + 1)  # behind the state all zeros: never used
_STATES = {guarded(state, _SLOT["state"]): state for state in SlotState}
_STATE_WORDS = {state: word for word, state in _STATES.items()}
OWNER, COMPLETED = "owner", "completed iteration"  # as they are called in `Segment.damaged`
NO_CURSOR = 2**32 - 1
NOT_COMPUTED = 0  # the digest of a parity bucket that is still to be computed: nothing fits it


def create(
    path: Path, shape: Shape, rank: int, fingerprint: Mapping[str, Any], world_size: int = 0, *, lost: bool = False
) -> None:
    """Allocate a segment and fault all of its pages in; `world_size` is the job's, 0 where that does not matter.

    `lost`: it takes the place of one that was damaged, which is known until a lineage is opened. Raises BudgetError
    when the memory is not there.
    """
    constants = Constants(shape, rank, world_size, encoded(fingerprint, rank))
    check_room(shape.total, f"rank {rank}: protection ({shape.slots} slots of {shape.slot_room} bytes)", path.parent)
    with files.replacing(path) as fd:
        try:
            os.posix_fallocate(fd, 0, shape.total)
        except OSError as error:
            raise BudgetError(
                f"rank {rank}: {path.parent} could not give {shape.total} bytes: {error.strerror}"
            ) from error
        with mmap.mmap(fd, shape.total) as mapped:
            words = np.frombuffer(mapped, dtype=np.uint64)
            constants.write(words[: PAGE // 8])
            Header(words[: PAGE // 8]).begin(lost)
            Header(words[: PAGE // 8]).ranges = _digest_of_ranges(words[PAGE // 8 :][: 2 * shape.buckets])
            words[_slot_start(shape, 0) // 8 :: shape.slot_room // 8] = _STATE_WORDS[SlotState.EMPTY]
            del words


class Segment:
    """A mapped segment. Its constants were verified when it was mapped; all else is read from shared memory."""

    def __init__(self, path: Path, *, populate: bool = False) -> None:
        """Map `path`. `populate` maps every page at once, so that no first touch costs a fault in the step path.

        Raises SegmentError when the file is missing, is not a segment of this version, or is another user's,
        CorruptHeaderError when it is damaged.
        """
        self.path = path
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(
                f"segment {path}: {error.strerror}; the SMP of this node creates it at attach"
            ) from error
        try:
            found = os.fstat(fd)
            if found.st_uid != os.getuid():  # anyone may put files into /dev/shm under a name that can be guessed
                raise SegmentError(f"segment {path} belongs to user {found.st_uid}; expected {os.getuid()}: remove it")
            if found.st_size < PAGE:
                raise SegmentError(f"segment {path} has {found.st_size} bytes: not a segment")
            self.resident_bytes = found.st_blocks * 512  # the kernel's figure
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            self._map = mmap.mmap(fd, found.st_size, flags=flags)
        finally:
            os.close(fd)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._page = self.bytes[:PAGE].view(np.uint64)
        self._header = Header(self._page)
        constants = constants_of(self._page, path)
        self.shape, self.rank, self.world_size = constants.shape, constants.rank, constants.world_size
        self._fingerprint = constants.fingerprint
        if self.shape.total != found.st_size:
            raise SegmentError(f"segment {path} has {found.st_size} bytes where its header tells {self.shape.total}")
        self._slot_words = [
            self.bytes[self._slot_start(i) : self._slot_start(i) + 8 * len(_SLOT)].view(np.uint64)
            for i in range(self.shape.slots)
        ]

    def close(self) -> None:
        """Unmap. Views handed out must be gone; those that live on keep the mapping until they go."""
        del self.bytes, self._page, self._header, self._slot_words
        try:
            self._map.close()
        except BufferError:  # a view is still held (a capture being torn down); the mapping goes with it
            return

    # ---- header ----

    def check(self) -> None:
        """Whether the segment can still be mapped by others. Raises CorruptHeaderError, SegmentError."""
        constants_of(self._page, self.path)

    @property
    def damaged(self) -> tuple[str, ...]:
        """What of the header is not believed, for people."""
        records: dict[str, object] = {OWNER: self._header.incarnation, "lineage": self._header.opened}
        records[COMPLETED] = self._header.completed
        found = [name for name, value in records.items() if value is None]
        return (*found, *([] if self._ranges_fit() else ["bucket ranges"]))

    @property
    def token(self) -> int:
        """The fencing token of the incarnation that may write; 0 where that is not known."""
        return (self._header.incarnation or Incarnation()).token

    @token.setter
    def token(self, value: int) -> None:
        self._header.incarnation = replace(self._header.incarnation or Incarnation(), token=value)

    @property
    def _opened(self) -> Opened:
        return self._header.opened or Opened()

    @property
    def lineage(self) -> int:
        """The newest lineage that was opened; 0 before the first, and where that is not known."""
        return self._opened.lineage

    @property
    def newest_lineage(self) -> int:
        """That, or the newest that a version in a slot is of: one that was taken over has a lineage of its own."""
        held = [slot.version.lineage for slot in self.slots() if slot.state is SlotState.CLEAN and slot.version]
        return max([self.lineage, *held])

    @property
    def from_nothing(self) -> bool:
        """Whether the newest lineage began without a restored version: nothing older is of use then, on any rank."""
        return bool(self._opened.from_nothing)

    @property
    def voiding(self) -> bool:
        """Whether that was recorded, but not yet done: what slots hold or seem to hold is void, damaged or not."""
        return bool(self._opened.voiding)

    @property
    def lineage_token(self) -> int:
        """The token under which the newest lineage was opened; 0 before the first."""
        return self._opened.token

    @property
    def lost(self) -> bool:
        """Whether this segment took the place of a damaged one, and no lineage was opened since."""
        return bool(self._opened.lost)

    @property
    def attached(self) -> bool:
        """Whether a trainer of the running incarnation has attached, also if it has ended since."""
        return bool((self._header.incarnation or Incarnation()).attached)

    @attached.setter
    def attached(self, value: bool) -> None:
        self._header.incarnation = replace(self._header.incarnation or Incarnation(), attached=int(value))

    @property
    def completed(self) -> int:
        """The last iteration whose end this rank has reached, in any incarnation; 0 where that is not known."""
        return self._header.completed or 0

    @completed.setter
    def completed(self, value: int) -> None:
        self._header.completed = value

    @property
    def owner(self) -> tuple[int, int]:
        """(pid, start time in clock ticks) of the trainer that attached last; (0, 0) for none."""
        found = self._header.incarnation or Incarnation()
        return found.owner_pid, found.owner_started

    @owner.setter
    def owner(self, value: tuple[int, int]) -> None:
        pid, began = value
        known = self._header.incarnation or Incarnation()
        self._header.incarnation = replace(known, owner_pid=pid, owner_started=began)

    @property
    def gate(self) -> npt.NDArray[np.uint8]:
        """The words by which the rank's trainer says how much of its copy may go now, a view: `bubbles.gate.Gate`."""
        return self.bytes[GATE : GATE + GATE_BYTES]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the job whose state this is."""
        return dict(json.loads(self._fingerprint))

    def release(self, slots: Iterable[int]) -> None:
        """Give the memory of these slots back to the system, but for the headers: they hold nothing from then on."""
        for index in slots:
            self._void(index)
            self._map.madvise(mmap.MADV_REMOVE, self._slot_start(index) + PAGE, self.shape.slot_room - PAGE)

    def claim(self) -> None:
        """Have all memory again, after `release`. Raises BudgetError."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.posix_fallocate(fd, 0, self.shape.total)
        except OSError as error:
            raise BudgetError(
                f"rank {self.rank}: {self.path.parent} could not give {self.shape.total} bytes: {error.strerror}"
            ) from error
        finally:
            os.close(fd)

    def open_lineage(self, lineage: int, base: Version | None, voided: Sequence[int]) -> None:
        """Grow `lineage` from `base`: the slots in `voided` can no longer be restored. Idempotent.

        Void first, so that a death in between leaves `base` the newest. From nothing there is no such version: that is
        recorded first, so that a death in between leaves all of them void, on every rank.
        """
        completed = base.iteration if base else 0
        guarded(completed, 0)  # refused before anything is void
        if base is None:
            self._header.opened = Opened(lineage, self.token, from_nothing=1, voiding=1)
        for index in voided:
            self._void(index)
        self.completed = completed
        self._header.opened = Opened(lineage, self.token, int(base is None))

    def _void(self, index: int) -> None:
        self.unpin(index, ~Pin(0))
        self.dirty(index, None, self.token)

    # ---- slots ----

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) in a slot's data area of each bucket, by which those who know no layout verify it.

        Raises CorruptHeaderError.
        """
        if not self._ranges_fit():
            raise CorruptHeaderError(f"segment {self.path}: its bucket ranges do not match their digest")
        return [(offset, nbytes) for offset, nbytes in self._ranges.reshape(-1, 2).tolist()]

    @ranges.setter
    def ranges(self, value: Sequence[tuple[int, int]]) -> None:
        """Written by the trainer that claims the segment; the layout's digest in the header says which cut it is.

        Raises SegmentError for another number of buckets.
        """
        if len(value) != self.shape.buckets:
            raise SegmentError(f"rank {self.rank}: {len(value)} bucket ranges; expected {self.shape.buckets}")
        self._ranges[:] = np.array(value, dtype=np.uint64).reshape(-1)
        self._header.ranges = _digest_of_ranges(self._ranges)

    @property
    def _ranges(self) -> npt.NDArray[np.uint64]:
        return self.bytes[PAGE : PAGE + 16 * self.shape.buckets].view(np.uint64)

    def _ranges_fit(self) -> bool:
        return self._header.ranges == _digest_of_ranges(self._ranges)

    @property
    def data_ranges(self) -> list[tuple[int, int]]:
        """The ranges of the buckets of captured tensors, without those of parity."""
        found = self.ranges
        return [entry for entry in found if entry[0] < self.shape.data_nbytes] if self.shape.parity_nbytes else found

    def _slot_start(self, index: int) -> int:
        return _slot_start(self.shape, index)

    def _area(self, index: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        start = self._slot_start(index) + PAGE + offset
        return self.bytes[start : start + nbytes]

    def digests(self, index: int) -> npt.NDArray[np.uint64]:
        """The digest table of a slot, a view: one xxh3-64 per bucket, then one per source of parity."""
        return self._area(index, 0, 8 * self.shape.digests).view(np.uint64)

    def data(self, index: int) -> npt.NDArray[np.uint8]:
        """The data area of a slot, a view."""
        return self._area(index, self.shape.table_room + self.shape.small_room, self.shape.nbytes)

    def small(self, index: int) -> bytes:
        """The small state of a slot."""
        length = min(int(self._slot_words[index][_SLOT["small"]]), self.shape.small_nbytes)
        return self._area(index, self.shape.table_room, length).tobytes()

    def write_small(self, index: int, encoded: bytes) -> None:
        """Put small state into a DIRTY slot. Raises SegmentError when it has outgrown its room."""
        if len(encoded) > self.shape.small_nbytes:
            raise SegmentError(
                f"rank {self.rank}: small state has grown to {len(encoded)} bytes; "
                f"{self.shape.small_nbytes} were claimed at start"
            )
        self._area(index, self.shape.table_room, len(encoded))[:] = np.frombuffer(encoded, dtype=np.uint8)
        self._slot_words[index][_SLOT["small"]] = len(encoded)

    def cursor(self, index: int) -> int | None:
        """The bucket that was being written when a capture into this slot was last at a bucket edge; None for none."""
        value = believed(int(self._slot_words[index][_SLOT["cursor"]]), _SLOT["cursor"])
        return None if value == NO_CURSOR else value

    def set_cursor(self, index: int, bucket: int | None) -> None:
        """Say which bucket is being written."""
        value = NO_CURSOR if bucket is None else bucket
        self._slot_words[index][_SLOT["cursor"]] = guarded(value, _SLOT["cursor"])

    def slot(self, index: int) -> Slot:
        """What the slot's header says; a header whose seal does not fit is DIRTY."""
        pins, record = self.pins(index), self._record(index)
        word, lineage, iteration, token, _, seal = record
        version = Version(lineage, iteration) if lineage or iteration else None
        match _state_of(record):
            case SlotState.EMPTY:
                return Slot(index, SlotState.EMPTY, None, 0, pins)
            case SlotState.CLEAN if self._sealed(index, record):
                return Slot(index, SlotState.CLEAN, version, token, pins, self._mark(index))
        if word == _STATE_WORDS[SlotState.DIRTY]:  # its writer may have died before it said what it was to write
            fits = seal == _seal_of_dirty(lineage, iteration, token)
            return Slot(index, SlotState.DIRTY, version if fits else None, token, pins)
        begun = self._record(index)[0] == _STATE_WORDS[SlotState.DIRTY]  # while it was looked at
        return Slot(index, SlotState.DIRTY, None, 0, pins, damaged=not begun)

    def _record(self, index: int) -> list[int]:
        """State, lineage, iteration, token, small size and seal of a slot."""
        return [int(word) for word in self._slot_words[index][_SEALED]]

    def _mark(self, index: int) -> Mark:
        """That which was set for what is sealed there now: one of an earlier version does not fit."""
        words = self._slot_words[index]
        found, seal = int(words[_SLOT["mark"]]), int(words[_SLOT["seal"]])
        return next((mark for mark in Mark if found and found == _marked(seal, mark)), Mark.NONE)

    def mark(self, version: Version, mark: Mark) -> bool:
        """Say what is known of the replicas of `version`; whether it is here. One store: it is said or not.

        Called by whoever may write the slots (the trainer, or an SMP without one), while no capture is running.
        """
        for slot in self.slots():
            if slot.version == version and slot.state is SlotState.CLEAN:
                words = self._slot_words[slot.index]
                words[_SLOT["mark"]] = _marked(int(words[_SLOT["seal"]]), mark)
                return True
        return False

    def pins(self, index: int) -> Pin:
        """What a slot is kept for, without a look at what it holds. Nothing, where that is not believed: a node that
        counts on such a slot asks whether it is still there."""
        return Pin(believed(int(self._slot_words[index][_SLOT["pins"]]), _SLOT["pins"]) or 0)

    def _set_pins(self, index: int, pins: Pin) -> None:
        self._slot_words[index][_SLOT["pins"]] = guarded(int(pins) & 0xFF, _SLOT["pins"])

    def slots(self) -> tuple[Slot, ...]:
        """All slots."""
        return tuple(self.slot(index) for index in range(self.shape.slots))

    def pin(self, version: Version, purpose: Pin) -> int | None:
        """Keep `version` for `purpose`; returns its slot. None when it is not here, or may be about to be overwritten.

        Called by the SMP alone. What the same purpose kept before stays kept until `unpin`.
        """
        index = may_pin(self.slots(), version)
        if index is None:
            return None
        held = self.slot(index).pins
        self._set_pins(index, held | purpose)
        if held or may_pin([replace(slot, pins=Pin(0)) for slot in self.slots()], version) == index:
            return index
        self._set_pins(index, held)
        return None

    def unpin(self, index: int, purpose: Pin) -> None:
        """The slot is no longer kept for `purpose`. Called by the SMP alone."""
        self._set_pins(index, self.pins(index) & ~purpose)

    def dirty(self, index: int, version: Version | None, token: int) -> None:
        """The slot holds nothing restorable from now on; `version` is about to be written, None for none."""
        check_transition(self.slot(index).state, SlotState.DIRTY)
        words = self._slot_words[index]
        lineage, iteration = (version.lineage, version.iteration) if version else (0, 0)
        words[_SLOT["state"]] = _STATE_WORDS[SlotState.DIRTY]
        words[_SLOT["seal"]] = 0
        words[_SLOT["lineage"]], words[_SLOT["iteration"]], words[_SLOT["token"]] = lineage, iteration, token
        words[_SLOT["seal"]] = _seal_of_dirty(lineage, iteration, token)

    def seal(self, index: int, version: Version, token: int, small: bytes, digests: npt.NDArray[np.uint64]) -> None:
        """Everything of `version` is in place: the slot becomes CLEAN. The last store is the state.

        The seal covers what the writer knows, not what it finds: whatever a superseded writer has put into header,
        small state or digest table meanwhile does not fit it, and the slot is read as DIRTY.
        """
        words = self._slot_words[index]
        check_transition(_state_of(self._record(index)), SlotState.CLEAN)
        known = np.array([version.lineage, version.iteration, token, len(small)], dtype=np.uint64)
        words[_SLOT["seal"]] = _seal(known, digests, small)
        words[_SLOT["state"]] = _STATE_WORDS[SlotState.CLEAN]

    def _sealed(self, index: int, record: Sequence[int]) -> bool:
        """Whether digests and small state are those that the seal of `record` covers, as it is itself."""
        *known, seal = record[1:]
        small = self._area(index, self.shape.table_room, min(known[-1], self.shape.small_nbytes)).tobytes()
        return seal == _seal(np.array(known, dtype=np.uint64), self.digests(index), small)

    def lacks_parity(self, version: Version) -> bool:
        """Whether the slot of `version` was filled otherwise than by capture, and parity in it is still missing."""
        captured, buckets = len(self.data_ranges), self.shape.buckets
        return any(
            slot.version == version and slot.state is SlotState.CLEAN
            and bool((self.digests(slot.index)[captured:buckets] == NOT_COMPUTED).any())
            for slot in self.slots()
        )  # fmt: skip

    def verify(self, index: int) -> None:
        """Compare every bucket of the data area with its digest, but parity that is still to be computed.

        Raises CorruptSlotError.
        """
        data, digests = self.data(index), self.digests(index)
        captured = len(self.data_ranges)
        for number, (offset, nbytes) in enumerate(self.ranges):
            if number >= captured and int(digests[number]) == NOT_COMPUTED:
                continue
            if xxhash.xxh3_64_intdigest(data[offset : offset + nbytes].data) != int(digests[number]):
                raise CorruptSlotError(
                    f"rank {self.rank}: bucket {number} of slot {index} ({self.slot(index).version}) "
                    "does not match its digest"
                )


def _slot_start(shape: Shape, index: int) -> int:
    return PAGE + shape.ranges_room + index * shape.slot_room


def _state_of(record: Sequence[int]) -> SlotState:
    """What a slot says of its state; DIRTY where that cannot be."""
    state = _STATES.get(record[0], SlotState.DIRTY)
    return SlotState.DIRTY if state is SlotState.EMPTY and any(record[1:]) else state


def _marked(seal: int, mark: Mark) -> int:
    """The word that says `mark` of what has that seal, and nothing of anything else, nor with a bit of it flipped."""
    return xxhash.xxh3_64_intdigest(seal.to_bytes(8, "little") + bytes([mark]))


def marks_in(held: Iterable[Segment]) -> list[list[int]]:
    """What is known of the replicas of the versions in some segments, as plain values: [lineage, iteration, mark]."""
    found = marks_of((slot.version, slot.mark) for segment in held for slot in segment.slots())
    return [[version.lineage, version.iteration, int(mark)] for version, mark in sorted(found.items())]


def _seal(words: npt.NDArray[np.uint64], digests: npt.NDArray[np.uint64], small: bytes) -> int:
    """Digest of (lineage, iteration, token, small size), digest table and small state."""
    digest = xxhash.xxh3_64(words.tobytes())
    digest.update(digests.tobytes())
    digest.update(small)
    return digest.intdigest()


def _seal_of_dirty(lineage: int, iteration: int, token: int) -> int:
    """Digest of what a DIRTY slot is to hold; none that `_seal` gives."""
    words = np.array([lineage, iteration, token], dtype=np.uint64)
    return xxhash.xxh3_64_intdigest(words.tobytes(), seed=SlotState.DIRTY)


def _digest_of_ranges(words: npt.NDArray[np.uint64]) -> int:
    return xxhash.xxh3_64_intdigest(words.tobytes())
