"""Time that passes only where somebody waits for it, for what is paced by a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable

MS = 1_000_000  # nanoseconds


class Clock:
    """Time that passes only where somebody waits for it."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Stop(threading.Event):
    """Waiting moves the clock, and lets things happen at their time; it is set at `end`."""

    def __init__(self, clock: Clock, end: int, events: dict[int, Callable[[], None]] | None = None) -> None:
        super().__init__()
        self._clock, self._end, self._events = clock, end, events or {}

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None and timeout > 0, "it does not wait at all"
        self._clock.now += max(1, int(timeout * 1e9))
        for at in sorted(at for at in self._events if at <= self._clock.now):
            self._events.pop(at)()
        if self._clock.now >= self._end:
            self.set()
        return self.is_set()
