"""What a rank does in one iteration, and when: spans, and the idle time between them. Pure.

In: seconds since the iteration began. Out: `Timeline`, `Bubble`, read by bubbles.plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a span is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    UPDATE = "update"


@dataclass(frozen=True)
class Span:
    """Seconds since the iteration began."""

    kind: Kind
    begin: float
    end: float
    microbatch: int = -1
    chunk: int = 0


@dataclass(frozen=True)
class Timeline:
    """One iteration of a rank. `memory`: bytes in use on the device at each step."""

    rank: int
    seconds: float
    spans: tuple[Span, ...]
    memory: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bubble:
    """Idle time. `after`: index of the compute span after whose end it begins, -1 before the first."""

    index: int
    begin: float
    end: float
    after: int
