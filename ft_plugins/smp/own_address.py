"""The address at which other nodes reach this one: of the interface that was named, else of the way to a host of the
job.

In: an interface or address, a host. Out: an address; ConfigError if there is none.
"""

from __future__ import annotations

import socket
from contextlib import closing

from ..errors import ConfigError


def own_address(interface: str | None, towards: str) -> str:
    """The address of this node at `interface` (a device or an address), or on the way to `towards`. Raises
    ConfigError."""
    if interface is None:
        try:
            family = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
            with closing(socket.socket(family[0], socket.SOCK_DGRAM)) as probe:
                probe.connect(family[4])  # sends nothing; the kernel chooses a route
                return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(f"no interface leads to '{towards}' ({error}); name one by --ftp-interface") from error
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
