"""Connections between SMPs of different nodes: TCP, authenticated both ways by the job's secret.

Invariant: without the secret a peer gets no answer beyond a nonce and a proof. Every wait is bounded.

    connection = handshake (`channel`) | server's first frame: the client is admitted | requests and replies

In: requests by name. Out: replies; a `ProtocolError` for anything malformed.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.intake import read_bytes
from ..errors import ConfigError, FtError, ProtocolError
from ..events import Events, catalogue
from . import connections, protocol
from .channel import Channel, Party
from .connections import Connections, OpenConnection, RejectedConnections
from .dial import ADMITTED, Caller
from .door import Door, DoorLimits
from .frame_codec import FRAME_LIMIT, PAYLOAD_LIMIT, FrameBounds, Message, Received
from .framed import PART_SECONDS, EndedError, FramedSocket, limit_in_kernel
from .loop import Loop
from .serving import Serving

PURPOSE = "smp"  # of these connections, among all of a job
BOUNDS = FrameBounds(FRAME_LIMIT, PAYLOAD_LIMIT)
SECRET_LIMIT = 4096
_LIMITS = DoorLimits()
_CONNECTIONS = 4096  # authenticated connections
_THREADS = 8  # that carry out requests at a time: as many as a node of eight ranks needs to restore them together
_OTHERS = 512 + _LIMITS.connections  # the SMP's other connections: those of its own node, and unproven ones
# A connection without a request for so long is closed: its peer may be without power, or a relay may hold it open. A
# live peer connects again. The launcher's connections have the same limit.
IDLE_SECONDS = 120.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Handover:
    """The answer to a request after which `take` owns the connection. It calls its last argument once it has closed the
    connection."""

    take: Callable[[socket.socket, Channel, Callable[[], None]], None]


Handler = Callable[[Message, Bytes], "tuple[Message, Bytes | None] | Handover"]


def read_secret(path: Path) -> bytes:
    """The job's secret. Raises ConfigError if other users can read the file, or if it holds less than 16 bytes or more
    than SECRET_LIMIT."""
    try:
        status, secret = path.stat(), read_bytes(path, SECRET_LIMIT).strip()
    except (OSError, ValueError) as error:  # ValueError: not a regular file, too long, or an invalid path
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--ftp-secret-file {path}: cannot be read ({why}); put the same file on every node, readable for user "
            f"{os.getuid()}, or give its path there"
        ) from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"--ftp-secret-file {path}: expected mode 0600 and user {os.getuid()}, found mode "
            f"{stat.S_IMODE(status.st_mode):04o} and user {status.st_uid}; chmod 600 it"
        )
    if len(secret) < 16:
        raise ConfigError(
            f"--ftp-secret-file {path}: expected at least 16 bytes, found {len(secret)}; "
            "write one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE), the same on all nodes"
        )
    return secret


class Peer(Caller):
    """Requests to another node's SMP. For any thread: one request at a time."""

    def __init__(self, endpoint: tuple[str, int], me: Party, secret: bytes, timeout: float, node: str = "") -> None:
        """`node` is the name of the node expected at `endpoint`; '' for any of the job."""
        super().__init__(endpoint, me, secret, timeout, node, BOUNDS)
        self._lock = threading.Lock()  # held during a request

    def ask(self, name: str, payload: Bytes | None = None, **fields: Any) -> tuple[Message, Bytes]:
        """Send one request; returns its reply and payload. Raises ProtocolError, or the error of the peer's refusal.
        After a connection error the next request makes a new connection.

        A peer closes idle connections: if an existing connection is cut off, the request is sent once more on a new
        one. Requests between SMPs may be carried out twice (`PeerRequests`).
        """
        message: Message = {"do": name, **fields}
        with self._lock:
            try:
                existed = self._line is not None
                try:
                    reply, received = self._ask_once(message, payload)
                except EndedError:
                    if not existed:
                        raise
                    self.drop()
                    reply, received = self._ask_once(message, payload)
            except (OSError, ProtocolError) as error:
                self.drop()
                host, port = self.endpoint
                reason = f"the SMP at {host}:{port} did not answer '{name}': {self.why(error)}"
                raise ProtocolError(reason) from error
        protocol.raise_refusal(reply)
        return reply, np.frombuffer(received, dtype=np.uint8)

    def _ask_once(self, message: Message, payload: Bytes | None) -> Received:
        self.send(message, b"" if payload is None else payload.data)
        return self.receive(_room)


