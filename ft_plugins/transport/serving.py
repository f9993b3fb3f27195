"""Serve connections: one thread watches those that are idle; one that has a request gets a thread as long as it has.

Invariant: a connection that has been idle for LINGER_SECONDS costs no thread, and no more than so many threads serve at
a time. Connections beyond that wait, the oldest first; a thread gives its place up to them after a reply, once it has
served for TURN_SECONDS. A request is read, carried out and answered by one thread. Threads are started by the watching
one alone: a thread inherits the priority of the one that starts it, and serving may lower that (`traffic.step_back`).

There are no more than `places` connections: an idle one makes room for a new one, never while a request is received,
carried out or answered. Its peer connects again at its next request.

In: open connections, functions to serve and to end one. Out: calls of these functions.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .loop import Loop

# A thread stays with its connection for so long after a reply, unless others wait: the lanes of an exchange send frame
# after frame, and on a node that is fully loaded each change of threads costs as much as several frames.
LINGER_SECONDS = 2.0
TURN_SECONDS = 0.1
_LOOK_SECONDS = (0.05, 0.005)  # how often a thread looks whether others wait; and while they do


@dataclass(eq=False)
class Served:
    """A connection of a server. `name`: of the peer's node; one name for all connections of a local socket."""

    connection: socket.socket
    name: str
    busy: bool = field(default=False, init=False)


T = TypeVar("T", bound=Served)


class Serving(Generic[T]):
    """The open connections of one server, between requests."""

    def __init__(
        self, serve: Callable[[T], bool], end: Callable[[T, str], None], name: str, threads: int, places: int,
        idle_seconds: float = math.inf,
    ) -> None:  # fmt: skip
        """`serve` carries out the one request that has arrived, in one of so many threads called `name`, and returns
        whether the connection goes on; it raises nothing. `end` leaves and closes a connection that was idle for
        `idle_seconds`, had to make room, cannot be watched, or has no thread; its second argument is why, '' where that
        is usual."""
        self._serve = serve
        self._end = end
        self._name = name
        self._threads = threads
        self.places = places
        self._open: dict[T, None] = {}  # the longest idle comes first
        self._changed = threading.Condition()
        self._idle_seconds = idle_seconds
        self._waiting: deque[T] = deque()  # with a request, for a thread
        self._active = 0  # threads that serve
        self._watched: dict[T, float] = {}  # idle ones, and since when; the longest idle comes first
        self._closing = False
        self._loop = Loop(f"{name}-idle")
        self._loop.start()

    def take(self, one: T, seconds: float | None = 0.0) -> bool:
        """Take a place for a connection, before it is added; False if all others stay busy for `seconds` (None: no
        limit). The longest idle one of the same name makes room, or, if that name has none, the longest idle of all."""
        with self._changed:
            if has_room := self._changed.wait_for(lambda: self._room(one.name), seconds):
                self._open[one] = None
            return has_room

    def _room(self, name: str) -> bool:
        if len(self._open) < self.places:
            return True
        idle = [each for each in self._open if not each.busy]
        oldest = next((each for each in idle if each.name == name), idle[0] if idle else None)
        if oldest is None:
            return False
        del self._open[oldest]
        with contextlib.suppress(OSError):  # its peer has just hung up
            oldest.connection.shutdown(socket.SHUT_RDWR)  # wakes its thread, which ends it
        return True

    def leave(self, one: T) -> None:
        """Give up the place of a connection, before it is closed. Idempotent."""
        with self._changed:
            self._open.pop(one, None)
            self._changed.notify()

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
        while self._waiting and self._active < self._threads and not self._closing:
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
            while goes_on := self._serve_once(one):
                if not self._stays(one, began):
                    break
        finally:
            self._loop.call(lambda: self._served(one, goes_on))

    def _serve_once(self, one: T) -> bool:
        with self._changed:
            one.busy = True
            keeps_place = one in self._open
        if not keeps_place:
            self._end(one, "")
            return False
        if goes_on := self._serve(one):
            with self._changed:
                one.busy = False
                if one in self._open:
                    del self._open[one]
                    self._open[one] = None
                self._changed.notify()
        return goes_on

    def _stays(self, one: T, began: float) -> bool:
        """Whether this thread, which began to serve the connection at that time, goes on with it: there is a request,
        or its end, within LINGER_SECONDS, and no other connection waits for too long."""
        poller = select.poll()
        poller.register(one.connection, select.POLLIN)
        until = time.monotonic() + LINGER_SECONDS
        while not self._closing and (now := time.monotonic()) < until:
            crowded = bool(self._waiting) and self._active >= self._threads
            if crowded and now - began >= TURN_SECONDS:
                return False
            if poller.poll(1000 * _LOOK_SECONDS[crowded]):
                return True
            if crowded:
                return False
        return False
