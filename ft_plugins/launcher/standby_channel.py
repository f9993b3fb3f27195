"""Messages between an agent and its standby workers: JSON over a pair of sockets, with descriptors.

Invariant: every length is bounded before it is used. In: plain values. Out: plain values, or EOFError when the other
side has ended.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from ..intake import Unfit, json_value

_LENGTH = struct.Struct("<I")
_LIMIT = 8 << 20  # bytes; an environment has at most a few MiB
_DESCRIPTORS = 2


class StandbyChannel:
    """One end of the pair. Owns its socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Raises OSError, also if the other side has ended."""
        content = json.dumps(message).encode()
        head = _LENGTH.pack(len(content))
        if descriptors:
            socket.send_fds(self._socket, [head], descriptors)
        else:
            self._socket.sendall(head)
        self._socket.sendall(content)

    def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors. Raises EOFError, TimeoutError, OSError, ValueError."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._wait(deadline)
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _DESCRIPTORS)
        try:
            while len(head) < _LENGTH.size:
                head += self._part(_LENGTH.size - len(head), deadline)
            (length,) = _LENGTH.unpack(head)
            if length > _LIMIT:
                raise Unfit(f"a message of {length} bytes, at most {_LIMIT} are allowed")
            content = bytearray()
            while len(content) < length:
                content += self._part(length - len(content), deadline)
            message = json_value(bytes(content))
            if not isinstance(message, dict):
                raise Unfit("it is not an object")
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return message, descriptors

    def pending(self) -> bool:
        """Whether there is something to receive, or the other side has ended."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def _part(self, nbytes: int, deadline: float | None) -> bytes:
        self._wait(deadline)
        part = self._socket.recv(nbytes)
        if not part:
            raise EOFError("the other side has ended")
        return part

    def _wait(self, deadline: float | None) -> None:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([self._socket], [], [], seconds)[0]:
            raise TimeoutError("no answer in time")
