"""Serve connections: one thread watches those that are idle; one that has a request gets a thread as long as it has.

Invariant: a connection that has been idle for LINGER_SECONDS costs no thread, and no more than `most` threads serve at
a time. Connections beyond that wait, the oldest first; a thread gives its place up to them after a reply, once it has
served for TURN_SECONDS. A request is read, carried out and answered by one thread. Threads are started by the watching
one alone: a thread inherits the priority of the one that starts it, and serving may lower that (`traffic.step_back`).

In: open connections, functions to serve and to end one. Out: calls of these functions.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from .loop import Loop

# A thread stays with its connection for so long after a reply, unless others wait: the lanes of an exchange send frame
# after frame, and on a node that is fully loaded each change of threads costs as much as several frames.
LINGER_SECONDS = 2.0
TURN_SECONDS = 0.1
_LOOK_SECONDS = (0.05, 0.005)  # how often a thread looks whether others wait; and while they do


class HasConnection(Protocol):
    """Whatever belongs to an open connection."""

    @property
    def connection(self) -> socket.socket:
        """The connection."""


T = TypeVar("T", bound=HasConnection)


class Serving(Generic[T]):
    """The open connections of one server, between requests."""

    def __init__(
        self,
        serve: Callable[[T], bool],
        end: Callable[[T, str], None],
        name: str,
        most: int,
        idle_seconds: float = math.inf,
    ) -> None:
        """`serve` carries out the one request that has arrived, in a thread called `name`, and returns whether the
        connection goes on; it raises nothing. `end` closes a connection that was idle for `idle_seconds`, cannot be
        watched, or has no thread; its second argument is why, '' where that is usual."""
        self._serve = serve
        self._end = end
        self._name = name
        self._most = most
        self._idle_seconds = idle_seconds
        self._waiting: deque[T] = deque()  # with a request, for a thread
        self._active = 0  # threads that serve
        self._watched: dict[T, float] = {}  # idle ones, and since when; the longest idle comes first
        self._closing = False
        self._loop = Loop(f"{name}-idle")
        self._loop.start()

    def add(self, one: T) -> None:
        """Serve a connection from now on. From any thread."""
        self._loop.call(lambda: self._watch(one))

    def close(self) -> None:
        """End the connections that are idle now, and the others after their requests. Idempotent."""
        self._closing = True
        self._loop.stop()
        while self._watched:
            self._unwatch(next(iter(self._watched)))
        while self._waiting:
            self._end(self._waiting.popleft(), "")
        self._loop.close()

    # ---- the watching thread ----

    def _watch(self, one: T) -> None:
        if self._closing:
            self._end(one, "")
            return
        try:
            self._loop.watch(one.connection, lambda _: self._ready(one))
        except (OSError, ValueError) as error:  # it was closed meanwhile
            self._end(one, str(error))
            return
        self._watched[one] = time.monotonic()
        self._schedule()

    def _served(self, one: T, goes_on: bool) -> None:
        """A thread is free again, and perhaps its connection."""
        self._active -= 1
        if goes_on:
            self._watch(one)
        self._start_threads()

    def _ready(self, one: T) -> None:
        self._loop.forget(one.connection)
        del self._watched[one]
        self._waiting.append(one)
        self._start_threads()

    def _unwatch(self, one: T) -> None:
        self._loop.forget(one.connection)
        del self._watched[one]
        self._end(one, "")

    def _schedule(self) -> None:
        """Look again when the longest idle connection has been idle for too long."""
        if self._watched:
            self._loop.at(next(iter(self._watched.values())) + self._idle_seconds, self._end_idle)

    def _end_idle(self, now: float) -> None:
        while self._watched and (one := next(iter(self._watched))) and self._watched[one] + self._idle_seconds <= now:
            self._unwatch(one)
        self._schedule()

    def _start_threads(self) -> None:
        while self._waiting and self._active < self._most and not self._closing:
            one = self._waiting.popleft()
            self._active += 1
            try:
                threading.Thread(target=self._work, args=(one,), name=self._name, daemon=True).start()
            except RuntimeError as error:
                self._active -= 1
                self._end(one, f"no thread for its connection ({error})")

    # ---- a serving thread ----

    def _work(self, one: T) -> None:
        goes_on, began = True, time.monotonic()
        try:
            while goes_on := self._serve(one):
                if not self._stays(one, began):
                    break
        finally:
            self._loop.call(lambda: self._served(one, goes_on))

    def _stays(self, one: T, began: float) -> bool:
        """Whether this thread, which began to serve the connection at that time, goes on with it: there is a request,
        or its end, within LINGER_SECONDS, and no other connection waits for too long."""
        poller = select.poll()
        poller.register(one.connection, select.POLLIN)
        until = time.monotonic() + LINGER_SECONDS
        while not self._closing and (now := time.monotonic()) < until:
            crowded = bool(self._waiting) and self._active >= self._most
            if crowded and now - began >= TURN_SECONDS:
                return False
            if poller.poll(1000 * _LOOK_SECONDS[crowded]):
                return True
            if crowded:
                return False
        return False