def _room(message: Message, nbytes: int) -> memoryview:
    """Memory for a payload, not filled with zeros first."""
    return np.empty(nbytes, dtype=np.uint8).data


def framed(connection: socket.socket, channel: Channel) -> FramedSocket:
    """The connection for requests, replies and their payloads."""
    made = FramedSocket(connection, channel, BOUNDS)
    made.decoder.room = _room
    return made


def send(line: FramedSocket, message: Message, payload: Bytes | None) -> None:
    """Write a message and a payload. Raises ProtocolError, OSError."""
    line.send(message, b"" if payload is None else payload.data)


def receive(line: FramedSocket) -> tuple[Message, Bytes] | None:
    """Read a message and its payload; None if the peer has closed between two frames. Raises ProtocolError, OSError."""
    if (received := line.receive()) is None:
        return None
    return received[0], np.frombuffer(received[1], dtype=np.uint8)


@dataclass(eq=False)
class _Served:
    """An authenticated connection of the server."""

    connection: socket.socket
    admitted: OpenConnection
    channel: Channel
    line: FramedSocket


class Server:
    """Accepts other nodes' SMPs on one address. `handle` answers their requests, in at most _THREADS threads."""

    def __init__(self, address: str, port: int, me: Party, secret: bytes, handle: Handler, events: Events) -> None:
        """Listen on `address` and `port` (0: any). Raises ConfigError if the system refuses."""
        self._handle = handle
        self._events = events
        self._closing = False
        self._connections = Connections(connections.places(_CONNECTIONS, _OTHERS))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"the SMP cannot listen on {address}:{port} ({error.strerror}); choose another --ftp-interface"
            ) from error
        self.endpoint: tuple[str, int] = (address, int(listener.getsockname()[1]))
        self._rejected = RejectedConnections(events)
        self._serving = Serving(self._serve, self._end, "smp-peer", _THREADS, IDLE_SECONDS)
        self._loop = Loop("smp-peers")
        self._door = Door(self._loop, listener, secret, me, self._admit, self._rejected, _LIMITS)
        self._loop.start()

    def _admit(self, connection: socket.socket, address: str, channel: Channel) -> None:
        """Serve an authenticated connection."""
        connection.setblocking(True)
        admitted = self._connections.take(connection, channel.node)
        if admitted is None:
            connection.close()
            self._rejected.count(address, f"node {channel.node}: all {self._connections.most} connections are busy")
            return
        served = _Served(connection, admitted, channel, framed(connection, channel))
        served.line.seconds = PART_SECONDS
        try:
            limit_in_kernel(connection, PART_SECONDS)
            served.line.send(ADMITTED)  # its first bytes: they do not wait
        except (FtError, OSError) as error:
            self._end(served, protocol.legible(error))
            return
        self._serving.add(served)

    def _serve(self, served: _Served) -> bool:
        """Carry out one request. False once the connection has ended: the peer has hung up, or sent a malformed frame,
        or it has to make room, or is handed over; then it keeps its place until it is closed."""
        try:
            if self._closing or not self._connections.begin(served.admitted) or not (frame := receive(served.line)):
                self._end(served, "")
                return False
            try:
                answer = self._handle(*frame)
            except FtError as error:
                answer = protocol.refusal(error), None
            if isinstance(answer, Handover):
                served.line.send({"ok": True})
                own = socket.socket(fileno=served.connection.detach())
                answer.take(own, served.channel, lambda: self._connections.leave(served.admitted))
                return False
            send(served.line, {"ok": True, **answer[0]}, answer[1])
            self._connections.rest(served.admitted)
            return True
        except Exception as error:  # a malformed frame or request, or a dead peer: this connection ends
            known = isinstance(error, (FtError, OSError))
            reason = protocol.legible(error) if known else str(protocol.unexpected(error))
            if isinstance(error, BlockingIOError):
                reason = f"no byte of a frame passed within {PART_SECONDS:g} s"
            self._end(served, reason)
            return False

    def _end(self, served: _Served, reason: str) -> None:
        """Close a connection, because of an error if there is a reason."""
        self._connections.leave(served.admitted)
        served.connection.close()
        if reason:
            self._events.emit(catalogue.PEER_DISCONNECTED, peer=served.channel.node, reason=reason)

    def close(self) -> None:
        """Stop listening and end idle connections; others end after their request."""
        self._closing = True
        self._loop.stop()
        self._door.close()
        self._loop.close()
        self._serving.close()
