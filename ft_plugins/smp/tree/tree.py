"""The tree over which the SMPs of a job report and agree: who reports to whom, and to whom instead if nodes are lost.

Positions 0 to n - 1 are numbered level by level, so the parent of p is (p - 1) // ARITY and the root is position 0.

                     0
          1       2      ...     8
        9..16  17..24   ...  65..72

A node whose parent is lost tries `candidates` in order and attaches to the first one that lives: the parent's siblings,
the grandparent and its siblings, and so on to the root, then all other lower positions. The children of one lost node
begin with different siblings, so they spread instead of doubling the load of one.

Invariant: a candidate has a lower position than its child, and every lower position is a candidate. So there is no
circle, whatever nodes believe about each other; exactly one node has no live candidate, the lowest live position, which
then acts as root; all others are connected to it.

In: positions. Out: positions. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

# Children of a node. 8: 2,048 nodes in 4 levels below the root. A node has at most 9 tree connections, and at most 17
# after two losses; a message is merged from at most 9 parts. A job of ten nodes has an inner one, so small tests have.
ARITY = 8


def parent_of(position: int) -> int | None:
    """The position that `position` reports to when nothing is lost; None for the root."""
    return (position - 1) // ARITY if position else None


def children_of(position: int, nodes: int) -> range:
    """The positions that report to `position` when nothing is lost."""
    first = ARITY * position + 1
    return range(min(first, nodes), min(first + ARITY, nodes))


def depth_of(position: int) -> int:
    """The number of levels above `position`."""
    depth = 0
    while (above := parent_of(position)) is not None:
        position, depth = above, depth + 1
    return depth


def candidates(position: int) -> Iterator[int]:
    """The positions to which `position` may report, the best first: all lower ones."""
    number = (position - 1) % ARITY  # among the children of its parent
    tried: set[int] = set()
    above = parent_of(position)
    while above is not None:
        generation = [above]
        if above:
            first, own = ARITY * ((above - 1) // ARITY) + 1, (above - 1) % ARITY
            turns = ((number + step) % (ARITY - 1) for step in range(ARITY - 1))
            generation += [first + (own + 1 + turn) % ARITY for turn in turns]
        tried.update(generation)
        yield from generation
        above = parent_of(above)
    yield from (lower for lower in range(position) if lower not in tried)
