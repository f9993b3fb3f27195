"""Ask other nodes at their ports, on mutually authenticated connections, and serve this node's port.

Invariant: every wait is bounded, even if the peer is stopped or powered off; torch's own store client would wait for
ever. Every failure to get a reply is a ConnectionError.

A peer cannot end the thread that serves or exceed the limits given here. One that has proved that it knows the job's
secret (`door`) gets one request answered at a time, and the next one only once its reply is sent, so unread replies do
not pile up. A reply may be held back: it is sent when `Held` releases it, or when another request arrives after it.
Neither a request nor a sweep searches all connections. A request that cannot be answered ends its connection. The only
thread resolves no names and holds no lock while it waits, so a process forked meanwhile inherits no lock to hang on.

In: endpoints as 'host:port', messages; a function from a request to its reply. Out: replies; a `ForeignError` if the
peer rejected this node or failed to authenticate; counts of rejected connections, at most once a minute.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

from ...errors import ConfigError, ProtocolError
from ...events import Events
from ...transport import door, protocol
from ...transport.calls import Caller
from ...transport.channel import Channel, Party
from ...transport.dial import ADMITTED, ForeignPeerError
from ...transport.door import Door, DoorLimits, RejectedConnections
from ...transport.frame_codec import FrameBounds, Message
from ...transport.framed import Link, close_connection
from ...transport.loop import Loop
from ..rounds.node_messages import REQUEST_LIMIT
from .endpoint import Endpoint

PURPOSE = "rendezvous"
ASKED_AT_ONCE = 32
# unproven connections at a time. A job's nodes connect all at once when it starts, and may be slow then. If they had to
# make room for each other, each would try again and again; so there are more places than nodes were measured with
_LIMITS = DoorLimits(connections=2048, of_one_address=8, seconds=5.0, any_job=True)
_BOUNDS = FrameBounds(REQUEST_LIMIT)
_IDLE_SECONDS = 120.0  # an idle connection is closed after this; a live peer makes a new one
_UNREAD_SECONDS = 10.0  # for a peer to read a reply
_SWEEP_SECONDS = 1.0  # between two searches for connections to close
_CONNECTIONS = 4096
_LEAST_WAIT = 0.01
_REJECTED_SECONDS = 30.0  # for which a rejected connection may be why a node does not come
_TURN = 16  # requests of one connection before others have their turn


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
    with closing(PeerConnection(endpoint, seconds, credentials)) as connection:
        return connection.ask(message)


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


# ---- answering ----


class Held(Protocol):
    """Replies that are held back, by connection."""

    def released(self) -> list[tuple[int, Message]]:
        """Those whose time has come."""

    def release(self, connection: int) -> Message:
        """That of a connection on which another request has arrived."""


@dataclass
class _Peer:
    """One connection of a peer that has proved that it knows the secret."""

    number: int
    address: str
    link: Link
    used: float  # monotonic
    held: bool = False  # its last request is not answered yet


class PeerServer:
    """Answers on a listening socket, from a thread, until `close`.

    `answer(request, connection)` gives the reply, or None if `held` has it later; `connection` is a number, and
    `gone(connection)` is called when it ends. `tick()` is called repeatedly; it returns the seconds until the next
    call. If one of them fails, all connections are closed, so that other nodes see this one as lost, and `check` raises
    the failure on this one.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        answer: Callable[[Message, int], Message | None],
        gone: Callable[[int], None],
        tick: Callable[[], float],
        events: Events,
        held: Held | None = None,
    ) -> None:
        self.port = int(listener.getsockname()[1])
        self._answer = answer
        self._gone = gone
        self._tick = tick
        self._held = held
        self._rejected = RejectedConnections(events)
        self._accepted = 0
        self._peers: OrderedDict[int, _Peer] = OrderedDict()  # by number, the longest unused one first
        self._unread: dict[int, _Peer] = {}  # with a reply to be sent
        self._places = door.places(_CONNECTIONS)
        self._failure: Exception | None = None
        self._loop = Loop("ft-post")
        self._door = Door(
            self._loop, listener, credentials.secret, credentials.who, self._admit, self._rejected, _LIMITS,
            lambda: self._places - len(self._peers),
        )  # fmt: skip
        self._loop.soon(self._turn)
        self._loop.soon(self._sweep)
        self._thread = threading.Thread(target=self._serve, name="ft-post", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and close every connection. Idempotent."""
        self._loop.stop()
        self._thread.join()

    def look(self) -> None:
        """Send the replies that are held no longer at once. Callable from any thread."""
        self._loop.call(lambda: self._loop.soon(self._turn))

    @property
    def rejected(self) -> str:
        """For people: which connection was rejected a moment ago, and what to check; '' for none."""
        when, what = self._rejected.newest
        return (
            f"{what}; if it is a node of this job, give the same --ftp-secret-file and --ftp-job on all nodes"
            if time.monotonic() - when < _REJECTED_SECONDS
            else ""
        )

    @property
    def is_serving(self) -> bool:
        """Whether requests are still answered."""
        return self._failure is None

    def check(self) -> None:
        """Raises RuntimeError if requests are no longer answered."""
        if self._failure:
            raise RuntimeError(f"the port of this node ({self.port}) no longer answers") from self._failure

    def _serve(self) -> None:
        try:
            self._loop.run()
        except Exception as error:  # raised again by `check`, in the thread that can end the job
            self._failure = error
        finally:  # does not call `gone`, which may be what failed
            self._door.close()
            for peer in self._peers.values():
                close_connection(peer.link.connection)
            self._loop.close()

    def _turn(self, now: float) -> None:
        """After each step in which something has happened, and when it is time."""
        self._loop.at(time.monotonic() + max(_LEAST_WAIT, self._tick()), self._turn)
        for number, reply in self._held.released() if self._held else ():
            if (peer := self._peers.get(number)) is not None and peer.held:
                peer.held = False
                self._attend(peer, reply)

    def _admit(self, connection: socket.socket, address: str, channel: Channel) -> None:
        self._accepted += 1
        peer = _Peer(self._accepted, address, Link(connection, channel, _BOUNDS), time.monotonic())
        self._peers[peer.number] = peer
        self._attend(peer, ADMITTED)

    def _attend(self, peer: _Peer, reply: Message | None = None) -> None:
        """Send a reply that was held; read, and answer each complete frame once the previous reply is sent."""
        link = peer.link
        peer.used = time.monotonic()
        self._peers.move_to_end(peer.number)
        self._loop.soon(self._turn)
        try:
            if reply is not None:
                link.push(reply)
            for _ in range(_TURN):
                link.write()
                if link.waiting:
                    break
                received = next(link.read(), None)
                if peer.held and self._held and not (received is None and link.decoder.is_between):
                    peer.held = False
                    link.push(self._held.release(peer.number))
                if received is not None:
                    self._take(peer, received[0])
                elif not link.waiting:
                    break
            self._watch(peer)
        except ProtocolError as error:
            self._drop(peer, str(error))
        except OSError:
            self._drop(peer)
        except Exception as error:  # anything that a request causes ends its connection, never the thread
            self._drop(peer, str(protocol.unexpected(error)))

    def _take(self, peer: _Peer, request: Message) -> None:
        reply = self._answer(request, peer.number)
        if reply is None:
            peer.held = True
        else:
            peer.link.push(reply)

    def _watch(self, peer: _Peer) -> None:
        if peer.link.waiting:
            self._unread[peer.number] = peer
        else:
            self._unread.pop(peer.number, None)
        events = selectors.EVENT_WRITE if peer.link.waiting else selectors.EVENT_READ
        self._loop.watch(peer.link.connection, lambda _: self._attend(peer), events)

    def _drop(self, peer: _Peer, why: str = "") -> None:
        """End a connection. `why`: the reason if it is rejected."""
        if why:
            self._rejected.count(peer.address, why)
        del self._peers[peer.number]
        self._unread.pop(peer.number, None)
        self._loop.forget(peer.link.connection)
        close_connection(peer.link.connection)
        self._gone(peer.number)

    def _sweep(self, now: float) -> None:
        """Close connections whose time is over."""
        self._loop.at(now + _SWEEP_SECONDS, self._sweep)
        for peer in list(self._unread.values()):
            if now - peer.used > _UNREAD_SECONDS:
                self._drop(peer)
        while self._peers and now - (oldest := next(iter(self._peers.values()))).used > _IDLE_SECONDS:
            self._drop(oldest)
