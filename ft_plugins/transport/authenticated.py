"""A connection between two SMPs that have authenticated each other: frames of a message and a payload.

Invariant: a frame is delivered whole, in order and as it was sent, across any relay: each message and each payload is a
unit of the connection's channel (`channel`), sent without a copy unless it is encrypted. No frame is longer than its
bound, nothing is unpickled.

    frame = length of the message (4 bytes) | message, tag | payload, tag (if the message announces its `bytes`)

In: messages of `protocol`, payloads of bytes. Out: the same at the other end; ProtocolError for anything malformed.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ProtocolError
from . import protocol
from .channel import TAG, Buffer, Channel

PAYLOAD_LIMIT = 1 << 20  # bytes of one frame

Bytes = npt.NDArray[np.uint8]
_EMPTY: Bytes = np.empty(0, dtype=np.uint8)


class AuthenticatedConnection:
    """A connection after the handshake. One thread sends at a time, and one receives."""

    def __init__(self, connection: socket.socket, channel: Channel, seconds: float = math.inf) -> None:
        """`seconds` bounds each part of a frame, if the socket blocks for no longer than that; by default only the
        socket's timeout does."""
        self.channel = channel
        self._connection = connection
        self._seconds = seconds
        self._seal = channel.sealer.seal
        self._open = channel.opener.open

    def send(self, message: dict[str, Any], payload: Bytes | None = None) -> None:
        """Write one frame. Raises ProtocolError if message or payload exceed their limits, OSError."""
        nbytes = 0 if payload is None else len(payload)
        if nbytes > PAYLOAD_LIMIT:
            raise ProtocolError(f"a payload of {nbytes} bytes exceeds the limit of {PAYLOAD_LIMIT}")
        unit = protocol.pack({**message, "bytes": nbytes} if nbytes else message)
        parts: list[Buffer] = [struct.pack(">I", len(unit)), *self._seal(unit)]
        if payload is not None and nbytes:
            parts += self._seal(payload.data)
        left = [memoryview(part) for part in parts]
        deadline = time.monotonic() + self._seconds
        while left:
            _drop_front(left, self._connection.sendmsg(left))
            _check_time(left, deadline, self._seconds)

    def receive(self) -> tuple[dict[str, Any], Bytes] | None:
        """Read one frame with its payload; None if the peer has closed between frames. Raises ProtocolError,
        OSError."""
        message = self.message()
        if message is None or "bytes" not in message:
            return None if message is None else (message, _EMPTY)
        payload = np.empty(protocol.number(message, "bytes", PAYLOAD_LIMIT + 1), dtype=np.uint8)
        self.payload(payload)
        return message, payload

    def message(self) -> dict[str, Any] | None:
        """Read the message of a frame. If it announces a payload, that has to be read next. Otherwise as `receive`."""
        head = bytearray(4)
        if not (received := _fill(self._connection, self._seconds, head)):
            return None
        if received < len(head):
            raise ProtocolError("the connection ended inside a frame's length")
        length = protocol.announced(head, protocol.FRAME_LIMIT)
        unit, tag = bytearray(length), bytearray(TAG)
        if _fill(self._connection, self._seconds, unit, tag) < length + TAG:
            raise ProtocolError(f"the connection ended inside a frame of {length} bytes")
        return protocol.unpack(self._open(unit, bytes(tag)))

    def payload(self, into: Bytes) -> None:
        """Read a payload directly into `into`, which holds unverified bytes after a ProtocolError."""
        view, tag = into.data, bytearray(TAG)
        if (received := _fill(self._connection, self._seconds, view, tag)) < len(into) + TAG:
            raise ProtocolError(f"the connection ended after {received} of {len(into)} bytes of a payload and its tag")
        opened = self._open(view, bytes(tag))
        if opened is not view:
            into[:] = np.frombuffer(opened, dtype=np.uint8)


def _fill(connection: socket.socket, seconds: float, *parts: bytearray | memoryview) -> int:
    """Receive until `parts` are full, in order. Returns the bytes received, fewer if the peer closes. Raises
    OSError."""
    left, received = [memoryview(part) for part in parts], 0
    deadline = time.monotonic() + seconds
    while left:
        nbytes = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if not nbytes:
            break
        received += nbytes
        _drop_front(left, nbytes)
        _check_time(left, deadline, seconds)
    return received


def _check_time(left: list[memoryview], deadline: float, seconds: float) -> None:
    """Raises TimeoutError if parts are left after the deadline."""
    if left and time.monotonic() >= deadline:
        raise TimeoutError(f"a part of a frame did not pass within {seconds:g} s")


def limit_in_kernel(connection: socket.socket, seconds: float) -> None:
    """Have each wait of a blocking socket end after `seconds`, with BlockingIOError if no byte has passed. Unlike the
    timeout of a Python socket, this costs no additional system calls."""
    whole, micros = divmod(math.ceil(1e6 * seconds), 1_000_000)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, micros))


def _drop_front(parts: list[memoryview], nbytes: int) -> None:
    """Remove `nbytes` from the front of `parts`, and buffers that are empty afterwards."""
    while parts and nbytes >= len(parts[0]):
        nbytes -= len(parts.pop(0))
    if nbytes:
        parts[0] = parts[0][nbytes:]
