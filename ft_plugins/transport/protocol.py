"""Messages between trainers, launcher, command line and the SMP of their node.

Invariant: bounded frames (`frame_codec`) over a Unix socket that only its owner can open (0600, in a 0700 directory,
the peer's uid checked with the kernel). No pickle. A malformed frame closes its connection, with an event. `requests`
parses the messages.

    request = {"do": name, ...}      reply = {"ok": true, ...} or {"ok": false, "error": class name, "message": text}
"""

from __future__ import annotations

import math
import os
import socket
import struct
import traceback
from pathlib import Path
from typing import Any

from .. import errors
from ..base.outside_values import Unfit, shown
from ..errors import FtError, ProtocolError, printable
from ..snapshot.segment.slots import Version
from .frame_codec import Message
from .framed import FramedSocket

TEXT_LIMIT = 4000  # characters of a text from a peer that is forwarded
_NAME_LIMIT = 60  # characters of a name from a peer
# in the run directory: alarms by topic; the lowest rank of the node prints them
ALARM = "alarm.json"


def send(connection: socket.socket, message: Message) -> None:
    """Write one message on a socket of this node, within its timeout, if it has one. Raises ProtocolError if it is too
    large, or msgpack cannot encode it; OSError."""
    line = FramedSocket(connection)
    line.seconds = connection.gettimeout() or math.inf
    line.send(message)


def receive(connection: socket.socket, until: float | None = None) -> Message | None:
    """Read one message on a socket of this node; None if the peer has closed between two. `until`: see
    `FramedSocket.receive`. Raises ProtocolError, OSError."""
    received = FramedSocket(connection).receive(until)
    return received and received[0]


def refusal(error: FtError) -> Message:
    """The reply that carries `error` to the peer."""
    return {"ok": False, "error": type(error).__name__, "message": legible(error)}


def raise_refusal(reply: Message) -> None:
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


def number(message: Message, name: str, limit: int = 1 << 63) -> int:
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
