"""When versions are captured, exchanged and compared: at multiples of intervals, so iterations decide. Pure. When they
are stored is in `capture.retention`.

Invariant: ranks and SMPs derive the same iterations from the same intervals without communicating. A version that is
exchanged or compared is one that is captured.

In: intervals, iterations. Out: iterations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotSchedule:
    """Iterations between two versions that are `captured`, `exchanged` with other nodes, and whose replicas are
    `compared` (0: none are)."""

    captured: int
    exchanged: int
    compared: int

    @classmethod
    def of(cls, interval: int, exchange_interval: int, audits: int) -> SnapshotSchedule:
        """As configured. Every `exchange_interval`-th capture is exchanged; only what is compared, if replicas are
        audited every `audits` iterations (0: never)."""
        exchanged = interval * exchange_interval
        return cls(
            interval, math.lcm(exchanged, audits) if audits else exchanged, math.lcm(interval, audits) if audits else 0
        )

    def captures(self, iteration: int) -> bool:
        """Whether a version is captured at the end of `iteration`."""
        return iteration > 0 and iteration % self.captured == 0


def next_due(after: int, interval: int) -> int:
    """The first multiple of `interval` after an iteration."""
    return (after // interval + 1) * interval


def due_from(iteration: int, interval: int) -> int:
    """The first multiple of `interval` that is not before an iteration."""
    return -(-iteration // interval) * interval


def is_turn(iteration: int, interval: int, step: int) -> bool:
    """Whether a version of every `step` iterations is the first one from a multiple of `interval` on; an `interval` of
    0 has no turns."""
    return interval > 0 and iteration % interval < step
