"""Windows in which frames went that were late: from then on less of them is used, and slowly more again.

A profile tells a bubble's usual length. Where the passes around it take now more and now less, it is over before that
in every second iteration; and on a slow link that several ranks share, a frame takes now one share of it and now all.
What is then still on its way is what the pipeline's own message waits for. So much of a window is used that a frame is
late in one of eleven of its openings. By how much it was late tells nothing: on a crowded machine a frame may be stuck
however long its window is.

Invariant: never more than was planned. One odd iteration costs a tenth of a window, and no window for ever.
In: windows that are opened, and in which a frame was late. Out: nanoseconds of windows to be used.
"""

from __future__ import annotations

GROWS = 0.01  # of a window, each time that it is opened
DROPS = 0.1  # of it, where a frame was late

Window = tuple[int, int]  # a bubble, and which of its windows


class Shortened:
    """The windows of one sender."""

    def __init__(self) -> None:
        self._used: dict[Window, float] = {}  # nanoseconds, of those that are not used whole

    def opened(self, window: Window, nanoseconds: int) -> None:
        """It is opened once more, for so long."""
        used = self._used.pop(window, None)
        if used is not None and used + GROWS * nanoseconds < nanoseconds:
            self._used[window] = used + GROWS * nanoseconds

    def used(self, window: Window, nanoseconds: int) -> int:
        """How long of so many nanoseconds frames may go."""
        return int(min(nanoseconds, self._used.get(window, nanoseconds)))

    def late(self, window: Window, nanoseconds: int) -> None:
        """A frame was late in so long a window."""
        used = min(nanoseconds, self._used.get(window, nanoseconds))
        self._used[window] = max(0.0, used - DROPS * nanoseconds)
