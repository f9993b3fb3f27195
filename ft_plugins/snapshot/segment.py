"""A rank's named shared memory: one header, slots, each with its own header, digests, small state and data.

Invariant: a slot's header is the truth about the slot. It says DIRTY before the first byte changes, and CLEAN only
after everything else is in place, with a seal over version, digests and small state written last; so a process that
dies at any instruction leaves the old version or none, never a torn one. A header that does not match its seal is read
as DIRTY. The file is named in `paths`; it is 0600, allocated once by the SMP and reused over restarts.

    file   = header page | bucket ranges | slot 0 | slot 1 | slot 2 | one slot more for each purpose of a pin
    header = magic, sizes, layout digest, token, lineage, completed, owner, lineage token, attached, size of the job,
             gate (bubbles.gate), fingerprint
    slot   = header page (state, version, token, small size, cursor, seal, pins, mark) | digest table | small | data
    data   = the captured share | parity that its rank has computed of other nodes' shares, if nodes protect each other
    table  = digest of each bucket, of data and of parity | digest of each source of the parity, as its rank saw it

In: a `Shape`. Out: `create` (SMP), `Segment` (trainer, SMP and recovery).
Files in /dev/shm are mapped directly: multiprocessing.shared_memory would unlink them behind our back.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..bubbles.gate import GATE_BYTES
from ..errors import BudgetError, CorruptSlotError, SegmentError
from .room import check_room
from .shape import PAGE, Shape
from .slots import Mark, Pin, Slot, SlotState, Version, check_transition, marks_of, may_pin

_MAGIC = int.from_bytes(b"FTPSEG03", "little")
_GATE = 512  # offset in the header page: closed as it is created, of zeros
_FINGERPRINT = 1024  # offset in the header page: length, then JSON
_FINGERPRINT_ROOM = PAGE - _FINGERPRINT - 8

# Words of the header page and of a slot's header page, each 8 bytes: a store of one is indivisible.
_HEADER = {
    name: index
    for index, name in enumerate(
        [
            "magic",
            "nbytes",
            "small_nbytes",
            "buckets",
            "layout",
            "rank",
            "token",
            "lineage",
            "completed",
            "owner_pid",
            "owner_started",
            "lineage_token",
            "attached",
            "slots",
            "from_nothing",
            "world_size",
            "parity_nbytes",
            "checks",
        ]
    )
}
_SLOT = {
    name: index
    for index, name in enumerate(["state", "lineage", "iteration", "token", "small", "cursor", "seal", "pins", "mark"])
}
NO_CURSOR = 2**64 - 1
NOT_COMPUTED = 0  # the digest of a parity bucket that is still to be computed: nothing fits it


def create(path: Path, shape: Shape, rank: int, fingerprint: Mapping[str, Any], world_size: int = 0) -> None:
    """Allocate a segment and fault all of its pages in; `world_size` is the job's, 0 where that does not matter.

    Raises BudgetError when the memory is not there.
    """
    text = json.dumps(fingerprint, sort_keys=True).encode()
    if len(text) > _FINGERPRINT_ROOM:
        raise SegmentError(f"rank {rank}: the job's fingerprint has {len(text)} bytes; at most {_FINGERPRINT_ROOM} fit")
    check_room(shape.total, f"rank {rank}: protection ({shape.slots} slots of {shape.slot_room} bytes)", path.parent)
    building = path.with_name(path.name + ".new")
    building.unlink(missing_ok=True)  # of an SMP that died meanwhile; or not ours at all, hence O_EXCL
    fd = os.open(building, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.posix_fallocate(fd, 0, shape.total)
        except OSError as error:
            raise BudgetError(
                f"rank {rank}: {path.parent} could not give {shape.total} bytes: {error.strerror}"
            ) from error
        with mmap.mmap(fd, PAGE) as page:
            words = np.frombuffer(page, dtype=np.uint64, count=len(_HEADER))
            for name, value in (
                ("nbytes", shape.nbytes),
                ("small_nbytes", shape.small_nbytes),
                ("buckets", shape.buckets),
                ("layout", shape.layout),
                ("slots", shape.slots),
                ("parity_nbytes", shape.parity_nbytes),
                ("checks", shape.checks),
                ("rank", rank),
                ("world_size", world_size),
                ("magic", _MAGIC),
            ):
                words[_HEADER[name]] = value
            del words
            page[_FINGERPRINT : _FINGERPRINT + 8 + len(text)] = len(text).to_bytes(8, "little") + text
        os.rename(building, path)
    except BaseException:
        building.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


class Segment:
    """A mapped segment. Its properties read and write shared memory; nothing is cached."""

    def __init__(self, path: Path, *, populate: bool = False) -> None:
        """Map `path`. `populate` maps every page at once, so that no first touch costs a fault in the step path.

        Raises SegmentError when the file is missing, is not a segment of this version, or is another user's.
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
        self._header = self.bytes[: 8 * len(_HEADER)].view(np.uint64)
        if int(self._header[0]) != _MAGIC:
            raise SegmentError(
                f"segment {path} was written by another version of ft_plugins or is damaged; "
                "'ft-plugins sweep' removes it"
            )
        self.shape = Shape(*(self._word(field.name) for field in fields(Shape)))
        if self.shape.total != found.st_size:
            raise SegmentError(f"segment {path} has {found.st_size} bytes where its header tells {self.shape.total}")
        self._slot_words = [
            self.bytes[self._slot_start(i) : self._slot_start(i) + 8 * len(_SLOT)].view(np.uint64)
            for i in range(self.shape.slots)
        ]

    def close(self) -> None:
        """Unmap. Views handed out must be gone; those that live on keep the mapping until they go."""
        del self.bytes, self._header, self._slot_words
        try:
            self._map.close()
        except BufferError:  # a view is still held (a capture being torn down); the mapping goes with it
            return

    # ---- header ----

    def _word(self, name: str) -> int:
        return int(self._header[_HEADER[name]])

    @property
    def rank(self) -> int:
        """The logical rank whose state this is."""
        return self._word("rank")

    @property
    def world_size(self) -> int:
        """The number of ranks of the job whose state this is; 0 where nobody said."""
        return self._word("world_size")

    @property
    def token(self) -> int:
        """The fencing token of the incarnation that may write."""
        return self._word("token")

    @token.setter
    def token(self, value: int) -> None:
        self._header[_HEADER["token"]] = value

    @property
    def lineage(self) -> int:
        """The newest lineage that was opened; 0 before the first."""
        return self._word("lineage")

    @property
    def from_nothing(self) -> bool:
        """Whether the newest lineage began without a restored version: nothing older is of use then, on any rank."""
        return bool(self._word("from_nothing"))

    @property
    def lineage_token(self) -> int:
        """The token under which the newest lineage was opened; 0 before the first."""
        return self._word("lineage_token")

    @property
    def attached(self) -> bool:
        """Whether a trainer of the running incarnation has attached, also if it has ended since."""
        return bool(self._word("attached"))

    @attached.setter
    def attached(self, value: bool) -> None:
        self._header[_HEADER["attached"]] = value

    @property
    def completed(self) -> int:
        """The last iteration whose end this rank has reached, in any incarnation."""
        return self._word("completed")

    @completed.setter
    def completed(self, value: int) -> None:
        self._header[_HEADER["completed"]] = value

    @property
    def owner(self) -> tuple[int, int]:
        """(pid, start time in clock ticks) of the trainer that attached last; (0, 0) for none."""
        return self._word("owner_pid"), self._word("owner_started")

    @owner.setter
    def owner(self, value: tuple[int, int]) -> None:
        self._header[_HEADER["owner_pid"]], self._header[_HEADER["owner_started"]] = value

    @property
    def gate(self) -> npt.NDArray[np.uint8]:
        """The words by which the rank's trainer says how much of its copy may go now, a view: `bubbles.gate.Gate`."""
        return self.bytes[_GATE : _GATE + GATE_BYTES]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the job whose state this is. Raises SegmentError when it is damaged."""
        length = int.from_bytes(self.bytes[_FINGERPRINT : _FINGERPRINT + 8].tobytes(), "little")
        start = _FINGERPRINT + 8
        try:
            return dict(json.loads(self.bytes[start : start + min(length, _FINGERPRINT_ROOM)].tobytes()))
        except (ValueError, TypeError) as error:
            raise SegmentError(f"segment {self.path}: the job's fingerprint in it is damaged ({error})") from error

    def release(self, slots: Iterable[int]) -> None:
        """Give the memory of these slots back to the system: they are empty from then on."""
        for index in slots:
            self._map.madvise(mmap.MADV_REMOVE, self._slot_start(index), self.shape.slot_room)

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
        """Grow `lineage` from `base`: the slots in `voided` can no longer be restored. Idempotent; void first, so
        that a death in between leaves `base` the newest."""
        for index in voided:
            self.unpin(index, ~Pin(0))
            self.dirty(index, None, self.token)
        self.completed = base.iteration if base else 0
        self._header[_HEADER["from_nothing"]] = base is None
        self._header[_HEADER["lineage"]] = lineage
        self._header[_HEADER["lineage_token"]] = self.token

    # ---- slots ----

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) in a slot's data area of each bucket, by which those who know no layout verify it."""
        area = self.bytes[PAGE : PAGE + 16 * self.shape.buckets].view(np.uint64)
        return [(offset, nbytes) for offset, nbytes in area.reshape(-1, 2).tolist()]

    @ranges.setter
    def ranges(self, value: Sequence[tuple[int, int]]) -> None:
        """Written by the trainer that claims the segment; the layout's digest in the header says which cut it is."""
        area = self.bytes[PAGE : PAGE + 16 * self.shape.buckets].view(np.uint64)
        area[:] = np.array(value, dtype=np.uint64).reshape(-1)

    @property
    def data_ranges(self) -> list[tuple[int, int]]:
        """The ranges of the buckets of captured tensors, without those of parity."""
        found = self.ranges
        return [entry for entry in found if entry[0] < self.shape.data_nbytes] if self.shape.parity_nbytes else found

    def _slot_start(self, index: int) -> int:
        return PAGE + self.shape.ranges_room + index * self.shape.slot_room

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
        value = int(self._slot_words[index][_SLOT["cursor"]])
        return None if value == NO_CURSOR else value

    def set_cursor(self, index: int, bucket: int | None) -> None:
        """Say which bucket is being written."""
        self._slot_words[index][_SLOT["cursor"]] = NO_CURSOR if bucket is None else bucket

    def slot(self, index: int) -> Slot:
        """What the slot's header says; a header whose seal does not fit is DIRTY."""
        words = self._slot_words[index]
        state = (
            SlotState(int(words[_SLOT["state"]])) if int(words[_SLOT["state"]]) <= SlotState.CLEAN else SlotState.DIRTY
        )
        version = Version(int(words[_SLOT["lineage"]]), int(words[_SLOT["iteration"]]))
        if state is SlotState.CLEAN and not self._sealed(index):
            state = SlotState.DIRTY
        held = version if state is not SlotState.EMPTY else None
        mark = self._mark(index) if state is SlotState.CLEAN else Mark.NONE
        return Slot(index, state, held, int(words[_SLOT["token"]]), self.pins(index), mark)

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
        """What a slot is kept for, without a look at what it holds."""
        return Pin(int(self._slot_words[index][_SLOT["pins"]]))

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
        self._slot_words[index][_SLOT["pins"]] = int(held | purpose)
        if held or may_pin([replace(slot, pins=Pin(0)) for slot in self.slots()], version) == index:
            return index
        self._slot_words[index][_SLOT["pins"]] = int(held)
        return None

    def unpin(self, index: int, purpose: Pin) -> None:
        """The slot is no longer kept for `purpose`. Called by the SMP alone."""
        words = self._slot_words[index]
        words[_SLOT["pins"]] = int(words[_SLOT["pins"]]) & ~int(purpose) & 0xFF

    def dirty(self, index: int, version: Version | None, token: int) -> None:
        """The slot holds nothing restorable from now on; `version` is about to be written, None for none."""
        check_transition(self.slot(index).state, SlotState.DIRTY)
        words = self._slot_words[index]
        words[_SLOT["state"]] = SlotState.DIRTY
        words[_SLOT["seal"]] = 0
        words[_SLOT["lineage"]], words[_SLOT["iteration"]] = (version.lineage, version.iteration) if version else (0, 0)
        words[_SLOT["token"]] = token

    def seal(self, index: int, version: Version, token: int, small: bytes, digests: npt.NDArray[np.uint64]) -> None:
        """Everything of `version` is in place: the slot becomes CLEAN. The last store is the state.

        The seal covers what the writer knows, not what it finds: whatever a superseded writer has put into header,
        small state or digest table meanwhile does not fit it, and the slot is read as DIRTY.
        """
        words = self._slot_words[index]
        check_transition(SlotState(int(words[_SLOT["state"]])), SlotState.CLEAN)
        known = np.array([version.lineage, version.iteration, token, len(small)], dtype=np.uint64)
        words[_SLOT["seal"]] = _seal(known, digests, small)
        words[_SLOT["state"]] = SlotState.CLEAN

    def _sealed(self, index: int) -> bool:
        """Whether the slot's header, digests and small state are those that its seal covers."""
        words = self._slot_words[index]
        found = _seal(words[_SLOT["lineage"] : _SLOT["cursor"]], self.digests(index), self.small(index))
        return int(words[_SLOT["seal"]]) == found

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
