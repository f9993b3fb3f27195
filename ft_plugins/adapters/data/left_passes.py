"""After how many batches a script leaves its passes over a loader: of a pass that a restore gave the rest of, too.

A script that ends its passes by a count (`if enough(i): break` in `enumerate(loader)`) begins that count again after a
restore, and so takes more of the restored pass than of any other: that shows by the lengths.

In: reads, passes that begin, and that end by themselves. Out: a line if the restored one is longer than its neighbours.
"""

from __future__ import annotations

import math

from ...events import say

_LEAVING = (
    "end a pass behind the training on its last batch, and by what a restart knows: the iteration that the loop runs "
    "over (`if step % n == 0: batches = iter(loader)`)"
)
LONGER = (
    "after the restore the script takes more batches of the restored pass over its data than of the other ones that it "
    f"leaves before their end: if it counts them, it trains on other batches than without a failure; {_LEAVING}"
)


class LeftPasses:
    """`left`: the batches of the last pass, if the script left it before it found its end; else 0."""

    def __init__(self) -> None:
        self.left = 0
        self._taken = 0  # 0 also if the pass has found its end
        self._is_rest = False  # the pass under way is the restored one
        self._after_rest, self._rest = False, 0  # the last pass was the restored one; `left` of it

    def restored(self, left: int, taken: int) -> None:
        self.left, self._taken, self._is_rest = left, taken, True

    def reading(self) -> None:
        """A batch is read: the restored pass may get longer than the one before."""
        self._taken += 1
        _say(self._is_rest and 0 < self.left == self._taken - 1)

    def ended(self) -> None:
        """The pass under way has found its end, while others are left before theirs."""
        self._taken = 0
        _say(self._is_rest and self.left > 0)

    def begin(self) -> None:
        """Another pass begins: the last one may have been shorter than the restored one before it."""
        self.left, self._taken = self._taken, 0
        shorter = self._after_rest and 0 < self.left < (self._rest or math.inf)
        self._after_rest, self._rest, self._is_rest = self._is_rest, self.left, False
        _say(shorter)


def _say(longer: bool) -> None:
    if longer:
        say(LONGER, alarm=True)
