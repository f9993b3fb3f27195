"""Where a node is reached, and listening there.

In: what users give as --rdzv-endpoint. Out: `Endpoint`, listening sockets.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError
from ..intake import shown

DEFAULT_PORT = 29400  # torch's, for an endpoint without one
LOOPBACK = "127.0.0.1"
_PREDECESSOR_SECONDS = 1.0  # for the kernel to end a process, and the ranks that it forked
_RETRY_SECONDS = 0.1


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
        if not host or port and not re.fullmatch(r"[0-9]{1,5}", port) or int(port or 0) > 65535:
            raise ConfigError(f"--rdzv-endpoint: expected host:port (or several, by commas), found {shown(text)}")
        return cls(host, int(port) if port else DEFAULT_PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_as(
    endpoint: Endpoint, answers: Callable[[Endpoint, float], bool], patience: float = _PREDECESSOR_SECONDS
) -> socket.socket | None:
    """A socket that listens there if the endpoint is this machine's and free; None if it is not.

    `answers` says whether a node does there, within so many seconds. One that is taken, where no node answers, is for
    `patience` seconds assumed to be that of a process that was killed just now. A name that means a loopback address
    here may mean another one to others: then all addresses are listened on.
    """
    if not endpoint.port:
        return None
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None  # a name that nobody knows yet
    deadline = time.monotonic() + patience
    for address in dict.fromkeys(str(address[0]) for _, _, _, _, address in found):
        own = endpoint.host == "localhost" or literal(endpoint.host) or not _loopback(address)
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
            if time.monotonic() > deadline or answers(endpoint, _RETRY_SECONDS):
                break
            time.sleep(_RETRY_SECONDS)
    return None


def listen_on(host: str) -> socket.socket:
    """A socket that listens on a free port of `host`. Raises ConfigError where that is no address of this machine."""
    try:
        return _listen(host, 0)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--local-addr {host}: no address of this machine ({error})") from error


def listen_anywhere(host: str | None) -> socket.socket:
    """A socket that listens on a free port of `host` if that is an address of this machine, else of all of them."""
    if host:
        with contextlib.suppress(OSError, UnicodeError):
            return _listen(host, 0)
    return _listen("", 0)


def emulated_apart(host: str, own: str | None) -> bool:
    """Whether the two are loopback addresses of two nodes that are emulated on this machine, which has them both."""
    if own is None or host == own or not (literal(host) and literal(own)):
        return False
    return _loopback(host) and _loopback(own)


def only_here(host: str) -> bool:
    """Whether this host is reached from this machine alone, whatever names mean elsewhere."""
    return host == "localhost" or literal(host) and _loopback(host)


def listen_on_same_address(listener: socket.socket) -> socket.socket:
    """A socket that listens on the address of another one, on a free port."""
    address = str(listener.getsockname()[0])
    return _listen("" if address in ("::", "0.0.0.0") else address, 0)


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def literal(host: str) -> bool:
    """Whether it is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
