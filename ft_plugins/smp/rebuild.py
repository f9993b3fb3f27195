"""Rebuild a rank's slot on this node: fetched from the node that still holds it, or decoded from parity.

Invariant: the slot is DIRTY until every bucket matches the digest table that was copied whole when the version was
exchanged; then it is sealed, and restored like any other. A mismatch is an error. The memory needed in addition to the
slot is one frame for each of the few threads that read.

Each thread takes the next frame and sends requests to all of its sources, and those for the frame after it before it
waits for the first one. One source is received directly into the slot, the others are added to it, each after its
digest passed. The thread that fills a bucket verifies it, while it is still in the processor's cache.

In: an exchange plan, which positions are lost, a reader per position. Out: a CLEAN slot, the bytes read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from .. import faults
from ..errors import CorruptSlotError, ResumeError, SegmentError
from ..redundancy.exchange_plan import ExchangePlan
from ..snapshot import manifest
from ..snapshot.segment import NOT_COMPUTED, Segment
from ..snapshot.shape import PAGE
from ..snapshot.slots import Version, choose
from .frames import Data, Frame, Parity, copied, decoded
from .wire import PAYLOAD_LIMIT

THREADS = 2  # that read and add up, for each slot that is rebuilt
AHEAD = 2  # frames for which a thread has asked

Bytes = npt.NDArray[np.uint8]


class ReadStream(Protocol):
    """Reads from one SMP, for one thread: answers arrive in the order of the requests."""

    def ask_for(self, wanted: Data | Parity) -> None:
        """Send a request without waiting for its answer."""
        ...

    def take(self, into: Bytes) -> None:
        """Wait for the next answer; its bytes are written to `into`, which has their length, and were verified."""
        ...

    def close(self) -> None:
        """Hang up for good, from any thread: a thread that waits for an answer gets an error."""
        ...

    def release(self) -> None:
        """The thread that asked has finished: release what the stream holds."""
        ...


class Reader(Protocol):
    """What the SMP at a position of the plan hands out: another node's memory over the wire, or this one's."""

    over_wire: bool

    def stream(self) -> ReadStream: ...
    def copy(self, rank: int, version: Version) -> bytes: ...
    def slot(self, rank: int, version: Version) -> bytes: ...


def fetch(segment: Segment, version: Version, token: int, holder: Reader) -> int:
    """Take the slot over from a node that holds it whole. Returns the bytes read over the wire.

    Raises what the reader raises, CorruptSlotError.
    """
    frames = copied(segment.rank, version, segment.shape.nbytes, 0)
    return _write(segment, version, token, holder.slot(segment.rank, version), frames, {0: holder})


def decode(
    segment: Segment,
    version: Version,
    token: int,
    plan: ExchangePlan,
    lost: Collection[int],
    readers: Mapping[int, Reader],
) -> int:
    """Compute the slot from parity. `lost` are the positions whose data cannot be read, `readers` those that can.

    Returns the bytes read over the wire. Raises ResumeError when more is lost than parity makes up for, what the
    readers raise, CorruptSlotError.
    """
    frames = decoded(plan, segment.rank, version, lost)
    copy = _copy_from_any(plan, segment.rank, version, readers)
    return _write(segment, version, token, copy, frames, readers)


def _copy_from_any(plan: ExchangePlan, rank: int, version: Version, readers: Mapping[int, Reader]) -> bytes:
    """The rank's small state and digest table, from a node that stores a copy."""
    problems = []
    for position in plan.small_state_holders(rank):
        if position in readers:
            try:
                return readers[position].copy(rank, version)
            except SegmentError as error:
                problems.append(str(error))
    raise ResumeError(
        f"rank {rank}: no node holds a copy of the small state of version {version} "
        f"({'; '.join(problems) or 'those that did are lost'})"
    )


def _write(
    segment: Segment,
    version: Version,
    token: int,
    copy: bytes,
    frames: Iterator[Frame],
    readers: Mapping[int, Reader],
) -> int:
    """Write `frames` into a slot, verify it against the copied digests, and seal it."""
    small, table = msgpack.unpackb(copy)
    digests = np.frombuffer(table, dtype=np.uint64).copy()
    if len(digests) != segment.shape.digests:
        raise ResumeError(
            f"rank {segment.rank}: version {version} has {len(digests)} digests, this segment {segment.shape.digests}: "
            "the state was laid out otherwise"
        )
    if not any(nbytes for _, nbytes in segment.ranges):  # of the job at another size: no trainer has claimed it
        segment.ranges = manifest.read(manifest.split(small)[0]).ranges
    index = choose(segment.slots())
    segment.dirty(index, version, token)
    filling = _Filling(segment, version, index, digests, frames, readers)
    with ThreadPoolExecutor(THREADS, "smp-rebuild") as pool:
        running = [pool.submit(filling.work) for _ in range(THREADS)]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
        finally:
            filling.stop()
    for thread in done:  # the one that failed by itself; the others because of it
        thread.result()
    filling.verify_the_rest()
    segment.write_small(index, small)
    segment.digests(index)[:] = digests
    segment.set_cursor(index, None)
    segment.seal(index, version, token, small, digests)
    return filling.wire_bytes


