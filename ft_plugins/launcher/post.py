"""The port of a node at which other nodes can ask it something, and the asking.

Invariant: every wait is bounded, for a peer that has ended as for one that is stopped or has lost its power: torch's
own store client waits for such a peer for ever. Frames are those of the SMP's protocol: bounded msgpack, no pickle; a
malformed one is answered by a close. Answers come from one thread, which looks up no names and holds no lock while it
waits: a process that is forked meanwhile inherits nothing that it could hang on.

In: a function from a request to its reply. Out: endpoints as 'host:port', the replies of others.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ..errors import ConfigError, ProtocolError
from ..intake import shown
from ..smp import protocol

DEFAULT_PORT = 29400  # torch's, for an endpoint without one
_IDLE_SECONDS = 120.0  # a connection on which nobody asks for so long is closed; a living peer makes a new one
_CONNECTIONS = 4096
_ASKED_AT_ONCE = 32
_LEAST_WAIT = 0.01
_PREDECESSOR_SECONDS = 1.0  # for the kernel to end a process, and the ranks that it forked
_RETRY_SECONDS = 0.1

Message = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """Where a node can be asked."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Endpoint:
        """From 'host', 'host:port' or '[address]:port'. Raises ConfigError."""
        found = text.strip()
        bare = found.startswith("[") and found.endswith("]") or found.count(":") > 1 and not found.startswith("[")
        host, _, port = (found, "", "") if bare else found.partition("]:" if found.startswith("[") else ":")
        host = host.strip("[]")
        if not host or "]" in port or not re.fullmatch("[0-9]{1,5}", port or "0") or int(port or 0) > 65535:
            raise ConfigError(f"--rdzv-endpoint: expected host:port (or several, by commas), found {shown(text)}")
        return cls(host, int(port) if port else DEFAULT_PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_as(endpoint: Endpoint, patience: float = _PREDECESSOR_SECONDS) -> socket.socket | None:
    """A socket that listens there if the endpoint is this machine's and free; None if it is not.

    For `patience` seconds one that is taken, where nobody answers, is taken for that of a process that was killed just
    now. A name that means a loopback address here may mean another one to others: then all addresses are listened on.
    """
    if not endpoint.port:
        return None
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None  # a name that nobody knows yet
    deadline = time.monotonic() + patience
    for address in dict.fromkeys(str(address[0]) for _, _, _, _, address in found):
        own = endpoint.host == "localhost" or _literal(endpoint.host) or not _loopback(address)
        while True:
            try:
                listener = _listen(address, endpoint.port)
                if own:
                    return listener
                listener.close()
                return _listen("", endpoint.port)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES, errno.EAFNOSUPPORT):
                    break
                if error.errno != errno.EADDRINUSE:
                    raise
            if time.monotonic() > deadline or _answers(endpoint):
                break
            time.sleep(_RETRY_SECONDS)
    return None


def _answers(endpoint: Endpoint) -> bool:
    try:
        ask(str(endpoint), {"do": "meet", "run": ""}, _RETRY_SECONDS)
    except ConnectionError:
        return False
    return True


def listen_anywhere(host: str | None) -> socket.socket:
    """A socket that listens on a free port of `host` if that is an address of this machine, else of all of them."""
    if host:
        with contextlib.suppress(OSError, UnicodeError):
            return _listen(host, 0)
    return _listen("", 0)


def emulated_apart(host: str, own: str | None) -> bool:
    """Whether the two are loopback addresses of two nodes that are emulated on this machine, which has them both."""
    literal = bool(own) and _literal(host) and _literal(str(own))
    return literal and host != own and _loopback(host) and _loopback(str(own))


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def _literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class Line:
    """A connection to another node. Every failure to get a reply is a ConnectionError, and its end."""

    def __init__(self, endpoint: str, seconds: float) -> None:
        """`seconds` bound the connecting and each reply."""
        self.endpoint = endpoint
        place = Endpoint.read(endpoint)
        try:
            self._socket = socket.create_connection((place.host, place.port), seconds)
        except (OSError, UnicodeError) as error:
            raise ConnectionError(_why(error, seconds)) from error
        self._seconds = seconds
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, message: Message) -> Message:
        """The reply to `message`."""
        try:
            protocol.send(self._socket, message)
            reply = protocol.receive(self._socket)
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionError(_why(error, self._seconds)) from error
        if reply is None:
            self.close()
            raise ConnectionError("it closed the connection")
        return reply

    def close(self) -> None:
        """Close the connection, also for processes that were forked with it. Idempotent."""
        _hang_up(self._socket)


def ask(endpoint: str, message: Message, seconds: float) -> Message:
    """The reply of one node, on a connection for this alone. Raises ConnectionError."""
    line = Line(endpoint, seconds)
    try:
        return line.ask(message)
    finally:
        line.close()


