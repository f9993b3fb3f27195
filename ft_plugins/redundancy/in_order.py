"""Whether a lost node can be survived if ranks lie in order on nodes of `per_node`: rank r on r // per_node. Pure.

Groups of a topology are copies of each other, moved by some ranks. Moved by whole nodes, a group is on as many nodes as
before. So only groups that begin at different places of a node are looked at, at most `per_node`, and each only until
it is on enough nodes: the cost depends on the size of a node, not on that of the job.

Invariant: the same answers as `why_unprotected` (groups that will be cut) and `why_unplaced` give for these nodes.

In: a topology without expert parallelism, ranks per node. Out: whether it can be protected.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model.topology import Axis, Topology
from .parity import LEAST_NODES


def parity_possible(topology: Topology, per_node: int, losses: int) -> bool:
    """Whether every sharding group is on enough nodes for parity against so many losses."""
    if topology.world_size <= per_node:
        return False
    starts = _starts(topology.dense_axes("tp", "pp"), per_node)
    members = topology.dense_axes("cp", "dp")
    return all(_reaches(LEAST_NODES[losses], start, members, per_node) for start in starts)


def copies_possible(topology: Topology, per_node: int) -> bool:
    """Whether every pipeline is on two nodes or more."""
    (stages,) = topology.dense_axes("pp")
    starts = _starts(topology.dense_axes("tp", "cp", "dp"), per_node)
    return all(start + (stages.size - 1) * stages.stride >= per_node for start in starts)


def _starts(axes: Sequence[Axis], per_node: int) -> set[int]:
    """The places of a node, from 0, at which the groups begin that differ along `axes`."""
    places = {0}
    for axis in axes:
        steps = {index * axis.stride % per_node for index in range(min(axis.size, per_node))}
        places = {(place + step) % per_node for place in places for step in steps}
    return places


def _reaches(needed: int, start: int, axes: Sequence[Axis], per_node: int) -> bool:
    """Whether a group that begins at the place `start` of a node and extends along two `axes` is on `needed` nodes."""
    inner, outer = sorted(axes, key=lambda axis: axis.stride)
    count, last = 0, -1
    for row in range(outer.size):
        for place in range(inner.size):
            node = (start + row * outer.stride + place * inner.stride) // per_node
            if node != last:
                count, last = count + 1, node
            if count >= needed:
                return True
    return False
