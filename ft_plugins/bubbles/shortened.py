"""Windows in which frames went that were late: from then on less of them is used, and slowly more again.

A profile tells a bubble's usual length. Where the passes around it take now more and now less, it is over before that
in every second iteration; and on a slow link that several ranks share, a frame takes now one share of it and now all.
What is then still on its way is what the pipeline's own message waits for.

Invariant: never more than was planned. One odd iteration costs half of a window at most, and no window for ever.
In: how much of a window was there for a frame that was late. Out: nanoseconds of windows to be used.
"""

from __future__ import annotations

GROWS = 0.01  # of a window, each time that it is opened
_DROPS = 0.5  # of the way to what was there

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

    def late(self, window: Window, nanoseconds: int, there: int) -> None:
        """A frame was late that would have been in time, had no more than `there` of its nanoseconds been used."""
        used = min(nanoseconds, self._used.get(window, nanoseconds))
        self._used[window] = used - _DROPS * (used - min(used, max(0, there)))
