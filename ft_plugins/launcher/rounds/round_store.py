"""The store of a round: served on one address, and reached in bounded time.

Invariant: no call waits longer than the store's own timeout and a few seconds. torch's client waits forever when a
server accepts the connection and never answers (it is stopped, has lost power, or is no store). Such a call leaves one
thread behind that waits in torch; until it returns, further calls fail at once.

In: the socket of this node's port; the endpoint that the node of rank 0 reports. Out: torch's stores.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, DistStoreError, Store, TCPStore

from ...base.intake import within
from ..rendezvous.endpoint import Endpoint, listen_on_same_address

_GRACE_SECONDS = 2.0  # for torch's own timeout, with its own message

T = TypeVar("T")


class BoundedStore(Store):  # type: ignore[misc]  # torch has no types for it
    """A client of a store; one call at a time. Keep a reference as long as a PrefixStore uses it: torch keeps none."""

    def __init__(self, make: Callable[[], Any], timeout: timedelta, where: str) -> None:
        """`make` connects, and may hang like any call; `where` names the store in messages. Raises DistStoreError, or
        what `make` raises."""
        super().__init__()
        self._where = where
        self._timeout = timeout
        self._over = threading.Event()  # set when the last call has returned
        self._over.set()
        self._store: Any = self._ask(make, timeout)

    def _ask(self, call: Callable[[], T], timeout: timedelta | None = None) -> T:
        if not self._over.is_set():
            raise DistStoreError(f"the store at {self._where} has not answered the previous call yet")
        over = self._over = threading.Event()

        def ask() -> T:
            try:
                return call()
            finally:
                over.set()

        try:
            seconds = (timeout or self._timeout).total_seconds() + _GRACE_SECONDS
            return within(seconds, ask, f"the store at {self._where}")
        except TimeoutError as error:
            raise DistStoreError(str(error)) from error

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call may wait."""
        self._timeout = timeout
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long a call may wait."""
        return self._timeout

    def set(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> Any:
        return self._ask(lambda: self._store.get(key))

    def add(self, key: str, value: int) -> int:
        return self._ask(lambda: int(self._store.add(key, value)))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        patience = timeout or self._timeout
        self._ask(lambda: self._store.wait(keys, patience), patience)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.delete_key(key)))

    def num_keys(self) -> int:
        return self._ask(lambda: int(self._store.num_keys()))

    def append(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.append(key, value))

    def multi_get(self, keys: list[str]) -> Any:
        return self._ask(lambda: self._store.multi_get(keys))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._ask(lambda: self._store.multi_set(keys, values))

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    getNumKeys, deleteKey = num_keys, delete_key  # noqa: N815  # as torch calls them through a prefix


def serve(port: socket.socket, host: str, bound: timedelta) -> TCPStore:
    """A store on a free port of the address of `port`, reached as `host`. It serves until it is released."""
    return store_on(listen_on_same_address(port), host, timeout=bound)


def store_on(listener: socket.socket, host: str, **options: Any) -> TCPStore:
    """A store that serves on this socket, which it takes over."""
    port = int(listener.getsockname()[1])
    options |= {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    try:
        return TCPStore(host, port, **options)
    except NotImplementedError:  # the libuv store of torch 2.6 takes no socket, the older one does
        return TCPStore(host, port, use_libuv=False, **options)


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
