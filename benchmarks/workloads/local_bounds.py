"""Compute what local SGD can gain at most over plain data parallelism, from the setting of a run. Pure.

    compute    seconds of forward and backward of one iteration
    plain      seconds of a plain iteration on the same link, without stragglers: compute, and what of the reduction
               does not hide behind the backward
    lag        seconds by which a straggler is late in an iteration

A plain iteration waits for the straggler of each iteration. Replicas that synchronise every tau iterations wait for the
one that lagged longest in total. Replicas at their own pace wait for none, and the work of all counts, that of the
straggler included: with one consistent straggler of M and plain = compute the gain is at most
((M - 1) / compute + 1 / (compute + lag)) / M x (compute + lag): 1.83 for M = 8 and a lag of 0.95 compute.

Invariant: bounds use no measured time of a policy; only that of the plain iteration, to which the link is calibrated.

In: seconds. Out: ratios of throughput; seconds of a stall; the lags of a scenario; the next rate of a link."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

FACTOR = 8.0  # maximum change of a rate in one step of the calibration


class Stragglers(str, Enum):
    """Which replica lags in an iteration."""

    NONE = "none"
    CONSISTENT = "consistent"  # the last one, always
    RANDOM = "random"  # one, drawn for each iteration


def laggard(stragglers: Stragglers, step: int, replicas: int, seed: int) -> int | None:
    """The replica that lags in iteration `step`; the same for all policies."""
    if stragglers is Stragglers.NONE:
        return None
    if stragglers is Stragglers.CONSISTENT:
        return replicas - 1
    return random.Random(f"{seed} {step}").randrange(replicas)


def lagging(stragglers: Stragglers, steps: Sequence[int], replicas: int, seed: int) -> list[int]:
    """In how many of the iterations each replica lags."""
    drawn = [laggard(stragglers, step, replicas, seed) for step in steps]
    return [drawn.count(replica) for replica in range(replicas)]


@dataclass(frozen=True)
class LinkLoad:
    """An exchange of all parameters, in modules that are synchronised one after another before their forwards.

    `exchange`: seconds of the link for all of them; `forward`: seconds of the whole forward."""

    modules: int
    exchange: float
    forward: float

    @property
    def layered_stall(self) -> float:
        """Seconds for which the forward waits, if each module is exchanged behind the forward of the one before. The
        first one has nothing to hide behind."""
        part, forward = self.exchange / self.modules, self.forward / self.modules
        stall, ready, started = part, part, part  # when the newest exchange ended, and its forward began
        for _ in range(self.modules - 1):
            ready = max(ready, started) + part  # begins when the forward before does, or when the link is free
            ended = started + forward
            stall += max(0.0, ready - ended)
            started = max(ready, ended)
        return stall

    @property
    def stall_ratio(self) -> float:
        """The stall of layered synchronisation over that of one for which training waits."""
        return self.layered_stall / self.exchange


def periodic_gain(
    compute: float, plain: float, lag: float, periods: Sequence[Sequence[int]], tau: int, stall: float
) -> float:
    """Throughput over that of plain, of replicas that are synchronised every `tau` iterations. `periods`: in how many
    iterations of each period each replica lags. Plain waits for one laggard in every iteration, if there is one."""
    seconds = [tau * compute + lag * max(counts) + stall for counts in periods]
    waited = lag if any(map(any, periods)) else 0.0
    return tau * len(periods) * (plain + waited) / sum(seconds)


def own_pace_gain(compute: float, plain: float, lag: float, shares: Sequence[float], stall_share: float = 0.0) -> float:
    """Throughput over that of plain, of replicas at their own pace, if each lags in a share of its iterations.
    `stall_share`: of the time, in which they wait for a synchronisation."""
    rate = sum(1 / (compute + share * lag) for share in shares) / len(shares)
    waited = lag if any(shares) else 0.0
    return (1 - stall_share) * rate * (plain + waited)


def next_link_rate(rate: float, plain: float, floor: float, target: float) -> float:
    """The rate of a link at which a plain iteration takes `target` seconds. At `rate` it takes `plain`; what it takes
    above `floor` is inversely proportional to the rate. One step changes the rate by a factor of at most 8."""
    wanted = rate * max(plain - floor, 1e-9) / max(target - floor, 1e-9)
    return min(max(wanted, rate / FACTOR), rate * FACTOR)
