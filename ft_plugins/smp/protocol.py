"""Messages between trainers, launcher, command line and the SMP of their node.

Invariant: bounded frames of msgpack over a Unix socket that only its owner can open (0600, in a 0700 directory, the
peer's uid checked by the kernel's word). No pickle; a malformed frame is answered by a close and an event.

    frame   = length (4 bytes, big endian, at most FRAME_LIMIT) | msgpack map
    request = {"do": name, ...}      reply = {"ok": true, ...} or {"ok": false, "error": class name, "message": text}
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

import msgpack

from .. import errors
from ..errors import FtError, ProtocolError

FRAME_LIMIT = 1 << 20  # bytes; a status of thousands of slots fits, nothing else comes near
REQUESTS = frozenset({"status", "watch", "fence", "attach", "restore", "shutdown", "end"})
NODE_REQUESTS = frozenset({"endpoint", "protect", "inventory", "rebuild"})  # about the other nodes
SIZE_REQUESTS = frozenset({"resize", "former", "spare", "settle"})  # about the job at another size
STORAGE_REQUESTS = frozenset({"checkpoint"})
# in the run directory: what the SMP wants a person to see, by what it is about; the lowest rank of the node prints it
ALARM = "alarm.json"


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Write one frame. Raises ProtocolError when it is too large."""
    payload = msgpack.packb(message, use_bin_type=True)
    if len(payload) > FRAME_LIMIT:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {FRAME_LIMIT}")
    connection.sendall(struct.pack(">I", len(payload)) + payload)


def receive(connection: socket.socket, until: float | None = None) -> dict[str, Any] | None:
    """Read one frame; None when the peer has closed between frames. Raises ProtocolError for anything else.

    `until` is the moment (monotonic) by which all of it has to be here; TimeoutError where it is not. None: each wait
    takes what the connection's own timeout allows.
    """
    head = _read(connection, 4, until)
    if not head:
        return None
    (length,) = struct.unpack(">I", head)
    if length > FRAME_LIMIT:
        raise ProtocolError(f"a frame of {length} bytes was announced; the limit is {FRAME_LIMIT}")
    payload = _read(connection, length, until)
    if payload is None or len(payload) < length:
        raise ProtocolError(f"the connection ended inside a frame of {length} bytes")
    try:
        message = msgpack.unpackb(payload, raw=False)
    except Exception as error:
        raise ProtocolError(f"a frame of {length} bytes is not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__} where a map was expected")
    return message


def _read(connection: socket.socket, length: int, until: float | None) -> bytes | None:
    """`length` bytes, fewer if the peer closes; None for none at all."""
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
    return {"ok": False, "error": type(error).__name__, "message": str(error)}


def raise_refusal(reply: dict[str, Any]) -> None:
    """Raise the error that a reply carries; does nothing for an ok."""
    if reply.get("ok") is True:
        return
    kind = getattr(errors, str(reply.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, FtError)):
        kind = ProtocolError
    raise kind(str(reply.get("message", "the SMP refused without saying why")))


def check_peer(connection: socket.socket) -> None:
    """Raises ProtocolError unless the peer runs as this process's user."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.getuid():
        raise ProtocolError(f"a process of uid {uid} knocked; only uid {os.getuid()} is let in")


def field(message: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a request. Raises ProtocolError when it is missing or of another type."""
    value = message.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        expected = kind.__name__ if isinstance(kind, type) else " or ".join(each.__name__ for each in kind)
        raise ProtocolError(
            f"{message.get('do')}: field '{name}' should be a {expected}, found {type(value).__name__}"
        )
    return value


def number(message: dict[str, Any], name: str, limit: int = 1 << 63) -> int:
    """A field that counts something. Raises ProtocolError when it is missing, no integer, negative or over `limit`."""
    value = field(message, name, int)
    if not 0 <= value < limit:
        raise ProtocolError(f"{message.get('do')}: field '{name}' should be from 0 to {limit - 1}, found {value}")
    return int(value)
