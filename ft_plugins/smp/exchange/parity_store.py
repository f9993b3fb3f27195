"""Store parity of other nodes' slots and copies of their small state, for two versions.

Invariant: a version is CLEAN here only if every frame of every source was XORed in exactly once, every copy is whole,
and the parity that this node's ranks computed themselves was made from the same bytes that the other nodes captured. A
cursor counts the bytes taken of each source: a frame that was taken already is skipped, one that is too early is not
taken, so a broken transfer resumes where it stopped. Cursors end with the process: parity that a dead SMP had begun is
discarded, and its sources send again.

It is a segment of its own with two slots: one holds the committed version, the other receives the next one.

    slot = header | digest of each MiB of parity | copies (msgpack: rank -> small state, digest table) | parity

In: frames and copies, from the SMPs of other nodes. Out: parity and copies, to SMPs that rebuild lost state.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from ...base import faults
from ...errors import ProtocolError, SegmentError
from ...redundancy import kernels
from ...redundancy.exchange_plan import Area, ExchangePlan
from ...redundancy.field import power
from ...snapshot.segment import segment as segments
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.shape import Shape
from ...snapshot.segment.slots import Pin, SlotState, Version, choose
from ..tree.protection import Protection

BUCKET = 1 << 20  # bytes of parity per digest
VERSIONS = 2
_COPY_OVERHEAD = 256  # bytes of msgpack around a copy

Bytes = npt.NDArray[np.uint8]
Key = tuple[int, int, int]  # section, stripe, 0 for P or 1 for Q


def shape_of(plan: ExchangePlan, position: int, shapes: Sequence[Shape], layout: int) -> Shape:
    """The segment that the node at `position` needs; `shapes` are those of all ranks, `layout` is the plan's digest."""
    nbytes = plan.parity_bytes(position)
    copies = sum(shapes[r].small_nbytes + 8 * shapes[r].digests + _COPY_OVERHEAD for r in plan.small_state_on(position))
    return Shape(nbytes, copies + _COPY_OVERHEAD, -(-nbytes // BUCKET), layout, VERSIONS)


def store_bytes(protection: Protection, position: int) -> int:
    """The bytes that the SMP of the node at `position` claims to protect other nodes. Pure."""
    return shape_of(protection.plan(), position, protection.shapes, 0).total


class ParityStore:
    """The parity store of one node. Guards its segment and the version that it receives."""

    def __init__(self, path: Path, plan: ExchangePlan, position: int, shape: Shape) -> None:
        """Claim the memory, or adopt an existing store. Raises BudgetError, SegmentError."""
        self._plan = plan
        self._position = position
        try:
            self._segment = Segment(path)
            own = self._segment.shape
            same = replace(own, small_nbytes=shape.small_nbytes) == shape and self._segment.rank == position
            if not same or own.small_nbytes < shape.small_nbytes:
                raise SegmentError(f"{path} has the layout of another plan or position")
        except SegmentError:
            path.unlink(missing_ok=True)
            segments.create(path, shape, position, {})
            self._segment = Segment(path)
        starts = range(0, shape.nbytes, BUCKET)  # also when adopted: its creator may have died before this
        self._segment.ranges = [(start, min(BUCKET, shape.nbytes - start)) for start in starts]
        self._closed = False
        self._areas = {(area.section, area.stripe, area.which): area for area in plan.areas[position]}
        self._lock = threading.Lock()
        self._area_locks = {key: threading.Lock() for key in self._areas}
        self.receiving: Version | None = None  # being received
        self._index = -1
        self._taken: dict[tuple[Key, int], int] = {}  # bytes taken of each source, by area and node of the section
        self._wanted: dict[tuple[Key, int], int] = {}
        self._open: set[tuple[Key, int]] = set()  # sources with missing bytes
        self._cleared: dict[Key, int] = {}  # bytes of each area, from its start, free of an older version
        self._copies: dict[int, bytearray] = {}
        self._whole: set[int] = set()  # ranks whose copy is complete
        # whether ranks of this node compute parity themselves
        self._computes_parity = any(plan.parts[rank] for rank in plan.ranks[position])
        self._agreed = False
        self._exponents: dict[tuple[Key, int], int] = {}  # each source is multiplied by 2**exponent
        for send in plan.sends_to(position):
            source = (send.area.section, send.area.stripe, send.area.which), send.node
            self._wanted[source], self._exponents[source] = send.stop - send.start, send.exponent
        self._copied = frozenset(plan.small_state_on(position))  # the ranks whose copies belong here

    @property
    def resident_bytes(self) -> int:
        """The resident size as the kernel reports it."""
        return self._segment.resident_bytes

    @property
    def nbytes(self) -> int:
        """Bytes claimed."""
        return self._segment.shape.total

    @property
    def linked(self) -> bool:
        """Whether the store's file is still there."""
        return self._segment.linked

    def write_again(self) -> None:
        """Write the store, whose file was removed, to a new one, for another `ParityStore`. Call after `pause`. Raises
        BudgetError, SegmentError, OSError."""
        segments.write_again(self._segment).close()

    # ---- receiving ----

    def begin(self, version: Version) -> None:
        """Start receiving `version`, unless it is complete here or being received already.

        Takes constant time: each frame clears the bytes that it is the first to reach.
        """
        with ExitStack() as frames:
            for lock in self._area_locks.values():  # no frame of the previous version is being XORed in
                frames.enter_context(lock)
            frames.enter_context(self._lock)
            if self.receiving == version or version in self.versions():
                return
            self.receiving = version
            self._index = choose(self._segment.slots())
            self._segment.dirty(self._index, version, 0)
            self._taken = dict.fromkeys(self._wanted, 0)
            self._open = {source for source, nbytes in self._wanted.items() if nbytes}
            self._cleared = dict.fromkeys(self._areas, 0)
            self._copies = {}
            self._whole = set()
            self._agreed = not self._computes_parity
            self._seal_if_complete()

    def replicas_agree(self, version: Version) -> None:
        """The replicas from which this node's ranks computed parity equal those that other nodes captured."""
        with self._lock:
            if version == self.receiving:
                self._agreed = True
                self._seal_if_complete()

    def taken(self, version: Version, node_sections: Sequence[tuple[int, int]]) -> list[list[int]] | None:
        """The progress of a sender's transfers, as [section, stripe, which, node, bytes]; `node_sections` are the
        (section, node of the section) that it sends. None if `version` is neither being received nor complete here."""
        with self._lock:
            complete = version in self.versions()
            if not complete and version != self.receiving:
                return None
            source = self._wanted if complete else self._taken
            mine = set(node_sections)
            return [[*key, node, done] for (key, node), done in source.items() if (key[0], node) in mine]

    def copied(self, version: Version, ranks: Sequence[int]) -> list[int]:
        """Which of the copies of `ranks` are complete here."""
        with self._lock:
            whole = set(ranks) if version in self.versions() else self._whole if version == self.receiving else set()
            return [rank for rank in ranks if rank in whole]

    def take(self, version: Version, key: Key, node: int, at: int, exponent: int, frame: Bytes) -> int:
        """XOR a frame into the parity block `key` at byte `at`; returns the number of bytes taken so far.

        Raises ProtocolError if the plan has no such frame.
        """
        area = self._areas.get(key)
        if area is None or (key, node) not in self._wanted or at + len(frame) > self._wanted[key, node]:
            raise ProtocolError(f"{len(frame)} bytes at {at} of node {node} do not belong to parity {key} of this node")
        if exponent != self._exponents[key, node]:
            raise ProtocolError(
                f"parity {key}: node {node} multiplied its data by 2**{exponent}, but the plan of this node expects "
                f"2**{self._exponents[key, node]}"
            )
        with self._area_locks[key]:
            with self._lock:
                if version != self.receiving:
                    if version in self.versions():
                        return self._wanted[key, node]
                    raise ProtocolError(f"version {version} is not being received here")
                done, index = self._taken[key, node], self._index
            if at != done:  # repeated, or too early
                return done
            parity = self._segment.data(index)[area.offset : area.offset + area.nbytes]
            if at + len(frame) > self._cleared[key]:
                parity[self._cleared[key] : at + len(frame)] = 0
                self._cleared[key] = at + len(frame)
            kernels.combine_into((parity[at : at + len(frame)],), (frame,), ((power(exponent),),))
            faults.reach("parity_store.xored", section=key[0], stripe=key[1], node=node, at=at, position=self._position)
            with self._lock:
                if version != self.receiving:
                    raise ProtocolError(f"version {version} is no longer received here")
                self._taken[key, node] = done = at + len(frame)
                if done == self._wanted[key, node]:
                    self._open.discard((key, node))
                    self._seal_if_complete()
                return done

    def take_copy(self, version: Version, rank: int, at: int, total: int, part: Bytes) -> int:
        """Take a part of a rank's copy; returns how many of its bytes are here."""
        if rank not in self._copied:
            raise ProtocolError(f"no copy of rank {rank} belongs to this node")
        if total > self._segment.shape.small_nbytes:
            room = self._segment.shape.small_nbytes
            raise ProtocolError(f"a copy of rank {rank} has {total} bytes; only {room} were claimed for all copies")
        with self._lock:
            if version != self.receiving:
                if version in self.versions():
                    return total
                raise ProtocolError(f"version {version} is not being received here")
            if at + len(part) > total:
                raise ProtocolError(f"{len(part)} bytes at {at} of rank {rank}'s copy, of which {total} were announced")
            copy = self._copies.setdefault(rank, bytearray())
            if at == len(copy):
                copy += part.tobytes()
            if len(copy) == total:
                self._whole.add(rank)
                self._seal_if_complete()
            return len(copy)

    def _seal_if_complete(self) -> None:
        """Write the digests of the parity, then seal, if nothing is missing. Call with the lock held."""
        version = self.receiving
        if version is None or self._open or self._whole != self._copied or not self._agreed:
            return
        data, table = self._segment.data(self._index), self._segment.digests(self._index)
        for key, area in self._areas.items():  # beyond the end of the longest source
            data[area.offset + self._cleared[key] : area.offset + area.nbytes] = 0
        for number, (offset, nbytes) in enumerate(self._segment.ranges):
            table[number] = xxhash.xxh3_64_intdigest(data[offset : offset + nbytes].data)
        small = msgpack.packb({rank: bytes(copy) for rank, copy in self._copies.items()})
        self._segment.write_small(self._index, small)
        faults.reach("parity_store.seal.before", iteration=version.iteration, position=self._position)
        self._segment.seal(self._index, version, 0, small, table)
        self.receiving = None
        self._copies = {}

    # ---- stored versions ----

    def versions(self) -> tuple[Version, ...]:
        """The versions that are complete here."""
        return tuple(s.version for s in self._segment.slots() if s.state is SlotState.CLEAN and s.version)

    def pin(self, version: Version) -> None:
        """Pin the committed version, in place of the previous one."""
        with self._lock:
            for slot in self._segment.slots():
                if slot.state is SlotState.CLEAN and slot.version == version:
                    self._segment.pin(version, Pin.NODE)
                else:
                    self._segment.unpin(slot.index, Pin.NODE)

    def void_after(self, base: Version | None) -> None:
        """Discard versions newer than `base` (None: all), to which a recovery went back."""
        with self._lock:
            for slot in self._segment.slots():
                if slot.state is SlotState.CLEAN and slot.version and (base is None or slot.version > base):
                    self._segment.unpin(slot.index, ~Pin(0))
                    self._segment.dirty(slot.index, None, 0)

    def read(self, version: Version, key: Key, at: int, nbytes: int) -> Bytes:
        """Bytes of a complete parity block, after their digests were verified. Raises SegmentError."""
        area = self._areas.get(key)
        if area is None or at + nbytes > area.nbytes:
            raise ProtocolError(f"{nbytes} bytes at {at} are not in parity {key} of this node")
        index = self._index_of(version)
        self._verify(index, area, at, nbytes)
        return self._segment.data(index)[area.offset + at : area.offset + at + nbytes]

    def copy(self, version: Version, rank: int) -> bytes:
        """The copy of a rank. Raises SegmentError if it is not here."""
        copies: dict[int, Any] = msgpack.unpackb(self._segment.small(self._index_of(version)), strict_map_key=False)
        if rank not in copies:
            raise SegmentError(f"node position {self._position} holds no copy of rank {rank}")
        return bytes(copies[rank])

    def _index_of(self, version: Version) -> int:
        for slot in self._segment.slots():
            if slot.state is SlotState.CLEAN and slot.version == version:
                return slot.index
        complete = list(map(str, self.versions()))
        why = f"cannot be read: {self.damage}" if self.damage else "is not here"
        raise SegmentError(f"parity of version {version} {why}; complete are {complete}")

    @property
    def damage(self) -> str:
        """A message on stored versions whose headers, digest tables or copies do not match their digests; ''."""
        damaged = [f"slot {slot.index}" for slot in self._segment.slots() if slot.damaged]
        return f"the parity in {', '.join(damaged)} is damaged, so the version there is not used" if damaged else ""

    def _verify(self, index: int, area: Area, at: int, nbytes: int) -> None:
        data, table, ranges = self._segment.data(index), self._segment.digests(index), self._segment.ranges
        start = area.offset + at
        for number in range(start // BUCKET, -(-(start + nbytes) // BUCKET)):
            offset, length = ranges[number]
            if xxhash.xxh3_64_intdigest(data[offset : offset + length].data) != int(table[number]):
                raise SegmentError(f"parity is damaged: bucket {number} of slot {index} does not match its digest")

    def pause(self) -> None:
        """Stop receiving. When this returns, no frame is being XORed in; complete versions can be read."""
        with ExitStack() as frames:
            for lock in self._area_locks.values():
                frames.enter_context(lock)
            frames.enter_context(self._lock)
            self.receiving = None

    def close(self) -> None:
        """Unmap; the memory stays. Idempotent."""
        if not self._closed:
            self._closed = True
            self.pause()
            self._segment.close()
