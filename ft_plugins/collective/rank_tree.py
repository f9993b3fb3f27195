"""Which ranks of a job are connected for collective operations: a tree of nodes, with the ranks of a node below its
first one. Pure.

Invariant: the ranks below a rank follow it without a gap, so what they send joins in rank order by concatenation. The
depth grows with the logarithm of the number of nodes, and a rank has at most ARITY connections to other nodes and one
to each rank of its own.

In: the rank, the number of ranks, how many a node has. Out: a `RankPlace`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import TopologyError

ARITY = 8  # nodes below a node: 4,096 nodes are four levels, and a node needs no more than 9 connections to others


@dataclass(frozen=True)
class RankPlace:
    """The neighbours of `rank`. It and the ranks below it are `rank` to `stop` - 1; the root has no parent."""

    rank: int
    parent: int | None
    children: tuple[int, ...]
    stop: int


def place_of(rank: int, world_size: int, on_node: int) -> RankPlace:
    """The place of `rank`, if each node has `on_node` consecutive ranks, the last one maybe fewer.

    If nodes have other ranks than that, the tree is the same on all ranks, but longer ways lead through other nodes.
    Raises TopologyError.
    """
    if not (0 <= rank < world_size and on_node > 0):
        raise TopologyError(f"there is no rank {rank} in a job of {world_size} ranks, {on_node} on a node")
    first = rank // on_node * on_node
    if rank != first:
        return RankPlace(rank, first, (), rank + 1)
    nodes = -(-world_size // on_node)
    parent, below, stop = _node_place(rank // on_node, nodes)
    own = range(first + 1, min(first + on_node, world_size))
    children = (*own, *(node * on_node for node in below))
    return RankPlace(rank, None if parent is None else parent * on_node, children, min(stop * on_node, world_size))


def _node_place(node: int, nodes: int) -> tuple[int | None, tuple[int, ...], int]:
    """Parent, children and end of the part of the tree below `node`."""
    parent: int | None = None
    start, stop = 0, nodes
    while True:
        parts = _parts(start + 1, stop)
        if node == start:
            return parent, tuple(begin for begin, _ in parts), stop
        parent = start
        start, stop = next(part for part in parts if part[0] <= node < part[1])


def _parts(start: int, stop: int) -> list[tuple[int, int]]:
    """`start` to `stop` in at most ARITY consecutive parts, none empty, whose sizes differ by at most one."""
    count = min(ARITY, stop - start)
    if count <= 0:
        return []
    size, larger = divmod(stop - start, count)
    bounds = [start + size * number + min(number, larger) for number in range(count + 1)]
    return list(zip(bounds, bounds[1:], strict=False))
