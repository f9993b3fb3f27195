"""Rebuild a rank's slot on this node: fetched from the node that still holds it, or decoded from parity.

Invariant: the slot is DIRTY until every bucket matches the digest table, which was copied whole in the exchange; then
it is sealed, and restored like any other. A mismatch is an error. Parity that the rank computes itself is not rebuilt:
the rank computes it again from the tensors that it loads. In addition to the slot, each of the few threads
needs the memory of as many frames as are added in one pass (`kernels.MAX_SOURCES`).

A thread takes the next frame, and requests its parts from all sources, and those of the frame after it, before it waits
for the first part. If one of them is the base of the frame, it is received directly into the slot; the others are added
to it in one pass, while the parts of the next frame arrive. The thread that completes a bucket verifies it, while it is
still in the processor's cache.

In: an exchange plan, the lost positions, a reader per position. Out: a CLEAN slot, the number of bytes read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from ...base import faults
from ...errors import CorruptSlotError, ResumeError, SegmentError
from ...redundancy import kernels
from ...redundancy.exchange_plan import ExchangePlan
from ...snapshot.capture import manifest
from ...snapshot.segment.claims import slot_to_rebuild
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.shape import PAGE
from ...snapshot.segment.slots import Version
from ...transport.frame_codec import PAYLOAD_LIMIT
from .frames import Data, Frame, Parity, copied, decoded

THREADS = 2  # for each slot that is rebuilt
AHEAD = 2  # frames that a thread has requested

Bytes = npt.NDArray[np.uint8]


class ReadStream(Protocol):
    """Reads from one SMP, for one thread: answers arrive in the order of the requests."""

    def ask_for(self, wanted: Data | Parity) -> None:
        """Send a request without waiting for its answer."""

    def take(self, into: Bytes) -> None:
        """Wait for the next answer, and write its verified bytes to `into`, which has their length."""

    def close(self) -> None:
        """Close for good, from any thread: a thread that waits for an answer gets an error."""

    def release(self) -> None:
        """Release what the stream holds: the requesting thread has finished."""


class Reader(Protocol):
    """Reads from the SMP at a position of the plan: another node's memory over the wire, or this node's."""

    over_wire: bool

    def stream(self) -> ReadStream: ...
    def copy(self, rank: int, version: Version) -> bytes: ...
    def slot(self, rank: int, version: Version) -> bytes: ...


def fetch(segment: Segment, version: Version, token: int, holder: Reader) -> int:
    """Fetch the slot from a node that holds it. Returns the bytes read over the wire.

    Raises what the reader raises, CorruptSlotError.
    """
    frames = copied(segment.rank, version, segment.shape.data_nbytes, 0)
    return _write(segment, version, token, holder.slot(segment.rank, version), frames, {0: holder})


def decode(
    segment: Segment,
    version: Version,
    token: int,
    plan: ExchangePlan,
    lost: Collection[int],
    readers: Mapping[int, Reader],
) -> int:
    """Compute the slot from parity, without the data at the positions `lost`; `readers` read the others.

    Returns the bytes read over the wire. Raises ResumeError if more is lost than parity can replace, what the readers
    raise, CorruptSlotError.
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
        f"({'; '.join(problems) or 'the nodes that held one are lost'})"
    )


def _write(
    segment: Segment, version: Version, token: int, copy: bytes, frames: Iterator[Frame], readers: Mapping[int, Reader]
) -> int:
    """Write `frames` into a slot, verify it against the copied digests, and seal it."""
    small, table = msgpack.unpackb(copy)
    digests = np.frombuffer(table, dtype=np.uint64).copy()
    if len(digests) != segment.shape.digests:
        raise ResumeError(
            f"rank {segment.rank}: version {version} has {len(digests)} digests, this segment {segment.shape.digests}: "
            "the state has another layout"
        )
    if not any(nbytes for _, nbytes in segment.ranges):  # of a previous size: no trainer has written them
        where = f"rank {segment.rank}, version {version}"
        segment.ranges = manifest.read(manifest.split(small, where)[0], where).ranges
    index = slot_to_rebuild(segment)
    segment.dirty(index, version, token)
    filling = _Filling(segment, version, index, digests, frames, readers)
    with ThreadPoolExecutor(THREADS, "smp-rebuild") as pool:
        running = [pool.submit(filling.work) for _ in range(THREADS)]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
        finally:
            filling.stop()
    for thread in done:  # the first one to fail; others fail because of it
        thread.result()
    filling.verify_remaining()
    segment.write_small(index, small)
    segment.digests(index)[:] = digests
    segment.set_cursor(index, None)
    segment.seal(index, version, token, small, digests)
    return filling.wire_bytes


