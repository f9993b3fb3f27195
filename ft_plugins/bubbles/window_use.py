"""How full the windows of bubbles were, of one sender: what went in them, of what they were to carry.

Only those count in which the sender had something to send when they began. Where its copy was through before a window
was over, the rest of it was not needed; where more was waiting, all of it was. So this is for a link what the fill of
Algorithms 1 and 2 is for a plan: what a bubble that ends early, a slow link or a frame that is not worth it leaves of
a window, is missing.

Invariant: `taken` is at most `offered`, which is at most what was planned.
In: openings as a sender sees them, and what goes in each window. Out: two sums of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence


class Fullness:
    """Of all openings that were seen. `left` of the last one: bytes that may still go in each window."""

    def __init__(self) -> None:
        self.taken = self.offered = 0
        self.left: list[int] = []
        self._windows: Sequence[tuple[int, int, int]] = ()
        self._wanted: list[bool] = []
        self._more: list[bool] = []  # when something went in it last, more was waiting

    def opened(self, windows: Sequence[tuple[int, int, int]], asking_ns: int, counts: bool = True) -> None:
        """There are other windows, (begin_ns, deadline_ns, bytes) each; somebody waits to send since `asking_ns`. Those
        before are settled. `counts`: they are windows of a bubble."""
        for place, (_, deadline, planned) in enumerate(self._windows):
            if self._wanted[place]:
                taken = planned - self.left[place]
                self.taken += taken
                self.offered += planned if self._more[place] or asking_ns < deadline else taken
        self._windows = windows
        self.left = [window[2] for window in windows]
        self._wanted = [counts and asking_ns <= begin for begin, _, _ in windows]
        self._more = [False for _ in windows]

    def take(self, window: int, nbytes: int, more: bool) -> None:
        """So much goes in one of them; whether there is more."""
        self.left[window] -= nbytes
        self._more[window] = more
