"""Within how many iterations a checkpoint fits into the bubbles of a pipeline: by the plan that a job makes of its own
profile (`bubbles.bubble_plan`), here of simulated timelines.

So what a forecast says is what BAFT does: bubbles that sender and receiver share, without what is reserved for
messages at both ends of each, the link of a node divided among its ranks, by bytes or by whole layers; and a rank that
shares no bubbles, or needs more than `MOST_ITERATIONS`, goes by a rate. What only a job can tell is left out: pauses of
less than a millisecond that are no bubbles, windows too short for a frame, and, unless given, messages that take longer
than what is reserved for them. So a forecast is the best that there can be.

Invariant: pure; times and sizes are those of one iteration and one rank, a rank is a stage. In: timelines of one
pipeline, bytes, bytes per second. Out: `BubblePlan`; by `fit` its iterations.

A rank sends in the time in which it and its destination idle. All ranks send in the same iterations: a checkpoint is
as slow as its slowest part. Where n0, n1, ... are the nodes of a pipeline in order:

    ring     n1 -> n0, n2 -> n1, ..., and the first to the last (BAFT, 4.2.1). These two hardly ever idle at once: in
             gpipe, interleaved and zero-bubble with links that cost nothing never, in 1f1b for at most half of the time
             that neighbours share. They decide
    pairs    n0 <-> n1, n2 <-> n3, ...; of an odd number the last three are a ring. All share what neighbours share;
             each node has one copy as before, and a copy is lost with one other node instead of one of two. It is
             what a job does (redundancy.neighbour)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from math import ceil
from typing import Protocol

from ..bubbles.bubble_plan import BubblePlan, plan_bubbles
from ..bubbles.filling import Granularity, Transfer
from ..bubbles.messages import Traffic
from ..bubbles.windows import Reserve
from ..model.timeline import Timeline, bubbles, busy_share
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


def plan(
    timelines: Sequence[Timeline],
    nbytes: float,
    bandwidth: float,
    *,
    per_node: int = 1,
    reserved: float = 0.0,
    placement: CopyPlacement = CopyPlacement.PAIRS,
    layers: int = 0,
    granularity: Granularity = Granularity.BYTES,
    messages: Mapping[int, Traffic] | None = None,
) -> BubblePlan | None:
    """The plan for `nbytes` from each rank, `bandwidth` for each; None where no rank has another node to send to.

    `messages`: of each rank those between stages, by number of rank. `layers`: into how many equal ones the bytes are
    cut, 0 for unknown; with them both fills are told, exact and by layers.
    """
    to = [destination(rank, len(timelines), per_node, placement) for rank in range(len(timelines))]
    whole = ceil(nbytes)
    parts = tuple(whole * (at + 1) // layers - whole * at // layers for at in range(layers))
    transfers = [
        Transfer(rank, rank // per_node, receiver, receiver // per_node, whole, parts)
        for rank, receiver in enumerate(to)
        if receiver is not None
    ]
    if not transfers:
        return None
    links = {node: bandwidth * len(to[node * per_node : (node + 1) * per_node]) for node in range(len(to))}
    return plan_bubbles(
        transfers,
        dict(enumerate(timelines)),
        {rank: bubbles(timeline, 0.0) for rank, timeline in enumerate(timelines)},
        links,
        Reserve(reserved, reserved),
        granularity,
        messages=messages,
    )


def fit(
    timelines: Sequence[Timeline],
    nbytes: float,
    bandwidth: float,
    *,
    per_node: int = 1,
    reserved: float = 0.0,
    placement: CopyPlacement = CopyPlacement.PAIRS,
) -> int | None:
    """A `Fit`: how many iterations it takes; None where some rank goes by a rate."""
    found = plan(timelines, nbytes, bandwidth, per_node=per_node, reserved=reserved, placement=placement)
    return None if found is None or found.paced_by_rate else found.iterations
