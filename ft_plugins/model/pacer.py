"""The protocol between a sender of bytes and the pacer that decides how many it may send now.

A sender takes an allowance, cuts its next frame to it, sends the frame, and reports when it is through:

    pacer.begins(bytes_of_the_copy)
    allowed = pacer.take(bytes_left, stop)      waits; nothing may be sent without an allowance
    ... send allowed.nbytes ...
    pacer.ended(allowed)                        counts what was in time and what was late

An allowance is never withdrawn: a late sender finishes its frame, then takes another.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

NO_DEADLINE = 0


@dataclass(frozen=True)
class Allowance:
    """`nbytes` may go now and should be through by `deadline_ns` (CLOCK_MONOTONIC; NO_DEADLINE for no limit)."""

    nbytes: int
    deadline_ns: int = NO_DEADLINE
    began_ns: int = field(default=0, compare=False)  # when it was given


class Pacer(Protocol):
    """Decides how much may go now. Called by several threads."""

    def begins(self, nbytes: int) -> None:
        """A copy of `nbytes` is to be sent from now on, instead of any other."""

    def take(self, nbytes: int, stop: threading.Event) -> Allowance:
        """Wait until some of `nbytes` may go; how many, 0 only if stopped."""

    def ended(self, allowed: Allowance) -> bool | None:
        """Report that the receiver has the frame of that allowance. Whether it was in time, None without a deadline."""
