"""Within how many iterations a checkpoint fits into the bubbles of a pipeline: by the plan that a job makes of its own
profile (`bubbles.plan`), here of simulated timelines.

So what a forecast says is what BAFT does: bubbles that sender and receiver share, without what is reserved for
messages at both ends of each, the link of a node divided among its ranks, by bytes or by whole layers; and a rank that
shares no bubbles, or needs more than `MOST_ITERATIONS`, goes by a rate. What only a job can tell is left out: pauses of
less than a millisecond that are no bubbles, windows too short for a frame, and, unless given, messages that take longer
than what is reserved for them. So a forecast is the best that there can be.

Invariant: pure; times and sizes are those of one iteration and one rank, a rank is a stage. In: timelines of one
pipeline, bytes, bytes per second. Out: `BubblePlan`; by `fit` its iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from ..bubbles.filling import Granularity, Transfer
from ..bubbles.messages import Traffic
from ..bubbles.plan import BubblePlan, plan_bubbles
from ..bubbles.windows import Reserve
from ..model.timeline import Timeline, bubbles
from .idle import CopyPlacement, destination


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
    """`idle.Fit`: how many iterations it takes; None where some rank goes by a rate."""
    found = plan(timelines, nbytes, bandwidth, per_node=per_node, reserved=reserved, placement=placement)
    return None if found is None or found.paced_by_rate else found.iterations
