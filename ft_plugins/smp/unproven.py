"""Accept connections and have each prove that it knows the job's secret, all of them in one thread.

Invariant: before its proof a connection costs a descriptor, HANDSHAKE_LIMIT bytes, PATIENCE_SECONDS and no thread. At
most CONNECTIONS of them are open at a time, ADDRESS_CONNECTIONS of one address (`crowd_of`). One more closes the oldest
(that of the same address, or of the address with the most), so silent connections keep no peer out. A peer whose
connection was closed for another connects again (`wire.Peer`).

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
PATIENCE_SECONDS = 5.0  # for both messages of a handshake, however a peer spreads its bytes
_ACCEPT_PAUSE_SECONDS = 0.1  # after one that could not be accepted, where there is none to make room

_NETWORK_BITS = 64  # of an IPv6 address: one machine can have all addresses of its network
Proven = Callable[[socket.socket, str, Channel], None]


def crowd_of(address: str) -> str:
    """The group that an address belongs to when connections are counted: itself, or its IPv6 network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), _NETWORK_BITS), strict=False))


@dataclass(eq=False)
class _Stranger:
    """A connection before its proof."""

    connection: socket.socket
    address: str
    until: float  # monotonic
    handshake: ServerHandshake
    received: bytearray = field(default_factory=bytearray)
    challenged: bool = False

    def step(self) -> Channel | None:
        """Go on with what has come; the channel, once it is proved. Raises ProtocolError, OSError."""
        while (message := self._message()) is not None:
            if self.challenged:
                return self.handshake.finish(message)
            challenge = protocol.pack(self.handshake.challenge(message))
            frame = struct.pack(">I", len(challenge)) + challenge
            if self.connection.send(frame) != len(frame):  # a fresh connection takes it whole
                raise ProtocolError("it takes no reply")
            self.challenged = True
        return None

    def _message(self) -> dict[str, object] | None:
        """The next one; None while it is not whole. Never reads beyond it: what follows a proof is not for us."""
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
    """The connections of one listening socket, until each has proved itself or is closed."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        me: Party,
        proven: Proven,
        rejected: RejectedConnections,
        name: str,
    ) -> None:
        """`proven` gets a blocking socket, its address and its channel, in this object's thread: it must not wait."""
        self._listener = listener
        self._secret = secret
        self._me = me
        self._proven = proven
        self._rejected = rejected
        self._closing = threading.Event()
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, close what has not proved itself. Idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket
        self._thread.join()

    def _run(self) -> None:
        with self._listener, self._selector:
            while not self._closing.is_set():
                ready = self._selector.select(self._wait())
                for key, _ in ready:
                    if key.data in self._strangers:  # else it is the listener's, or has just made room
                        self._step(key.data)
                now = time.monotonic()
                for late in [each for each in self._strangers if each.until <= now]:
                    self._reject(late, f"no proof within {PATIENCE_SECONDS:g} s")
                if any(key.data is None for key, _ in ready):  # last and one at a time: who is here goes first
                    self._accept()
                self._rejected.report()
            for stranger in self._strangers:
                stranger.connection.close()

    def _wait(self) -> float | None:
        """Seconds until something is to be done of itself; None for never."""
        moments = [each.until for each in self._strangers][:1]
        moments += [due for due in [self._rejected.due] if due is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._closing.is_set():
                self._rejected.count("unknown", f"a connection could not be accepted: {error.strerror}")
                if self._strangers:
                    self._make_room(None)
                else:
                    self._closing.wait(_ACCEPT_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        address = str(peer[0])
        crowd = crowd_of(address)
        if self._crowds()[crowd] >= ADDRESS_CONNECTIONS:
            self._make_room(crowd)
        elif len(self._strangers) >= CONNECTIONS:
            self._make_room(None)
        until = time.monotonic() + PATIENCE_SECONDS
        stranger = _Stranger(connection, address, until, ServerHandshake(self._secret, self._me))
        self._strangers[stranger] = None
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _crowds(self) -> Counter[str]:
        return Counter(crowd_of(each.address) for each in self._strangers)

    def _make_room(self, crowd: str | None) -> None:
        """Close the oldest connection of `crowd`; of the one that has the most, if None."""
        if crowd is None:
            crowd = self._crowds().most_common(1)[0][0]
        oldest = next(each for each in self._strangers if crowd_of(each.address) == crowd)
        self._reject(oldest, "made room for a newer connection")

    def _step(self, stranger: _Stranger) -> None:
        try:
            channel = stranger.step()
        except Exception as error:  # any error: only this thread admits peers
            known = isinstance(error, (FtError, OSError))
            self._reject(stranger, str(error) if known else str(protocol.unexpected(error)))
            return
        if channel is not None:
            self._forget(stranger)
            stranger.connection.setblocking(True)
            self._proven(stranger.connection, stranger.address, channel)

    def _reject(self, stranger: _Stranger, reason: str) -> None:
        self._forget(stranger)
        stranger.connection.close()
        self._rejected.count(stranger.address, reason)

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger]
