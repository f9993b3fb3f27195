"""Which positions the root of the tree of SMPs hears of, and which it has not heard of for too long. No I/O.

Invariant: a position that is in the summary is never absent. One that leaves it has GRACE of `detect_seconds` to appear
again, below another parent.

In: the positions in the root's summary, as bits; times in seconds, monotonic. Out: the absent positions.
"""

from __future__ import annotations

import numpy as np

from .agreement import LOST_LIMIT

GRACE = 0.5  # of `detect_seconds`, for a node to attach to another parent
_LOOKS_PER_DETECTION = 20  # while a position is missing


class Presence:
    """The positions of a job of `nodes`. All are expected within `detect_seconds` from `now`."""

    def __init__(self, nodes: int, detect_seconds: float, heartbeat_seconds: float, now: float) -> None:
        self._nodes = nodes
        self._detect = detect_seconds
        self._heartbeat = heartbeat_seconds
        self._present = np.zeros(nodes, dtype=bool)  # in the summary of the last look
        self._seen = np.zeros(nodes)  # when each was in one last
        self._covered = 0  # the summary of the last look
        self.absent: tuple[int, ...] = ()  # LOST_LIMIT at most
        self.expect_all(now)

    def expect_all(self, now: float) -> None:
        """Forget what was seen: all have `detect_seconds` from now to be in a summary."""
        self._seen[:] = now + (1 - GRACE) * self._detect
        self._present[:] = False
        self._looked_at, self._covered, self.absent = now, 0, ()

    @property
    def due(self) -> float:
        """When to look again, even if the summary has not changed."""
        whole = self._covered == (1 << self._nodes) - 1
        return self._looked_at + (self._heartbeat if whole else self._detect / _LOOKS_PER_DETECTION)

    def look(self, covered: int, now: float) -> None:
        """Note which positions are in the summary, and which have not been for too long; nothing before that is due."""
        if covered == self._covered and now < self.due:
            return
        self._seen[self._present] = np.maximum(self._seen[self._present], now)
        if covered != self._covered:
            bits = np.frombuffer(covered.to_bytes((self._nodes + 7) // 8, "little"), dtype=np.uint8)
            self._present = np.unpackbits(bits, count=self._nodes, bitorder="little").astype(bool)
        absent = ~self._present & (now >= self._seen + GRACE * self._detect)
        self.absent = tuple(map(int, np.flatnonzero(absent)[:LOST_LIMIT]))
        self._looked_at, self._covered = now, covered

    def skip(self, seconds: float, now: float) -> None:
        """Do not count `seconds`, for which this process could hear no one."""
        self._seen = np.maximum(self._seen, np.minimum(self._seen + seconds, now))
