"""Map and check the file of a segment, give out its areas as views, release its pages and claim them again.

Invariant: the constants of the header page are verified once, on mapping; the bucket ranges match their digest or are
not used.

    file   = header page | bucket ranges | ledger | slots | parity slots, if the rank computes parity of others' shares
    slot   = header page | digest table | small state | data: the captured share
    parity = header page | digest table | parity
    table  = digest of each bucket, of data and of parity | digest of each source of the parity, as the rank read it

A slot without memory (UNCLAIMED) is a hole in the file, except for its header page.

A slot's table has no digests of parity, a parity slot's none of data: these are zeros. Both kinds of slots share one
numbering of slots, buckets and offsets, in which parity follows data.

In: a path. Out: views into shared memory. Files in /dev/shm are mapped directly, because multiprocessing.shared_memory
would unlink them when the process ends.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ...bubbles.gate.gate import GATE_BYTES
from ...errors import BudgetError, CorruptHeaderError, SegmentError
from .header import GATE, Header, constants_of
from .ledger import Ledger
from .shape import LEDGER_ROOM, PAGE, Shape
from .slot_header import HEADER_BYTES, SlotHeader

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which `mmap` does not name: of Linux 5.14
_PIECE = 4 << 20  # bytes that are mapped at once, a multiple of pages

Bytes = npt.NDArray[np.uint8]


class SegmentFile:
    """A mapped segment: where its areas are, not what they mean."""

    def __init__(self, path: Path, *, populate: bool = False) -> None:
        """Map `path`. `populate` maps every page that has memory now, so that no first access faults in the step path.

        Raises SegmentError if the file is missing, is not a segment of this version or belongs to another user;
        CorruptHeaderError if it is damaged.
        """
        self.path = path
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(
                f"segment {path}: {error.strerror}; the SMP of this node creates it on attach"
            ) from error
        try:
            stat = os.fstat(fd)
            if stat.st_uid != os.getuid():  # any user may create a file in /dev/shm under a predictable name
                raise SegmentError(f"segment {path} belongs to user {stat.st_uid}; expected {os.getuid()}: remove it")
            if stat.st_size < PAGE:
                raise SegmentError(f"segment {path} has {stat.st_size} bytes: not a segment")
            self._map = mmap.mmap(fd, stat.st_size, flags=mmap.MAP_SHARED)
            self._map.madvise(mmap.MADV_DONTDUMP)  # a core with it would take the longer, and hold the job's state
        finally:
            os.close(fd)
        self._file = stat.st_dev, stat.st_ino
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._page = self.bytes[:PAGE].view(np.uint64)
        self.header = Header(self._page)
        constants = constants_of(self._page, path)
        self.shape, self.rank, self.world_size = constants.shape, constants.rank, constants.world_size
        self._fingerprint = constants.fingerprint
        if self.shape.total != stat.st_size:
            raise SegmentError(
                f"segment {path} has {stat.st_size} bytes, but its header describes {self.shape.total} bytes"
            )
        starts = [slot_start(self.shape, index) for index in range(self.shape.parity_indices.stop)]
        self._slots = [SlotHeader(self.bytes[at : at + HEADER_BYTES].view(np.uint64)) for at in starts]
        if populate:
            for start, nbytes in extents(self.shape, self.claimed):
                self._populate(start, nbytes)

    def close(self) -> None:
        """Unmap. Views that are still held keep the mapping until they are released."""
        del self.bytes, self._page, self.header, self._slots
        self.__dict__.pop("ledger", None)
        try:
            self._map.close()
        except BufferError:  # a view is still held (a capture being torn down) and keeps the mapping
            return

    def check(self) -> None:
        """Check that others can still map the segment. Raises CorruptHeaderError, SegmentError."""
        constants_of(self._page, self.path)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the job whose state this is."""
        return dict(json.loads(self._fingerprint))

    @property
    def gate(self) -> Bytes:
        """A view of the words by which the rank's trainer allows sends of its copy: see `bubbles.gate.gate.Gate`."""
        return self.bytes[GATE : GATE + GATE_BYTES]

    @cached_property
    def ledger(self) -> Ledger:
        """What is known of the rank's last iterations. Written by its trainer alone."""
        start = PAGE + self.shape.ranges_room
        return Ledger(self.bytes[start : start + LEDGER_ROOM].view(np.uint64))

    # ---- memory ----

    @property
    def linked(self) -> bool:
        """Whether the path still names this memory, which is kept while it is mapped, even if the file was removed."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return False
        return (stat.st_dev, stat.st_ino) == self._file

    @property
    def resident_bytes(self) -> int:
        """The memory that the file takes, as the kernel counts; 0 if it is gone."""
        try:
            return os.stat(self.path).st_blocks * 512
        except OSError:
            return 0

    @property
    def claimed(self) -> tuple[int, ...]:
        """The indices of the slots that have memory."""
        return tuple(index for index in range(self.shape.slots) if not self._slots[index].unclaimed)

    @property
    def claimed_bytes(self) -> int:
        return self.shape.bytes_with(len(self.claimed))

    def area_of(self, index: int) -> Bytes:
        """A view of a slot, or of a parity slot, with its header."""
        room = self.shape.slot_room if index < self.shape.slots else self.shape.parity_room
        start = slot_start(self.shape, index)
        return self.bytes[start : start + room]

    def claim_slot(self, index: int, permitted: Callable[[], None] = lambda: None) -> None:
        """Claim the memory of a slot that has none; it becomes EMPTY. Called by who may write slots: `permitted` raises
        if that has changed meanwhile. Raises BudgetError; SegmentError if the file was removed or replaced meanwhile.
        """
        start, room = slot_start(self.shape, index), self.shape.slot_room
        self._allocate([(start, room)])
        self._populate(start, room)
        permitted()
        self._slots[index].claim()

    def _populate(self, start: int, nbytes: int) -> None:
        """Map these pages, which have memory. In pieces: `madvise` keeps the interpreter, and training needs it."""
        for at in range(start, start + nbytes, _PIECE):
            piece = min(_PIECE, start + nbytes - at)
            try:
                self._map.madvise(_POPULATE_WRITE, at, piece)
            except OSError:  # an older kernel
                self.bytes[at : at + piece : PAGE].max(initial=0)

    def _discard_pages(self, index: int) -> None:
        """Return the memory of a slot to the system, except for its header."""
        room = self.shape.slot_room if index < self.shape.slots else self.shape.parity_room
        self._map.madvise(mmap.MADV_REMOVE, slot_start(self.shape, index) + PAGE, room - PAGE)

    def claim(self) -> None:
        """Allocate the memory of all claimed slots again, after slots were released. Raises BudgetError."""
        self._allocate(extents(self.shape, self.claimed))

    def _allocate(self, areas: Iterable[tuple[int, int]]) -> None:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(f"rank {self.rank}: {self.path}: {error.strerror}") from error
        try:
            stat = os.fstat(fd)
            if (stat.st_dev, stat.st_ino) != self._file:
                raise SegmentError(f"rank {self.rank}: {self.path} was replaced by another segment")
            allocate(fd, self.path, areas, self.rank)
        finally:
            os.close(fd)

    # ---- bucket ranges ----

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each bucket in a slot's data area, for readers without the layout.

        Raises CorruptHeaderError.
        """
        if not self._ranges_fit():
            raise CorruptHeaderError(f"segment {self.path}: its bucket ranges do not match their digest")
        return [(offset, nbytes) for offset, nbytes in self._ranges.reshape(-1, 2).tolist()]

    @ranges.setter
    def ranges(self, value: Sequence[tuple[int, int]]) -> None:
        """Written by the trainer that claims the segment. The layout's digest in the header identifies the buckets.

        Raises SegmentError for another number of buckets.
        """
        if len(value) != self.shape.buckets:
            raise SegmentError(f"rank {self.rank}: {len(value)} bucket ranges; expected {self.shape.buckets}")
        self._ranges[:] = np.array(value, dtype=np.uint64).reshape(-1)
        self.header.ranges = digest_of_ranges(self._ranges)

    @property
    def _ranges(self) -> npt.NDArray[np.uint64]:
        return self.bytes[PAGE : PAGE + 16 * self.shape.buckets].view(np.uint64)

    def _ranges_fit(self) -> bool:
        return self.header.ranges == digest_of_ranges(self._ranges)

    @property
    def data_ranges(self) -> list[tuple[int, int]]:
        """The ranges of the buckets of captured tensors, without those of parity."""
        ranges = self.ranges
        return [entry for entry in ranges if entry[0] < self.shape.data_nbytes] if self.shape.parity_nbytes else ranges

    @property
    def parity_ranges(self) -> list[tuple[int, int]]:
        """The ranges of the buckets of parity; offsets count from the start of the data."""
        return self.ranges[len(self.data_ranges) :]

    # ---- areas of a slot ----

    def _area(self, index: int, offset: int, nbytes: int) -> Bytes:
        start = slot_start(self.shape, index) + PAGE + offset
        return self.bytes[start : start + nbytes]

    def digests(self, index: int) -> npt.NDArray[np.uint64]:
        """A view of the digest table of a slot: one xxh3-64 per bucket, then one per source of parity."""
        return self._area(index, 0, 8 * self.shape.digests).view(np.uint64)

    def data(self, index: int) -> Bytes:
        """A view of the data area of a slot; of a parity slot, of its parity."""
        if index >= self.shape.slots:
            return self._area(index, self.shape.table_room, self.shape.parity_nbytes)
        return self._area(index, self.shape.table_room + self.shape.small_room, self.shape.data_nbytes)

    def _small_area(self, index: int) -> Bytes:
        """The area of a slot's small state; a parity slot has none."""
        return self._area(index, self.shape.table_room, self.shape.small_nbytes if index < self.shape.slots else 0)

    def small(self, index: int) -> bytes:
        return self._small_area(index)[: self._slots[index].small_bytes].tobytes()

    def write_small(self, index: int, encoded: bytes) -> None:
        """Write small state into a DIRTY slot. Raises SegmentError if it has outgrown its area."""
        if len(encoded) > self.shape.small_nbytes:
            raise SegmentError(
                f"rank {self.rank}: small state has grown to {len(encoded)} bytes; "
                f"{self.shape.small_nbytes} were claimed at start"
            )
        self._small_area(index)[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        self._slots[index].small_bytes = len(encoded)


def allocate(fd: int, path: Path, areas: Iterable[tuple[int, int]], rank: int) -> None:
    """Allocate memory for areas of a file, each an offset and a number of bytes. Raises BudgetError."""
    for start, nbytes in areas:
        try:
            os.posix_fallocate(fd, start, nbytes)
        except OSError as error:
            raise BudgetError(f"rank {rank}: {path.parent} could not give {nbytes} bytes: {error.strerror}") from error


def extents(shape: Shape, claimed: Collection[int]) -> Iterator[tuple[int, int]]:
    """The areas of a file that have memory while the slots in `claimed` do: offsets and numbers of bytes."""
    yield 0, slot_start(shape, 0)
    for index in range(shape.slots):
        yield slot_start(shape, index), shape.slot_room if index in claimed else PAGE
    if shape.parity_indices:
        first = slot_start(shape, shape.slots)
        yield first, shape.total - first


def slot_start(shape: Shape, index: int) -> int:
    """The offset of a slot, or of a parity slot, in the file."""
    parities = max(0, index - shape.slots)
    return shape.slots_start + (index - parities) * shape.slot_room + parities * shape.parity_room


def digest_of_ranges(words: npt.NDArray[np.uint64]) -> int:
    return xxhash.xxh3_64_intdigest(words.tobytes())
