"""How long a frame takes until it is through: a latency, and so much for each byte, as told by the frames before.

Invariant: what is predicted lies between two readings of the same mean frame: that all of its time was for its bytes,
and that half of it was for none of them. So one odd frame makes nobody send twice what gets through.

In: bytes and nanoseconds of frames as they end. Out: bytes that are through within a time.
"""

from __future__ import annotations

_FADES = 0.9  # what frames before still count for, one later
_SPREAD = 0.01  # of the square of the mean size, a variance: frames of one size tell nothing of latency


class RoundTrips:
    """A line through (bytes, nanoseconds) by least squares, the last frames counting most."""

    def __init__(self) -> None:
        self._count = self._bytes = self._time = 0.0  # sums that fade
        self._squares = self._products = 0.0

    def add(self, nbytes: int, nanoseconds: int) -> None:
        """A frame is through."""
        self._count = _FADES * self._count + 1
        self._bytes = _FADES * self._bytes + nbytes
        self._time = _FADES * self._time + nanoseconds
        self._squares = _FADES * self._squares + nbytes * nbytes
        self._products = _FADES * self._products + nbytes * nanoseconds

    def halve(self) -> None:
        """Frames may take half as long as they did: one that was stuck must not be what all others are measured by."""
        self._time /= 2
        self._products /= 2

    def __bool__(self) -> bool:
        return self._bytes > 0 and self._time > 0

    @property
    def per_byte(self) -> float:
        """Nanoseconds."""
        size, time = self._bytes / self._count, self._time / self._count
        variance = self._squares / self._count - size * size
        most = time / size
        if variance < _SPREAD * size * size:
            return most
        return min(most, max(most / 2, (self._products / self._count - size * time) / variance))

    @property
    def latency(self) -> float:
        """Nanoseconds of a frame whatever its bytes; 0 before the first."""
        return max(0.0, (self._time - self.per_byte * self._bytes) / self._count) if self else 0.0

    def through(self, nanoseconds: float) -> float:
        """Bytes that get through within so long, in one frame."""
        return max(0.0, (nanoseconds - self.latency) / self.per_byte)
