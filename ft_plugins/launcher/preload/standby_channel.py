"""Messages between an agent and its standby workers: JSON over a pair of sockets, with descriptors.

Invariant: every length is bounded before it is used, and no wait for the other side is endless unless that is asked
for. In: plain values. Out: plain values, or EOFError when the other side has ended.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from ...base.intake import Unfit, json_value

_LENGTH = struct.Struct("<I")
_LIMIT = 8 << 20  # bytes; an environment has at most a few MiB
_DESCRIPTORS = 2
_SEND_SECONDS = 5.0  # for the other side to take what the kernel does not keep for it


class StandbyChannel:
    """One end of the pair. Owns its socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.set_inheritable(False)  # else a program that an import starts keeps it open
        end.settimeout(_SEND_SECONDS)
        self._poller = select.poll()  # any descriptor, unlike `select`, which fails from 1024 on
        self._poller.register(end, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """In one part, if it is not too long: then a sender that is stopped has sent all of it or nothing. Raises
        OSError, also if the other side has ended or does not take it in time."""
        content = json.dumps(message).encode()
        whole = _LENGTH.pack(len(content)) + content
        sent = socket.send_fds(self._socket, [whole], descriptors) if descriptors else self._socket.send(whole)
        if sent < len(whole):  # sending nothing fails, too, once the other side has read all of it and closed
            self._socket.sendall(whole[sent:])

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
        return bool(self._poller.poll(0))

    def _part(self, nbytes: int, deadline: float | None) -> bytes:
        self._wait(deadline)
        part = self._socket.recv(nbytes)
        if not part:
            raise EOFError("the other side has ended")
        return part

    def _wait(self, deadline: float | None) -> None:
        left = None if deadline is None else math.ceil(1000 * max(0.0, deadline - time.monotonic()))
        if not self._poller.poll(left):
            raise TimeoutError("no answer in time")
