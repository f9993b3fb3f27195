"""A connection to a neighbour in the tree of ranks.

In: frames of `operations`. Out: the same at the other end; ProtocolError for anything malformed, ConnectionError at its
end.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from ..errors import ProtocolError
from ..transport.channel import Channel
from ..transport.frame_codec import FrameBounds
from ..transport.framed import Link
from .operations import FrameKind, RankFrame

BODY_LIMIT = 1 << 30  # bytes: a payload of 64 KiB from each of 16,384 ranks
_BOUNDS = FrameBounds(64, BODY_LIMIT)
_KINDS = frozenset(FrameKind)


class RankLink(Link):
    """One connection, on a non-blocking socket. Not safe for threads."""

    def __init__(self, rank: int, connection: socket.socket, channel: Channel) -> None:
        """`rank` is the neighbour's."""
        super().__init__(connection, channel, _BOUNDS)
        self.rank = rank

    def send(self, frame: RankFrame) -> None:
        """Queue a frame for `write`. Raises ProtocolError if it is too large."""
        self.push({"kind": int(frame.kind), "number": frame.number}, frame.body)

    def frames(self) -> Iterator[RankFrame]:
        """Those that have arrived. Raises ProtocolError; ConnectionError if the neighbour has closed."""
        for message, body in self.read():
            kind, number = message.get("kind"), message.get("number")
            if type(kind) is not int or kind not in _KINDS or type(number) is not int or number < 0:
                raise ProtocolError("a frame of another rank cannot be read")
            yield RankFrame(FrameKind(kind), number, body)
