"""Connections between SMPs of different nodes: TCP, authenticated both ways by the job's secret, bounded frames.

Invariant: nobody without the secret gets an answer beyond a nonce, no frame is longer than its bound, nothing is
unpickled, every wait is bounded. The secret never leaves its file: what travels are nonces and keyed digests of them.
A payload carries its xxh3 digest and is handed on only when it fits.

    connection = client nonce -> | <- server nonce, proof | proof -> | then requests and replies
    frame      = protocol frame (msgpack map, with `bytes` and `digest` if a payload follows) | payload

In: requests by name. Out: replies; a `ProtocolError` for whatever does not fit.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import ConfigError, FtError, ProtocolError
from ..events import Events
from . import protocol

PAYLOAD_LIMIT = 1 << 20  # bytes of one frame
SECRET_LIMIT = 4096
_NONCE = 32
_CONNECTIONS = 4096
_ACCEPT_PAUSE_SECONDS = 0.1
_STRANGER_SECONDS = 10.0  # until a peer has proved who it is, however it spreads its bytes

Bytes = npt.NDArray[np.uint8]
Handler = Callable[[dict[str, Any], Bytes], tuple[dict[str, Any], "Bytes | None"]]
_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


def read_secret(path: Path) -> bytes:
    """The job's secret. Raises ConfigError for a file that others can read, or that holds less than 16 bytes."""
    try:
        found = path.stat()
        secret = path.read_bytes()[:SECRET_LIMIT].strip()
    except OSError as error:
        raise ConfigError(f"--ftp-secret-file {path}: cannot be read ({error.strerror})") from error
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


def _proof(secret: bytes, who: str, job: str, *nonces: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join([who.encode(), job.encode(), *nonces]), "sha256")


def send(connection: socket.socket, message: dict[str, Any], payload: Bytes | None = None) -> None:
    """Write one frame. Raises ProtocolError when the payload exceeds its limit."""
    if payload is None or not len(payload):
        protocol.send(connection, message)
        return
    if len(payload) > PAYLOAD_LIMIT:
        raise ProtocolError(f"a payload of {len(payload)} bytes exceeds the limit of {PAYLOAD_LIMIT}")
    digest = xxhash.xxh3_64_intdigest(payload.data)
    protocol.send(connection, {**message, "bytes": len(payload), "digest": digest})
    connection.sendall(payload.data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], Bytes] | None:
    """Read one frame with its payload; None when the peer has closed between frames. Raises ProtocolError."""
    message = protocol.receive(connection)
    if message is None:
        return None
    if "bytes" not in message:
        return message, _NOTHING
    length = protocol.number(message, "bytes", PAYLOAD_LIMIT + 1)
    payload = np.empty(length, dtype=np.uint8)
    view, done = payload.data, 0
    while done < length:
        count = connection.recv_into(view[done:])
        if not count:
            raise ProtocolError(f"the connection ended after {done} of {length} bytes of a payload")
        done += count
    found, expected = xxhash.xxh3_64_intdigest(payload.data), protocol.number(message, "digest", 1 << 64)
    if found != expected:
        raise ProtocolError(f"a payload of {length} bytes has digest {found:016x}; its sender took {expected:016x}")
    return message, payload


class Peer:
    """A connection to another node's SMP, made at the first request. Guards the socket: one request at a time."""

    def __init__(self, endpoint: tuple[str, int], job: str, secret: bytes, timeout: float) -> None:
        self.endpoint = endpoint
        self._job = job
        self._secret = secret
        self._timeout = timeout
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()  # for the time of a request
        self._making = threading.Lock()  # never for long
        self._closed = False

    def ask(self, name: str, payload: Bytes | None = None, **fields: Any) -> tuple[dict[str, Any], Bytes]:
        """One request; its reply and payload. Raises ProtocolError, or what the peer refused with. After an error of
        the connection the next request makes a new one."""
        with self._lock:
            try:
                if self._closed:
                    raise ProtocolError("this side has hung up")
                if self._connection is None:
                    self._connection = self._connect()
                send(self._connection, {"do": name, **fields}, payload)
                found = receive(self._connection)
                if found is None:
                    raise ProtocolError("it hung up")
            except (OSError, ProtocolError) as error:
                self._drop()
                host, port = self.endpoint
                raise ProtocolError(f"the SMP at {host}:{port} did not answer '{name}': {error}") from error
        protocol.raise_refusal(found[0])
        return found

    def _connect(self) -> socket.socket:
        """A connection on which both sides have proved who they are, in the time of one answer. `close` reaches it from
        its first moment."""
        until = time.monotonic() + self._timeout
        connection = self._call()
        try:
            _until_answered(connection, self._timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(self._timeout)
            ours = secrets.token_bytes(_NONCE)
            protocol.send(connection, {"job": self._job, "nonce": ours})
            answer = protocol.receive(connection, until) or {}
            theirs = protocol.field(answer, "nonce", bytes)
            expected = _proof(self._secret, "server", self._job, ours, theirs)
            if not hmac.compare_digest(protocol.field(answer, "proof", bytes), expected):
                raise ProtocolError("it does not know the secret of this job (--ftp-secret-file differs between nodes)")
            protocol.send(connection, {"proof": _proof(self._secret, "client", self._job, ours, theirs)})
            connection.settimeout(self._timeout)
        except BaseException:
            self._drop()
            raise
        return connection

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
                self._connection = None

    def close(self) -> None:
        """Hang up for good. Does not wait for a request in flight, nor for a connection in the making: that fails."""
        with self._making:
            self._closed = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # not connected any more
                    self._connection.shutdown(socket.SHUT_RDWR)


def _until_answered(connection: socket.socket, timeout: float) -> None:
    """Wait for a call to be answered. Raises OSError."""
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    if not poller.poll(1000 * timeout):
        raise TimeoutError("timed out")
    if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


class Server:
    """Accepts other nodes' SMPs on one address; a thread per connection; `handle` answers their requests."""

    def __init__(self, address: str, port: int, job: str, secret: bytes, handle: Handler, events: Events) -> None:
        """Listen on `address`, on `port` or, if that is 0, any. Raises ConfigError when that cannot be had."""
        self._job = job
        self._secret = secret
        self._handle = handle
        self._events = events
        self._closing = False
        self._places = threading.BoundedSemaphore(_CONNECTIONS)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"the SMP cannot listen on {address}:{port} ({error.strerror}); choose another --ftp-interface"
            ) from error
        self._socket.listen(512)
        self.endpoint: tuple[str, int] = (address, int(self._socket.getsockname()[1]))
        threading.Thread(target=self._accept, name="smp-peers", daemon=True).start()

    def _accept(self) -> None:
        while not self._closing:
            self._places.acquire()
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                self._places.release()
                if self._closing:
                    return
                self._events.emit("peer.hangup", reason=f"a connection could not be accepted: {error}")
                threading.Event().wait(_ACCEPT_PAUSE_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connection, peer), name="smp-peer", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: Any) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._check(connection, time.monotonic() + _STRANGER_SECONDS)
                connection.settimeout(None)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                while not self._closing and (found := receive(connection)) is not None:
                    message, payload = found
                    try:
                        reply, data = self._handle(message, payload)
                    except FtError as error:
                        reply, data = protocol.refusal(error), None
                    send(connection, {"ok": True, **reply}, data)
            except (FtError, OSError) as error:  # malformed, a dead peer or a stranger: this connection ends
                self._events.emit("peer.hangup", peer=str(peer[0]), reason=str(error))
            except (KeyError, TypeError, ValueError) as error:  # a request that lacks a field, or holds another kind
                self._events.emit("peer.hangup", peer=str(peer[0]), reason=f"{type(error).__name__}: {error}")
            finally:
                self._places.release()

    def _check(self, connection: socket.socket, until: float) -> None:
        """Raises ProtocolError unless the peer knows the secret of this job, TimeoutError if it has not said so by
        then."""
        hello = protocol.receive(connection, until) or {}
        theirs, job = protocol.field(hello, "nonce", bytes), protocol.field(hello, "job", str)
        if job != self._job or len(theirs) != _NONCE:
            raise ProtocolError(f"an SMP of job '{job[:48]}' has called; this is job '{self._job}'")
        ours = secrets.token_bytes(_NONCE)
        protocol.send(connection, {"nonce": ours, "proof": _proof(self._secret, "server", self._job, theirs, ours)})
        answer = protocol.receive(connection, until) or {}
        expected = _proof(self._secret, "client", self._job, theirs, ours)
        if not hmac.compare_digest(protocol.field(answer, "proof", bytes), expected):
            raise ProtocolError("a peer does not know the secret of this job")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; connections end at their next request."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()
