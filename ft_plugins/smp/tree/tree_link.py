"""One connection of the tree, after its handshake.

Invariant: a frame has no payload. A peer that reads nothing costs at most _WAITING_LIMIT bytes.

In: a connected socket with its channel. Out: messages, maps of plain values.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ProtocolError
from ...transport.channel import Channel
from ...transport.frame_codec import FrameBounds
from ...transport.framed import Link
from .tree_messages import MESSAGE_LIMIT

_WAITING_LIMIT = 4 * MESSAGE_LIMIT
_BOUNDS = FrameBounds(MESSAGE_LIMIT, sent=MESSAGE_LIMIT)


class TreeLink(Link):
    """A connection to the SMP at `position`. For one thread."""

    def __init__(
        self, position: int, connection: socket.socket, channel: Channel, ended: Callable[[], None] = lambda: None
    ) -> None:
        """`ended` is called once it is closed."""
        super().__init__(connection, channel, _BOUNDS)
        self.position = position
        self.node = channel.node
        self.sent_messages = 0
        self._ended: Callable[[], None] | None = ended

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or keep what the connection does not take now. Raises ProtocolError, OSError."""
        if self.waiting > _WAITING_LIMIT:
            raise ProtocolError(f"its peer has not read {self.waiting} bytes")
        self.push(dict(message))
        self.sent_messages += 1
        self.write()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self.connection.close()
            ended()
