"""Messages between trainers, launcher, command line and the SMP of their node.

Invariant: bounded frames of msgpack over a Unix socket that only its owner can open (0600, in a 0700 directory, the
peer's uid checked with the kernel). No pickle. A malformed frame closes its connection, with an event. `requests`
parses the messages.

    frame   = length (4 bytes, big endian, at most FRAME_LIMIT) | msgpack map: text keys, at most DEPTH deep
    request = {"do": name, ...}      reply = {"ok": true, ...} or {"ok": false, "error": class name, "message": text}
"""

from __future__ import annotations

import os
import socket
import struct
import time
import traceback
from pathlib import Path
from typing import Any

import msgpack

from .. import errors
from ..base.outside_values import Unfit, shown
from ..errors import FtError, ProtocolError, printable
from ..snapshot.segment.slots import Version

FRAME_LIMIT = 1 << 20  # bytes; fits a status of thousands of slots, the largest message
DEPTH = 32  # of nested maps and lists; fingerprints are the deepest, with a few levels
TEXT_LIMIT = 4000  # characters of a text from a peer that is forwarded
_NAME_LIMIT = 60  # characters of a name from a peer
# bounds on a frame before its sender has authenticated itself: what a handshake needs, and no lists
_HANDSHAKE = {"max_str_len": 1024, "max_bin_len": 64, "max_array_len": 0, "max_map_len": 8, "max_ext_len": 0}
# in the run directory: alarms by topic; the lowest rank of the node prints them
ALARM = "alarm.json"


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Write one frame. Raises ProtocolError if it is too large, or msgpack cannot encode it."""
    payload = pack(message)
    connection.sendall(struct.pack(">I", len(payload)) + payload)


def pack(message: dict[str, Any]) -> bytes:
    """The content of a frame. Raises ProtocolError if it is too large, or msgpack cannot encode it."""
    try:
        payload = msgpack.packb(message, use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # ValueError: for example a surrogate
        raise ProtocolError(f"a message cannot be packed: {legible(error)}") from error
    if len(payload) > FRAME_LIMIT:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {FRAME_LIMIT}")
    return bytes(payload)


def receive(connection: socket.socket, until: float | None = None, limit: int = FRAME_LIMIT) -> dict[str, Any] | None:
    """Read one frame; None if the peer has closed between frames. Raises ProtocolError for anything else.

    `until` is the deadline (monotonic) for the whole frame; TimeoutError if it is missed. None: the connection's own
    timeout bounds each wait. `limit` is in bytes; memory is allocated for bytes that have arrived, not for the
    announced length.
    """
    head = _read(connection, 4, until)
    if not head:
        return None
    length = announced(head, limit)
    payload = _read(connection, length, until)
    if payload is None or len(payload) < length:
        raise ProtocolError(f"the connection ended inside a frame of {length} bytes")
    return unpack(payload, proven=limit == FRAME_LIMIT)


def announced(head: bytes | bytearray, limit: int) -> int:
    """The length in the first four bytes of a frame. Raises ProtocolError if it exceeds `limit`."""
    length = int.from_bytes(head, "big")
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes was announced; the limit is {limit}")
    return length


def unpack(payload: bytes | bytearray | memoryview, proven: bool = True) -> dict[str, Any]:
    """The message in a frame. Raises ProtocolError if it is not a map, has a key other than text, or is nested deeper
    than DEPTH; from a sender that is not `proven`, also for anything that no handshake needs."""
    try:
        bounds = {"max_ext_len": 0} if proven else _HANDSHAKE
        message = msgpack.unpackb(payload, raw=False, strict_map_key=True, **bounds)
    except Exception as error:
        raise ProtocolError(f"a frame of {len(payload)} bytes is not msgpack: {legible(error)}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__} where a map was expected")
    level: list[Any] = [message]
    for _ in range(DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if not all(type(key) is str for key in one):
                    raise ProtocolError(f"a frame of {len(payload)} bytes holds a map with a key that is not text")
                one = one.values()
            inner += [each for each in one if isinstance(each, (dict, list))]
        if not inner:
            return message
        level = inner
    raise ProtocolError(f"a frame of {len(payload)} bytes is nested deeper than {DEPTH}")


def _read(connection: socket.socket, length: int, until: float | None) -> bytes | None:
    """Read `length` bytes, fewer if the peer closes; None if it closes before the first."""
    received = bytearray()
    while len(received) < length:
        if until is not None:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        part = connection.recv(min(length - len(received), 1 << 16))
        if not part:
            break
        received += part
    if received and len(received) < length and length == 4:
        raise ProtocolError("the connection ended inside a frame's length")
    return bytes(received) if received or length == 0 else None


def refusal(error: FtError) -> dict[str, Any]:
    """The reply that carries `error` to the peer."""
    return {"ok": False, "error": type(error).__name__, "message": legible(error)}


def raise_refusal(reply: dict[str, Any]) -> None:
    """Raise the error in a reply, if there is one."""
    if reply.get("ok") is True:
        return
    kind = getattr(errors, str(reply.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, FtError)):
        kind = ProtocolError
    raise kind(legible(reply.get("message", "the SMP refused without a reason")))


def unexpected(error: Exception) -> ProtocolError:
    """An unexpected error as one of this package: its class, and the place in the code.

    So bad input costs one line in an event, which is enough to find the cause.
    """
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({Path(each.filename).name}:{each.lineno})" for each in last)
    return ProtocolError(f"{type(error).__name__}: {legible(error, 200)}{place}")


def legible(text: object, limit: int = TEXT_LIMIT) -> str:
    """`text` for a log: at most `limit` characters, control characters escaped."""
    whole = str(text)
    return printable(whole if len(whole) <= limit else f"{whole[:limit]}...")


def check_peer(connection: socket.socket) -> None:
    """Raises ProtocolError unless the peer runs as this process's user."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.getuid():
        raise ProtocolError(f"rejected connection from uid {uid}; only uid {os.getuid()} is allowed")


def number(message: dict[str, Any], name: str, limit: int = 1 << 63) -> int:
    """An integer field of a message, from 0 to `limit` - 1. Raises ProtocolError for anything else."""
    value = message.get(name)
    if type(value) is not int or not 0 <= value < limit:
        request = legible(message.get("do"), _NAME_LIMIT)
        raise ProtocolError(f"{request}: field '{name}' should be from 0 to {limit - 1}, found {shown(value)}")
    return value


def packed(version: Version | None) -> list[int] | None:
    """A version as plain values, for a message or a file."""
    return [version.lineage, version.iteration] if version is not None else None


def version_of(value: Any) -> Version:
    """The inverse of `packed` for a version. Raises Unfit."""
    if not (isinstance(value, list) and len(value) == 2 and all(type(p) is int and 0 <= p < 1 << 63 for p in value)):
        raise Unfit("expected a lineage and an iteration")
    return Version(*value)


def maybe_version(value: Any) -> Version | None:
    """The inverse of `packed`. Raises Unfit."""
    return None if value is None else version_of(value)
