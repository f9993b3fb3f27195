"""The address at which other nodes reach this one: of the interface that was named, else of the way to a host of the
job.

A node often resolves its own name to a loopback address (127.0.1.1 in Debian's /etc/hosts). On the node of that name
the way to it is then an address that is of no use to other nodes. If another node of the job is elsewhere, the way to
that one is taken (`towards_peer`). If all are on loopback and on one machine, they are emulated, and nothing changes;
whether they are on one machine is known by `host_identity`.

In: an interface or address, a host, another node's address. Out: an address; ConfigError if there is none.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import ConfigError

IDENTITY = 16  # bytes
UNKNOWN = bytes(IDENTITY)  # of a host that cannot be identified


def own_address(interface: str | None, towards: str) -> str:
    """The address of this node at `interface` (a device or an address), or on the way to `towards`. Raises
    ConfigError."""
    if interface is None:
        return _on_the_way(towards)
    import psutil  # slow, and only needed for a name

    devices = psutil.net_if_addrs()
    addresses = {entry.address for device in devices.values() for entry in device}
    if interface in addresses:
        return interface
    for wanted in (socket.AF_INET, socket.AF_INET6):
        for entry in devices.get(interface, []):
            if entry.family == wanted:
                return str(entry.address)
    raise ConfigError(
        f"--ftp-interface {interface}: no device or address of this node; its devices are {', '.join(devices)}"
    )


def depends_on_name(interface: str | None, towards: str) -> bool:
    """Whether `own_address` is what this node resolves a name to, so that it may be loopback although other nodes reach
    this one. Pure."""
    try:
        ipaddress.ip_address(towards)
    except ValueError:
        return interface is None and towards != "localhost"
    return False


def towards_peer(own: str, peer: str) -> str:
    """The address of this node for a node at the address `peer`: `own`, unless only that is loopback. Raises
    ConfigError."""
    return _on_the_way(peer) if only_local(own) and not only_local(peer) else own


def address_of(place: Sequence[Any]) -> str:
    """The address in a socket's address, with the device of a link-local one, without which it is of no use."""
    return f"{place[0]}%{socket.if_indextoname(place[3])}" if any(place[3:]) else str(place[0])


def listening(address: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there, of IPv4 if it is a name. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server(  # with the device of a link-local address
        socket.getaddrinfo(address or None, port, family, socket.SOCK_STREAM, 0, socket.AI_PASSIVE)[0][4],
        family=family, backlog=backlog,
    )  # fmt: skip


def only_local(address: str) -> bool:
    """Whether only this machine can reach an address, because it is loopback. Pure."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def host_identity() -> bytes:
    """What processes have in common that share loopback addresses, and others do not: the running kernel and the
    network namespace. `UNKNOWN` where the system does not give them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return UNKNOWN
    return hashlib.sha256(boot + str(namespace).encode()).digest()[:IDENTITY]


def known_apart(one: bytes, other: bytes) -> bool:
    """Whether two host identities are of different hosts. One that is unknown may be the same. Pure."""
    return one != other and UNKNOWN not in (one, other)


def _on_the_way(host: str) -> str:
    try:
        family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family[0], socket.SOCK_DGRAM)) as probe:
            probe.connect(family[4])  # sends nothing; the kernel chooses a route
            return address_of(probe.getsockname())
    except OSError as error:
        raise ConfigError(f"no interface leads to '{host}' ({error}); name one by --ftp-interface") from error
