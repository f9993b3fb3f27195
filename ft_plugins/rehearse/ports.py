"""Choose ports for emulated nodes.

Invariant: no port comes from the kernel's ephemeral range. A port from there may be given to any connection on this
machine between two nodes that listen on it in turn, and the second one could then not listen.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 100


def free_port() -> int:
    """A port that is free on all addresses of this machine. Raises OSError if none is found."""
    end = int(_EPHEMERAL.read_text().split()[0])
    chosen = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = chosen.randrange(_FIRST, max(end, _FIRST + 1))
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise OSError(f"no free port found from {_FIRST} to {end} in {_ATTEMPTS} attempts")
