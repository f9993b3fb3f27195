"""When an edge of a span was: on the host, or on the device that the rank computes on.

Invariant: `mark` allocates nothing and waits for nobody; a CUDA device is never synchronised with, it is asked whether
it has come that far. Slot 0 is the begin of the iteration, to which all other times are relative.

In: marks. Out: seconds, once `ready`; by how much the device was behind the host.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Times of numbered edges."""

    def room(self, slots: int) -> None:
        """Make room for so many edges, outside the step path. What was marked is lost."""
        ...

    def mark(self, slot: int) -> None:
        """This edge is now."""
        ...

    def ready(self, last: int) -> bool:
        """Whether the edge that was marked last, `last`, is over."""
        ...

    def seconds(self, slots: int) -> list[float]:
        """Those of the first `slots` edges, since edge 0."""
        ...

    def leads(self, seconds: Sequence[float]) -> list[float]:
        """By how many seconds the host was ahead at each of the first edges, which were at `seconds`; empty where the
        host itself computes."""
        ...

    def memory(self) -> int:
        """Bytes in use now; -1 where that is not known."""
        ...


class HostClock:
    """Where the host computes: an edge is when it is told."""

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
    """Where a CUDA device computes, ahead of which the host runs: an edge is when the current stream gets there. A
    receive over NCCL is waited for by that stream, so its end is there too."""

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
    """By how many seconds the host was ahead at each edge, of when either was there by its own clock.

    A device is never ahead: it does what it was told. So where the host was ahead by least, it is taken to have waited,
    and there the two clocks are compared. Megatron's 1F1B waits for the device at each message. A host that waits
    nowhere in an iteration is further ahead than is told here, everywhere by as much.
    """
    behind = max((told - done for told, done in zip(host, device, strict=True)), default=0.0)
    return [done + behind - told for told, done in zip(host, device, strict=True)]


def clock_of(device: torch.device) -> Clock:
    """The clock of a rank that computes on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()
