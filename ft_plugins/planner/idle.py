"""How much of an iteration is bubbles, and how soon a copy of the state to a neighbour fits into them.

A rank sends to the nearest earlier stage on another node, in the time in which both idle; at either end of a bubble the
pipeline's own message may need the link, so it is left free for that long (BAFT, Algorithm 1). All ranks send in the
same iterations: a checkpoint is as slow as its slowest part.

That part is the first stage's. Nothing is earlier than it, so it sends to the last one (a `ring`), which is busy while
the first one idles: in gpipe, interleaved and zero-bubble with links that cost nothing the two share no time at all, in
1f1b at most half of what neighbours share. With its successor it shares as much as any two.

Invariant: pure; times and sizes are those of one iteration and one rank.

In: timelines of one pipeline, bytes, bytes per second. Out: shares, seconds, iterations per checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ..model.timeline import Timeline, bubbles, busy_share

Gap = tuple[float, float]  # begin and end

LEAST_SECONDS = 1e-9  # what idles for less in a whole iteration idles by rounding


class Fit(Protocol):
    """What plans the bubbles, as far as intervals go."""

    def __call__(self, timelines: Sequence[Timeline], nbytes: float, bandwidth: float) -> int | None:
        """Iterations that it takes to send `nbytes` from each rank at `bandwidth`; None: no bubbles to send in."""


def bubble_shares(timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """Of each rank: the part of the iteration in which it idles."""
    return tuple(1 - busy_share(timeline) for timeline in timelines)


def bubble_share(timelines: Sequence[Timeline]) -> float:
    """The same of all ranks together."""
    return math.fsum(bubble_shares(timelines)) / len(timelines)


def destination(rank: int, ranks: int, per_node: int = 1, ring: bool = True) -> int | None:
    """The nearest earlier stage on another node, None where all are on one. Those of the first node: the last stage,
    or where not `ring`, the nearest later one."""
    if ranks <= per_node:
        return None
    earlier = rank // per_node * per_node - 1
    return earlier if earlier >= 0 else ranks - 1 if ring else per_node


def shared_idle(sender: Timeline, receiver: Timeline, reserved: float = 0.0) -> float:
    """Seconds in which both idle, when of each bubble of either `reserved` seconds at both ends are not counted."""
    return _shared(_open(sender, reserved), _open(receiver, reserved))


def _shared(ours: Sequence[Gap], theirs: Sequence[Gap]) -> float:
    seconds, at = 0.0, 0
    for begin, end in ours:
        while at < len(theirs) and theirs[at][1] <= begin:
            at += 1
        for other_begin, other_end in theirs[at:]:
            if other_begin >= end:
                break
            seconds += min(end, other_end) - max(begin, other_begin)
    return seconds


def capacities(
    timelines: Sequence[Timeline], per_node: int = 1, reserved: float = 0.0, ring: bool = True
) -> tuple[float, ...]:
    """Of each rank: seconds of an iteration in which it and its destination idle, 0 without a destination."""
    opened = [_open(timeline, reserved) for timeline in timelines]
    to = [destination(rank, len(timelines), per_node, ring) for rank in range(len(timelines))]
    return tuple(0.0 if at is None else _shared(ours, opened[at]) for ours, at in zip(opened, to, strict=True))


def fit(
    timelines: Sequence[Timeline],
    nbytes: float,
    bandwidth: float,
    *,
    per_node: int = 1,
    reserved: float = 0.0,
    ring: bool = True,
) -> int | None:
    """`Fit` by capacity: shared idle time x bandwidth, and nothing of what stands in the way of using all of it."""
    least = min(capacities(timelines, per_node, reserved, ring))
    if least <= LEAST_SECONDS * timelines[0].seconds:
        return None
    return max(1, math.ceil(nbytes / (least * bandwidth) * (1 - 1e-12)))  # as in `intervals.iterations`


def _open(timeline: Timeline, reserved: float) -> list[Gap]:
    """Bubbles without what is reserved; where the iteration begins and ends no message is due."""
    found = []
    for bubble in bubbles(timeline, 0.0):
        begin = bubble.begin + (reserved if bubble.begin > 0 else 0.0)
        end = bubble.end - (reserved if bubble.end < timeline.seconds else 0.0)
        if begin < end:
            found.append((begin, end))
    return found
