"""The protocol between whoever sends bytes and what says how many may go now.

A sender takes an allowance, cuts its next frame to it, sends the frame, and says when it is through:

    allowed = pacer.take(len(what is left), stop)      waits; nothing may go without it
    ... send allowed.nbytes ...
    pacer.ended(allowed)                               what went in time, and what was late, is counted

Nothing that was allowed is taken back: who is late stops at the end of its frame, and takes again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

NO_DEADLINE = 0


@dataclass(frozen=True)
class Allowance:
    """`nbytes` may go now; by `deadline_ns` (CLOCK_MONOTONIC) they should be through, NO_DEADLINE for whenever."""

    nbytes: int
    deadline_ns: int = NO_DEADLINE
    began_ns: int = field(default=0, compare=False)  # when it was given


class Pacer(Protocol):
    """Says how much may go now. Called by several threads."""

    def take(self, nbytes: int, stop: threading.Event) -> Allowance:
        """Wait until some of `nbytes` may go; how many of them, none only when stopped."""
        ...

    def ended(self, allowed: Allowance) -> bool | None:
        """The frame of that allowance has been taken by its receiver; whether in time, None where any time will do."""
        ...
