"""Looks whose replies the leader holds back, by connection. Pure.

Invariant: a search for looks whose time is over costs the same for two looks as for thousands, if there is none. All
are due as soon as the state is not the one in which they were held.

In: looks, until when they are held, the state of the leader. Out: the connections whose looks are due.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable

from .node_messages import Look

_SILENCE = 0.25  # a look is held for so much of the silence of a lost node: it has four to be heard from
_LONGEST = 10.0  # seconds


def longest_hold(silence: float) -> float:
    """The maximum of seconds for which a look is held back, where a node is lost after `silence` seconds."""
    return min(_SILENCE * silence, _LONGEST)


class HeldLooks:
    """At most one look of each connection."""

    def __init__(self) -> None:
        self._looks: dict[int, tuple[float, Look]] = {}  # until when, by connection
        self._until: list[tuple[float, int]] = []  # heap of the same times, and of looks that are no longer held
        self._state: Hashable = None  # in which the first of them was held

    def hold(self, connection: int, look: Look, until: float, state: Hashable) -> None:
        """Hold one more, in a state that it knows."""
        if not self._looks:
            self._state = state
        self._looks[connection] = until, look
        heapq.heappush(self._until, (until, connection))

    def due(self, now: float, state: Hashable) -> list[int]:
        """Connections whose looks are to be answered."""
        if self._looks and state != self._state:
            self._until.clear()
            return list(self._looks)
        due = []
        while self._until and self._until[0][0] <= now:
            until, connection = heapq.heappop(self._until)
            if connection in self._looks and self._looks[connection][0] == until:
                due.append(connection)
        return due

    def release(self, connection: int) -> Look:
        """The look of a connection, no longer held."""
        return self._looks.pop(connection)[1]

    def drop(self, connection: int) -> None:
        """Forget the look of a connection, if there is one."""
        self._looks.pop(connection, None)
