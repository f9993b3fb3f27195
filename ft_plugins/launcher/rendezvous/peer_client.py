"""Ask other nodes at their ports, on mutually authenticated connections.

Invariant: every wait is bounded, even if the peer is stopped or powered off; torch's own store client would wait for
ever. Every failure to get a reply is a ConnectionError.

In: endpoints as 'host:port', messages. Out: replies; a `ForeignError` if the peer rejected this node or failed to
authenticate.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...errors import ConfigError, ProtocolError
from ...transport.channel import Party
from ...transport.dial import CUT_OFF, Dialer, ForeignPeerError
from ...transport.frame_codec import Message
from ...transport.framed import FramedSocket
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
        """`seconds`: limit for connecting including the handshake, and for each reply."""
        self.endpoint = endpoint
        self._seconds = seconds
        self._awaited = 0  # replies to requests that were sent
        try:
            place = Endpoint.read(endpoint)
            self._dialer = Dialer((place.host, place.port), credentials.secret, credentials.who)
            self._line = self._dialer.connect(time.monotonic() + seconds, FramedSocket)
            self._line.seconds = seconds
        except ForeignPeerError as error:
            raise ForeignError(str(error)) from error
        except CUT_OFF as error:
            raise ConnectionError("it closed the connection") from error
        except (OSError, UnicodeError, ConfigError, ProtocolError) as error:
            raise ConnectionError(_why(error, seconds)) from error

    def ask(self, message: Message) -> Message:
        """The reply to `message`; replies to earlier ones are dropped."""
        self.send(message)
        while self._awaited > 1:
            self.receive()
        return self.receive()

    def send(self, message: Message) -> None:
        """Send a request whose reply is received later."""
        try:
            self._line.connection.settimeout(self._seconds)
            self._line.send(message)
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionError(_why(error, self._seconds)) from error
        self._awaited += 1

    def is_readable(self, seconds: float) -> bool:
        """Whether a reply has begun to arrive, or the connection has ended, within `seconds`."""
        poll = select.poll()
        poll.register(self._line.connection, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def receive(self) -> Message:
        """The next reply."""
        try:
            self._awaited -= 1
            received = self._line.receive(time.monotonic() + self._seconds)
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionError(_why(error, self._seconds)) from error
        if received is None:
            self.close()
            raise ConnectionError("it closed the connection")
        return received[0]

    def close(self) -> None:
        """Close the connection, in forked processes too. Idempotent."""
        self._dialer.close()
        self._dialer.drop()


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


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
