"""Messages between an agent and its preloader: JSON, one a packet of a pair of sockets, with descriptors.

Invariant: a packet is delivered whole or not at all, and its size is bounded. In: plain values. Out: plain values, or
EOFError when the other side has ended.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Sequence
from typing import Any

from ...base.intake import Unfit, json_value

_LIMIT = 1 << 20  # bytes; an environment rarely has a tenth of it
_DESCRIPTORS = 3
_SEND_SECONDS = 5.0  # for the other side to take what the kernel does not keep for it


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LIMIT)
    return ends


def pending(end: socket.socket, seconds: float = 0.0) -> bool:
    """Whether, within `seconds`, there is something to receive, or the other side has ended."""
    poller = select.poll()  # any descriptor, unlike `select`, which fails from 1024 on
    poller.register(end, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def send(end: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Raises OSError, also if the message is too long or the other side has ended."""
    end.settimeout(_SEND_SECONDS)
    socket.send_fds(end, [json.dumps(message).encode()], descriptors)


def receive(end: socket.socket, seconds: float | None = None) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors. Raises EOFError, TimeoutError, OSError, ValueError."""
    end.settimeout(seconds)
    content, descriptors, flags, _ = socket.recv_fds(end, _LIMIT, _DESCRIPTORS)
    try:
        if not content:
            raise EOFError("the other side has ended")
        message = json_value(content)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not isinstance(message, dict):
            raise Unfit("it is not a whole object")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors
