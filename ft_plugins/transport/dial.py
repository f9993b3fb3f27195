"""Connect to a peer: prove that this side knows the job's secret, have the peer prove it, and wait to be admitted.

Invariant: every wait is bounded, and ended by `close`, even if the peer is stopped or powered off. Until the peer has
proved that it knows the secret, it gets this side's handshake and nothing else.

    connection = handshake (`channel`) | the server's first frame: ADMITTED | frames of its purpose

In: where the peer listens. Out: a connected socket and its channel; OSError or ProtocolError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import ProtocolError
from .channel import Channel, ClientHandshake, Party
from .frame_codec import HANDSHAKE, PLAIN, Message
from .framed import FramedSocket, keep_alive

ADMITTED: Message = {"ok": True}  # the first frame that is sealed: after it the connection is not dropped for others
REFUSED: Message = {"refused": True}  # instead, to a peer of another job or purpose that knows the secret
_RETRY_SECONDS = (0.02, 1.0)  # pause before the next attempt: first, longest
# the peer may have closed the connection to make room for others
CUT_OFF: tuple[type[Exception], ...] = (ConnectionResetError, BrokenPipeError)

T = TypeVar("T")


class ForeignPeerError(ProtocolError):
    """The peer belongs to another job, or has another secret."""


class Dialer:
    """Makes one connection at a time to one peer, and owns it."""

    def __init__(
        self, where: tuple[str, int], secret: bytes, me: Party, retried: tuple[type[Exception], ...] = CUT_OFF
    ):
        """`where`: host and port. `retried`: errors after which it tries again."""
        self.where = where
        self.connection: socket.socket | None = None
        self.is_closed = False
        self._secret = secret
        self._me = me
        self._retried = retried
        self._lock = threading.Lock()  # never held for long

    def connect(self, until: float, greet: Callable[[socket.socket, Channel], T]) -> T:
        """Connect by `until` (monotonic); returns what `greet` makes of the connection, which its errors end too.
        Raises OSError, ProtocolError."""
        pause, longest = _RETRY_SECONDS
        while True:
            try:
                connection = self._connected(until)
                return greet(connection, prove(connection, self._secret, self._me, until))
            except self._retried:
                self.drop()
                if self.is_closed or time.monotonic() + pause >= until:
                    raise
            except BaseException:
                self.drop()
                raise
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    def _connected(self, until: float) -> socket.socket:
        """A socket that is connected to the first of the peer's addresses that answers within its part of the time."""
        addresses = socket.getaddrinfo(*self.where, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(addresses, 1):
            try:
                with self._lock:  # so `close` either comes first, or has a connection to shut down
                    if self.is_closed:
                        raise ProtocolError("this side has hung up")
                    self.connection = connection = socket.socket(family, kind, protocol)
                    connection.setblocking(False)
                    code = connection.connect_ex(address)
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, f"{os.strerror(code)} by {address[0]}")
                began, left = time.monotonic(), len(addresses) + 1 - number
                _wait_established(connection, began + (until - began) / left, address[0])
                keep_alive(connection)
                return connection
            except BaseException as error:
                self.drop()
                if not isinstance(error, OSError) or number == len(addresses):
                    raise
        raise OSError(errno.EADDRNOTAVAIL, "its name has no address")

    def surrender(self) -> socket.socket | None:
        """The connection, which the caller owns from now on; None if there is none, or this side has hung up."""
        with self._lock:
            if self.is_closed:
                return None
            connection, self.connection = self.connection, None
            return connection

    def drop(self) -> None:
        """Close the connection, if there is one."""
        with self._lock:
            if self.connection is not None:
                self.connection.close()
            self.connection = None

    def close(self) -> None:
        """Hang up for good, without waiting: whatever uses or makes the connection fails."""
        with self._lock:
            self.is_closed = True
            if self.connection is not None:
                with contextlib.suppress(OSError):  # no longer connected
                    self.connection.shutdown(socket.SHUT_RDWR)


def prove(connection: socket.socket, secret: bytes, me: Party, until: float) -> Channel:
    """The handshake as the side that has connected, and the wait to be admitted. Raises ForeignPeerError,
    ProtocolError; ConnectionResetError if the peer hangs up; OSError."""
    framed = FramedSocket(connection, bounds=HANDSHAKE)
    handshake = ClientHandshake(secret, me)
    connection.settimeout(max(0.001, until - time.monotonic()))
    framed.send(handshake.hello())
    challenge = _expected(framed, until)
    try:
        answer, channel = handshake.answer(challenge)
    except ProtocolError as error:
        raise ForeignPeerError(str(error)) from error
    framed.send(answer)
    framed.protect(channel, PLAIN)
    if (reply := _expected(framed, until)) == REFUSED:
        raise ForeignPeerError("it belongs to another job")
    if reply != ADMITTED:
        raise ProtocolError("expected to be admitted, found another reply")
    return channel


def _expected(framed: FramedSocket, until: float) -> Message:
    if (received := framed.receive(until)) is None:
        raise ConnectionResetError("it hung up during the handshake; is it of this job?")
    return received[0]


def _wait_established(connection: socket.socket, until: float, address: object) -> None:
    """Wait until a connection is established. Raises OSError with the address: elsewhere the name may have another."""
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    if not poller.poll(1000 * max(0.0, until - time.monotonic())):
        raise TimeoutError(f"timed out at {address}")
    if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, f"{os.strerror(code)} by {address}")
