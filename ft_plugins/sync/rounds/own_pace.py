"""Synchronise by the clock: A-EDiT (EDiT, section 3.3). Replicas make as many local iterations as their speed allows.

    TRAINING    until the period is over by the replica's own clock
    READY       it says so to the other replicas, and goes on training
    joining     at the end of its first iteration after all replicas are ready

The paper has each replica wait at the end of its period. Here it waits only for iterations that are under way when the
last replica becomes ready. That replica learns within `PATIENCE` of an iteration that it was the last, and joins at
once; otherwise all others would wait for one more of its iterations, which tend to be the longest.

Invariant: a replica joins every synchronisation once, in order, because it announces each of them once and joins only
when all replicas have announced it. None waits for longer than the longest iteration of another one. So there is no
deadlock as long as every replica goes on training.

In: a clock, the announcements of the other replicas. Out: whether a replica joins; the next period; shares of the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

PATIENCE = 0.1  # of an iteration, for which a replica that has just become ready waits for the answer that all are


class Readiness(Protocol):
    """The announcements of all replicas for one synchronisation after the other."""

    def announce(self) -> None:
        """This replica is ready for the next synchronisation. Does not wait."""

    def all_ready(self, patience: float) -> bool:
        """Whether every replica has announced the synchronisation that this one announced last. Waits at most
        `patience` seconds for the answer."""


@dataclass(frozen=True)
class WorkDone:
    """What all replicas have done, equal on all ranks. `steps`: iterations of each replica since the start of training;
    `number`: of synchronisations."""

    number: int
    steps: tuple[int, ...]

    def after(self, steps: Sequence[int]) -> WorkDone:
        """With one more synchronisation, at which replicas have made `steps` iterations."""
        return WorkDone(self.number + 1, tuple(steps))

    def since(self, before: WorkDone) -> tuple[int, ...]:
        """Iterations of each replica since `before`."""
        return tuple(now - then for now, then in zip(self.steps, before.steps, strict=True))

    def reaches(self, last: int) -> bool:
        """Whether replicas together have done the work of `last` iterations of each of them."""
        return sum(self.steps) >= last * len(self.steps)

    def first_quota(self, last: int) -> int:
        """Iterations after which a replica is ready although its period is not over, as long as no speed is known: half
        of what is left for each replica, at least 1. Otherwise a job that is shorter than a period would never end."""
        return max(1, (last * len(self.steps) - sum(self.steps)) // (2 * len(self.steps)))


def next_period(seconds: float, progress: WorkDone, done: Sequence[int], elapsed: float, last: int) -> float:
    """How long replicas train until the next synchronisation: `seconds`, or less if the work that is left needs less at
    the speed of the last period, in which they made `done` iterations in `elapsed` seconds."""
    left = last * len(progress.steps) - sum(progress.steps)
    if not sum(done) or elapsed <= 0:
        return seconds
    return min(seconds, max(0.0, left * elapsed / sum(done)))


class Timekeeper:
    """Decides for one replica when it joins a synchronisation."""

    def __init__(self, readiness: Readiness, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds, from any start."""
        self._readiness, self._clock = readiness, clock
        self._started = self._ended = 0.0  # the period; the last iteration
        self._period = self._quota = float("inf")
        self._steps = 0  # of the period
        self._announced = False

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

    def begin(self, period: float, quota: float = float("inf")) -> None:
        """A period begins now: of that many seconds, or `quota` iterations if these are made earlier."""
        self._started = self._ended = self._clock()
        self._period, self._quota, self._steps, self._announced = period, quota, 0, False

    def joins(self) -> bool:
        """Whether the replica joins the synchronisation now, at the end of one of its iterations."""
        before, self._ended = self._ended, self._clock()
        self._steps += 1
        patience = 0.0
        over = self._ended - self._started >= self._period or self._steps >= self._quota
        if over and not self._announced:
            self._readiness.announce()
            self._announced, patience = True, PATIENCE * (self._ended - before)
        return self._announced and self._readiness.all_ready(patience)
