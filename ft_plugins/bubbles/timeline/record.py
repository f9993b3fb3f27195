"""Record the spans of chosen iterations, edge by edge, in preallocated arrays.

Invariant: an edge does not allocate, lock or synchronise with a device; in an iteration that is not recorded it costs
one comparison. Spans do not nest: one that begins inside another is part of it. An iteration with more spans than there
is room for is not reported; room is then made for the next.

In: edges called by a host, begin and end of iterations. Out: a `Timeline`, once its clock is ready.
"""

from __future__ import annotations

from array import array

from ...model.host import Edges
from ...model.timeline import Kind, Span, Timeline
from .clock import Clock

_ITERATION = 2  # slots of the clock before those of spans: begin and end of the iteration
_ROOM = 1024  # spans at first


class Recorder:
    """The spans of one rank. `begin` and `end` are `model.host.Edges`."""

    def __init__(self, rank: int, clock: Clock, room: int = _ROOM) -> None:
        self._rank = rank
        self._clock = clock
        self._recording = False
        self._recorded = False  # and not yet taken
        self._depth = 0
        self._count = 0
        self._make_room(room)

    def _make_room(self, room: int) -> None:
        self._room = room
        self._kinds: list[Kind] = [Kind.FORWARD] * room
        self._microbatches = array("i", bytes(4 * room))
        self._chunks = array("i", bytes(4 * room))
        self._memory = array("q", bytes(8 * room))
        self._clock.room(_ITERATION + 2 * room)

    @property
    def free(self) -> bool:
        """Whether another iteration can be recorded: the last was taken."""
        return not self._recorded

    def iteration_begin(self) -> None:
        self._recording, self._recorded, self._depth, self._count = True, False, 0, 0
        self._clock.mark(0)

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        if not self._recording:
            return
        self._depth += 1
        at = self._count
        if self._depth > 1 or at >= self._room:
            return
        self._kinds[at] = kind
        self._microbatches[at] = microbatch
        self._chunks[at] = chunk
        self._memory[at] = self._clock.memory()
        self._clock.mark(_ITERATION + 2 * at)

    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        if not self._recording:
            return
        self._depth -= 1
        if self._depth == 0:
            if self._count < self._room:
                self._clock.mark(_ITERATION + 2 * self._count + 1)
            self._count += 1

    def iteration_end(self) -> None:
        if not self._recording:
            return
        self._recording = False
        if self._depth or self._count > self._room:  # cut short by an error that was caught, or too long
            self._make_room(max(self._room, 2 * self._count))
            return
        self._recorded = True
        self._clock.mark(1)

    def take(self) -> Timeline | None:
        """The recorded iteration, once; None if there is none, or while the device still runs it."""
        if not self._recorded or not self._clock.ready(1):
            return None
        self._recorded = False
        count = self._count
        times = self._clock.seconds(_ITERATION + 2 * count)
        spans = tuple(
            Span(self._kinds[i], times[2 + 2 * i], times[3 + 2 * i], self._microbatches[i], self._chunks[i])
            for i in range(count)
        )
        known = count > 0 and self._memory[0] >= 0
        memory = tuple(self._memory[:count]) if known else ()
        return Timeline(self._rank, times[1], spans, memory, tuple(self._clock.leads(times)))


class EdgeFanout:
    """Pass each edge to several receivers, in the given order: those that act first, those that record last."""

    def __init__(self, *edges: Edges) -> None:
        self._begins = tuple(one.begin for one in edges)
        self._ends = tuple(one.end for one in edges)

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        for begin in self._begins:
            begin(kind, microbatch, chunk)

    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        for end in self._ends:
            end(kind, microbatch, chunk)
