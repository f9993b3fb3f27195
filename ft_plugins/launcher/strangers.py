"""Counts what came to a port and was turned away, so that whoever knocks there cannot fill a log.

Invariant: one report a minute at most, whatever happens; the memory it takes does not grow.

In: kinds of what was turned away, by address. Out: counts by kind, some of the addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

PERIOD_SECONDS = 60.0
_NAMED = 4  # addresses


class Strangers:
    """Counts since the last report."""

    def __init__(self, report: Callable[..., object]) -> None:
        """`report` gets counts by kind, and `addresses`."""
        self._report = report
        self._counts: Counter[str] = Counter()
        self._addresses: list[str] = []
        self._next = float("-inf")

    def note(self, kind: str, address: str = "") -> None:
        """One more of this kind, of which there are few: a word of this program."""
        self._counts[kind] += 1
        if address and address not in self._addresses and len(self._addresses) < _NAMED:
            self._addresses.append(address)

    def tick(self, now: float) -> None:
        """Report what there is, if it is time."""
        if self._counts and now >= self._next:
            self._next = now + PERIOD_SECONDS
            counts, addresses = dict(self._counts), self._addresses
            self._counts, self._addresses = Counter(), []
            self._report(**counts, addresses=addresses)
