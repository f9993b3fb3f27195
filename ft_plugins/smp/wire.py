"""Connections between SMPs of different nodes: TCP, authenticated both ways by the job's secret, bounded frames.

Invariant: without the secret a peer gets no answer beyond a nonce and a proof; no frame is longer than its bound,
nothing is unpickled, every wait is bounded. What is delivered is what the other side sent, whole and in order, across
any relay: each message and each payload is a unit of the connection's channel (`channel`), sent without a copy if
nothing is encrypted.

    connection = handshake (`channel`) | server's first frame: the client is admitted | requests and replies
    frame      = length of the message (4 bytes) | message, tag | payload, tag (if the message announces its `bytes`)

In: requests by name. Out: replies; a `ProtocolError` for anything malformed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, FtError, ProtocolError
from ..events import Events, catalogue
from ..intake import read_bytes
from . import connections, protocol, unproven
from .channel import HANDSHAKE_LIMIT, TAG, Buffer, Channel, ClientHandshake, Party
from .connections import Connections, OpenConnection, RejectedConnections

PURPOSE = "smp"  # of these connections, among all of a job
PAYLOAD_LIMIT = 1 << 20  # bytes of one frame
SECRET_LIMIT = 4096
_CONNECTIONS = 4096  # whose peer has proved itself
_OTHERS = 512 + unproven.CONNECTIONS  # connections that the SMP has besides: those of its own node, and unproven ones
# A connection without a request for so long is closed: its peer may be without power, or a relay may hold it open. A
# living peer connects again. The same for the launcher's connections.
IDLE_SECONDS = 120.0
PART_SECONDS = 120.0  # for a length, message or payload: a reader may wait for other nodes between two replies
# on an idle connection, the kernel probes after so many seconds, so far apart, so many times
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_AGAIN_SECONDS = (0.02, 1.0)  # pause before a handshake that was cut off is tried again: the first, the longest

Bytes = npt.NDArray[np.uint8]
Handler = Callable[[dict[str, Any], Bytes], tuple[dict[str, Any], "Bytes | None"]]
_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


def read_secret(path: Path) -> bytes:
    """The job's secret. Raises ConfigError for a file that others can read, or that holds less than 16 bytes or more
    than SECRET_LIMIT."""
    try:
        found, secret = path.stat(), read_bytes(path, SECRET_LIMIT).strip()
    except (OSError, ValueError) as error:  # ValueError: no regular file, too long, or no path at all
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--ftp-secret-file {path}: cannot be read ({why})") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"--ftp-secret-file {path}: expected mode 0600 and user {os.getuid()}, found mode "
            f"{stat.S_IMODE(found.st_mode):04o} and user {found.st_uid}; chmod 600 it"
        )
    if len(secret) < 16:
        raise ConfigError(
            f"--ftp-secret-file {path}: expected at least 16 bytes, found {len(secret)}; "
            "write one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE), the same on all nodes"
        )
    return secret


class Link:
    """A connection whose two ends have proved who they are. One thread sends at a time, and one receives."""

    def __init__(self, connection: socket.socket, channel: Channel, seconds: float = math.inf) -> None:
        """`seconds` bound each part of a frame, on a socket that blocks for no longer; else only the socket's timeout
        does."""
        self._connection = connection
        self._seconds = seconds
        self._seal = channel.sealer.seal
        self._open = channel.opener.open

    def send(self, message: dict[str, Any], payload: Bytes | None = None) -> None:
        """Write one frame. Raises ProtocolError when message or payload exceed their limits, OSError."""
        nbytes = 0 if payload is None else len(payload)
        if nbytes > PAYLOAD_LIMIT:
            raise ProtocolError(f"a payload of {nbytes} bytes exceeds the limit of {PAYLOAD_LIMIT}")
        unit = protocol.pack({**message, "bytes": nbytes} if nbytes else message)
        parts: list[Buffer] = [struct.pack(">I", len(unit)), *self._seal(unit)]
        if payload is not None and nbytes:
            parts += self._seal(payload.data)
        left = [memoryview(part) for part in parts]
        until = time.monotonic() + self._seconds
        while left:
            _drop_front(left, self._connection.sendmsg(left))
            _check_time(left, until, self._seconds)

    def receive(self) -> tuple[dict[str, Any], Bytes] | None:
        """Read one frame with its payload; None if the peer has closed between frames. Raises ProtocolError,
        OSError."""
        message = self.message()
        if message is None or "bytes" not in message:
            return None if message is None else (message, _NOTHING)
        payload = np.empty(protocol.number(message, "bytes", PAYLOAD_LIMIT + 1), dtype=np.uint8)
        self.payload(payload)
        return message, payload

    def message(self) -> dict[str, Any] | None:
        """Read the message of a frame; its payload, if it announces one, has to be read next. As `receive`."""
        head = bytearray(4)
        if not (found := _fill(self._connection, self._seconds, head)):
            return None
        if found < len(head):
            raise ProtocolError("the connection ended inside a frame's length")
        length = protocol.announced(head, protocol.FRAME_LIMIT)
        unit, tag = bytearray(length), bytearray(TAG)
        if _fill(self._connection, self._seconds, unit, tag) < length + TAG:
            raise ProtocolError(f"the connection ended inside a frame of {length} bytes")
        return protocol.unpack(self._open(unit, bytes(tag)))

    def payload(self, into: Bytes) -> None:
        """Read a payload right into its place. After a ProtocolError `into` holds unverified bytes."""
        view, tag = into.data, bytearray(TAG)
        if (found := _fill(self._connection, self._seconds, view, tag)) < len(into) + TAG:
            raise ProtocolError(f"the connection ended after {found} of {len(into)} bytes of a payload and its tag")
        opened = self._open(view, bytes(tag))
        if opened is not view:
            into[:] = np.frombuffer(opened, dtype=np.uint8)


def _fill(connection: socket.socket, seconds: float, *parts: bytearray | memoryview) -> int:
    """Receive until `parts` are full, in order; the bytes received, fewer where the peer closes. Raises OSError."""
    left, done = [memoryview(part) for part in parts], 0
    until = time.monotonic() + seconds
    while left:
        count = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if not count:
            break
        done += count
        _drop_front(left, count)
        _check_time(left, until, seconds)
    return done


def _check_time(left: list[memoryview], until: float, seconds: float) -> None:
    """Raises TimeoutError if something is left to do after the deadline."""
    if left and time.monotonic() >= until:
        raise TimeoutError(f"a part of a frame was not through within {seconds:g} s")


def limit_in_kernel(connection: socket.socket, seconds: float) -> None:
    """Have every wait of a blocking socket end after `seconds`, with BlockingIOError if nothing has passed. Unlike the
    timeout of a Python socket, it costs no further system calls."""
    whole, micros = divmod(math.ceil(1e6 * seconds), 1_000_000)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, micros))


def _drop_front(parts: list[memoryview], nbytes: int) -> None:
    """Take so many bytes, and buffers that are empty then, from the front of `parts`."""
    while parts and nbytes >= len(parts[0]):
        nbytes -= len(parts.pop(0))
    if nbytes:
        parts[0] = parts[0][nbytes:]


class Peer:
    """A connection to another node's SMP, made at the first request. Guards the socket: one request at a time."""

    def __init__(self, endpoint: tuple[str, int], me: Party, secret: bytes, timeout: float, node: str = "") -> None:
        """`node` is the one whose SMP is expected there; '' for any of the job."""
        self.endpoint = endpoint
        self._me = me
        self._secret = secret
        self._timeout = timeout
        self._node = node
        self._connection: socket.socket | None = None
        self._link: Link | None = None
        self._lock = threading.Lock()  # for the time of a request
        self._making = threading.Lock()  # never for long
        self._closed = False

    def ask(self, name: str, payload: Bytes | None = None, **fields: Any) -> tuple[dict[str, Any], Bytes]:
        """One request; its reply and payload. Raises ProtocolError, or what the peer refused with. After an error of
        the connection the next request makes a new one.

        A peer closes connections that have been idle: a request on an existing one that ends without a byte of a reply
        is sent once more on a new one. Requests between SMPs may be carried out twice (`PeerRequests`).
        """
        with self._lock:
            try:
                used = self._link is not None
                found = self._ask_once({"do": name, **fields}, payload)
                if found is None and used:
                    self._drop()
                    found = self._ask_once({"do": name, **fields}, payload)
                if found is None:
                    raise ProtocolError("it hung up")
            except (OSError, ProtocolError) as error:
                self._drop()
                host, port = self.endpoint
                raise ProtocolError(f"the SMP at {host}:{port} did not answer '{name}': {error}") from error
        protocol.raise_refusal(found[0])
        return found

    def _ask_once(self, message: dict[str, Any], payload: Bytes | None) -> tuple[dict[str, Any], Bytes] | None:
        """The reply; None where the peer hangs up before its first byte. Raises ProtocolError, OSError."""
        if self._closed:
            raise ProtocolError("this side has hung up")
        if self._link is None:
            self._link = self._connect()
        assert self._connection is not None
        try:
            self._link.send(message, payload)
            self._connection.recv(1, socket.MSG_PEEK)
        except (ConnectionResetError, BrokenPipeError):
            return None
        return self._link.receive()

    def _connect(self) -> Link:
        """A connection on which both sides have proved who they are, in the time of one answer. `close` ends it at any
        stage.

        One that was cut off before it was admitted is tried again: it may have had to make room for others.
        """
        until = time.monotonic() + self._timeout
        pause, longest = _AGAIN_SECONDS
        while True:
            try:
                return self._introduce(until)
            except (ConnectionResetError, BrokenPipeError):
                self._drop()
                if self._closed or time.monotonic() + pause >= until:
                    raise
            except BaseException:
                self._drop()
                raise
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    def _introduce(self, until: float) -> Link:
        """Connect, prove, and wait to be admitted. Raises ConnectionResetError if the peer hangs up before that."""
        connection = self._call()
        _until_answered(connection, until)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._timeout)
        handshake = ClientHandshake(self._secret, self._me)
        protocol.send(connection, handshake.hello())
        answer, channel = handshake.answer(_expected(protocol.receive(connection, until, HANDSHAKE_LIMIT)))
        if self._node not in ("", channel.node):
            raise ProtocolError(f"expected the SMP of node {self._node} there, found that of node {channel.node}")
        protocol.send(connection, answer)
        link = Link(connection, channel)
        connection.settimeout(max(0.001, until - time.monotonic()))
        _expected(link.message())
        connection.settimeout(self._timeout)
        return link

    def _call(self) -> socket.socket:
        """A connection that is being made."""
        connection = socket.socket(socket.AF_INET6 if ":" in self.endpoint[0] else socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        with self._making:  # `close` comes before it, or finds a call that it can break off
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
        with self._making:
            if self._connection is not None:
                self._connection.close()
            self._connection = self._link = None

    def close(self) -> None:
        """Hang up for good. Does not wait for a request in flight, nor for a connection in the making: that fails."""
        with self._making:
            self._closed = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # not connected any more
                    self._connection.shutdown(socket.SHUT_RDWR)


def _until_answered(connection: socket.socket, until: float) -> None:
    """Wait until a connection is established. Raises OSError."""
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    if not poller.poll(1000 * max(0.0, until - time.monotonic())):
        raise TimeoutError("timed out")
    if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


def _watch(connection: socket.socket) -> None:
    """Have the kernel bound every wait for the peer, and notice when it is gone. Raises OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_KEEPALIVE, "TCP_USER_TIMEOUT": int(1000 * PART_SECONDS)}.items():
        if (option := getattr(socket, name, None)) is not None:  # not of every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    limit_in_kernel(connection, PART_SECONDS)


def _expected(message: dict[str, Any] | None) -> dict[str, Any]:
    if message is None:
        raise ConnectionResetError("it hung up during the handshake; is it of this job?")
    return message


class Server:
    """Accepts other nodes' SMPs on one address; a thread per proven connection; `handle` answers their requests."""

    def __init__(self, address: str, port: int, me: Party, secret: bytes, handle: Handler, events: Events) -> None:
        """Listen on `address`, on `port` or, if that is 0, any. Raises ConfigError when that cannot be had."""
        self._handle = handle
        self._events = events
        self._closing = False
        self._connections = Connections(connections.places(_CONNECTIONS, _OTHERS))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"the SMP cannot listen on {address}:{port} ({error.strerror}); choose another --ftp-interface"
            ) from error
        listener.listen(512)
        self.endpoint: tuple[str, int] = (address, int(listener.getsockname()[1]))
        self._rejected = RejectedConnections(events)
        self._unproven = unproven.Unproven(listener, secret, me, self._let_in, self._rejected, "smp-peers")

    def _let_in(self, connection: socket.socket, address: str, channel: Channel) -> None:
        """Start a thread that serves a connection that has proved itself."""
        admitted = self._connections.take(connection, channel.node)
        if admitted is None:
            connection.close()
            self._rejected.count(address, f"node {channel.node}: as many connections are busy as there may be")
            return
        try:
            threading.Thread(target=self._serve, args=(admitted, channel), name="smp-peer", daemon=True).start()
        except RuntimeError as error:
            self._connections.leave(admitted)
            connection.close()
            self._rejected.count(address, f"node {channel.node}: no thread for its connection ({error})")

    def _serve(self, admitted: OpenConnection, channel: Channel) -> None:
        """Until the peer hangs up, is idle for too long, sends what is malformed, or makes room for another."""
        with admitted.connection as connection:
            try:
                _watch(connection)
                link = Link(connection, channel, PART_SECONDS)
                link.send({"ok": True})
                idle = select.poll()
                idle.register(connection, select.POLLIN)
                while not self._closing and idle.poll(1000 * IDLE_SECONDS) and self._connections.begin(admitted):
                    if (found := link.receive()) is None:
                        break
                    message, payload = found
                    try:
                        reply, data = self._handle(message, payload)
                    except FtError as error:
                        reply, data = protocol.refusal(error), None
                    link.send({"ok": True, **reply}, data)
                    self._connections.rest(admitted)
            except Exception as error:  # malformed, a dead peer, or a request of another shape: this connection ends
                known = isinstance(error, (FtError, OSError))
                reason = protocol.legible(error) if known else str(protocol.unexpected(error))
                if isinstance(error, BlockingIOError):
                    reason = f"nothing of a frame passed within {PART_SECONDS:g} s"
                self._events.emit(catalogue.PEER_DISCONNECTED, peer=channel.node, reason=reason)
            finally:
                self._connections.leave(admitted)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; connections end at their next request."""
        self._closing = True
        self._unproven.close()
