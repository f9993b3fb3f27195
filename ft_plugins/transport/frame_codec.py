"""The bytes of frames: how messages and payloads lie on a connection, of whatever purpose. Sans I/O: no socket, no
thread, no clock; `framed` sends and receives them.

Invariant: a frame is delivered whole, in order and as it was sent, across any relay: its message and each unit of its
payload are units of the connection's channel (`channel`), sent without a copy unless they are encrypted. Nothing is
longer, deeper or more than its bound, nothing is read beyond a frame, nothing is unpickled.

    frame   = length of the message (4 bytes, big endian) | message, tag | units of the payload: up to UNIT bytes, tag
    message = msgpack map: text keys, at most DEPTH deep; `bytes` announces a payload

Before the handshake is over, and on a socket of this node, there are no tags.

In: messages and payloads; received bytes, written where `Decoder.space` says. Out: buffers to send; messages and
payloads; ProtocolError for anything malformed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from ..base.outside_values import shown
from ..errors import ProtocolError

if TYPE_CHECKING:  # the command line imports this module, and no ciphers
    from .channel import Opener, Sealer

HANDSHAKE_LIMIT = 4096  # bytes of one message before the peer has authenticated itself
TAG = 16  # bytes that follow each unit
FRAME_LIMIT = 1 << 20  # bytes of a message; fits a status of thousands of slots, the largest one
UNIT = 1 << 20  # bytes of a payload that have one tag: larger ones would not be faster
PAYLOAD_LIMIT = UNIT  # bytes of a payload between SMPs
DEPTH = 32  # of nested maps and lists; fingerprints are the deepest, with a few levels
_LENGTH = struct.Struct(">I")
# bounds on a message before its sender has authenticated itself: what a handshake needs, and no lists
_UNPROVEN = {"max_str_len": 1024, "max_bin_len": 64, "max_array_len": 0, "max_map_len": 8, "max_ext_len": 0}

Buffer = bytes | bytearray | memoryview
Message = dict[str, Any]
Received = tuple[Message, Buffer]  # a message and its payload


@dataclass(frozen=True)
class FrameBounds:
    """Of one end of a connection: bytes of a message that it accepts, bytes of a payload (0: `bytes` is a field like
    others), bytes of a message that it sends, and whether its peer has proved itself; before that the peer may send no
    more than a handshake."""

    message: int = FRAME_LIMIT
    payload: int = 0
    sent: int = FRAME_LIMIT
    proven: bool = True


PLAIN = FrameBounds()
HANDSHAKE = FrameBounds(HANDSHAKE_LIMIT, proven=False)


def pack(message: Message, limit: int = FRAME_LIMIT) -> bytes:
    """The bytes of a message. Raises ProtocolError if it is too large, or msgpack cannot encode it."""
    try:
        packed = msgpack.packb(message, use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # ValueError: for example a surrogate
        raise ProtocolError(f"a message cannot be packed: {error}") from error
    if len(packed) > limit:
        raise ProtocolError(f"a message of {len(packed)} bytes exceeds the limit of {limit}")
    return bytes(packed)


def unpack(packed: Buffer, proven: bool = True) -> Message:
    """The inverse of `pack`. Raises ProtocolError if it is not a map, has a key other than text, or is nested deeper
    than DEPTH; from a sender that is not `proven`, also for anything that no handshake needs."""
    try:
        bounds = {"max_ext_len": 0} if proven else _UNPROVEN
        message = msgpack.unpackb(packed, raw=False, strict_map_key=True, **bounds)
    except Exception as error:
        raise ProtocolError(f"a frame of {len(packed)} bytes is not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__} where a map was expected")
    level: list[Any] = [message]
    for _ in range(DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if not all(type(key) is str for key in one):
                    raise ProtocolError(f"a frame of {len(packed)} bytes holds a map with a key that is not text")
                one = one.values()
            inner += [each for each in one if isinstance(each, (dict, list))]
        if not inner:
            return message
        level = inner
    raise ProtocolError(f"a frame of {len(packed)} bytes is nested deeper than {DEPTH}")


def seal(
    message: Message, payload: Buffer = b"", sealer: Sealer | None = None, bounds: FrameBounds = PLAIN
) -> tuple[int, Iterator[Buffer]]:
    """A frame: its size in bytes, and its buffers, sealed one after another while they are taken. Frames are taken in
    the order in which they are sent. Raises ProtocolError if it exceeds the `bounds`, or as `pack`."""
    if len(payload) > bounds.payload:
        raise ProtocolError(f"a payload of {len(payload)} bytes exceeds the limit of {bounds.payload}")
    packed = pack({**message, "bytes": len(payload)} if payload else message, bounds.sent)
    tags = TAG * (1 + -(-len(payload) // UNIT)) if sealer else 0
    return _LENGTH.size + len(packed) + len(payload) + tags, _buffers(packed, memoryview(payload), sealer)


def _buffers(packed: bytes, payload: memoryview, sealer: Sealer | None) -> Iterator[Buffer]:
    yield _LENGTH.pack(len(packed))
    units: list[Buffer] = [packed]
    units += [payload[at : at + UNIT] for at in range(0, len(payload), UNIT)]
    for unit in units:
        yield from sealer.seal(unit) if sealer else (unit,)


class Decoder:
    """The incoming half of a connection.

    `room(message, nbytes)`, if it is set, gives the place of a payload that `message` announces, which holds unverified
    bytes after a ProtocolError. Otherwise memory is allocated for one unit after another.
    """

    def __init__(self, bounds: FrameBounds, opener: Opener | None = None) -> None:
        self.room: Callable[[Message, int], memoryview] | None = None
        self._bounds = bounds
        self._opener = opener
        self._unit: bytearray | memoryview
        self.space: list[memoryview]  # where the next bytes belong, in order; none of a later frame
        self._then: Callable[[], Received | None]
        self._tag = bytearray(TAG if opener else 0)
        self._message: Message = {}
        self._head = memoryview(bytearray(_LENGTH.size))
        self._await_length()

    @property
    def is_between(self) -> bool:
        """Whether no byte of a frame has arrived that is not complete."""
        return self._then == self._take_length and len(self.space[0]) == _LENGTH.size

    def filled(self, nbytes: int) -> Received | None:
        """So many bytes were written to `space`: the message and payload that they complete, if they do. Raises
        ProtocolError: the connection is void then."""
        drop_front(self.space, nbytes)
        while not self.space:  # an empty message completes at once
            if (frame := self._then()) is not None:
                return frame
        return None

    def end(self) -> None:
        """No more bytes will come. Raises ProtocolError inside a frame."""
        if not self.is_between:
            what = "a frame's length" if self._then == self._take_length else f"a frame of {len(self._unit)} bytes"
            what = f"a payload of {self._nbytes} bytes" if self._then == self._take_unit else what
            raise ProtocolError(f"the connection ended inside {what}")

    def _await_length(self) -> None:
        self._unit, self.space, self._then = self._head, [self._head], self._take_length

    def _await(self, unit: bytearray | memoryview, then: Callable[[], Received | None]) -> None:
        self._unit, self._then = unit, then
        self.space = [memoryview(part) for part in (unit, self._tag) if part]

    def _take_length(self) -> None:
        (length,) = _LENGTH.unpack(self._unit)
        if length > self._bounds.message:
            raise ProtocolError(f"a frame of {length} bytes was announced; the limit is {self._bounds.message}")
        self._await(bytearray(length), self._take_message)

    def _take_message(self) -> Received | None:
        self._message = unpack(self._opened(), self._bounds.proven)
        self._nbytes, self._at = 0, 0
        if self._bounds.payload and "bytes" in self._message:
            self._nbytes = nbytes = self._message["bytes"]
            if type(nbytes) is not int or not 0 <= nbytes <= self._bounds.payload:
                raise ProtocolError(
                    f"a payload of {shown(nbytes)} bytes was announced; the limit is {self._bounds.payload}"
                )
        if not self._nbytes:
            self._await_length()
            return self._message, bytearray()
        self._place = self.room(self._message, self._nbytes) if self.room else None
        self._grown = bytearray()
        self._await_unit()
        return None

    def _await_unit(self) -> None:
        size = min(UNIT, self._nbytes - self._at)
        unit = bytearray(size) if self._place is None else self._place[self._at : self._at + size]
        self._await(unit, self._take_unit)

    def _take_unit(self) -> Received | None:
        opened = self._opened()
        if self._place is None:
            self._grown += opened
        elif opened is not self._unit:
            self._place[self._at : self._at + len(opened)] = opened
        self._at += len(opened)
        if self._at < self._nbytes:
            self._await_unit()
            return None
        whole, self._place = self._grown if self._place is None else self._place, None  # it may be unmapped then
        self._await_length()
        return self._message, whole

    def _opened(self) -> Buffer:
        return self._unit if self._opener is None else self._opener.open(self._unit, bytes(self._tag))


def drop_front(parts: list[memoryview], nbytes: int) -> None:
    """Remove `nbytes` from the front of `parts`, and buffers that are empty afterwards."""
    while parts and nbytes >= len(parts[0]):
        nbytes -= len(parts.pop(0))
    if nbytes:
        parts[0] = parts[0][nbytes:]
