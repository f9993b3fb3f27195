"""When versions are captured, exchanged and compared: at multiples of intervals, so iterations decide. Pure. When they
are stored is in `capture.retention`.

Intervals that a job chooses itself (`auto`) change at an iteration that all ranks know before they reach it, and at a
restart.

Invariant: ranks and SMPs derive the same iterations from the same intervals without communicating. A version that is
exchanged or compared is one that is captured.

In: intervals, iterations. Out: iterations.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

_PACKED = struct.Struct("<7I4x")  # of `ChosenSchedule`
PACKED = _PACKED.size


@dataclass(frozen=True)
class Intervals:
    """`captured`: one of so many of the versions that are captured as configured, of each iteration with `auto`;
    `stored`: iterations between two that are stored (0: none are)."""

    captured: int
    stored: int


@dataclass(frozen=True)
class ChosenSchedule:
    """Intervals that the job chooses: those of `now` from iteration `since` on, those of `before` until then. `began`:
    when it first chose, in whole seconds since the epoch; it has restarted `restarts` times since."""

    since: int
    now: Intervals
    before: Intervals
    began: int
    restarts: int = 0

    def at(self, iteration: int) -> Intervals:
        """The intervals for the version of an iteration."""
        return self.now if iteration >= self.since else self.before

    def due(self, after: int, every: int) -> int:
        """The first iteration after `after` that is due, if one of `every` iterations is as configured."""
        turn = next_due(after, every * self.before.captured)
        return turn if turn < self.since else next_due(max(after, self.since - 1), every * self.now.captured)

    def pack(self) -> bytes:
        """As PACKED bytes."""
        now, before = self.now, self.before
        values = (self.since, self.restarts, now.captured, now.stored, before.captured, before.stored, self.began)
        return _PACKED.pack(*values)

    @classmethod
    def unpack(cls, packed: bytes) -> ChosenSchedule | None:
        """From PACKED bytes; None from zeros."""
        since, restarts, now, stored, before, stored_before, began = _PACKED.unpack(packed)
        intervals = Intervals(now, stored), Intervals(before, stored_before)
        return cls(since, *intervals, began, restarts) if now and before else None

    def changed(self, since: int, now: Intervals) -> ChosenSchedule:
        """With the intervals `now` from iteration `since` on, those that hold there until then."""
        return replace(self, since=since, now=now, before=self.at(since))

    def restarted(self, restored: int) -> ChosenSchedule:
        """After a restart that restored the version of iteration `restored`: snapshots are taken twice as often, so
        that a job which fails more often than was known goes on all the same."""
        again, at = replace(self, restarts=self.restarts + 1), self.at(restored + 1)
        return again if at.captured == 1 else again.changed(restored + 1, replace(at, captured=at.captured // 2))


def newest(known: Iterable[ChosenSchedule | None]) -> ChosenSchedule | None:
    """The last change that any rank knows: another one may be about to write it; None for none."""
    return max((one for one in known if one), key=lambda one: (one.restarts, one.since), default=None)


@dataclass(frozen=True)
class SnapshotSchedule:
    """Iterations between two versions that are `captured`, `exchanged` with other nodes, and whose replicas are
    `compared` (0: none are). Of those captured as configured, `chosen` leaves out some."""

    captured: int
    exchanged: int
    compared: int
    chosen: ChosenSchedule | None = None

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
        captured = self.chosen.at(iteration).captured if self.chosen else 1
        return iteration > 0 and iteration % (self.captured * captured) == 0


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
