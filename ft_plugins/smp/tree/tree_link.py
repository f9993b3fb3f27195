"""One connection of the tree, after its handshake: frames that are sent and received without blocking.

Invariant: a frame is authenticated as on any connection between SMPs (`authenticated`), without payload. Memory is
allocated for bytes that have arrived; a peer that reads nothing costs at most _WAITING_LIMIT bytes.

In: a connected socket with its channel. Out: messages, maps of plain values.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ProtocolError
from ...transport import protocol
from ...transport.channel import TAG, Channel
from .tree_messages import MESSAGE_LIMIT

_WAITING_LIMIT = 4 * MESSAGE_LIMIT
_PART = 1 << 16


class TreeLink:
    """A connection to the SMP at `position`. For one thread."""

    def __init__(
        self, position: int, connection: socket.socket, channel: Channel, ended: Callable[[], None] = lambda: None
    ) -> None:
        """`ended` is called once it is closed."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # not TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.position = position
        self.connection = connection
        self.node = channel.node
        self.sent_messages = self.sent_bytes = 0
        self._channel = channel
        self._ended = ended
        self._received = bytearray()
        self._waiting = bytearray()
        self._closed = False

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have arrived, and whether the peer has closed. Raises ProtocolError, OSError."""
        try:
            part = self.connection.recv(_PART)
        except BlockingIOError:
            return [], False
        self._received += part
        return self._messages(), not part

    def _messages(self) -> list[dict[str, Any]]:
        messages, at = [], 0
        received = self._received
        while len(received) - at >= 4:
            length = protocol.announced(received[at : at + 4], MESSAGE_LIMIT)
            end = at + 4 + length + TAG
            if len(received) < end:
                break
            unit, tag = received[at + 4 : at + 4 + length], bytes(received[end - TAG : end])
            messages.append(protocol.unpack(self._channel.opener.open(unit, tag)))
            at = end
        del received[:at]
        return messages

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or keep what the connection does not take now. Raises ProtocolError, OSError."""
        unit = protocol.pack(dict(message))
        if len(unit) > MESSAGE_LIMIT or len(self._waiting) > _WAITING_LIMIT:
            raise ProtocolError(f"{len(unit)} bytes for a peer that has not read {len(self._waiting)}")
        body, tag = self._channel.sealer.seal(unit)
        self.sent_messages += 1
        self._waiting += b"".join((struct.pack(">I", len(unit)), body, tag))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the connection takes it. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                sent = self.connection.send(self._waiting)
                self.sent_bytes += sent
                del self._waiting[:sent]

    @property
    def waits(self) -> bool:
        """Whether there are bytes that the connection has not taken yet."""
        return bool(self._waiting)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            self.connection.close()
            self._ended()
