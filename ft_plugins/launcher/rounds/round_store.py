"""The store of a round: served on one address, and reached in bounded time.

In: the socket of this node's port; the endpoint that the node of rank 0 reports. Out: torch's stores.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from ...collective.stores import BoundedStore
from ..rendezvous.endpoint import Endpoint, listen_on_same_address


def serve(port: socket.socket, host: str, bound: timedelta) -> TCPStore:
    """A store on a free port of the address of `port`, reached as `host`. It serves until it is released."""
    listener = listen_on_same_address(port)
    number = int(listener.getsockname()[1])
    return TCPStore(host, number, None, True, bound, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(place: Endpoint, bound: timedelta, reach: float) -> BoundedStore:
    """The store that another node serves. `reach`: seconds for connecting. Raises ConnectionError if it is lost or does
    not answer within `bound`."""
    try:
        socket.create_connection((place.host, place.port), reach).close()  # torch would retry for a minute
        return BoundedStore(
            lambda: TCPStore(place.host, place.port, None, False, bound, wait_for_workers=False), bound, str(place)
        )
    except (OSError, UnicodeError, DistError) as error:
        raise ConnectionError(f"the store at {place} was lost: {error}") from error