def ask_all(endpoints: Iterable[str], message: Message, seconds: float) -> dict[str, Message | str]:
    """The replies of several nodes, asked at once; of those that gave none, why. `seconds` bound each of them."""

    def attempt(endpoint: str) -> Message | str:
        try:
            return ask(endpoint, message, seconds)
        except ConnectionError as error:
            return str(error)

    names = list(dict.fromkeys(endpoints))
    if len(names) < 2:
        return {name: attempt(name) for name in names}
    with ThreadPoolExecutor(min(len(names), _ASKED_AT_ONCE)) as pool:  # all have ended when this returns
        return dict(zip(names, pool.map(attempt, names), strict=True))


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@dataclass
class _Peer:
    """One connection: what came in and is no whole frame yet, what is still to go out."""

    number: int
    used: float
    received: bytearray = field(default_factory=bytearray)
    sending: bytearray = field(default_factory=bytearray)


class Post:
    """Answers on a listening socket, from a thread, until `close`.

    `answer(request, connection)` gives the reply; `connection` is a number, and `gone(connection)` is called when it
    ends. `tick()` is called again and again; it tells within how many seconds it wants to be called next. Where one of
    them fails, all connections are closed: others see that nobody is here, and `check` says so on this node.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[Message, int], Message],
        gone: Callable[[int], None],
        tick: Callable[[], float],
    ) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._answer = answer
        self._gone = gone
        self._tick = tick
        self._accepted = 0
        self._failure: Exception | None = None
        self._next_idle = 0.0  # monotonic
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="ft-post", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and close every connection. Idempotent."""
        self._wake.close()
        self._thread.join()

    @property
    def answers(self) -> bool:
        """Whether nothing has failed."""
        return self._failure is None

    def check(self) -> None:
        """Raises RuntimeError if nothing is answered any more."""
        if self._failure:
            raise RuntimeError(f"the port of this node ({self.port}) is not answered any more") from self._failure

    def _serve(self) -> None:
        try:
            self._answer_all()
        except Exception as error:  # raised again by `check`, where somebody hears of it
            self._failure = error
        finally:
            self._close_all()

    def _answer_all(self) -> None:
        while True:
            ready = self._selector.select(max(_LEAST_WAIT, self._tick()))
            for key, events in ready:
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._attend(key.fileobj, key.data, events)  # type: ignore[arg-type]
            if time.monotonic() >= self._next_idle:
                self._next_idle = time.monotonic() + _IDLE_SECONDS / 10
                self._close_idle()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or we have no descriptors left; others are still answered
            time.sleep(_LEAST_WAIT)
            return
        if len(self._selector.get_map()) > _CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._accepted += 1
        self._selector.register(connection, selectors.EVENT_READ, _Peer(self._accepted, time.monotonic()))

    def _attend(self, connection: socket.socket, peer: _Peer, events: int) -> None:
        """Read what has come, answer each whole frame, write what goes."""
        try:
            if events & selectors.EVENT_READ:
                part = connection.recv(1 << 16)
                if not part:
                    raise ConnectionError
                peer.received += part
                peer.used = time.monotonic()
                while (request := _next_frame(peer.received)) is not None:
                    payload = msgpack.packb(self._answer(request, peer.number), use_bin_type=True)
                    peer.sending += struct.pack(">I", len(payload)) + payload
            if peer.sending:
                del peer.sending[: connection.send(peer.sending)]
        except BlockingIOError:
            pass
        except (OSError, ProtocolError):
            self._drop(connection, peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.sending else 0)
        self._selector.modify(connection, wanted, peer)

    def _drop(self, connection: socket.socket, peer: _Peer) -> None:
        self._selector.unregister(connection)
        _hang_up(connection)
        self._gone(peer.number)

    def _close_idle(self) -> None:
        limit = time.monotonic() - _IDLE_SECONDS
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer) and key.data.used < limit:
                self._drop(key.fileobj, key.data)  # type: ignore[arg-type]

    def _close_all(self) -> None:
        """Nobody is told who has gone: that may be what has failed."""
        self._listener.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                _hang_up(key.fileobj)  # type: ignore[arg-type]
        self._selector.close()
        self._woken.close()


def _hang_up(connection: socket.socket) -> None:
    """End a connection, also for processes that were forked with it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _next_frame(received: bytearray) -> Message | None:
    """Take the first whole frame out of `received`; None while there is none. Raises ProtocolError."""
    if len(received) < 4:
        return None
    (length,) = struct.unpack_from(">I", received)
    if length > protocol.FRAME_LIMIT:
        raise ProtocolError(f"a frame of {length} bytes was announced; the limit is {protocol.FRAME_LIMIT}")
    if len(received) < 4 + length:
        return None
    try:
        message = msgpack.unpackb(received[4 : 4 + length], raw=False)
    except Exception as error:
        raise ProtocolError(f"a frame of {length} bytes is not msgpack: {error}") from error
    del received[: 4 + length]
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__} where a map was expected")
    return message
