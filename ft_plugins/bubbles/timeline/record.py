"""Record the spans of chosen iterations, edge by edge, in preallocated arrays.

Invariant: an edge does not allocate, lock or synchronise with a device; in an iteration that is not recorded it costs
one comparison. Spans do not nest: one that begins inside another is part of it. An iteration with more spans than there
is room for is not reported; room is then made for the next.

A clock, of the host or of the device that the rank computes on, marks an edge without waiting; a CUDA device is polled,
never synchronised with. Slot 0 is the begin of the iteration, to which all other times are relative.

In: edges called by a host, begin and end of iterations. Out: a `Timeline`, once its clock is ready.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...model.host import Edges
from ...model.timeline import Kind, Span, Timeline

_ITERATION = 2  # slots of the clock before those of spans: begin and end of the iteration
_ROOM = 1024  # spans at first


class Clock(Protocol):
    """Times of numbered edges."""

    def room(self, slots: int) -> None:
        """Make room for `slots` edges, outside the step path; discards all marks."""

    def mark(self, slot: int) -> None:
        """Record that edge `slot` is now."""

    def ready(self, last: int) -> bool:
        """Whether `last`, the edge that was marked last, has passed."""

    def seconds(self, slots: int) -> list[float]:
        """Times of the first `slots` edges, since edge 0."""

    def leads(self, seconds: Sequence[float]) -> list[float]:
        """Seconds by which the host was ahead at each of the first edges, which were at `seconds`; empty if the host
        itself computes."""

    def memory(self) -> int:
        """Bytes in use now; -1 if unknown."""


class HostClock:
    """For ranks that compute on the host: an edge is at the time of its mark."""

    def __init__(self) -> None:
        self._times = array("d")

    def room(self, slots: int) -> None:
        self._times = array("d", bytes(8 * slots))

    def mark(self, slot: int, now: Any = time.perf_counter) -> None:
        self._times[slot] = now()

    def ready(self, last: int) -> bool:
        return True

    def seconds(self, slots: int) -> list[float]:
        return [when - self._times[0] for when in self._times[:slots]]

    def leads(self, seconds: Sequence[float]) -> list[float]:
        return []

    def memory(self) -> int:
        return -1


class CudaClock:
    """For ranks that compute on a CUDA device: an edge is when the current stream reaches it, later than the host.
    The stream waits for NCCL receives, so their ends are in it too."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._host = array("d")

    def room(self, slots: int) -> None:
        self._host = array("d", bytes(8 * slots))
        self._events += [torch.cuda.Event(enable_timing=True) for _ in range(slots - len(self._events))]

    def mark(self, slot: int) -> None:
        self._host[slot] = time.perf_counter()
        self._events[slot].record()

    def ready(self, last: int) -> bool:
        return bool(self._events[last].query())

    def seconds(self, slots: int) -> list[float]:
        first = self._events[0]
        return [0.0, *(1e-3 * first.elapsed_time(event) for event in self._events[1:slots])]

    def leads(self, seconds: Sequence[float]) -> list[float]:
        return leads([when - self._host[0] for when in self._host[: len(seconds)]], seconds)

    def memory(self) -> int:
        return int(torch.cuda.memory_allocated())


def leads(host: Sequence[float], device: Sequence[float]) -> list[float]:
    """Seconds by which the host was ahead at each edge, from the times by each one's own clock.

    A device is never ahead of its host. So the host is assumed to have waited at the edge where its lead is smallest,
    and the clocks are aligned there. Megatron's 1F1B waits for the device at each message. If a host does not wait in
    an iteration, all leads are underestimated by the same amount.
    """
    offset = max((issued - done for issued, done in zip(host, device, strict=True)), default=0.0)
    return [done + offset - issued for issued, done in zip(host, device, strict=True)]


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


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
