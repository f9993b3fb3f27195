"""Accept connections at a listening socket, and authenticate each by the job's secret, in the thread of a loop.

Invariant: an unauthenticated connection costs a descriptor, HANDSHAKE_LIMIT bytes, a few seconds and no thread. Only so
many of them are open at a time, in all and of one address (`crowd_of`); one more closes the oldest (of the same
address, or of the address with the most), so silent connections keep no peer out. A peer whose connection was closed
for another one connects again (`dial`).

Connections never take the last RESERVE descriptors of a process (`places`), which are for segments, locks, logs and
child processes. A flood of rejected connections costs one event a minute, of bounded size; the first is reported at
once.

In: a listening socket, limits. Out: sockets with their channel; counts of all others.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import resource
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError, FtError, ProtocolError
from ..events import Events, catalogue
from . import protocol
from .channel import Channel, Party, ServerHandshake
from .dial import REFUSED
from .frame_codec import HANDSHAKE, PLAIN
from .framed import Link, close_connection
from .loop import Loop
from .own_address import listening
from .protocol import legible

ENOUGH = 1 << 16  # descriptors; no more even if the hard limit is 2**30: some programs iterate over all of them
RESERVE = 256  # descriptors; half of the limit if that is less
EVERY_SECONDS = 60.0  # between two events about rejected connections
_NAMED = 8  # reasons and addresses in one event; the others are counted together
_REASON = 160  # characters
_OTHERS = "others"
_NETWORK_BITS = 64  # of an IPv6 address: one machine can have all addresses of its network
_PAUSE_SECONDS = 0.5  # after a failed accept, if no connection can make room
Admit = Callable[[socket.socket, str, Channel], None]


def raise_limit() -> int:
    """Raise the soft limit on descriptors of this process and its future children, to the hard limit or to ENOUGH if
    that is lower.

    Returns the limit afterwards. Never lowers it; if the system refuses, the limit stays, without an error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_number(hard), ENOUGH)
    if _number(soft) < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def places(wanted: int, others: int = 0) -> int:
    """How many connections may be open at a time: `wanted`, or fewer, to leave the reserve and `others`."""
    limit = _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return max(1, min(wanted, limit - min(RESERVE, limit // 2) - others))


def _number(limit: int) -> int:
    return ENOUGH if limit == resource.RLIM_INFINITY else limit


class RejectedConnections:
    """Counts connections that were rejected, or ended before their peer had authenticated itself."""

    def __init__(self, events: Events, every: float = EVERY_SECONDS) -> None:
        self._events = events
        self._every = every
        self._lock = threading.Lock()
        self._reported = float("-inf")  # monotonic
        self._reasons: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()
        self.newest = (float("-inf"), "")  # when (monotonic), and what, in words

    def count(self, address: str, reason: str) -> None:
        """Count one more, and `report`."""
        with self._lock:
            _add(self._reasons, legible(reason, _REASON))
            _add(self._addresses, legible(address, _REASON))
            self.newest = (
                time.monotonic(),
                (f"a connection from {legible(address, _REASON)} was rejected: {legible(reason, _REASON)}"),
            )
        self.report()

    @property
    def due(self) -> float | None:
        """When (monotonic) `report` will emit an event; None: never."""
        return self._reported + self._every if self._reasons else None

    def report(self) -> None:
        """Emit the counts, if there are any and the last event is long enough ago."""
        with self._lock:
            now = time.monotonic()
            if (due := self.due) is None or now < due:
                return
            reasons, addresses = dict(self._reasons), dict(self._addresses)
            self._reasons.clear()
            self._addresses.clear()
            self._reported = now
        self._events.emit(catalogue.PEER_REJECTED, count=sum(reasons.values()), reasons=reasons, addresses=addresses)


def _add(counts: Counter[str], name: str) -> None:
    counts[name if name in counts or len(counts) < _NAMED else _OTHERS] += 1


@dataclass(frozen=True)
class DoorLimits:
    """Of connections that are not authenticated: how many at a time, how many of them of one address, and for how many
    seconds each, however slowly its bytes arrive.

    `any_job`: a peer of another job or purpose that knows the secret gets `REFUSED`, and one that does not know it
    learns no name; else the reply to either is a close.
    """

    connections: int = 64
    of_one_address: int = 8
    seconds: float = 5.0
    any_job: bool = False


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


def listen(address: str, port: int, who: str) -> socket.socket:
    """A socket that listens on `address` and `port` (0: any). Raises ConfigError, about `who`, if the system
    refuses."""
    try:
        return listening(address, port, 512)
    except OSError as error:
        raise ConfigError(
            f"{who} cannot listen on {address}:{port} ({os.strerror(error.errno or 0)}); choose another --ftp-interface"
        ) from error


@dataclass(eq=False)
class _Stranger:
    """A connection during its handshake."""

    link: Link
    address: str
    crowd: str
    until: float  # monotonic
    handshake: ServerHandshake
    challenged: bool = False

    def step(self) -> Channel | None:
        """Process what has arrived; the channel, once the peer is authenticated. Raises ProtocolError, OSError."""
        try:
            for message, _ in self.link.read():
                if self.challenged:
                    return self._finish(message)
                self.link.push(self.handshake.challenge(message))
                self.challenged = True
                self._write()
        except ConnectionResetError:
            raise ProtocolError("it hung up before it had proved that it knows the secret") from None
        return None

    def _finish(self, answer: dict[str, object]) -> Channel:
        channel = self.handshake.finish(answer)
        if self.handshake.is_foreign:
            self.link.protect(channel, PLAIN)
            self.link.push(REFUSED)
            self._write()
            raise ProtocolError("it belongs to another job")
        return channel

    def _write(self) -> None:
        self.link.write()
        if self.link.waiting:  # a new connection has room for it
            raise ProtocolError("it did not accept the reply")


class Door:
    """The unauthenticated connections of one listening socket."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        secret: bytes,
        me: Party,
        admit: Admit,
        rejected: RejectedConnections,
        limits: DoorLimits,
        room: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Make it before the loop runs. `admit` is called with a non-blocking socket, its address and its channel, in
        the loop's thread; its first frame to the peer is `ADMITTED`. `room()` is how many unauthenticated connections
        the server has places for."""
        self._loop = loop
        self._listener = listener
        self._secret = secret
        self._me = me
        self._admit = admit
        self._rejected = rejected
        self._limits = limits
        self._room = room
        self._strangers: OrderedDict[_Stranger, None] = OrderedDict()  # oldest first
        self._crowds: Counter[str] = Counter()
        listener.setblocking(False)
        self._watch_listener(0.0)

    def close(self) -> None:
        """Stop listening, for forked processes too, and close the unauthenticated connections, in the loop's thread or
        after it has ended. Idempotent."""
        self._loop.forget(self._listener)
        close_connection(self._listener)
        self._loop.at(math.inf, self._check)
        self._loop.at(math.inf, self._watch_listener)
        for stranger in list(self._strangers):
            self._forget(stranger)
            close_connection(stranger.link.connection)

    def _watch_listener(self, now: float) -> None:
        """Accept one connection at a time, after those that are open had their turn."""
        self._loop.watch(self._listener, lambda _: self._loop.soon(self._accept))

    def _accept(self, now: float) -> None:
        try:
            connection, (address, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # none, or it has hung up already
            return
        except OSError as error:  # out of descriptors
            self._rejected.count("unknown", f"a connection could not be accepted: {error.strerror}")
            self._schedule()
            if not self._make_room(None):
                self._loop.forget(self._listener)
                self._loop.at(time.monotonic() + _PAUSE_SECONDS, self._watch_listener)
            return
        crowd, room = crowd_of(str(address)), self._room() - len(self._strangers)
        if self._crowds[crowd] >= self._limits.of_one_address:
            self._make_room(crowd)
        elif (len(self._strangers) >= self._limits.connections or room <= 0) and not self._make_room(None):
            self._rejected.count(str(address), "as many connections as may be open are authenticated")
            connection.close()
            return
        handshake = ServerHandshake(self._secret, self._me, self._limits.any_job)
        until = time.monotonic() + self._limits.seconds
        stranger = _Stranger(Link(connection, bounds=HANDSHAKE), str(address), crowd, until, handshake)
        try:
            self._loop.watch(connection, lambda events: self._step(stranger))
        except OSError as error:  # no memory
            connection.close()
            self._rejected.count(str(address), str(error))
            return
        self._strangers[stranger] = None
        self._crowds[crowd] += 1
        self._schedule()

    def _make_room(self, crowd: str | None) -> bool:
        """Close the oldest connection of `crowd`; None: of the crowd with the most. Whether there was one."""
        if not self._strangers:
            return False
        if crowd is None:
            crowd = self._crowds.most_common(1)[0][0]
        self._reject(next(each for each in self._strangers if each.crowd == crowd), "made room for a newer connection")
        return True

    def _step(self, stranger: _Stranger) -> None:
        try:
            if (channel := stranger.step()) is not None:
                self._forget(stranger)
                self._admit(stranger.link.connection, stranger.address, channel)
        except Exception as error:  # any error: this thread has to go on admitting peers
            known = isinstance(error, (FtError, OSError))
            self._reject(stranger, str(error) if known else str(protocol.unexpected(error)))

    def _reject(self, stranger: _Stranger, reason: str) -> None:
        self._forget(stranger)
        close_connection(stranger.link.connection)
        self._rejected.count(stranger.address, reason)
        self._schedule()

    def _forget(self, stranger: _Stranger) -> None:
        self._loop.forget(stranger.link.connection)
        if stranger in self._strangers:  # else its admission has failed
            del self._strangers[stranger]
            self._crowds[stranger.crowd] -= 1
            if not self._crowds[stranger.crowd]:
                del self._crowds[stranger.crowd]

    def _schedule(self) -> None:
        """Look again when the oldest connection is late, or an event about rejected ones is due."""
        until = next(iter(self._strangers)).until if self._strangers else math.inf
        self._loop.at(min(until, self._rejected.due or math.inf), self._check)

    def _check(self, now: float) -> None:
        while self._strangers and (oldest := next(iter(self._strangers))).until <= now:
            self._reject(oldest, f"no proof within {self._limits.seconds:g} s")
        self._rejected.report()
        self._schedule()
