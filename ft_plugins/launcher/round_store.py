"""The store of a round: served on one address, and reached in bounded time.

In: the socket of this node's port; a place that another node has named. Out: torch's stores.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from ..collective.stores import BoundedStore
from .endpoint import Endpoint, listen_on_same_address


def serve(port: socket.socket, host: str, bound: timedelta) -> TCPStore:
    """A store on a free port of the address on which `port` listens, reached as `host`; it serves while it is held."""
    listener = listen_on_same_address(port)
    number = int(listener.getsockname()[1])
    return TCPStore(host, number, None, True, bound, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(place: Endpoint, bound: timedelta, reach: float) -> BoundedStore:
    """The store that another node serves; `reach` are seconds to be connected in. ConnectionError: it is gone, or does
    not answer within `bound`."""
    try:
        socket.create_connection((place.host, place.port), reach).close()  # torch tries again for a minute
        return BoundedStore(
            lambda: TCPStore(place.host, place.port, None, False, bound, wait_for_workers=False), bound, str(place)
        )
    except (OSError, UnicodeError, DistError) as error:
        raise ConnectionError(f"the store at {place} was lost: {error}") from error
