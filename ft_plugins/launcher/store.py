"""The store of a round: served on one address, and reached in bounded time.

In: the socket of this node's port; a place that another node has named. Out: torch's stores.
"""

from __future__ import annotations

import queue
import socket
import threading
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from .endpoint import Endpoint, listen_beside


def serve(port: socket.socket, host: str, bound: timedelta) -> TCPStore:
    """A store on a free port of the address on which `port` listens, reached as `host`; it serves while it is held."""
    listener = listen_beside(port)
    number = int(listener.getsockname()[1])
    return TCPStore(host, number, None, True, bound, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(place: Endpoint, bound: timedelta, reach: float) -> TCPStore:
    """The store that another node serves. ConnectionError: it is gone, or does not answer within `bound`.

    torch tries again for a minute where it is refused, and waits for ever where the store accepts and then says nothing
    (its node was stopped, or lost its power): the thread that waits is left behind then. `reach`: seconds within which
    a node is connected to.
    """
    try:
        socket.create_connection((place.host, place.port), reach).close()
    except (OSError, UnicodeError) as error:
        raise ConnectionError(f"the store at {place} was lost: {error}") from error
    found: queue.SimpleQueue[TCPStore | Exception] = queue.SimpleQueue()

    def make() -> None:
        try:
            found.put(TCPStore(place.host, place.port, None, False, bound, wait_for_workers=False))
        except Exception as error:  # raised again where it was wanted
            found.put(error)

    threading.Thread(target=make, name="ft-store", daemon=True).start()
    seconds = bound.total_seconds()
    try:
        store = found.get(timeout=seconds)
    except queue.Empty:
        raise ConnectionError(f"the store at {place} did not answer for {seconds:g} s") from None
    if isinstance(store, DistError):
        raise ConnectionError(f"the store at {place} was lost: {store}") from store
    if isinstance(store, Exception):
        raise store
    return store
