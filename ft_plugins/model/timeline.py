"""What a rank does in the course of one iteration: spans of compute and of communication. Pure.

Invariant: times are seconds since the iteration began, on the rank's own clock.

In: what an adapter records, or a simulator computes. Out: `Timeline`, read by what plans bubbles.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a rank was at."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    UPDATE = "update"


@dataclass(frozen=True)
class Span:
    """One thing from its begin to its end. `microbatch` is -1 where it belongs to none; `chunk` is the virtual stage
    on this rank."""

    kind: Kind
    begin: float
    end: float
    microbatch: int = -1
    chunk: int = 0


@dataclass(frozen=True)
class Timeline:
    """An iteration of `seconds` of one rank. `memory` is bytes that are in use, empty where nobody has measured."""

    rank: int
    seconds: float
    spans: tuple[Span, ...]
    memory: tuple[int, ...] = ()
