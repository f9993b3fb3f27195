"""A torch store of another process, asked within a bound.

Invariant: no call waits longer than the store's own timeout and a few seconds. torch's client waits for ever for a
server that has accepted a connection and says nothing: one that is stopped, has lost its power, or is none. What is
left behind then is one thread that waits in torch; until it comes back the store is not asked again.

In: a way to make a client, a timeout. Out: a store for which DistStoreError stands where torch would hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistStoreError, Store

from ..intake import within

_GRACE_SECONDS = 2.0  # for torch to give up by itself, with its own words

T = TypeVar("T")


class BoundedStore(Store):  # type: ignore[misc]  # torch has no types for it
    """A client of a store. One call at a time. To be held as long as a PrefixStore uses it: torch does not."""

    def __init__(self, make: Callable[[], Any], timeout: timedelta, where: str) -> None:
        """`make` connects, and may hang like any call; `where` is what people call the store. Raises DistStoreError, or
        what `make` raises."""
        super().__init__()
        self._where = where
        self._timeout = timeout
        self._over = threading.Event()  # what was asked last
        self._over.set()
        self._store: Any = self._ask(make, timeout)

    def _ask(self, call: Callable[[], T], timeout: timedelta | None = None) -> T:
        if not self._over.is_set():
            raise DistStoreError(f"the store at {self._where} has still not answered what it was asked before")
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
        """How long a call may wait from now on."""
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
