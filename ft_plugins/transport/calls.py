"""Requests and replies between processes of a job on different nodes: TCP, authenticated both ways by the job's secret.

Invariant: without the secret a peer gets no answer beyond a nonce and a proof. Every wait is bounded. One request at a
time is under way on a connection, unless the caller awaits several replies; they come in the order of the requests.

    connection = handshake (`channel`) | server's first frame: the client is admitted (`dial`) | requests and replies

In: requests. Out: replies; a `ProtocolError` for anything malformed; connections that are handed over.
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
from . import door, protocol
from .channel import Channel, Party
from .dial import ADMITTED, CUT_OFF, Dialer
from .door import Door, DoorLimits, RejectedConnections, listen
from .frame_codec import FRAME_LIMIT, PAYLOAD_LIMIT, PLAIN, Buffer, FrameBounds, Message, Received
from .framed import PART_SECONDS, EndedError, FramedSocket, limit_in_kernel
from .loop import Loop
from .serving import Served, Serving

PURPOSE = "smp"  # of these connections, among all of a job
BOUNDS = FrameBounds(FRAME_LIMIT, PAYLOAD_LIMIT)
SECRET_LIMIT = 4096
_LIMITS = DoorLimits()
_CONNECTIONS = 4096  # authenticated connections
# Threads that carry out requests at a time. Each also waits for a peer that sends half a frame, or reads no reply
# because it waits for another node first: with fewer than the streams of a lost node's eight ranks (two each), nodes
# that rebuild from several others could wait in a circle. One that waits costs no processor time.
_THREADS = 64
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


# ---- asking ----


class Caller:
    """Requests to one peer, over a connection that is made when one is sent. For one thread at a time, except for
    `close`. Guards the socket, which blocks with the kernel's timeout: what has arrived costs one system call."""

    def __init__(
        self, where: tuple[str, int], me: Party, secret: bytes, timeout: float, node: str = "",
        bounds: FrameBounds = PLAIN,
    ) -> None:  # fmt: skip
        """`timeout`: seconds for connecting, for a request to be taken, and for each part of a reply. `node`: the name
        of the node expected there; '' for any of the job. Replies are within `bounds`."""
        self.endpoint = where
        self.awaited = 0  # replies to requests that were sent
        self._timeout = timeout
        self._node = node
        self._bounds = bounds
        self._dialer = Dialer(where, secret, me)
        self._line: FramedSocket | None = None
        self._channel: Channel | None = None

    def connect(self) -> FramedSocket:
        """The connection; a new one if there is none. `close` interrupts that at any stage. Raises ProtocolError,
        OSError."""
        if self._dialer.is_closed:
            raise ProtocolError("this side has hung up")
        if self._line is None:
            self._line = self._dialer.connect(time.monotonic() + self._timeout, self._greet)
        return self._line

    def _greet(self, connection: socket.socket, channel: Channel) -> FramedSocket:
        if self._node not in ("", channel.node):
            raise ProtocolError(f"expected the SMP of node {self._node} there, found that of node {channel.node}")
        connection.settimeout(None)
        limit_in_kernel(connection, self._timeout)
        line = FramedSocket(connection, channel, self._bounds)
        line.seconds = self._timeout
        self._channel = channel
        return line

    def send(self, message: Message, payload: Buffer = b"") -> None:
        """Send a request whose reply is received later; on a new connection, if the peer has closed the last one while
        no reply was awaited. Raises EndedError if it closes this one; ProtocolError, OSError. Then replies that are
        awaited are void."""
        if not self.awaited and self.is_readable(0.0):
            self.drop()
        line = self.connect()
        try:
            line.send(message, payload)
        except OSError as error:
            raise _ended(error) from error
        self.awaited += 1

    def receive(self, place: Callable[[Message, int], memoryview] | None = None) -> Received:
        """The next reply; its payload is where `place` says. Raises as `send`."""
        if self._dialer.is_closed or self._line is None:
            raise ProtocolError("this side has hung up")
        self._line.decoder.room = place
        try:
            received = self._line.receive()
        except OSError as error:
            raise _ended(error) from error
        finally:
            if self._line is not None:
                self._line.decoder.room = None  # which may refer to memory that is given back
        if received is None:
            raise EndedError("it hung up")
        self.awaited -= 1
        return received

    def is_readable(self, seconds: float) -> bool:
        """Whether a reply has begun to arrive, or the connection has ended, within `seconds`; there may be none."""
        if self._line is None or self._dialer.is_closed:
            return True
        poller = select.poll()
        poller.register(self._line.connection, select.POLLIN)
        return bool(poller.poll(1000 * seconds))

    def surrender(self) -> tuple[socket.socket, Channel]:
        """The connection, after a request that was answered: the caller owns it now. Raises ProtocolError."""
        connection, self._line = self._dialer.surrender(), None
        if connection is None or self._channel is None:
            raise ProtocolError("this side has hung up")
        return connection, self._channel

    def why(self, error: Exception) -> str:
        """The reason in an error of these methods."""
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout:g} s"
        return getattr(error, "strerror", None) or str(error) or type(error).__name__

    def drop(self) -> None:
        """Close the connection; the next request makes a new one."""
        self._dialer.drop()
        self._line, self.awaited = None, 0

    def close(self) -> None:
        """Hang up for good, without waiting: a request in flight or a connection attempt fails."""
        self._dialer.close()


