"""Windows whose bubbles have ended before their time: from then on less of them is used, and slowly more again.

A profile tells a bubble's usual length. Where the passes around it take now more and now less, it is over before that
in every second iteration, and what is on its way then is what the pipeline's own message waits for.

Invariant: never more than was planned. One odd iteration costs half of a window at most, and no window for ever.
In: how far into its window a frame began that its bubble did not wait for. Out: nanoseconds of windows to be used.
"""

from __future__ import annotations

GROWS = 0.01  # of a window, each time that it is opened
_DROPS = 0.5  # of the way to where a bubble was over

Window = tuple[int, int]  # a bubble, and which of its windows


class EarlyEnds:
    """Of the windows of one sender."""

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

    def ended(self, window: Window, nanoseconds: int, after: int) -> None:
        """Of its nanoseconds no more than the first `after` were certainly there: then a frame began that was late."""
        used = min(nanoseconds, self._used.get(window, nanoseconds))
        self._used[window] = used - _DROPS * (used - min(used, after))
