"""Ask other nodes at their ports, on mutually authenticated connections.

Invariant: every wait is bounded, even if the peer is stopped or powered off; torch's own store client would wait for
ever. Before the peer has proved that it knows the secret, this node sends only its handshake. Every failure to get a
reply is a ConnectionError.

In: endpoints as 'host:port', messages. Out: replies; a `ForeignError` if the peer rejected this node or failed to
authenticate.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...errors import ConfigError, ProtocolError
from ...transport import protocol
from ...transport.channel import HANDSHAKE_LIMIT, TAG, Channel, ClientHandshake, Party
from ...transport.protocol import FRAME_LIMIT
from ..rounds.node_messages import Message
from .endpoint import Endpoint

PURPOSE = "rendezvous"
HEAD = 4  # bytes of the length before the content of a frame
REFUSED: Message = {"refused": True}  # sealed: to a node of another job that knows the secret
ASKED_AT_ONCE = 32
ADMITTED: Message = {"let in": True}  # the first sealed frame: after it the connection is not dropped for others
_RETRY_SECONDS = (0.02, 1.0)  # first and longest pause before reconnecting after a connection that ended before that


@dataclass(frozen=True)
class Credentials:
    """What a node authenticates with."""

    secret: bytes
    run: str
    node: str
    encrypt: bool = False

    @property
    def who(self) -> Party:
        """This node in a handshake."""
        return Party(PURPOSE, self.run, self.node, self.encrypt)


class ForeignError(ConnectionError):
    """The node there belongs to another job or has another secret."""


class _HungUpError(ConnectionError):
    """The peer closed the connection before it admitted this node, maybe to make room for others."""


class PeerConnection:
    """A connection to another node. Any failure to get a reply ends it and raises ConnectionError."""

    def __init__(self, endpoint: str, seconds: float, credentials: Credentials) -> None:
        """`seconds`: limit for connecting including the handshake, and for each reply."""
        self.endpoint = endpoint
        self._seconds = seconds
        self._awaited = 0  # replies to requests that were sent
        until = time.monotonic() + seconds
        pause, longest = _RETRY_SECONDS
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
        try:
            answer, channel = client.answer(challenge)
        except ProtocolError as error:
            raise ForeignError(str(error)) from error
        proof = protocol.pack(answer)
        self._socket.sendall(length_prefix(proof) + proof)
        if (reply := self._receive(channel, until)) == REFUSED:
            raise ForeignError("it belongs to another job")
        if reply != ADMITTED:
            raise ProtocolError("expected to be admitted, found another reply")
        return channel

    def ask(self, message: Message) -> Message:
        """The reply to `message`; replies to earlier ones are dropped."""
        self.send(message)
        while self._awaited > 1:
            self.receive()
        return self.receive()

    def send(self, message: Message) -> None:
        """Send a request whose reply is received later."""
        try:
            payload = protocol.pack(message)
            body, tag = self._channel.sealer.seal(payload)
            self._socket.settimeout(self._seconds)
            self._socket.sendall(b"".join((length_prefix(payload), body, tag)))
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionError(_why(error, self._seconds)) from error
        self._awaited += 1

    def is_readable(self, seconds: float) -> bool:
        """Whether a reply has begun to arrive, or the connection has ended, within `seconds`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def receive(self) -> Message:
        """The next reply."""
        try:
            self._awaited -= 1
            return self._receive(self._channel, time.monotonic() + self._seconds)
        except EOFError as error:
            self.close()
            raise ConnectionError("it closed the connection") from error
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionError(_why(error, self._seconds)) from error

    def _receive(self, channel: Channel, until: float) -> Message:
        length = self._announced(FRAME_LIMIT, until)
        sealed = memoryview(self._read(length + TAG, until))
        return protocol.unpack(channel.opener.open(sealed[:length], bytes(sealed[length:])))

    def _announced(self, limit: int, until: float) -> int:
        return protocol.announced(self._read(HEAD, until), limit)

    def _read(self, count: int, until: float) -> bytes:
        """Exactly `count` bytes. Raises EOFError if the peer has closed, TimeoutError at `until` (monotonic)."""
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
        """Close the connection, in forked processes too. Idempotent."""
        close_connection(self._socket)


def ask(endpoint: str, message: Message, seconds: float, credentials: Credentials) -> Message:
    """The reply of one node, on a connection of its own. Raises ConnectionError."""
    connection = PeerConnection(endpoint, seconds, credentials)
    try:
        return connection.ask(message)
    finally:
        connection.close()


def ask_all(
    endpoints: Iterable[str], message: Message, seconds: float, credentials: Credentials
) -> dict[str, Message | ConnectionError]:
    """The replies of several nodes, asked concurrently, or the reason for none. `seconds`: limit for each."""

    def attempt(endpoint: str) -> Message | ConnectionError:
        try:
            return ask(endpoint, message, seconds, credentials)
        except ConnectionError as error:
            return error

    distinct = list(dict.fromkeys(endpoints))
    if len(distinct) < 2:
        return {each: attempt(each) for each in distinct}
    with ThreadPoolExecutor(min(len(distinct), ASKED_AT_ONCE)) as pool:  # all threads have ended when this returns
        return dict(zip(distinct, pool.map(attempt, distinct), strict=True))


def node_answers(endpoint: Endpoint, seconds: float) -> bool:
    """Whether a node of any job answers there."""
    try:
        PeerConnection(str(endpoint), seconds, Credentials(bytes(16), "?", "?")).close()
    except ForeignError:
        return True
    except ConnectionError:
        return False
    return True


def length_prefix(payload: bytes) -> bytes:
    """The length of a payload, as sent before it; excludes the tag that follows it after the handshake."""
    return struct.pack(">I", len(payload))


def close_connection(connection: socket.socket) -> None:
    """End a connection, in forked processes too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
