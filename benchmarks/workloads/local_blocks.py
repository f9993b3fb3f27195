"""Compute iteration times, stalls and gains from the step logs of the replicas of one run. Pure.

An iteration of the job begins when its last replica begins it. So a replica that waits for a slower one is not counted
as stalled, but the wait of the slowest is.

    window     from the beginning of iteration tau + 1 to that of tau x (periods + 1) + 1: one synchronisation
               for each period, whenever it is applied
    stall      what the two iterations around a synchronisation take together, more than twice the median local one:
               training waits at the end of one (wait) or in the other (forward, update)

Invariant: a ratio is of two blocks of the same round.

In: when each replica began its iterations. Out: seconds per iteration; stalls; gains by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from workloads.sync_blocks import PLAIN


@dataclass(frozen=True)
class LaneSpan:
    """What a replica did from `begin` to `end`: a lane of the timeline, and what in it."""

    lane: str
    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class StepLog:
    """One replica in one block. `begins`: seconds at which its iterations began, the first of which is `first`;
    `ended`: when the last one had ended and everything was applied; `held`: bytes of what a session holds then."""

    first: int
    begins: tuple[float, ...]
    ended: float
    spans: tuple[LaneSpan, ...] = field(default=(), repr=False)
    held: int = 0

    @property
    def steps(self) -> int:
        return len(self.begins)


def job_begins(logs: Sequence[StepLog]) -> dict[int, float]:
    """When each iteration of the job began: when its last replica began it."""
    times = zip(*(log.begins for log in logs), strict=True)
    return dict(enumerate(map(max, times), logs[0].first))


def seconds_in_step(logs: Sequence[StepLog], begin: int, end: int) -> float:
    """Seconds of one iteration, from the beginning of iteration `begin` to that of `end`."""
    begins = job_begins(logs)
    return (begins[end] - begins[begin]) / (end - begin)


def seconds_at_own_pace(logs: Sequence[StepLog]) -> float:
    """Seconds in which replicas do one iteration each, on average, if they make different numbers of iterations."""
    wall = max(log.ended for log in logs) - max(log.begins[0] for log in logs)
    return wall * len(logs) / sum(log.steps for log in logs)


def stalls(logs: Sequence[StepLog], tau: int) -> list[float]:
    """The stall of each synchronisation of the block, in seconds. Needs tau of at least 4."""
    begins = job_begins(logs)
    lengths = {step: begins[step + 1] - begins[step] for step in begins if step + 1 in begins}
    local = statistics.median(length for step, length in lengths.items() if step % tau > 1)
    at = [step for step in lengths if step % tau == 0 and step + 1 in lengths]
    return [lengths[step] + lengths[step + 1] - 2 * local for step in at]


def gains(rounds: Sequence[Mapping[str, float]], policy: str) -> list[float]:
    """Throughput of a policy over that of plain, by round. `rounds`: seconds of an iteration, by policy."""
    return [seconds[PLAIN] / seconds[policy] for seconds in rounds if policy in seconds]


def window_of_synchronisation(log: StepLog, lane: str) -> tuple[float, float]:
    """Beginning and end of two iterations: the one at whose end a synchronisation begins (the second one, if there are
    several: the first one is the first to use its memory) and the next. `lane`: of the spans of synchronisations. Plain
    has none: its second and third iteration."""
    half = statistics.median(after - before for before, after in pairwise(log.begins)) / 2
    times = [span.begin for span in log.spans if span.lane == lane]
    starts = [now for before, now in pairwise([float("-inf"), *times]) if now - before > half][:2]
    at = sum(begin <= starts[-1] for begin in log.begins) - 1 if starts else 1
    return log.begins[at], log.begins[min(at + 2, len(log.begins) - 1)]
