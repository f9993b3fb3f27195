"""Read slots, copies and parity for a rebuild: from this node's memory, or from another node's over the wire.

Invariant: bytes are read only from complete versions. Bytes from the wire have passed the connection's integrity check
when `take` returns.

In: where to read. Out: bytes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from ...errors import ProtocolError, SegmentError
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import SlotState, Version
from ...transport import protocol
from ...transport.calls import BOUNDS, Bytes, Caller, Peer
from ...transport.channel import Party
from ...transport.frame_codec import Message
from ..resize.previous_segments import PreviousSegments
from .exchange import descriptor_of, parity_slot_of, slot_of
from .frames import Data, Parity
from .parity_store import ParityStore


class LocalReader:
    """This node's own memory, as `rebuild.Reader`."""

    over_wire = False

    def __init__(
        self, segments: Mapping[int, Segment], previous: PreviousSegments, store: Callable[[], ParityStore | None]
    ) -> None:
        """`previous` is searched for versions that `segments` do not have. A version is of one size of the job."""
        self._segments = segments
        self._previous = previous
        self._store = store
        # the slot read last, which is tried first; the weak reference keeps no mapping of a segment that has left
        self._last: tuple[int, Version, weakref.ref[Segment], int] | None = None

    def _parity(self) -> ParityStore:
        store = self._store()
        if store is None:
            raise SegmentError("this node stores no parity")
        return store

    def read(self, wanted: Data | Parity) -> Bytes:
        """A view of bytes of a slot's data, or of a parity block, whose digests are verified."""
        if isinstance(wanted, Parity):
            return self._parity().read(wanted.version, wanted.key, wanted.at, wanted.nbytes)
        segment, index = self._slot(wanted.rank, wanted.version)
        at, room = wanted.at, segment.shape.data_nbytes
        if at >= room and wanted.nbytes:  # parity that the rank computed
            at, room, index = at - room, segment.shape.parity_nbytes, parity_slot_of(segment, wanted.version)
        if at + wanted.nbytes > room:
            raise ProtocolError(f"{wanted.nbytes} bytes at {wanted.at} are not in the slots of rank {wanted.rank}")
        return segment.data(index)[at : at + wanted.nbytes]

    def _slot(self, rank: int, version: Version) -> tuple[Segment, int]:
        """The slot that holds `version` CLEAN. Reading a slot's header costs a digest of its table and small state.

        Raises SegmentError, CorruptSlotError.
        """
        if self._last is not None and self._last[:2] == (rank, version):
            segment, known = self._last[2](), self._last[3]
            slot = segment.slot(known) if segment is not None else None
            if segment is not None and slot and slot.version == version and slot.state is SlotState.CLEAN:
                return segment, known
        own = self._segments.get(rank)
        try:
            if own is None:
                raise SegmentError(f"rank {rank} has no segment on this node")
            place = own, slot_of(own, version)
        except SegmentError:
            previous = self._previous.find(rank, version)
            if previous is None:
                raise
            place = previous, slot_of(previous, version)
        self._last = (rank, version, weakref.ref(place[0]), place[1])
        return place

    def copy(self, rank: int, version: Version) -> bytes:
        """The copy of another node's rank that this node stores."""
        return self._parity().copy(version, rank)

    def slot(self, rank: int, version: Version) -> bytes:
        """Small state and digest table of a rank of this node."""
        return descriptor_of(self._slot(rank, version)[0], version)

    def stream(self) -> _LocalStream:
        """A stream for one thread that rebuilds."""
        return _LocalStream(self)


class _LocalStream:
    """A `rebuild.ReadStream` of this node's own memory."""

    def __init__(self, memory: LocalReader) -> None:
        self._memory = memory
        self._requested: deque[Data | Parity] = deque()

    def ask_for(self, wanted: Data | Parity) -> None:
        self._requested.append(wanted)

    def take(self, into: Bytes) -> None:
        into[:] = self._memory.read(self._requested.popleft())

    def close(self) -> None:
        """There is no connection to close."""

    def release(self) -> None:
        self._requested.clear()


class RemoteReader:
    """Another node's memory, as `rebuild.Reader`."""

    over_wire = True

    def __init__(self, where: tuple[str, int], me: Party, secret: bytes, timeout: float) -> None:
        self._peer = (where, me, secret, timeout)

    def copy(self, rank: int, version: Version) -> bytes:
        """The copy of another node's rank that that node stores."""
        return self._whole("copy", rank, version)

    def slot(self, rank: int, version: Version) -> bytes:
        """Small state and digest table of a rank of that node."""
        return self._whole("slot", rank, version)

    def _whole(self, what: str, rank: int, version: Version) -> bytes:
        received = bytearray()
        fields: dict[str, Any] = {"what": what, "rank": rank, "version": protocol.packed(version)}
        with closing(Peer(*self._peer)) as peer:
            while True:
                reply, part = peer.ask("read", offset=len(received), **fields)
                received += part.tobytes()
                if len(received) >= reply["total"] or not len(part):
                    return bytes(received)

    def stream(self) -> PipelinedPeer:
        """A stream for one thread that rebuilds."""
        return PipelinedPeer(*self._peer)


class PipelinedPeer(Caller):
    """A connection with several requests in flight: a `rebuild.ReadStream`, for one thread except for `close`."""

    def __init__(self, where: tuple[str, int], me: Party, secret: bytes, timeout: float) -> None:
        super().__init__(where, me, secret, timeout, bounds=BOUNDS)

    def release(self) -> None:
        self.drop()

    def ask_for(self, wanted: Data | Parity) -> None:
        """Send a request to read. Raises ProtocolError."""
        fields: dict[str, Any] = {"version": protocol.packed(wanted.version), "at": wanted.at, "nbytes": wanted.nbytes}
        if isinstance(wanted, Parity):
            fields |= {"what": "parity", "key": list(wanted.key)}
        else:
            fields |= {"what": "data", "rank": wanted.rank}
        with self._named():
            self.send({"do": "read", **fields})

    def take(self, into: Bytes) -> None:
        """Receive the next reply's payload. Raises ProtocolError, also if it was changed on the way, or the error of
        the peer's refusal."""

        def place(message: Message, nbytes: int) -> memoryview:
            if nbytes != len(into):
                raise ProtocolError(f"expected {len(into)} bytes, found {nbytes}")
            return into.data

        with self._named():
            reply, payload = self.receive(place)
            if reply.get("ok") is True and len(payload) != len(into):
                raise ProtocolError(f"expected {len(into)} bytes, found {len(payload)}")
        protocol.raise_refusal(reply)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the peer in errors of the connection, and close it: requests in flight are void."""
        try:
            yield
        except (OSError, ProtocolError) as error:
            self.close()
            host, port = self.endpoint
            raise ProtocolError(f"the SMP at {host}:{port} cannot be read: {self.why(error)}") from error
