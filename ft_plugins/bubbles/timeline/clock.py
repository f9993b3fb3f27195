"""Clocks for the edges of spans, on the host or on the device that the rank computes on.

Invariant: `mark` neither allocates nor waits; a CUDA device is polled, never synchronised with. Slot 0 is the begin of
the iteration, to which all other times are relative.

In: marks. Out: seconds, once `ready`; by how much the host was ahead of the device.
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
        """Make room for `slots` edges, outside the step path; discards all marks."""
        ...

    def mark(self, slot: int) -> None:
        """Record that edge `slot` is now."""
        ...

    def ready(self, last: int) -> bool:
        """Whether `last`, the edge that was marked last, has passed."""
        ...

    def seconds(self, slots: int) -> list[float]:
        """Times of the first `slots` edges, since edge 0."""
        ...

    def leads(self, seconds: Sequence[float]) -> list[float]:
        """Seconds by which the host was ahead at each of the first edges, which were at `seconds`; empty if the host
        itself computes."""
        ...

    def memory(self) -> int:
        """Bytes in use now; -1 if unknown."""
        ...


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
