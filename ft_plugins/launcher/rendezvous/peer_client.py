"""Ask other nodes at their ports, on mutually authenticated connections.

Invariant: every wait is bounded, even if the peer is stopped or powered off; torch's own store client would wait for
ever. Every failure to get a reply is a ConnectionError.

In: endpoints as 'host:port', messages. Out: replies; a `ForeignError` if the peer rejected this node or failed to
authenticate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ...errors import ConfigError, ProtocolError
from ...transport.calls import Caller
from ...transport.channel import Party
from ...transport.dial import ForeignPeerError
from ...transport.frame_codec import Message
from .endpoint import Endpoint

PURPOSE = "rendezvous"
ASKED_AT_ONCE = 32


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


class PeerConnection:
    """A connection to another node. Any failure to get a reply ends it and raises ConnectionError."""

    def __init__(self, endpoint: str, seconds: float, credentials: Credentials) -> None:
        """`seconds`: limit for connecting including the handshake, for sending, and for each part of a reply."""
        self.endpoint = endpoint
        try:
            place = Endpoint.read(endpoint)
        except ConfigError as error:
            raise ConnectionError(str(error)) from error
        self._caller = Caller((place.host, place.port), credentials.who, credentials.secret, seconds)
        with self._failing():
            self._caller.connect()

    def ask(self, message: Message) -> Message:
        """The reply to `message`; replies to earlier ones are dropped."""
        self.send(message)
        while self._caller.awaited > 1:
            self.receive()
        return self.receive()

    def send(self, message: Message) -> None:
        """Send a request whose reply is received later."""
        with self._failing():
            self._caller.send(message)

    def is_readable(self, seconds: float) -> bool:
        """Whether a reply has begun to arrive, or the connection has ended, within `seconds`."""
        return self._caller.is_readable(seconds)

    def receive(self) -> Message:
        """The next reply."""
        with self._failing():
            return self._caller.receive()[0]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError, ProtocolError) as error:
            self.close()
            kind = ForeignError if isinstance(error, ForeignPeerError) else ConnectionError
            raise kind(self._caller.why(error)) from error

    def close(self) -> None:
        """Close the connection, in forked processes too. Idempotent."""
        self._caller.close()
        self._caller.drop()


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
