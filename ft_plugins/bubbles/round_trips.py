"""Predict the time of a frame, a latency plus a time per byte, from recent frames.

If processes share a processor, one frame in ten is stuck for as long as a hundred others take, and says nothing about
the next. A slower link slows all frames, and shows after a few.

Invariant: the time per byte lies between all and half of the mean of frames that were not stuck, the rest being
latency. So one odd frame cannot make a sender send more than twice what gets through.

In: bytes and nanoseconds of completed frames. Out: bytes that get through within a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

LAST = 16  # recent frames that are used
STUCK = 2.0  # a frame that takes more than this times its prediction says nothing about the link
_SPREAD = 0.01  # least variance, as a share of the squared mean size: frames of one size do not show latency


class _Line(NamedTuple):
    """Nanoseconds of a frame."""

    per_byte: float
    latency: float


class RoundTrips:
    """A least-squares line through (bytes, nanoseconds) of recent frames, without those that were stuck."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, float]] = deque(maxlen=LAST)
        self._line = _Line(0.0, 0.0)

    def add(self, nbytes: int, nanoseconds: int) -> None:
        """Add a completed frame."""
        self._frames.append((nbytes, max(1, nanoseconds)))
        self._line = _through(self._frames)

    def halve(self) -> None:
        """Halve the times of recent frames, to at least a nanosecond, so a stuck one does not block all others."""
        self._frames = deque([(nbytes, max(1.0, took / 2)) for nbytes, took in self._frames], maxlen=LAST)
        self._line = _through(self._frames)

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def per_byte(self) -> float:
        """Nanoseconds."""
        return self._line.per_byte

    @property
    def latency(self) -> float:
        """Nanoseconds of a frame of no bytes; 0 before the first frame."""
        return self._line.latency

    def through(self, nanoseconds: float) -> float:
        """Bytes of one frame that gets through within `nanoseconds`."""
        return max(0.0, (nanoseconds - self.latency) / self.per_byte)


def _through(frames: Sequence[tuple[int, float]]) -> _Line:
    """The line through all frames except STUCK ones, which are a quarter at most."""
    others, line = list(frames), _fitted(frames)
    for _ in range(len(frames) // 4):
        slowness = [took / (line.latency + line.per_byte * nbytes) for nbytes, took in others]
        if max(slowness) <= STUCK:
            break
        del others[slowness.index(max(slowness))]
        line = _fitted(others)
    return line


def _fitted(frames: Sequence[tuple[int, float]]) -> _Line:
    """Least squares, within the bounds of the invariant."""
    count = len(frames)
    size, time = sum(nbytes for nbytes, _ in frames) / count, sum(took for _, took in frames) / count
    variance = sum((nbytes - size) ** 2 for nbytes, _ in frames) / count
    per_byte = time / size
    if variance >= _SPREAD * size * size:
        slope = sum((nbytes - size) * (took - time) for nbytes, took in frames) / count / variance
        per_byte = min(per_byte, max(per_byte / 2, slope))
    return _Line(per_byte, max(0.0, time - per_byte * size))
