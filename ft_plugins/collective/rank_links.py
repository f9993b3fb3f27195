"""A connection to a neighbour in the tree of ranks: frames in authenticated units, without blocking.

Invariant: a frame arrives whole, in order and as it was sent (`transport.channel`). Memory is allocated for what has
arrived, not for what was announced.

    frame = unit (kind, number, bytes of the body) | units of the body
    unit  = length (4 bytes) | bytes | tag

In: frames. Out: the same at the other end; ProtocolError for anything malformed, ConnectionError at its end.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections import deque
from collections.abc import Iterator

from ..errors import ProtocolError
from ..transport.channel import TAG, Channel
from ..transport.wire import keep_alive
from .operations import Buffer, FrameKind, RankFrame

UNIT = 1 << 20  # bytes that have one tag: larger ones would not be faster
BODY_LIMIT = 1 << 30  # bytes: a payload of 64 KiB from each of 16,384 ranks
_HEADER = struct.Struct(">BQQ")
_LENGTH = struct.Struct(">I")
_PARTS = 64  # buffers in one system call
_READS = 64  # units read before other connections have their turn


class Link:
    """One connection, on a non-blocking socket. Not safe for threads."""

    def __init__(self, rank: int, connection: socket.socket, channel: Channel) -> None:
        """`rank` is the neighbour's."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a Unix socket has no such options
            keep_alive(connection)
        self.rank = rank
        self.connection = connection
        self._seal = channel.sealer.seal
        self._open = channel.opener.open
        self._out: deque[memoryview] = deque()
        self.queued = self.written = 0  # bytes
        self._wanted = _LENGTH.size  # bytes of the part that is being received
        self._part = bytearray(self._wanted)
        self._filled = 0
        self._length = False  # whether that part is a unit; else the length of one
        self._header: tuple[FrameKind, int, int] | None = None
        self._body = bytearray()

    def push(self, frame: RankFrame) -> None:
        """Queue a frame for `write`. Raises ProtocolError if it is too large."""
        nbytes = len(frame.body)
        if nbytes > BODY_LIMIT:
            raise ProtocolError(f"{nbytes} bytes for all ranks exceed the limit of {BODY_LIMIT}")
        self._push_unit(_HEADER.pack(frame.kind, frame.number, nbytes))
        body = memoryview(frame.body)
        for at in range(0, nbytes, UNIT):
            self._push_unit(body[at : at + UNIT])

    def _push_unit(self, unit: Buffer) -> None:
        sealed, tag = self._seal(unit)
        for part in (_LENGTH.pack(len(unit)), sealed, tag):
            self._out.append(memoryview(part))
            self.queued += len(part)

    @property
    def waiting(self) -> bool:
        """Whether frames wait to be written."""
        return bool(self._out)

    def write(self) -> None:
        """Write what the connection takes now. Raises OSError."""
        while self._out:
            try:
                sent = self.connection.sendmsg([*self._out][:_PARTS] if len(self._out) <= _PARTS else self._front())
            except (BlockingIOError, InterruptedError):
                return
            self.written += sent
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]

    def _front(self) -> list[memoryview]:
        return [self._out[place] for place in range(_PARTS)]

    def read(self) -> Iterator[RankFrame]:
        """The frames that have arrived. Raises ProtocolError; ConnectionError if the neighbour has closed."""
        for _ in range(2 * _READS):
            try:
                nbytes = self.connection.recv_into(memoryview(self._part)[self._filled :])
            except (BlockingIOError, InterruptedError):
                return
            if not nbytes:
                raise ConnectionResetError(errno.ECONNRESET, "it has ended")
            self._filled += nbytes
            if self._filled == self._wanted:
                frame = self._advance()
                if frame is not None:
                    yield frame

    def _advance(self) -> RankFrame | None:
        """Take the part that is complete; returns the frame that it completes."""
        part, self._filled = self._part, 0
        if not self._length:
            (length,) = _LENGTH.unpack(part)
            if not 0 < length <= UNIT:
                raise ProtocolError(f"a unit of {length} bytes was announced; the limit is {UNIT}")
            self._wanted, self._length = length + TAG, True
            self._part = bytearray(self._wanted)
            return None
        self._wanted, self._length = _LENGTH.size, False
        self._part = bytearray(self._wanted)
        unit = self._open(memoryview(part)[:-TAG], bytes(part[-TAG:]))
        if self._header is None:
            self._header = _header(unit)
        else:
            self._body += unit
        kind, number, nbytes = self._header
        if len(self._body) < nbytes:
            return None
        if len(self._body) > nbytes:
            raise ProtocolError(f"a frame of {nbytes} bytes has {len(self._body)}")
        body, self._body, self._header = self._body, bytearray(), None
        return RankFrame(kind, number, body)

    def close(self) -> None:
        """Close the connection, also for processes that have inherited it; what was written still arrives."""
        with contextlib.suppress(OSError):  # the other end is gone
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()


def _header(unit: Buffer) -> tuple[FrameKind, int, int]:
    """FrameKind, number and length in a frame's first unit. Raises ProtocolError."""
    try:
        kind, number, nbytes = _HEADER.unpack(unit)
        known = FrameKind(kind)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a frame of another rank cannot be read ({error})") from error
    if nbytes > BODY_LIMIT:
        raise ProtocolError(f"a frame of {nbytes} bytes was announced; the limit is {BODY_LIMIT}")
    return known, number, nbytes
