"""Serve this node's port, at which other nodes of its job send requests.

Invariant: a peer cannot end the thread or exceed the limits given here. Until it has proved that it knows the job's
secret, it gets 4 KiB, a few seconds and one of a few places; the oldest unproven connection is dropped for a new one.
After that, one request is answered at a time, and the next one only once its reply is sent, so unread replies do not
pile up. A reply may be held back: it is sent when `Held` releases it, or when another request arrives after it. Neither
a request nor a sweep searches all connections. A request that cannot be answered ends its connection. The only thread
resolves no names and holds no lock while it waits, so a process forked meanwhile inherits no lock to hang on.

In: a function from a request to its reply. Out: replies; counts of rejected connections, at most once a minute.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...errors import ProtocolError
from ...events import Events
from ...transport import connections, protocol
from ...transport.channel import HANDSHAKE_LIMIT, TAG, Channel, ServerHandshake
from ...transport.connections import RejectedConnections
from ...transport.unproven import crowd_of
from ..rounds.node_messages import REQUEST_LIMIT, Message
from .peer_client import ADMITTED, HEAD, REFUSED, Credentials, close_connection, length_prefix

_PROOF_SECONDS = 5.0  # for a handshake, which takes a live peer milliseconds
# unproven connections at a time. A job's nodes connect all at once when it starts, and may be slow then. If they had to
# make room for each other, each would try again and again; so there are more places than nodes were measured with
_UNPROVEN, _OF_ONE_ADDRESS = 2048, 8
_IDLE_SECONDS = 120.0  # an idle connection is closed after this; a live peer makes a new one
_UNREAD_SECONDS = 10.0  # for a peer to read a reply
_SWEEP_SECONDS = 1.0  # between two searches for connections to close
_CONNECTIONS = 4096
_LEAST_WAIT = 0.01
_WAKES = 4096  # bytes, one for each call of `look`
_TOO_MANY, _SILENT = "more connections than may be open without a proof", "no proof of the secret"
_SHORT_SECONDS = 0.5  # pause in accepting when descriptors have run out


class Held(Protocol):
    """Replies that are held back, by connection."""

    def released(self) -> list[tuple[int, Message]]:
        """Those whose time has come."""

    def release(self, connection: int) -> Message:
        """That of a connection on which another request has arrived."""


@dataclass
class _Peer:
    """One connection, with the bytes of an incomplete frame and those still to be sent."""

    number: int
    address: str
    crowd: str
    server: ServerHandshake
    used: float
    held: bool = False  # its last request is not answered yet
    writes: bool = False  # whether it is waited for until more can be sent
    greeted: bool = False  # the challenge was sent
    channel: Channel | None = None  # once it has proved that it knows the secret
    received: bytearray = field(default_factory=bytearray)
    sending: bytearray = field(default_factory=bytearray)

    @property
    def limit(self) -> int:
        """Maximum bytes of the next frame, without its length."""
        return REQUEST_LIMIT + TAG if self.channel else HANDSHAKE_LIMIT

    def next_frame(self) -> bytes | None:
        """Remove the first complete frame from the received bytes; None if there is none. Raises ProtocolError."""
        if len(self.received) < HEAD:
            return None
        tag = TAG if self.channel else 0
        end = HEAD + protocol.announced(self.received[:HEAD], self.limit - tag) + tag
        if len(self.received) < end:
            return None
        frame = bytes(self.received[HEAD:end])
        del self.received[:end]
        return frame

    def reply(self, message: Message) -> None:
        """Queue a sealed message. The peer must have proved itself."""
        if self.channel is None:
            raise RuntimeError("the peer has not proved itself yet")
        payload = protocol.pack(message)
        body, tag = self.channel.sealer.seal(payload)
        self.sending += b"".join((length_prefix(payload), body, tag))


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
        self._listener = listener
        self._credentials = credentials
        self._answer = answer
        self._gone = gone
        self._tick = tick
        self._held = held
        self._rejected = RejectedConnections(events)
        self._accepted = 0
        self._unproven: dict[socket.socket, _Peer] = {}  # the oldest one first
        self._crowds: Counter[str] = Counter()  # of the unproven ones
        self._proven: OrderedDict[socket.socket, _Peer] = OrderedDict()  # the longest unused one first
        self._unread: dict[socket.socket, _Peer] = {}  # proven ones with a reply to be sent
        self._by_number: dict[int, socket.socket] = {}  # proven ones
        self._places = connections.places(_CONNECTIONS)
        self._failure: Exception | None = None
        self._next_sweep = self._accept_again = 0.0  # monotonic
        self._listening = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="ft-post", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and close every connection. Idempotent."""
        close_connection(self._wake)
        self._thread.join()

    def look(self) -> None:
        """Send the replies that are held no longer at once. Callable from any thread."""
        with contextlib.suppress(OSError):  # full: it will look; closed
            self._wake.send(b"1", socket.MSG_DONTWAIT)

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
            self._answer_all()
        except Exception as error:  # raised again by `check`, in the thread that can end the job
            self._failure = error
        finally:
            self._close_all()

    def _answer_all(self) -> None:
        while True:
            now = time.monotonic()
            if not self._listening and now >= self._accept_again:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._listening = True
            if now >= self._next_sweep:
                self._next_sweep = now + _SWEEP_SECONDS
                self._sweep(now)
            self._rejected.report()
            for key, events in self._selector.select(max(_LEAST_WAIT, self._tick())):
                if key.fileobj is self._woken:
                    if not self._woken.recv(_WAKES):
                        return
                    continue
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not dropped meanwhile
                    self._attend(key.fileobj, key.data, events)  # type: ignore[arg-type]
            for number, reply in self._held.released() if self._held else ():
                self._send_held(number, reply)

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: existing connections are still answered
            self._rejected.count("", f"could not be accepted ({error.strerror})")
            self._selector.unregister(self._listener)
            self._listening, self._accept_again = False, time.monotonic() + _SHORT_SECONDS
            return
        self._make_room(str(address))
        if len(self._selector.get_map()) >= self._places:
            self._rejected.count(str(address), _TOO_MANY)
            connection.close()
            return
        connection.setblocking(False)
        self._accepted += 1
        server = ServerHandshake(self._credentials.secret, self._credentials.who, any_job=True)
        peer = _Peer(self._accepted, str(address), crowd_of(str(address)), server, time.monotonic())
        self._unproven[connection] = peer
        self._crowds[peer.crowd] += 1
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _make_room(self, address: str) -> None:
        """At the limit of unproven connections, or of all, drop the oldest unproven one of `address`, or of the address
        with the most."""
        crowd = crowd_of(address)
        if self._crowds[crowd] < _OF_ONE_ADDRESS:
            is_full = len(self._unproven) >= _UNPROVEN or len(self._selector.get_map()) >= self._places
            if not is_full or not self._unproven:
                return
            crowd = self._crowds.most_common(1)[0][0]
        oldest = next(each for each, peer in self._unproven.items() if peer.crowd == crowd)
        self._drop(oldest, self._unproven[oldest], _TOO_MANY)

    def _attend(self, connection: socket.socket, peer: _Peer, events: int) -> None:
        """Read, and answer each complete frame once the previous reply is sent."""
        try:
            if events & selectors.EVENT_READ:
                part = connection.recv(HEAD + peer.limit)
                if not part:
                    self._drop(connection, peer, "" if peer.channel else _SILENT)
                    return
                peer.received += part
                self._note_use(connection, peer)
            while True:
                if peer.sending:
                    del peer.sending[: connection.send(peer.sending)]
                    self._note_use(connection, peer)
                if peer.sending:
                    break
                if peer.held and peer.received and self._held:
                    peer.held = False
                    peer.reply(self._held.release(peer.number))
                    continue
                if (frame := peer.next_frame()) is None:
                    break
                self._handle(connection, peer, frame)
        except BlockingIOError:
            pass
        except ProtocolError as error:
            self._drop(connection, peer, str(error))
            return
        except OSError:
            self._drop(connection, peer, "" if peer.channel else _SILENT)
            return
        except Exception as error:  # anything that a request causes ends its connection, never the thread
            self._drop(connection, peer, str(protocol.unexpected(error)))
            return
        writes = bool(peer.sending)
        if writes != peer.writes:
            peer.writes = writes
            self._selector.modify(connection, selectors.EVENT_WRITE if writes else selectors.EVENT_READ, peer)
            if writes and peer.channel:
                self._unread[connection] = peer
            elif not writes:
                self._unread.pop(connection, None)

    def _note_use(self, connection: socket.socket, peer: _Peer) -> None:
        if peer.channel:  # a handshake has a fixed time, however it is split
            peer.used = time.monotonic()
            self._proven.move_to_end(connection)

    def _send_held(self, number: int, reply: Message) -> None:
        """Send a reply that was held back, if its connection has not ended meanwhile."""
        connection = self._by_number.get(number)
        if connection is None:
            return
        peer = self._proven[connection]
        if peer.held:
            peer.held = False
            peer.reply(reply)
            self._attend(connection, peer, 0)

    def _handle(self, connection: socket.socket, peer: _Peer, frame: bytes) -> None:
        """Answer one step of the handshake, or one request."""
        if peer.channel:
            unit = peer.channel.opener.open(frame[:-TAG], frame[-TAG:])
            reply = self._answer(protocol.unpack(unit), peer.number)
            if reply is None:
                peer.held = True
            else:
                peer.reply(reply)
        elif peer.greeted:
            channel = peer.server.finish(protocol.unpack(frame, proven=False))
            if peer.server.is_foreign:
                body, tag = channel.sealer.seal(refusal := protocol.pack(REFUSED))
                connection.send(b"".join((length_prefix(refusal), body, tag)))
                raise ProtocolError("it belongs to another job")
            peer.channel = channel
            self._leave_unproven(connection)
            self._proven[connection] = peer
            self._by_number[peer.number] = connection
            peer.used = time.monotonic()
            peer.reply(ADMITTED)
        else:
            challenge = protocol.pack(peer.server.challenge(protocol.unpack(frame, proven=False)))
            peer.greeted = True
            peer.sending += length_prefix(challenge) + challenge

    def _drop(self, connection: socket.socket, peer: _Peer, why: str = "") -> None:
        """End a connection. `why`: the reason if it is rejected."""
        if why:
            self._rejected.count(peer.address, why)
        self._leave_unproven(connection)
        self._proven.pop(connection, None)
        self._unread.pop(connection, None)
        self._by_number.pop(peer.number, None)
        self._selector.unregister(connection)
        close_connection(connection)
        if peer.channel:
            self._gone(peer.number)

    def _leave_unproven(self, connection: socket.socket) -> None:
        if peer := self._unproven.pop(connection, None):
            self._crowds[peer.crowd] -= 1
            if not self._crowds[peer.crowd]:
                del self._crowds[peer.crowd]

    def _sweep(self, now: float) -> None:
        """Close connections whose time is over."""
        for connection, peer in list(self._unread.items()):
            if now - peer.used > _UNREAD_SECONDS:
                self._drop(connection, peer)
        for group, patience, why in ((self._unproven, _PROOF_SECONDS, _SILENT), (self._proven, _IDLE_SECONDS, "")):
            while group:
                connection, peer = next(iter(group.items()))
                if now - peer.used <= patience:
                    break
                self._drop(connection, peer, why)

    def _close_all(self) -> None:
        """Does not call `gone`, which may be what failed."""
        self._listener.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                close_connection(key.fileobj)  # type: ignore[arg-type]
        self._selector.close()
        self._woken.close()
