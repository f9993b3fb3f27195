"""Connections between SMPs of different nodes: TCP, authenticated both ways by the job's secret.

Invariant: without the secret a peer gets no answer beyond a nonce and a proof. Every wait is bounded.

    connection = handshake (`channel`) | server's first frame: the client is admitted | requests and replies

In: requests by name. Out: replies; a `ProtocolError` for anything malformed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.intake import read_bytes
from ..errors import ConfigError, FtError, ProtocolError
from ..events import Events, catalogue
from . import connections, protocol, unproven
from .authenticated import AuthenticatedConnection, Bytes, limit_in_kernel
from .channel import HANDSHAKE_LIMIT, Channel, ClientHandshake, Party
from .connections import Connections, OpenConnection, RejectedConnections
from .serving import Serving

PURPOSE = "smp"  # of these connections, among all of a job
SECRET_LIMIT = 4096
_CONNECTIONS = 4096  # authenticated connections
_THREADS = 8  # that carry out requests at a time: as many as a node of eight ranks needs to restore them together
_OTHERS = 512 + unproven.CONNECTIONS  # the SMP's other connections: those of its own node, and unproven ones
# A connection without a request for so long is closed: its peer may be without power, or a relay may hold it open. A
# live peer connects again. The launcher's connections have the same limit.
IDLE_SECONDS = 120.0
PART_SECONDS = 120.0  # for a length, message or payload: a reader may wait for other nodes between two replies
# kernel probes on an idle connection: seconds before the first, seconds between two, number
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_RETRY_SECONDS = (0.02, 1.0)  # pause before a handshake that was cut off is retried: first, longest


@dataclass(frozen=True)
class Handover:
    """The answer to a request after which `take` owns the connection. It calls its last argument once it has closed the
    connection."""

    take: Callable[[socket.socket, Channel, Callable[[], None]], None]


Handler = Callable[[dict[str, Any], Bytes], "tuple[dict[str, Any], Bytes | None] | Handover"]


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
        self._me = me
        self._secret = secret
        self._timeout = timeout
        self._node = node
        self._connection: socket.socket | None = None
        self._authenticated: AuthenticatedConnection | None = None
        self._lock = threading.Lock()  # held during a request
        self._connecting = threading.Lock()  # never held for long
        self._closed = False

    def ask(self, name: str, payload: Bytes | None = None, **fields: Any) -> tuple[dict[str, Any], Bytes]:
        """Send one request; returns its reply and payload. Raises ProtocolError, or the error of the peer's refusal.
        After a connection error the next request makes a new connection.

        A peer closes idle connections: if an existing connection ends without a byte of a reply, the request is sent
        once more on a new one. Requests between SMPs may be carried out twice (`PeerRequests`).
        """
        with self._lock:
            try:
                reused = self._authenticated is not None
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

    def _ask_once(self, message: dict[str, Any], payload: Bytes | None) -> tuple[dict[str, Any], Bytes] | None:
        """The reply; None if the peer hangs up before its first byte. Raises ProtocolError, OSError."""
        if self._closed:
            raise ProtocolError("this side has hung up")
        if self._authenticated is None:
            self._authenticated = self._connect()
        assert self._connection is not None
        try:
            self._authenticated.send(message, payload)
            self._connection.recv(1, socket.MSG_PEEK)
        except (ConnectionResetError, BrokenPipeError):
            return None
        return self._authenticated.receive()

    def _connect(self) -> AuthenticatedConnection:
        """Connect and authenticate within `timeout`. `close` interrupts it at any stage.

        Retries a connection that was cut off before it was admitted: it may have made room for others.
        """
        deadline = time.monotonic() + self._timeout
        pause, longest = _RETRY_SECONDS
        while True:
            try:
                return self._authenticate(deadline)
            except (ConnectionResetError, BrokenPipeError):
                self._drop()
                if self._closed or time.monotonic() + pause >= deadline:
                    raise
            except BaseException:
                self._drop()
                raise
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    def _authenticate(self, deadline: float) -> AuthenticatedConnection:
        """Connect, run the handshake, and wait to be admitted. Raises ConnectionResetError if the peer hangs up
        before that."""
        connection = self._start_connecting()
        _wait_established(connection, deadline)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._timeout)
        handshake = ClientHandshake(self._secret, self._me)
        protocol.send(connection, handshake.hello())
        answer, channel = handshake.answer(_expected(protocol.receive(connection, deadline, HANDSHAKE_LIMIT)))
        if self._node not in ("", channel.node):
            raise ProtocolError(f"expected the SMP of node {self._node} there, found that of node {channel.node}")
        protocol.send(connection, answer)
        authenticated = AuthenticatedConnection(connection, channel)
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        _expected(authenticated.message())
        connection.settimeout(self._timeout)
        return authenticated

    def _start_connecting(self) -> socket.socket:
        """A non-blocking socket on which `connect` has begun."""
        connection = socket.socket(socket.AF_INET6 if ":" in self.endpoint[0] else socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        with self._connecting:  # so `close` either comes first, or has a socket to shut down
            if self._closed:
                connection.close()
                raise ProtocolError("this side has hung up")
            self._connection = connection
            code = connection.connect_ex(self.endpoint)
        if code not in (0, errno.EINPROGRESS):
            self._drop()
            raise OSError(code, os.strerror(code))
        return connection

    def _drop(self) -> None:
        with self._connecting:
            if self._connection is not None:
                self._connection.close()
            self._connection = self._authenticated = None

    def wait_until_closed(self, seconds: float) -> None:
        """Wait until the peer, or `close`, ends the connection, but no longer than `seconds`. Returns at once if there
        is none. For the thread that makes the requests."""
        connection = self._connection
        if connection is not None and not self._closed:
            poller = select.poll()
            poller.register(connection, select.POLLIN)
            poller.poll(1000 * seconds)

    def surrender(self) -> tuple[socket.socket, Channel]:
        """The connection, after a request that was answered: the caller owns it now. Raises ProtocolError."""
        with self._lock, self._connecting:
            connection, authenticated = self._connection, self._authenticated
            if connection is None or authenticated is None or self._closed:
                raise ProtocolError("this side has hung up")
            self._connection = self._authenticated = None
            return connection, authenticated.channel

    def close(self) -> None:
        """Hang up for good, without waiting: a request in flight or a connection attempt fails."""
        with self._connecting:
            self._closed = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # no longer connected
                    self._connection.shutdown(socket.SHUT_RDWR)


def _wait_established(connection: socket.socket, deadline: float) -> None:
    """Wait until a connection is established. Raises OSError."""
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError("timed out")
    if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


def _set_timeouts(connection: socket.socket) -> None:
    """Have the kernel bound every wait for the peer, and detect when it is gone. Raises OSError."""
    keep_alive(connection)
    limit_in_kernel(connection, PART_SECONDS)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel send small messages at once, and detect when the peer of an idle connection is gone. Raises
    OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_KEEPALIVE, "TCP_USER_TIMEOUT": int(1000 * PART_SECONDS)}.items():
        if (option := getattr(socket, name, None)) is not None:  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _expected(message: dict[str, Any] | None) -> dict[str, Any]:
    if message is None:
        raise ConnectionResetError("it hung up during the handshake; is it of this job?")
    return message


@dataclass(eq=False)
class _Served:
    """An authenticated connection of the server."""

    connection: socket.socket
    admitted: OpenConnection
    channel: Channel
    frames: AuthenticatedConnection


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
        self._unproven = unproven.Unproven(listener, secret, me, self._admit, self._rejected, "smp-peers")

    def _admit(self, connection: socket.socket, address: str, channel: Channel) -> None:
        """Serve an authenticated connection."""
        admitted = self._connections.take(connection, channel.node)
        if admitted is None:
            connection.close()
            self._rejected.count(address, f"node {channel.node}: all {self._connections.most} connections are busy")
            return
        served = _Served(connection, admitted, channel, AuthenticatedConnection(connection, channel, PART_SECONDS))
        try:
            _set_timeouts(connection)
            served.frames.send({"ok": True})  # its first bytes: they do not wait
        except (FtError, OSError) as error:
            self._end(served, protocol.legible(error))
            return
        self._serving.add(served)

    def _serve(self, served: _Served) -> bool:
        """Carry out one request. False once the connection has ended: the peer has hung up, or sent a malformed frame,
        or it has to make room, or is handed over; then it keeps its place until it is closed."""
        try:
            if self._closing or not self._connections.begin(served.admitted) or not (frame := served.frames.receive()):
                self._end(served, "")
                return False
            try:
                answer = self._handle(*frame)
            except FtError as error:
                answer = protocol.refusal(error), None
            if isinstance(answer, Handover):
                served.frames.send({"ok": True})
                own = socket.socket(fileno=served.connection.detach())
                answer.take(own, served.channel, lambda: self._connections.leave(served.admitted))
                return False
            served.frames.send({"ok": True, **answer[0]}, answer[1])
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
        self._unproven.close()
        self._serving.close()
