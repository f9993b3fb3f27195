"""Requests and replies of the rendezvous as bytes: bounded msgpack, no pickle, nothing nested deeper than needed.

    frame = length (4 bytes, big endian) | payload | tag, once both sides have proved that they know the secret

In: maps, or bytes of a peer. Out: the other one. Raises ProtocolError for whatever is no map within the bounds.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from ..errors import ProtocolError

Message = dict[str, Any]
HEAD = 4  # bytes of a frame's length
REQUEST_LIMIT = 8 << 10  # bytes; the longest one names an endpoint or two, and a reason
REPLY_LIMIT = 1 << 20  # bytes; the places of thousands of nodes
_DEPTH = 6  # reply, roster, members, place; a request has less


def pack(message: Message, limit: int) -> bytes:
    """The payload of a frame."""
    payload: bytes = msgpack.packb(message, use_bin_type=True)
    if len(payload) > limit:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {limit}")
    return payload


def head(length: int) -> bytes:
    """What goes before a payload of this length."""
    return struct.pack(">I", length)


def length(beginning: bytes | bytearray, limit: int) -> int:
    """The length that a frame's first bytes announce."""
    (found,) = struct.unpack_from(">I", beginning)
    if found > limit:
        raise ProtocolError(f"a frame of {found} bytes was announced; the limit is {limit}")
    return int(found)


def unpack(payload: bytes | bytearray | memoryview) -> Message:
    """The map in a payload."""
    try:
        message = msgpack.unpackb(payload, raw=False)
    except Exception as error:  # msgpack raises many kinds
        raise ProtocolError(f"a frame of {len(payload)} bytes is not msgpack ({type(error).__name__})") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__} where a map was expected")
    _check_depth(message)
    return message


def _check_depth(message: Any) -> None:
    level = [message]
    for _ in range(_DEPTH):
        nested = [part for part in level if isinstance(part, (dict, list))]
        level = [child for part in nested for child in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return
    if any(isinstance(part, (dict, list)) for part in level):
        raise ProtocolError(f"a message is nested deeper than {_DEPTH} levels")
