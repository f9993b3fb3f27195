"""Send and receive frames, whose bytes `frame_codec` lays out: on a socket that blocks, and on one in a selector.

Invariant: no wait is longer, and no memory more, than the bounds say, whatever the peer does. Nothing is read beyond a
frame, so a connection can be handed on between two of them.

In: a connected socket; messages and payloads. Out: the same at the other end; ProtocolError for anything malformed,
OSError once the connection has ended.
"""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from .frame_codec import PLAIN, Buffer, Decoder, FrameBounds, Message, Received, drop_front, seal

if TYPE_CHECKING:
    from .channel import Channel

PART_SECONDS = 120.0  # for a length, message or unit: a reader may wait for other nodes between two replies
_READS = 128  # parts of frames that a link reads before others have their turn
_PARTS, _LARGE = 64, 1 << 16  # buffers in one system call; bytes of one that is worth a call of its own
# kernel probes on an idle connection: seconds before the first, seconds between two, number
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_MOST_UNREAD = 2e6  # seconds; in milliseconds, the kernel has 31 bits for it


class EndedError(ConnectionResetError):
    """The peer has closed the connection."""


class Framed:
    """One end of a connection; without a `channel` nothing is authenticated, as in a handshake and within a node."""

    def __init__(self, connection: socket.socket, channel: Channel | None = None, bounds: FrameBounds = PLAIN) -> None:
        self.connection = connection
        self.protect(channel, bounds)

    def protect(self, channel: Channel | None, bounds: FrameBounds) -> None:
        """From now on, the connection has this channel and these bounds."""
        self.decoder = Decoder(bounds, channel.opener if channel else None)
        self._sealer = channel.sealer if channel else None
        self._bounds = bounds


class FramedSocket(Framed):
    """A connection that blocks. One thread sends at a time, and one receives."""

    seconds = math.inf  # for each part of a frame, if the socket blocks for no longer than that

    def send(self, message: Message, payload: Buffer = b"") -> None:
        """Write one frame. Raises ProtocolError if message or payload exceed their bounds, OSError."""
        _, buffers = seal(message, payload, self._sealer, self._bounds)
        left, late = [memoryview(part) for part in buffers], time.monotonic() + self.seconds
        while left:
            drop_front(left, self.connection.sendmsg(left))
            self._check_time(left, late)

    def receive(self, until: float | None = None) -> Received | None:
        """Read one frame; None if the peer has closed between frames. `until`: the deadline (monotonic) for all of it;
        None: the socket's own timeout bounds each wait. Raises ProtocolError, OSError."""
        while True:
            part, late = self.decoder.space, time.monotonic() + self.seconds
            if not part:
                raise ProtocolError("an earlier frame was given up")
            while part:
                if until is not None:
                    if (left := until - time.monotonic()) <= 0:
                        raise TimeoutError("timed out")
                    self.connection.settimeout(left)
                nbytes = self.connection.recvmsg_into(part, 0, socket.MSG_WAITALL)[0]
                if not nbytes:
                    self.decoder.end()
                    return None
                if (received := self.decoder.filled(nbytes)) is not None:
                    return received
                self._check_time(part, late)

    def _check_time(self, left: list[memoryview], late: float) -> None:
        if left and time.monotonic() >= late:
            raise TimeoutError(f"a part of a frame did not pass within {self.seconds:g} s")


class Link(Framed):
    """A connection that does not block. For one thread."""

    def __init__(
        self,
        connection: socket.socket,
        channel: Channel | None = None,
        bounds: FrameBounds = PLAIN,
        unread: float = PART_SECONDS,
    ) -> None:
        """`unread`: for so many seconds the peer may read nothing of what was sent."""
        super().__init__(connection, channel, bounds)
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a Unix socket has no such options
            keep_alive(connection, unread)
        self.queued = self.written = 0  # bytes
        self._frames: deque[Iterator[Buffer]] = deque()
        self._left: list[memoryview] = []  # of the first one

    def push(self, message: Message, payload: Buffer = b"") -> None:
        """Queue a frame for `write`. Raises ProtocolError."""
        nbytes, buffers = seal(message, payload, self._sealer, self._bounds)
        self.queued += nbytes
        self._frames.append(buffers)

    @property
    def waiting(self) -> int:
        """Bytes of frames that the connection has not taken."""
        return self.queued - self.written

    def write(self) -> None:
        """Write what the connection takes now. Raises OSError."""
        while self.waiting:
            # a unit is sealed just before it is sent, while it is in the processor's cache
            while self._frames and len(self._left) < _PARTS and not (self._left and len(self._left[-1]) >= _LARGE):
                if (part := next(self._frames[0], None)) is None:
                    self._frames.popleft()
                elif part:
                    self._left.append(memoryview(part))
            try:
                sent = self.connection.sendmsg(self._left)
            except (BlockingIOError, InterruptedError):
                return
            self.written += sent
            drop_front(self._left, sent)

    def read(self) -> Iterator[Received]:
        """The frames that have arrived. Raises ProtocolError; EndedError, OSError."""
        for _ in range(_READS):
            try:
                nbytes = self.connection.recvmsg_into(self.decoder.space)[0]
            except (BlockingIOError, InterruptedError):
                return
            if not nbytes:  # also inside a frame: its process has ended
                raise EndedError(errno.ECONNRESET, "it has ended")
            if (received := self.decoder.filled(nbytes)) is not None:
                yield received

    def close(self) -> None:
        """Close the connection, also for processes that have inherited it; what was written still arrives."""
        with contextlib.suppress(OSError):  # the other end is gone
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()


def keep_alive(connection: socket.socket, unread: float = PART_SECONDS) -> None:
    """Have the kernel send small messages at once, and detect when the peer of an idle connection is gone, or has read
    nothing for `unread` seconds. Raises OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_KEEPALIVE, "TCP_USER_TIMEOUT": int(1000 * min(unread, _MOST_UNREAD))}.items():
        if (option := getattr(socket, name, None)) is not None:  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def limit_in_kernel(connection: socket.socket, seconds: float) -> None:
    """Have each wait of a blocking socket end after `seconds`, with BlockingIOError if no byte has passed. Unlike the
    timeout of a Python socket, this costs no additional system calls."""
    whole, micros = divmod(math.ceil(1e6 * seconds), 1_000_000)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, micros))


def close_connection(connection: socket.socket) -> None:
    """End a connection, in forked processes too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
