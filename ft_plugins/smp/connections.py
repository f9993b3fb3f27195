"""How many connections a server serves at a time, and which of them makes room for a newer one.

Invariant: a connection makes room only between requests, never while one of its requests is received, carried out or
answered. It is the one of the same name that has been idle for longest; where that name has no idle one, the one that
has been idle for longest of all. Its other side connects again at its next request.

In: connections that have proved who they are, each with a name. Out: places, as many as there may be.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass


@dataclass(eq=False)
class Place:
    """One connection's."""

    connection: socket.socket
    name: str
    busy: bool = False


class Places:
    """Those of one server, for all of its threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[Place, None] = {}  # the one that has been idle for longest first
        self._changed = threading.Condition()

    def take(self, connection: socket.socket, name: str, seconds: float | None = 0.0) -> Place | None:
        """A place for `connection`; None where all others are busy for so many seconds. `seconds` None: no limit."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._room(name), seconds):
                return None
            place = Place(connection, name)
            self._taken[place] = None
            return place

    def _room(self, name: str) -> bool:
        """Whether there is room, or could be made by hanging up on an idle connection."""
        if len(self._taken) < self._most:
            return True
        idle = [place for place in self._taken if not place.busy]
        oldest = next((place for place in idle if place.name == name), idle[0] if idle else None)
        if oldest is None:
            return False
        del self._taken[oldest]
        with contextlib.suppress(OSError):  # its other side has just gone
            oldest.connection.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        return True

    def begin(self, place: Place) -> bool:
        """A request is about to be received; False where the connection has made room: then nothing is received."""
        with self._changed:
            place.busy = True
            return place in self._taken

    def rest(self, place: Place) -> None:
        """The request has been answered."""
        with self._changed:
            place.busy = False
            if place in self._taken:
                del self._taken[place]
                self._taken[place] = None
            self._changed.notify()

    def leave(self, place: Place) -> None:
        """Before the connection is closed. Idempotent."""
        with self._changed:
            self._taken.pop(place, None)
            self._changed.notify()
