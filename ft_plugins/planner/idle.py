"""How much of an iteration is bubbles, and who sends to whom in them: what `fitting` plans with.

A rank sends in the time in which it and its destination idle. All ranks send in the same iterations: a checkpoint is
as slow as its slowest part. Where n0, n1, ... are the nodes of a pipeline in order:

    ring     n1 -> n0, n2 -> n1, ..., and the first to the last (BAFT, 4.2.1). These two hardly ever idle at once: in
             gpipe, interleaved and zero-bubble with links that cost nothing never, in 1f1b for at most half of the time
             that neighbours share. They decide
    pairs    n0 <-> n1, n2 <-> n3, ...; of an odd number the last three are a ring. All share what neighbours share;
             each node has one copy as before, and a copy is lost with one other node instead of one of two. It is
             what a job does (redundancy.neighbour)

Invariant: pure; times and sizes are those of one iteration and one rank.

In: timelines of one pipeline. Out: shares, destinations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from ..model.timeline import Timeline, busy_share
from ..redundancy.neighbour import partner


class CopyPlacement(Enum):
    """Who sends to whom; the value is its name for programs."""

    RING = "ring"
    PAIRS = "pairs"


class Fit(Protocol):
    """What plans the bubbles, as far as intervals go."""

    def __call__(self, timelines: Sequence[Timeline], nbytes: float, bandwidth: float) -> int | None:
        """Iterations that it takes to send `nbytes` from each rank at `bandwidth`; None: not in bubbles."""


def bubble_shares(timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """Of each rank: the part of the iteration in which it idles."""
    return tuple(1 - busy_share(timeline) for timeline in timelines)


def bubble_share(timelines: Sequence[Timeline]) -> float:
    """The same of all ranks together."""
    return math.fsum(bubble_shares(timelines)) / len(timelines)


def destination(rank: int, ranks: int, per_node: int = 1, placement: CopyPlacement = CopyPlacement.PAIRS) -> int | None:
    """The stage nearest to `rank` on the node that has its copy; None where all are on one."""
    nodes, node = -(-ranks // per_node), rank // per_node
    if nodes < 2:
        return None
    to = partner(node, nodes) if placement is CopyPlacement.PAIRS else (node - 1) % nodes
    return to * per_node if to > node and to - node < nodes - 1 else min((to + 1) * per_node, ranks) - 1