def _ended(error: OSError) -> OSError:
    """What ended a request: the kernel after its time, or the peer."""
    if isinstance(error, BlockingIOError):
        return TimeoutError("timed out")
    return EndedError("it hung up") if isinstance(error, CUT_OFF) else error


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
            except BaseException as error:  # of a signal's handler too: its reply must not be that of the next request
                self.drop()
                if not isinstance(error, (OSError, ProtocolError)):
                    raise
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


# ---- answering ----


@dataclass(eq=False)
class _ServedPeer(Served):
    """An authenticated connection of the server."""

    channel: Channel
    line: FramedSocket


class Server:
    """Accepts other nodes' SMPs on one address. `handle` answers their requests, in at most _THREADS threads."""

    def __init__(self, address: str, port: int, me: Party, secret: bytes, handle: Handler, events: Events) -> None:
        """Listen on `address` and `port` (0: any). Raises ConfigError if the system refuses."""
        self._handle = handle
        self._events = events
        self._closing = False
        listener = listen(address, port, "the SMP")
        self.endpoint: tuple[str, int] = (address, int(listener.getsockname()[1]))
        self._rejected = RejectedConnections(events)
        places = door.places(_CONNECTIONS, _OTHERS)
        self._serving = Serving(self._serve, self._end, "smp-peer", _THREADS, places, IDLE_SECONDS)
        self._loop = Loop("smp-peers")
        self._door = Door(self._loop, listener, secret, me, self._admit, self._rejected, _LIMITS)
        self._loop.start()

    def _admit(self, connection: socket.socket, address: str, channel: Channel) -> None:
        """Serve an authenticated connection."""
        connection.setblocking(True)
        served = _ServedPeer(connection, channel.node, channel, FramedSocket(connection, channel, BOUNDS))
        if not self._serving.take(served):
            connection.close()
            self._rejected.count(address, f"node {channel.node}: all {self._serving.places} connections are busy")
            return
        served.line.seconds, served.line.decoder.room = PART_SECONDS, _room
        try:
            limit_in_kernel(connection, PART_SECONDS)
            served.line.send(ADMITTED)  # its first bytes: they do not wait
        except (FtError, OSError) as error:
            self._end(served, protocol.legible(error))
            return
        self._serving.add(served)

    def _serve(self, served: _ServedPeer) -> bool:
        """Carry out one request. False once the connection has ended: the peer has hung up, or sent a malformed frame;
        or it is handed over, and then keeps its place until it is closed."""
        try:
            if self._closing or (received := served.line.receive()) is None:
                self._end(served, "")
                return False
            try:
                answer = self._handle(received[0], np.frombuffer(received[1], dtype=np.uint8))
            except FtError as error:
                answer = protocol.refusal(error), None
            if isinstance(answer, Handover):
                served.line.send({"ok": True})
                own = socket.socket(fileno=served.connection.detach())
                answer.take(own, served.channel, lambda: self._serving.leave(served))
                return False
            served.line.send({"ok": True, **answer[0]}, b"" if answer[1] is None else answer[1].data)
            return True
        except Exception as error:  # a malformed frame or request, or a dead peer: this connection ends
            known = isinstance(error, (FtError, OSError))
            reason = protocol.legible(error) if known else str(protocol.unexpected(error))
            if isinstance(error, BlockingIOError):
                reason = f"no byte of a frame passed within {PART_SECONDS:g} s"
            self._end(served, reason)
            return False

    def _end(self, served: _ServedPeer, reason: str) -> None:
        """Close a connection, because of an error if there is a reason."""
        self._serving.leave(served)
        served.connection.close()
        if reason:
            self._events.emit(catalogue.PEER_DISCONNECTED, peer=served.name, reason=reason)

    def close(self) -> None:
        """Stop listening and end idle connections; others end after their request."""
        self._closing = True
        self._loop.stop()
        self._door.close()
        self._loop.close()
        self._serving.close()
