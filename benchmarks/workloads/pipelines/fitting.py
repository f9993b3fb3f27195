"""Predict how many iterations it takes to send a version in the bubbles of a pipeline, from simulated timelines. Pure.

The plan is the one that a job makes from its own profile (`bubbles.bubble_plan`): bubbles shared by sender and
receiver, less the reserve for messages at both ends, the link of a node divided among its ranks, by bytes or by whole
layers; a rank without shared bubbles, or that needs more than `MOST_ITERATIONS`, is paced by a rate. The forecast is
optimistic. It omits what only a running job knows: pauses below a millisecond that are not bubbles, windows too short
for a frame, and, unless given, messages longer than their reserve.

Invariant: times and sizes are those of one iteration and one rank; a rank is a stage. In: timelines of one pipeline,
bytes, bytes per second. Out: `BubblePlan`; from `fit` its iterations.

A rank sends while it and its destination are both idle. All ranks send in the same iterations, so the slowest decides.
Placements, for nodes n0, n1, ... of a pipeline in order:

    ring     n1 -> n0, n2 -> n1, ..., and the first to the last (BAFT, 4.2.1). First and last are hardly ever idle
             together: never in gpipe, interleaved and zero-bubble with free links, in 1f1b for at most half of the time
             that neighbours share. So this pair decides
    pairs    n0 <-> n1, n2 <-> n3, ...; the last three of an odd number are a ring. All are neighbours; each node keeps
             one copy as in the ring, and a copy is lost if one particular other node is, instead of one of two. Jobs
             use this (redundancy.neighbour)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from math import ceil
from typing import Protocol

from ft_plugins.bubbles.bubble_plan import BubblePlan, plan_bubbles
from ft_plugins.bubbles.filling import Granularity, Transfer
from ft_plugins.bubbles.timeline.messages import Traffic
from ft_plugins.bubbles.windows import Reserve
from ft_plugins.model.timeline import Timeline, bubbles, busy_share
from ft_plugins.redundancy.neighbour import partner


class CopyPlacement(Enum):
    """Which node sends to which; the value is its machine-readable name."""

    RING = "ring"
    PAIRS = "pairs"


class Fit(Protocol):
    """A function that returns how many iterations it takes to send a version in bubbles."""

    def __call__(self, timelines: Sequence[Timeline], nbytes: float, bandwidth: float) -> int | None:
        """Iterations to send `nbytes` from each rank at `bandwidth`; None: not in bubbles."""


def bubble_shares(timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """The share of the iteration in which each rank is idle."""
    return tuple(1 - busy_share(timeline) for timeline in timelines)


def bubble_share(timelines: Sequence[Timeline]) -> float:
    """The mean of `bubble_shares`."""
    return math.fsum(bubble_shares(timelines)) / len(timelines)


def destination(rank: int, ranks: int, per_node: int = 1, placement: CopyPlacement = CopyPlacement.PAIRS) -> int | None:
    """The stage nearest to `rank` on the node that keeps its copy; None if all ranks are on one node."""
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
    """The plan for `nbytes` and `bandwidth` of each rank; None if there is only one node.

    `messages`: by rank, those between stages. `layers`: number of equal layers of the bytes, 0 for unknown; with
    layers, the plan has both fills, by bytes and by layers.
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
    """A `Fit`: iterations per version; None if some rank is paced by a rate."""
    bubble_plan = plan(timelines, nbytes, bandwidth, per_node=per_node, reserved=reserved, placement=placement)
    return None if bubble_plan is None or bubble_plan.paced_by_rate else bubble_plan.iterations
