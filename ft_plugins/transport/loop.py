"""One thread for many connections and times: a selector, calls from other threads, and what is due.

Invariant: nothing here waits for a peer. Everything that has arrived is read before anything is due, so a process that
was itself stopped for a while presumes no peer silent before it has read what that one sent. What is called must raise
nothing; a loop ends with the first error.

In: connections to watch, calls, times. Out: calls of what was given, in the loop's thread.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

_LONGEST_SECONDS = 60.0  # of a wait


class Loop:
    """A selector. `run` it in a thread, or `start` one; then `stop` and `close`."""

    def __init__(self, name: str) -> None:
        """`name` of the thread."""
        self._name = name
        self._selector = selectors.DefaultSelector()
        self._ready: dict[socket.socket, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._times: dict[Callable[[float], None], float] = {}  # monotonic
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []  # of the same, and of outdated ones
        self._numbers = itertools.count()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._waking = threading.RLock()  # so no byte goes to a descriptor that was closed and is another one's now
        self._stopping = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    # ---- from any thread ----

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread = threading.Thread(target=self.run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its step, and wait for that, if there is one; then the caller closes what was watched.
        Idempotent."""
        self._stopping.set()
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Free the selector after `stop`. What was called meanwhile, or is called later, happens here: a
        connection that is handed over then is closed."""
        self._closed = True
        self._call_all()
        with self._waking:
            self.close_copies()

    def close_copies(self) -> None:
        """In a child that was forked: close what it has inherited of the selector."""
        for one in (self._selector, self._woken, self._waker):
            one.close()

    def call(self, what: Callable[[], None]) -> None:
        """Have the loop's thread call `what` soon."""
        self._calls.append(what)
        self.wake()
        if self._closed:
            self._call_all()

    def wake(self) -> None:
        """Have the thread take a step."""
        with self._waking, contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._waker.send(b"1")

    # ---- in the loop's thread ----

    def watch(
        self, connection: socket.socket, ready: Callable[[int], None], events: int = selectors.EVENT_READ
    ) -> None:
        """Call `ready(events)` whenever one of these `events` is there, instead of what was said before. Raises
        OSError."""
        if connection not in self._ready:
            self._selector.register(connection, events)
        elif self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events)
        self._ready[connection] = ready

    def forget(self, connection: socket.socket) -> None:
        """Watch `connection` no more, before it is closed. Idempotent."""
        if self._ready.pop(connection, None) is not None:
            with contextlib.suppress(KeyError):  # an error of the selector has forgotten it already
                self._selector.unregister(connection)

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Call `what(now)` at `when` (monotonic), instead of when was said before; inf: not at all."""
        if when == math.inf:  # an entry of it would never be due, so the heap would keep it
            self._times.pop(what, None)
        elif self._times.get(what) != when:
            self._times[what] = when
            heapq.heappush(self._heap, (when, next(self._numbers), what))

    def soon(self, what: Callable[[float], None]) -> None:
        """Call `what(now)` once this step has read everything that has arrived."""
        self.at(-math.inf, what)

    def run(self) -> None:
        """Take steps until `stop`."""
        while not self._stopping.is_set():
            self.step()

    def step(self, longest: float = _LONGEST_SECONDS) -> None:
        """Wait for something to do, but no longer than `longest` seconds, and do it.

        What is due is so at a time before which everything that had arrived has been read, however long this process
        was stopped in between.
        """
        now = time.monotonic()
        found = self._selector.select(self._wait(longest))
        if not found:
            now = time.monotonic()
            found = self._selector.select(0)
        for key, events in found:
            if key.fileobj is self._woken:
                with contextlib.suppress(OSError):
                    self._woken.recv(4096)
            elif key.fileobj in self._ready:  # else it was just forgotten
                self._ready[key.fileobj](events)  # type: ignore[index]
        self._call_all(len(self._calls))
        due = []
        while self._heap and self._heap[0][0] <= now:
            when, _, what = heapq.heappop(self._heap)
            if self._times.get(what) == when:
                del self._times[what]
                due.append(what)
        for what in due:
            what(now)

    def _wait(self, longest: float) -> float:
        while self._heap and self._times.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._calls:
            return 0.0
        return max(0.0, min(longest, self._heap[0][0] - time.monotonic())) if self._heap else longest

    def _call_all(self, most: float = math.inf) -> None:
        while most > 0:
            try:
                what = self._calls.popleft()
            except IndexError:  # another thread may have taken the last one
                return
            what()
            most -= 1
