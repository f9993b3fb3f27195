"""How far the windows of bubbles can be used and how full they were, for one sender.

`Fullness` counts bytes sent in windows against bytes planned for them, only in windows at whose begin the sender had
something to send. If its copy ended before the window did, the rest of the window was not needed; if more was waiting,
all of it was. It is the measured counterpart of the planned fill of BAFT's Algorithms 1 and 2: what is missing was lost
to bubbles that end early, slow links and frames not worth sending. Invariant: `taken` <= `offered` <= planned.

`Shortened` uses less of a window after a frame in it was late, then slowly more again. A profile gives a bubble's usual
length. Where the passes around it vary, or several ranks share a slow link, a window may end early in every second
iteration, and a frame still in flight delays the pipeline's own message. In balance, a frame is late in one of eleven
openings. How late it was is ignored: on a crowded machine a frame can be stuck whatever the window. Invariant: a window
is never used beyond its planned end. One odd iteration costs a tenth of a window, and recovers.
"""

from __future__ import annotations

from collections.abc import Sequence

REGROWTH = 0.01  # of a window's length, regained each time it is opened
CUT = 0.1  # of a window's length, given up when a frame in it was late

WindowKey = tuple[int, int]  # a bubble, and which of its windows


class Fullness:
    """Bytes that may still go in each window of the last opening (`left`), and sums over all openings."""

    def __init__(self) -> None:
        self.taken = self.offered = 0
        self.left: list[int] = []
        self._windows: Sequence[tuple[int, int, int]] = ()
        self._wanted: list[bool] = []
        self._more: list[bool] = []  # whether more was waiting when the last bytes went

    def opened(self, windows: Sequence[tuple[int, int, int]], asking_ns: int, in_bubble: bool = True) -> None:
        """Start new windows, (begin_ns, deadline_ns, bytes) each, and settle the previous ones. A sender has been
        waiting since `asking_ns`. `in_bubble`: whether they are windows of a bubble."""
        for place, (_, deadline, planned) in enumerate(self._windows):
            if self._wanted[place]:
                taken = planned - self.left[place]
                self.taken += taken
                self.offered += planned if self._more[place] or asking_ns < deadline else taken
        self._windows = windows
        self.left = [window[2] for window in windows]
        self._wanted = [in_bubble and asking_ns <= begin for begin, _, _ in windows]
        self._more = [False for _ in windows]

    def take(self, window: int, nbytes: int, more: bool) -> None:
        """Count `nbytes` sent in a window; `more`: whether others wait."""
        self.left[window] -= nbytes
        self._more[window] = more


class Shortened:
    """The usable part of each window of one sender."""

    def __init__(self) -> None:
        self._used: dict[WindowKey, float] = {}  # nanoseconds, of windows that are not fully used

    def opened(self, window: WindowKey, nanoseconds: int) -> None:
        """Record that the window is opened again, for `nanoseconds`."""
        used = self._used.pop(window, None)
        if used is not None and used + REGROWTH * nanoseconds < nanoseconds:
            self._used[window] = used + REGROWTH * nanoseconds

    def used(self, window: WindowKey, nanoseconds: int) -> int:
        """How many of `nanoseconds` frames may use."""
        return int(min(nanoseconds, self._used.get(window, nanoseconds)))

    def late(self, window: WindowKey, nanoseconds: int) -> None:
        """Record that a frame was late in a window of that length."""
        used = min(nanoseconds, self._used.get(window, nanoseconds))
        self._used[window] = max(0.0, used - CUT * nanoseconds)
