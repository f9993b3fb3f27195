"""Addresses of nodes, and sockets that listen on them.

In: what users give as --rdzv-endpoint. Out: `Endpoint`, listening sockets.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...base.intake import shown
from ...errors import ConfigError
from ...transport.own_address import address_of, listening, only_local, own_address

DEFAULT_PORT = 29400  # torch's, for an endpoint without one
LOOPBACK = "127.0.0.1"
_PREDECESSOR_SECONDS = 1.0  # for the kernel to end a killed process and the ranks that it forked
_RETRY_SECONDS = 0.1
_BACKLOG = 4096  # connections of a port that wait to be accepted: thousands of nodes connect when a job starts


@dataclass(frozen=True)
class Endpoint:
    """The host and port of a node."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Endpoint:
        """Parse 'host', 'host:port' or '[address]:port'. Raises ConfigError."""
        place = text.strip()
        bare = place.startswith("[") and place.endswith("]") or place.count(":") > 1 and not place.startswith("[")
        host, _, port = (place, "", "") if bare else place.partition("]:" if place.startswith("[") else ":")
        host = host.strip("[]")
        if not host or port and not re.fullmatch(r"[0-9]{1,5}", port) or int(port or 0) > 65535:
            raise ConfigError(f"--rdzv-endpoint: expected host:port (or several, by commas), found {shown(text)}")
        return cls(host, int(port) if port else DEFAULT_PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


NodeAnswers = Callable[[Endpoint, float], bool]  # whether a node answers at an endpoint within so many seconds


def open_port(
    endpoints: Sequence[Endpoint], address: str | None, loopback_only: bool, node_answers: NodeAnswers
) -> tuple[socket.socket, str]:
    """A socket that listens on the first endpoint of this machine that is free, else on `address` at the first
    endpoint's port if that is free, else at another one; and the host by which others reach it. Raises ConfigError."""
    for endpoint in endpoints:
        if emulated_apart(endpoint.host, address):
            continue
        if listener := listen_as(endpoint, node_answers):
            return listener, endpoint.host
    if loopback_only or not any(endpoint.port for endpoint in endpoints):  # no other machine is expected
        host = address if address and is_literal(address) and is_loopback(address) else LOOPBACK
        return _listen_on(host), host
    host = address or address_towards(endpoints)
    with contextlib.suppress(OSError, UnicodeError):  # taken, or a name that is not this machine's
        return _listen(address or "", next(each.port for each in endpoints if each.port)), host
    return listen_anywhere(address), host


def address_towards(endpoints: Sequence[Endpoint]) -> str:
    """The address of this machine on the way to the first endpoint that is not itself, to which no name has to resolve;
    its name if there is no such way."""
    for place in endpoints:
        with contextlib.suppress(ConfigError, UnicodeError):
            own = own_address(None, place.host)
            if is_loopback(place.host) or not only_local(own):  # else the name of this machine, as only it reads it
                return own
    return socket.getfqdn()


def listen_as(
    endpoint: Endpoint, node_answers: NodeAnswers, patience: float = _PREDECESSOR_SECONDS
) -> socket.socket | None:
    """A socket that listens on the endpoint; None if it belongs to another machine or is taken.

    If it is taken and no node answers there, its process may have just been killed: keep trying for `patience` seconds.
    A name that resolves to a loopback address here may resolve to another one elsewhere: then listen on all addresses.
    """
    if not endpoint.port:
        return None
    try:
        resolved = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None  # the name does not resolve yet
    deadline = time.monotonic() + patience
    for address in dict.fromkeys(address_of(address) for _, _, _, _, address in resolved):
        exact = endpoint.host == "localhost" or is_literal(endpoint.host) or not only_local(address)
        while True:
            try:
                listener = _listen(address, endpoint.port)
                if exact:
                    return listener
                listener.close()
                return _listen("", endpoint.port)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES, errno.EAFNOSUPPORT):
                    break
                if error.errno != errno.EADDRINUSE:
                    raise
            if time.monotonic() > deadline or node_answers(endpoint, _RETRY_SECONDS):
                break
            time.sleep(_RETRY_SECONDS)
    return None


def listen_anywhere(host: str | None) -> socket.socket:
    """A socket that listens on a free port of `host` if that is an address of this machine, else of all of them."""
    if host:
        with contextlib.suppress(OSError, UnicodeError):
            return _listen(host, 0)
    return _listen("", 0)


def listen_on_same_address(listener: socket.socket) -> socket.socket:
    """A socket that listens on the address of `listener`, on another free port."""
    address = address_of(listener.getsockname())
    return _listen("" if address in ("::", "0.0.0.0") else address, 0)


def emulated_apart(host: str, own: str | None) -> bool:
    """Whether the two are loopback addresses of different nodes emulated on this machine."""
    if own is None or host == own or not (is_literal(host) and is_literal(own)):
        return False
    return only_local(host) and only_local(own)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, however names resolve elsewhere."""
    return host == "localhost" or is_literal(host) and only_local(host)


def is_literal(host: str) -> bool:
    """Whether it is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listen_on(host: str) -> socket.socket:
    try:
        return _listen(host, 0)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--local-addr {host}: expected an address of this machine ({error})") from error


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return listening(host, port, _BACKLOG)
