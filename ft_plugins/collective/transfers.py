"""Bulk data between ranks, over connections of their own that exist as long as a restore needs them.

Invariant: bytes arrive as they were sent, in authenticated units, straight into their place; what a failed transfer
leaves there must not be used. A connection carries bytes in one direction. A rank connects to those that it sends to,
and a replica set passes shares around a ring, so the connections of a rank do not grow with the set.

In: where each rank listens, a key of this incarnation. Out: filled buffers; ProtocolError for altered bytes, a lost
rank or a timeout.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ..errors import ProtocolError
from ..transport.channel import TAG, Channel
from .meeting import Door, dial
from .rank_links import UNIT

PART_BYTES = 32 << 20  # of a share, passed around at a time: bounds the memory of a restore

Bytes = npt.NDArray[np.uint8]


class _Outgoing:
    """Bytes to one rank, in units with their tags."""

    def __init__(self, connection: socket.socket, channel: Channel, data: Bytes) -> None:
        self.connection = connection
        self._seal = channel.sealer.seal
        self._view = data.data.cast("B")
        self._at = 0
        self._left: list[memoryview] = []

    def advance(self) -> bool:
        """Send what the connection takes now. Returns whether all was sent. Raises OSError."""
        while True:
            if not self._left:
                if self._at == len(self._view):
                    return True
                unit = self._view[self._at : self._at + UNIT]
                self._at += len(unit)
                self._left = [memoryview(part) for part in self._seal(unit)]
            try:
                sent = self.connection.sendmsg(self._left)
            except (BlockingIOError, InterruptedError):
                return False
            while self._left and sent >= len(self._left[0]):
                sent -= len(self._left.pop(0))
            if sent:
                self._left[0] = self._left[0][sent:]


class _Incoming:
    """Bytes from one rank, in units with their tags."""

    def __init__(self, connection: socket.socket, channel: Channel, into: Bytes) -> None:
        self.connection = connection
        self._open = channel.opener.open
        self._view = into.data.cast("B")
        self._at = 0
        self._tag = bytearray(TAG)
        self._left: list[memoryview] = []

    def advance(self) -> bool:
        """Receive what has arrived. Returns whether all has. Raises ProtocolError, OSError."""
        while True:
            unit = self._view[self._at : self._at + UNIT]
            if not unit:
                return True
            if not self._left:
                self._left = [unit, memoryview(self._tag)]
            try:
                received = self.connection.recvmsg_into(self._left)[0]
            except (BlockingIOError, InterruptedError):
                return False
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, "it has ended")
            while self._left and received >= len(self._left[0]):
                received -= len(self._left.pop(0))
            if received:
                self._left[0] = self._left[0][received:]
            if not self._left:
                opened = self._open(unit, bytes(self._tag))
                if opened is not unit:
                    unit[:] = opened
                self._at += len(unit)


class Transfers:
    """Connections of one rank to others, until the end of a `with` block."""

    def __init__(
        self, rank: int, endpoints: Sequence[tuple[str, int]], door: Door | None, key: bytes, seconds: float
    ) -> None:
        """`endpoints`: where each rank listens; `door`: where this one does, for those that know `key`; None in a job
        of one rank. `seconds` bounds each wait."""
        self._rank = rank
        self._endpoints = endpoints
        self._door = door
        self._key = key
        self._seconds = seconds
        self._to: dict[int, tuple[socket.socket, Channel]] = {}
        self._from: dict[int, tuple[socket.socket, Channel]] = {}

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._door is not None:
            self._door.close()
        for connection, _ in (*self._to.values(), *self._from.values()):
            connection.close()

    def swap(self, send: Mapping[int, Bytes], receive: Mapping[int, Bytes]) -> None:
        """Send bytes to ranks and receive from ranks, by rank; returns when all of `receive` is filled.

        Both ranks of a pair call, in the same order and with equal sizes; no other rank takes part. Raises
        ProtocolError.
        """
        until = time.monotonic() + self._seconds
        moving: dict[int, tuple[int, _Outgoing | _Incoming, int]] = {}  # by descriptor: rank, bytes, event
        for rank, data in sorted(send.items()):
            connection, channel = self._connected(rank, until)
            moving[connection.fileno()] = rank, _Outgoing(connection, channel, data), select.POLLOUT
        for rank, into in sorted(receive.items()):
            connection, channel = self._accepted(rank, until)
            moving[connection.fileno()] = rank, _Incoming(connection, channel, into), select.POLLIN
        poller = select.poll()
        for descriptor, (_, _, event) in moving.items():
            poller.register(descriptor, event)
        while moving:
            ready = poller.poll(1000 * self._seconds)
            if not ready:
                ranks = ", ".join(str(rank) for rank, _, _ in moving.values())
                raise ProtocolError(f"rank {self._rank}: no byte passed to or from rank {ranks} in {self._seconds:g} s")
            for descriptor, _ in ready:
                rank, way, _ = moving[descriptor]
                if self._advance(rank, way):
                    poller.unregister(descriptor)
                    del moving[descriptor]

    def _advance(self, rank: int, way: _Outgoing | _Incoming) -> bool:
        try:
            return way.advance()
        except OSError as error:
            raise ProtocolError(f"rank {self._rank}: rank {rank} was lost during a transfer ({error})") from error
        except ProtocolError as error:
            raise ProtocolError(
                f"rank {self._rank}: rejected data of rank {rank}: {error}. Another process takes part in the job's "
                "traffic; make sure that only the job's nodes reach its ports, then start the job again"
            ) from error

    def exchange_shares(
        self, replicas: Sequence[int], shares: Sequence[tuple[int, int]], own: Bytes
    ) -> Iterator[tuple[int, Bytes]]:
        """All-gather a replica set's byte stream from its members' shares, in parts of bounded size.

        `shares[i]` is the range (start, stop) that `replicas[i]` holds, `own` this rank's bytes. Yields (offset in the
        stream, bytes) until all of it has been received; the bytes are valid until the next one. Members of the set
        call together. Raises ProtocolError.
        """
        count, place = len(replicas), list(replicas).index(self._rank)
        following, previous = replicas[(place + 1) % count], replicas[place - 1]
        for at in range(0, max(stop - start for start, stop in shares), PART_BYTES):
            sizes = [max(0, min(PART_BYTES, stop - start - at)) for start, stop in shares]
            piece = np.ascontiguousarray(own[at : at + sizes[place]])
            if sizes[place]:
                yield shares[place][0] + at, piece
            for step in range(1, count):
                source = (place - step) % count  # whose piece arrives now; that of the one after it is passed on
                arriving = np.empty(sizes[source], dtype=np.uint8)
                self.swap(
                    {following: piece} if len(piece) else {}, {previous: arriving} if len(arriving) else {}
                )  # fmt: skip
                if len(arriving):
                    yield shares[source][0] + at, arriving
                piece = arriving

    def _connected(self, rank: int, until: float) -> tuple[socket.socket, Channel]:
        assert self._door is not None
        if rank not in self._to:
            where, me = self._endpoints[rank], self._door.me
            connection, _, channel, _ = dial(where, self._key, me, rank, until, lambda connection: None)
            self._to[rank] = _ready(connection), channel
        return self._to[rank]

    def _accepted(self, rank: int, until: float) -> tuple[socket.socket, Channel]:
        assert self._door is not None
        while rank not in self._from:
            connection, sender, channel = self._door.next(until, set(range(len(self._endpoints))) - {self._rank})
            if (before := self._from.get(sender)) is not None:  # cut off before it had sent anything
                before[0].close()
            self._from[sender] = _ready(connection), channel
        return self._from[rank]


def _ready(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
