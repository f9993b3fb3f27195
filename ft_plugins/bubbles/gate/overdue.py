"""Choose the frames of a copy that its bubbles did not carry in time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import sqrt

from .pacing_limits import PacingLimits

GROWTH = 4  # of the larger frame that is measured
_STRIKES = 3
_FORGOTTEN = 64  # small frames, after which the link may have another speed
_LARGE_FRAMES = 8  # on a busy machine most frames wait for a processor, hardly ever all of so many


@dataclass
class OverdueFrames:
    """Whether frames of an overdue copy may be large, as large as the planned link carries in `slow_frame_seconds`.

    On a busy machine a frame takes far longer than its bytes take on the link, and one four times larger at most twice
    as long. On a slow link it takes four times as long. So a small one and a large one are measured; again after
    `retry_frames` usual ones, or after _STRIKES large ones in a row that took long after all. Two that are stuck may
    look like a slow link, so its speed is taken from the quickest of the recent frames that are no small ones."""

    large: bool = False
    small: tuple[int, int] | None = None  # bytes and nanoseconds of a smaller frame
    waits: int = 0  # usual frames until a larger one is tried
    strikes: int = 0
    _small: int = 0  # small frames since a larger one
    _per_byte: deque[float] = field(default_factory=lambda: deque(maxlen=_LARGE_FRAMES))  # of such frames

    def seen(self, nbytes: int, took: int, most: int) -> None:
        """Record any frame of a planned link; one that is too small may be quick on a slow link, too."""
        self._small = 0 if nbytes >= most // GROWTH else self._small + 1
        if not self._small:
            self._per_byte.append(max(1, took) / nbytes)
        elif self._small >= _FORGOTTEN:
            self._per_byte.clear()

    @property
    def per_byte(self) -> float:
        """Nanoseconds of the link, at most."""
        return min(self._per_byte, default=1e9)

    def size(self, usual: int, most: int) -> int:
        """Bytes of the next frame; `usual`: those of a link that is as slow as frames are."""
        if self.waits:
            return usual
        return most if self.small is not None else max(1, most // GROWTH)

    def ended(self, nbytes: int, took: int, most: int, limits: PacingLimits) -> None:
        """Record a frame; `most` as for `size`. The last one of a copy may be too small to show anything."""
        if self.waits:
            self.waits -= 1
        elif self.small is None:
            self.small = (nbytes, took) if most // GROWTH // 2 <= nbytes < most // 2 else None
        elif nbytes >= GROWTH // 2 * self.small[0]:
            times_larger, times_longer = nbytes / self.small[0], took / self.small[1]
            if self.large:
                self.strikes = self.strikes + 1 if times_longer > 2 * times_larger else 0
                self.large = self.strikes < _STRIKES
            else:
                self.large, self.strikes = times_longer <= sqrt(times_larger), 0
                self.waits = 0 if self.large else limits.retry_frames
            if not self.large:
                self.small = None