class _Filling:
    """A slot that several threads fill, and what is left to request, write and verify."""

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
        self._digests = digests
        self._frames = frames
        self._readers = readers
        self._lock = threading.Lock()
        self._stopped = False
        self._streams: list[ReadStream] = []
        self._buckets = sorted((offset, nbytes, number) for number, (offset, nbytes) in enumerate(segment.data_ranges))
        self._starts = [offset for offset, _, _ in self._buckets]
        self._missing = [nbytes for _, nbytes, _ in self._buckets]  # bytes, by index in `_buckets`
        self._verified = [False] * len(self._buckets)

    def work(self) -> None:
        """Fill frames until none is left; each thread runs it. Raises what a stream raises, CorruptSlotError."""
        streams: dict[int, ReadStream] = {}
        try:
            self._work(streams)
        finally:
            for stream in streams.values():
                stream.release()

    def _work(self, streams: dict[int, ReadStream]) -> None:
        scratch = list(np.empty((kernels.MAX_SOURCES, PAYLOAD_LIMIT), dtype=np.uint8))
        requested: deque[Frame] = deque()
        while True:
            while len(requested) < AHEAD and (frame := self._next()) is not None:
                for part in frame.parts:
                    if part.position not in streams:
                        streams[part.position] = self._stream_to(part.position)
                    streams[part.position].ask_for(part.wanted)
                requested.append(frame)
            if not requested:
                return
            frame = requested.popleft()
            faults.reach("rebuild.frame", rank=self._rank, at=frame.offset)
            _sum_parts(self._data[frame.offset : frame.offset + frame.nbytes], frame, streams, scratch)
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

    def _written(self, frame: Frame) -> list[int]:
        """Count the frame; returns the buckets, by index, that it completed."""
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
        if xxhash.xxh3_64_intdigest(self._data[offset : offset + nbytes].data) != int(self._digests[number]):
            raise CorruptSlotError(
                f"rank {self._rank}: bucket {number} of slot {self._index}, rebuilt for version {self._version}, "
                "does not match its digest"
            )
        self._verified[place] = True

    def verify_remaining(self) -> None:
        """Verify the buckets that no frame completed: those without bytes. Raises CorruptSlotError."""
        for place, done in enumerate(self._verified):
            if not done:
                self._verify(place)

    def stop(self) -> None:
        """Stop reading; threads that wait for an answer get an error."""
        with self._lock:
            self._stopped = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()


def _sum_parts(target: Bytes, frame: Frame, streams: Mapping[int, ReadStream], scratch: Sequence[Bytes]) -> None:
    """Receive the parts, in the order of their requests, and add them in `target`, as many in one pass as there
    is `scratch` for."""
    target[::PAGE].max()  # reading a page first maps it with its neighbours, at a quarter of the cost
    if frame.has_base:
        streams[frame.parts[0].position].take(target)
    elif not frame.parts:
        target.fill(0)
    added = frame.parts[frame.has_base :]
    for first in range(0, len(added), len(scratch)):
        parts = added[first : first + len(scratch)]
        sources = [buffer[: part.at + part.wanted.nbytes] for part, buffer in zip(parts, scratch, strict=False)]
        for part, source in zip(parts, sources, strict=True):
            source[: part.at] = 0
            streams[part.position].take(source[part.at :])
        overwrite = first == 0 and not frame.has_base
        kernels.combine_into((target,), sources, ([part.factor for part in parts],), overwrite=overwrite)
