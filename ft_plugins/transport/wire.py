"""Connections between SMPs of different nodes: TCP, authenticated both ways by the job's secret.

Invariant: without the secret a peer gets no answer beyond a nonce and a proof. Every wait is bounded.

    connection = handshake (`channel`) | server's first frame: the client is admitted | requests and replies

In: requests by name. Out: replies; a `ProtocolError` for anything malformed.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
import time
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
from .dial import ADMITTED, Dialer
from .door import Door, DoorLimits
from .frame_codec import FRAME_LIMIT, PAYLOAD_LIMIT, FrameBounds, Message
from .framed import PART_SECONDS, FramedSocket, limit_in_kernel
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


class Peer:
    """A connection to another node's SMP, made at the first request. Guards the socket: one request at a time."""

    def __init__(self, endpoint: tuple[str, int], me: Party, secret: bytes, timeout: float, node: str = "") -> None:
        """`node` is the name of the node expected at `endpoint`; '' for any of the job."""
        self.endpoint = endpoint
        self._dialer = Dialer(endpoint, secret, me)
        self._timeout = timeout
        self._node = node
        self._line: FramedSocket | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()  # held during a request

    def ask(self, name: str, payload: Bytes | None = None, **fields: Any) -> tuple[Message, Bytes]:
        """Send one request; returns its reply and payload. Raises ProtocolError, or the error of the peer's refusal.
        After a connection error the next request makes a new connection.

        A peer closes idle connections: if an existing connection ends without a byte of a reply, the request is sent
        once more on a new one. Requests between SMPs may be carried out twice (`PeerRequests`).
        """
        with self._lock:
            try:
                reused = self._line is not None
                answer = self._ask_once({"do": name, **fields}, payload)
                if answer is None and reused:
                    self._drop()
                    answer = self._ask_once({"do": name, **fields}, payload)
                if answer is None:
                    raise ProtocolError("it hung up")
            except (OSError, ProtocolError) as error:
                self._drop()
                host, port = self.endpoint
                raise ProtocolError(f"the SMP at {host}:{port} did not answer '{name}': {error}") from error
        protocol.raise_refusal(answer[0])
        return answer

    def _ask_once(self, message: Message, payload: Bytes | None) -> tuple[Message, Bytes] | None:
        """The reply; None if the peer hangs up before its first byte. Raises ProtocolError, OSError."""
        line = self._connected()
        try:
            send(line, message, payload)
            line.connection.recv(1, socket.MSG_PEEK)
        except (ConnectionResetError, BrokenPipeError):
            return None
        return receive(line)

    def _connected(self) -> FramedSocket:
        """The connection; a new one, within `timeout`, if there is none. `close` interrupts that at any stage."""
        if self._dialer.is_closed:
            raise ProtocolError("this side has hung up")
        if self._line is None:
            self._line = self._dialer.connect(time.monotonic() + self._timeout, self._greet)
        return self._line

    def _greet(self, connection: socket.socket, channel: Channel) -> FramedSocket:
        if self._node not in ("", channel.node):
            raise ProtocolError(f"expected the SMP of node {self._node} there, found that of node {channel.node}")
        connection.settimeout(self._timeout)
        self._channel = channel
        line = framed(connection, channel)
        line.seconds = self._timeout
        return line

    def _drop(self) -> None:
        self._dialer.drop()
        self._line = None

    def wait_until_closed(self, seconds: float) -> None:
        """Wait until the peer, or `close`, ends the connection, but no longer than `seconds`. Returns at once if there
        is none. For the thread that makes the requests."""
        if self._line is not None and not self._dialer.is_closed:
            poller = select.poll()
            poller.register(self._line.connection, select.POLLIN)
            poller.poll(1000 * seconds)

    def surrender(self) -> tuple[socket.socket, Channel]:
        """The connection, after a request that was answered: the caller owns it now. Raises ProtocolError."""
        with self._lock:
            connection, self._line = self._dialer.surrender(), None
            if connection is None or self._channel is None:
                raise ProtocolError("this side has hung up")
            return connection, self._channel

    def close(self) -> None:
        """Hang up for good, without waiting: a request in flight or a connection attempt fails."""
        self._dialer.close()


def framed(connection: socket.socket, channel: Channel) -> FramedSocket:
    """The connection for requests, replies and their payloads."""
    made = FramedSocket(connection, channel, BOUNDS)
    made.decoder.room = lambda message, nbytes: np.empty(nbytes, dtype=np.uint8).data  # not filled with zeros first
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
