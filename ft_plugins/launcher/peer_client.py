"""Asking other nodes, at their ports, on connections whose ends have proved to each other that they know the secret.

Invariant: every wait is bounded, for a peer that has ended as for one that is stopped or has lost its power: torch's
own store client waits for such a peer for ever. Nothing of this node's is sent before the peer has proved itself, but
what the handshake says. Every failure to get a reply is a ConnectionError.

In: endpoints as 'host:port', messages. Out: the replies of others; a `ForeignError` where one has refused this node, or
could not prove itself.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import ConfigError, ProtocolError
from ..smp import protocol
from ..smp.channel import HANDSHAKE_LIMIT, TAG, Channel, ClientHandshake, Who
from ..smp.protocol import FRAME_LIMIT
from .endpoint import Endpoint
from .node_messages import Message

PURPOSE = "rendezvous"
HEAD = 4  # bytes before the content of a frame, which tell its length
REFUSED: Message = {"refused": True}  # all that a node says to one of another job
ASKED_AT_ONCE = 32
ADMITTED: Message = {"let in": True}  # the first sealed frame: from now on the connection makes no room for others
_AGAIN_SECONDS = (0.02, 1.0)  # pause before one that ended before that is made again: the first, the longest


@dataclass(frozen=True)
class Credentials:
    """By which nodes of one job know each other."""

    secret: bytes
    run: str
    node: str
    encrypt: bool = False

    @property
    def who(self) -> Who:
        """This node in a handshake."""
        return Who(PURPOSE, self.run, self.node, self.encrypt)


class ForeignError(ConnectionError):
    """Where this was asked there is a node of another job, or of one with another secret."""


class _HungUpError(ConnectionError):
    """The peer has closed the connection before it let this node in: it may have had to make room for others."""


class PeerConnection:
    """A connection to another node. Every failure to get a reply is a ConnectionError, and its end."""

    def __init__(self, endpoint: str, seconds: float, credentials: Credentials) -> None:
        """`seconds` bound the connecting with its handshake, and each reply."""
        self.endpoint = endpoint
        self._seconds = seconds
        until = time.monotonic() + seconds
        pause, longest = _AGAIN_SECONDS
        while True:
            try:
                self._connect(until, credentials)
                return
            except _HungUpError:
                if time.monotonic() + pause > until:
                    raise
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    def _connect(self, until: float, credentials: Credentials) -> None:
        try:
            place = Endpoint.read(self.endpoint)
            self._socket = socket.create_connection((place.host, place.port), max(0.001, until - time.monotonic()))
        except (OSError, UnicodeError, ConfigError) as error:
            raise ConnectionError(_why(error, self._seconds)) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._channel = self._prove(until, credentials)
        except (ConnectionResetError, BrokenPipeError, EOFError) as error:
            self.close()
            raise _HungUpError("it closed the connection") from error
        except ConnectionError:
            self.close()
            raise
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionError(_why(error, self._seconds)) from error

    def _prove(self, until: float, credentials: Credentials) -> Channel:
        client = ClientHandshake(credentials.secret, credentials.who)
        hello = protocol.pack(client.hello())
        self._socket.sendall(length_prefix(hello) + hello)
        challenge = protocol.unpack(self._read(self._announced(HANDSHAKE_LIMIT, until), until), proven=False)
        if challenge == REFUSED:
            raise ForeignError("it belongs to another job")
        try:
            answer, channel = client.answer(challenge)
        except ProtocolError as error:
            raise ForeignError(str(error)) from error
        proof = protocol.pack(answer)
        self._socket.sendall(length_prefix(proof) + proof)
        if self._opened(channel, until) != ADMITTED:
            raise ProtocolError("expected to be let in, found another reply")
        return channel

    def ask(self, message: Message) -> Message:
        """The reply to `message`."""
        until = time.monotonic() + self._seconds
        try:
            payload = protocol.pack(message)
            body, tag = self._channel.sealer.seal(payload)
            self._socket.settimeout(self._seconds)
            self._socket.sendall(b"".join((length_prefix(payload), body, tag)))
            return self._opened(self._channel, until)
        except EOFError as error:
            self.close()
            raise ConnectionError("it closed the connection") from error
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionError(_why(error, self._seconds)) from error

    def _opened(self, channel: Channel, until: float) -> Message:
        length = self._announced(FRAME_LIMIT, until)
        sealed = memoryview(self._read(length + TAG, until))
        return protocol.unpack(channel.opener.open(sealed[:length], bytes(sealed[length:])))

    def _announced(self, limit: int, until: float) -> int:
        return protocol.announced(self._read(HEAD, until), limit)

    def _read(self, count: int, until: float) -> bytes:
        """So many bytes. Raises EOFError where the peer has closed, TimeoutError where they are not here by then."""
        received = bytearray()
        while len(received) < count:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left)
            part = self._socket.recv(min(count - len(received), 1 << 16))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

    def close(self) -> None:
        """Close the connection, also for processes that were forked with it. Idempotent."""
        close_connection(self._socket)


def ask(endpoint: str, message: Message, seconds: float, credentials: Credentials) -> Message:
    """The reply of one node, on a connection for this alone. Raises ConnectionError."""
    line = PeerConnection(endpoint, seconds, credentials)
    try:
        return line.ask(message)
    finally:
        line.close()


def ask_all(
    endpoints: Iterable[str], message: Message, seconds: float, credentials: Credentials
) -> dict[str, Message | ConnectionError]:
    """The replies of several nodes, asked at once; of those that gave none, why. `seconds` bound each of them."""

    def attempt(endpoint: str) -> Message | ConnectionError:
        try:
            return ask(endpoint, message, seconds, credentials)
        except ConnectionError as error:
            return error

    names = list(dict.fromkeys(endpoints))
    if len(names) < 2:
        return {name: attempt(name) for name in names}
    with ThreadPoolExecutor(min(len(names), ASKED_AT_ONCE)) as pool:  # all have ended when this returns
        return dict(zip(names, pool.map(attempt, names), strict=True))


def node_answers(endpoint: Endpoint, seconds: float) -> bool:
    """Whether a node answers there, of whichever job."""
    try:
        PeerConnection(str(endpoint), seconds, Credentials(bytes(16), "?", "?")).close()
    except ForeignError:
        return True
    except ConnectionError:
        return False
    return True


def length_prefix(payload: bytes) -> bytes:
    """What goes before a payload: its length, without that of the tag that follows it after the handshake."""
    return struct.pack(">I", len(payload))


def close_connection(connection: socket.socket) -> None:
    """End a connection, also for processes that were forked with it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
