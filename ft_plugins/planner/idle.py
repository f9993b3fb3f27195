"""How much of an iteration is bubbles, and how soon a copy of the state to a neighbour fits into them.

A rank sends in the time in which it and its destination idle; at either end of a bubble the pipeline's own message may
need the link, so it is left free for that long (BAFT, Algorithm 1). All ranks send in the same iterations: a checkpoint
is as slow as its slowest part. Who sends to whom, where n0, n1, ... are the nodes of a pipeline in order:

    ring     n1 -> n0, n2 -> n1, ..., and the first to the last (BAFT, 4.2.1). These two hardly ever idle at once: in
             gpipe, interleaved and zero-bubble with links that cost nothing never, in 1f1b for at most half of the time
             that neighbours share. They decide.
    pairs    n0 <-> n1, n2 <-> n3, ...; of an odd number the last three are a ring. All share what neighbours share;
             each node has one copy as before, and a copy is lost with one other node instead of one of two.

Invariant: pure; times and sizes are those of one iteration and one rank.

In: timelines of one pipeline, bytes, bytes per second. Out: shares, seconds, iterations per checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from ..model.timeline import Timeline, bubbles, busy_share
from ..redundancy.neighbour import partner

Gap = tuple[float, float]  # begin and end

LEAST_SECONDS = 1e-9  # what idles for less in a whole iteration idles by rounding


class Placement(Enum):
    """Who sends to whom; the value is its name for programs."""

    RING = "ring"
    PAIRS = "pairs"


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


def destination(rank: int, ranks: int, per_node: int = 1, placement: Placement = Placement.RING) -> int | None:
    """The stage nearest to `rank` on the node that has its copy; None where all are on one."""
    nodes, node = -(-ranks // per_node), rank // per_node
    if nodes < 2:
        return None
    to = partner(node, nodes) if placement is Placement.PAIRS else (node - 1) % nodes
    return to * per_node if to > node and to - node < nodes - 1 else min((to + 1) * per_node, ranks) - 1


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
    timelines: Sequence[Timeline], per_node: int = 1, reserved: float = 0.0, placement: Placement = Placement.RING
) -> tuple[float, ...]:
    """Of each rank: seconds of an iteration in which it and its destination idle, 0 without a destination."""
    opened = [_open(timeline, reserved) for timeline in timelines]
    to = [destination(rank, len(timelines), per_node, placement) for rank in range(len(timelines))]
    return tuple(0.0 if at is None else _shared(ours, opened[at]) for ours, at in zip(opened, to, strict=True))


def fit(
    timelines: Sequence[Timeline],
    nbytes: float,
    bandwidth: float,
    *,
    per_node: int = 1,
    reserved: float = 0.0,
    placement: Placement = Placement.RING,
) -> int | None:
    """`Fit` by capacity: shared idle time x bandwidth, and nothing of what stands in the way of using all of it."""
    least = min(capacities(timelines, per_node, reserved, placement))
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