class _Filling:
    """A slot that several threads fill: what is left to be requested, written and verified."""

    def __init__(
        self,
        segment: Segment,
        version: Version,
        index: int,
        digests: npt.NDArray[np.uint64],
        frames: Iterator[Frame],
        readers: Mapping[int, Reader],
    ) -> None:
        self.wire_bytes = 0
        self._rank = segment.rank
        self._version = version
        self._index = index
        self._data = segment.data(index)
        self._captured = segment.shape.data_nbytes
        self._digests = digests
        self._frames = frames
        self._readers = readers
        self._lock = threading.Lock()
        self._stopped = False
        self._streams: list[ReadStream] = []
        self._buckets = sorted((offset, nbytes, number) for number, (offset, nbytes) in enumerate(segment.ranges))
        self._starts = [offset for offset, _, _ in self._buckets]
        self._missing = [nbytes for _, nbytes, _ in self._buckets]  # bytes, by place in `_buckets`
        self._verified = [False] * len(self._buckets)

    def work(self) -> None:
        """Run by each thread until no frame is left. Raises what a stream raises, CorruptSlotError."""
        streams: dict[int, ReadStream] = {}
        try:
            self._work(streams)
        finally:
            for stream in streams.values():
                stream.release()

    def _work(self, streams: dict[int, ReadStream]) -> None:
        scratch: Bytes = np.empty(PAYLOAD_LIMIT, dtype=np.uint8)
        asked: deque[Frame] = deque()
        while True:
            while len(asked) < AHEAD and (frame := self._next()) is not None:
                for part in frame.parts:
                    if part.position not in streams:
                        streams[part.position] = self._stream_to(part.position)
                    streams[part.position].ask_for(part.wanted)
                asked.append(frame)
            if not asked:
                return
            frame = asked.popleft()
            faults.reach("rebuild.frame", rank=self._rank, at=frame.offset)
            self._put_together(frame, streams, scratch)
            for place in self._written(frame):
                self._verify(place)

    def _next(self) -> Frame | None:
        with self._lock:
            return None if self._stopped else next(self._frames, None)

    def _stream_to(self, position: int) -> ReadStream:
        stream = self._readers[position].stream()
        with self._lock:
            self._streams.append(stream)
        return stream

    def _put_together(self, frame: Frame, streams: Mapping[int, ReadStream], scratch: Bytes) -> None:
        """Receive the parts, in the order of their requests, and add them up in the slot."""
        target = self._data[frame.offset : frame.offset + frame.nbytes]
        target[::PAGE].max()  # a page that is read first is mapped with its neighbours, for a quarter of the price
        if frame.has_base:
            streams[frame.parts[0].position].take(target)
        else:
            target.fill(0)
        for part in frame.parts[frame.has_base :]:
            nbytes = part.wanted.nbytes
            streams[part.position].take(scratch[:nbytes])
            _add(target[part.at : part.at + nbytes], scratch[:nbytes], part.factor)

    def _written(self, frame: Frame) -> list[int]:
        """Count the frame; the buckets, by index, that are full now."""
        full = []
        with self._lock:
            self.wire_bytes += sum(p.wanted.nbytes for p in frame.parts if self._readers[p.position].over_wire)
            first = max(0, bisect_right(self._starts, frame.offset) - 1)
            for place in range(first, len(self._buckets)):
                start, nbytes, _ = self._buckets[place]
                low, high = max(start, frame.offset), min(start + nbytes, frame.offset + frame.nbytes)
                if start >= frame.offset + frame.nbytes:
                    break
                if low < high:
                    self._missing[place] -= high - low
                    if not self._missing[place]:
                        full.append(place)
        return full

    def _verify(self, place: int) -> None:
        offset, nbytes, number = self._buckets[place]
        if offset >= self._captured and int(self._digests[number]) == NOT_COMPUTED:
            self._verified[place] = True  # the holder lacks it as well: it is computed once the tensors are loaded
            return
        if xxhash.xxh3_64_intdigest(self._data[offset : offset + nbytes].data) != int(self._digests[number]):
            raise CorruptSlotError(
                f"rank {self._rank}: bucket {number} of slot {self._index}, rebuilt for version {self._version}, "
                "does not match its digest"
            )
        self._verified[place] = True

    def verify_the_rest(self) -> None:
        """Verify the buckets that no frame has filled up: those without bytes, and parity that is to be computed again
        because no node has it whole. Raises CorruptSlotError."""
        for place, done in enumerate(self._verified):
            offset, nbytes, number = self._buckets[place]
            if offset >= self._captured and 0 < self._missing[place] == nbytes:
                self._digests[number] = NOT_COMPUTED
            if not done:
                self._verify(place)

    def stop(self) -> None:
        """Stop reading; threads that wait for an answer get an error."""
        with self._lock:
            self._stopped = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()


def _add(target: Bytes, part: Bytes, factor: int) -> None:
    """target += factor * part."""
    if factor == 1:
        np.bitwise_xor(target, part, out=target)
        return
    from ..redundancy import kernels  # here: numba takes a second to import and to compile

    kernels.scale_xor_into(target, part, factor)
