"""Accept connections and authenticate each by the job's secret, all of them in one thread.

Invariant: an unauthenticated connection costs a descriptor, HANDSHAKE_LIMIT bytes, PATIENCE_SECONDS and no thread. At
most CONNECTIONS of them are open at a time, and ADDRESS_CONNECTIONS of one address (`crowd_of`). One more closes the
oldest (of the same address, or of the address with the most), so silent connections keep no peer out. A peer whose
connection was closed for another one connects again (`wire.Peer`).

In: a listening socket. Out: connections with their channel, for the server; counts of all others.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import FtError, ProtocolError
from . import protocol
from .channel import HANDSHAKE_LIMIT, Channel, Party, ServerHandshake
from .connections import RejectedConnections

CONNECTIONS = 64
ADDRESS_CONNECTIONS = 8
PATIENCE_SECONDS = 5.0  # for both messages of a handshake, however slowly their bytes arrive
_ACCEPT_PAUSE_SECONDS = 0.1  # after a failed accept, if no connection can make room

_NETWORK_BITS = 64  # of an IPv6 address: one machine can have all addresses of its network
Proven = Callable[[socket.socket, str, Channel], None]


def crowd_of(address: str) -> str:
    """The group that an address belongs to when connections are counted: itself, or its IPv6 network."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), _NETWORK_BITS), strict=False))


@dataclass(eq=False)
class _Handshaking:
    """A connection during its handshake."""

    connection: socket.socket
    address: str
    until: float  # monotonic
    handshake: ServerHandshake
    received: bytearray = field(default_factory=bytearray)
    challenged: bool = False

    def step(self) -> Channel | None:
        """Process the bytes that have arrived; the channel, once the peer is authenticated. Raises ProtocolError,
        OSError."""
        while (message := self._message()) is not None:
            if self.challenged:
                return self.handshake.finish(message)
            challenge = protocol.pack(self.handshake.challenge(message))
            frame = struct.pack(">I", len(challenge)) + challenge
            if self.connection.send(frame) != len(frame):  # a new connection has room for it
                raise ProtocolError("it did not accept the reply")
            self.challenged = True
        return None

    def _message(self) -> dict[str, object] | None:
        """The next message; None while it is incomplete. Never reads beyond it: bytes after a proof are for the
        server."""
        while True:
            wanted = 4 + (protocol.announced(self.received[:4], HANDSHAKE_LIMIT) if len(self.received) >= 4 else 0)
            if len(self.received) == wanted > 4:
                message = protocol.unpack(self.received[4:], proven=False)
                self.received.clear()
                return message
            try:
                part = self.connection.recv(max(1, wanted - len(self.received)))
            except BlockingIOError:
                return None
            if not part:
                raise ProtocolError("it hung up before it had proved that it knows the secret")
            self.received += part


class Unproven:
    """The unauthenticated connections of one listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        me: Party,
        proven: Proven,
        rejected: RejectedConnections,
        name: str,
    ) -> None:
        """`proven` is called with a blocking socket, its address and its channel, in this object's thread: it must not
        wait."""
        self._listener = listener
        self._secret = secret
        self._me = me
        self._proven = proven
        self._rejected = rejected
        self._closing = threading.Event()
        self._unproven: dict[_Handshaking, None] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close the unauthenticated connections. Idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket
        self._thread.join()

    def _run(self) -> None:
        with self._listener, self._selector:
            while not self._closing.is_set():
                ready = self._selector.select(self._wait())
                for key, _ in ready:
                    if key.data in self._unproven:  # otherwise it is the listener, or has just made room
                        self._step(key.data)
                now = time.monotonic()
                for late in [each for each in self._unproven if each.until <= now]:
                    self._reject(late, f"no proof within {PATIENCE_SECONDS:g} s")
                if any(key.data is None for key, _ in ready):  # last, and one at a time: open connections go first
                    self._accept()
                self._rejected.report()
            for peer in self._unproven:
                peer.connection.close()

    def _wait(self) -> float | None:
        """Seconds until the next deadline; None: there is none."""
        deadlines = [each.until for each in self._unproven][:1]
        deadlines += [due for due in [self._rejected.due] if due is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self) -> None:
        try:
            connection, name = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._closing.is_set():
                self._rejected.count("unknown", f"a connection could not be accepted: {error.strerror}")
                if self._unproven:
                    self._make_room(None)
                else:
                    self._closing.wait(_ACCEPT_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        address = str(name[0])
        crowd = crowd_of(address)
        if self._crowds()[crowd] >= ADDRESS_CONNECTIONS:
            self._make_room(crowd)
        elif len(self._unproven) >= CONNECTIONS:
            self._make_room(None)
        until = time.monotonic() + PATIENCE_SECONDS
        peer = _Handshaking(connection, address, until, ServerHandshake(self._secret, self._me))
        self._unproven[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _crowds(self) -> Counter[str]:
        return Counter(crowd_of(each.address) for each in self._unproven)

    def _make_room(self, crowd: str | None) -> None:
        """Close the oldest connection of `crowd`; None: of the crowd with the most."""
        if crowd is None:
            crowd = self._crowds().most_common(1)[0][0]
        oldest = next(each for each in self._unproven if crowd_of(each.address) == crowd)
        self._reject(oldest, "made room for a newer connection")

    def _step(self, peer: _Handshaking) -> None:
        try:
            channel = peer.step()
        except Exception as error:  # any error: this thread has to go on admitting peers
            known = isinstance(error, (FtError, OSError))
            self._reject(peer, str(error) if known else str(protocol.unexpected(error)))
            return
        if channel is not None:
            self._forget(peer)
            peer.connection.setblocking(True)
            self._proven(peer.connection, peer.address, channel)

    def _reject(self, peer: _Handshaking, reason: str) -> None:
        self._forget(peer)
        peer.connection.close()
        self._rejected.count(peer.address, reason)

    def _forget(self, peer: _Handshaking) -> None:
        self._selector.unregister(peer.connection)
        del self._unproven[peer]
