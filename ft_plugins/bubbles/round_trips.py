"""How long a frame takes until it is through: a latency, and so much for each byte, as told by the frames before.

Where processes share a processor, one frame in ten is stuck for as long as a hundred others take, which says nothing of
the next one. A link that is slower makes all frames slow, and is known after a few.

Invariant: what is predicted lies between two readings of the mean of frames that were not stuck: that all of its time
was for its bytes, and that half of it was for none of them. So one odd frame makes nobody send twice what gets through.

In: bytes and nanoseconds of frames as they end. Out: bytes that are through within a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

LAST = 16  # frames that are told by
STUCK = 2.0  # times what the others tell of it a frame took, or more: it tells nothing of the link
_SPREAD = 0.01  # of the square of the mean size, a variance: frames of one size tell nothing of latency


class _Line(NamedTuple):
    """Nanoseconds of a frame."""

    per_byte: float
    latency: float


class RoundTrips:
    """A line through (bytes, nanoseconds) by least squares, of the last frames but those that were stuck."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, float]] = deque(maxlen=LAST)
        self._line = _Line(0.0, 0.0)

    def add(self, nbytes: int, nanoseconds: int) -> None:
        """A frame is through."""
        self._frames.append((nbytes, max(1, nanoseconds)))
        self._line = _through(self._frames)

    def halve(self) -> None:
        """Frames may take half as long as they did: one that was stuck must not be what all others are measured by.
        However often that is said, a frame takes a nanosecond."""
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
        """Nanoseconds of a frame whatever its bytes; 0 before the first."""
        return self._line.latency

    def through(self, nanoseconds: float) -> float:
        """Bytes that get through within so long, in one frame."""
        return max(0.0, (nanoseconds - self.latency) / self.per_byte)


def _through(frames: Sequence[tuple[int, float]]) -> _Line:
    """The line through all but those that were STUCK, a quarter of them at most: by what the others tell."""
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
