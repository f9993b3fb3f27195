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
then acts as root; all others are connected to it. Of the positions that the root of the tree hears of, none in its
summary is absent; one that leaves it has GRACE of `detect_seconds` to appear again, below another parent.

In: positions, and times (seconds, monotonic). Out: positions. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .agreement import LOST_LIMIT

# Children of a node. 8: 2,048 nodes in 4 levels below the root. A node has at most 9 tree connections, and at most 17
# after two losses; a message is merged from at most 9 parts. A job of ten nodes has an inner one, so small tests have.
ARITY = 8
GRACE = 0.5  # of `detect_seconds`, for a node to attach to another parent
_LOOKS_PER_DETECTION = 20  # while a position is missing


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


class Presence:
    """Which positions of a job of `nodes` the root hears of, and which it has not heard of for too long. All are
    expected within `detect_seconds` from `now`."""

    def __init__(self, nodes: int, detect_seconds: float, heartbeat_seconds: float, now: float) -> None:
        self._nodes = nodes
        self._detect = detect_seconds
        self._heartbeat = heartbeat_seconds
        self._present = np.zeros(nodes, dtype=bool)  # in the summary of the last look
        self._seen = np.zeros(nodes)  # when each was in one last
        self._covered = 0  # the summary of the last look
        self.absent: tuple[int, ...] = ()  # LOST_LIMIT at most
        self.expect_all(now)

    def expect_all(self, now: float) -> None:
        """Forget what was seen: all have `detect_seconds` from now to be in a summary."""
        self._seen[:] = now + (1 - GRACE) * self._detect
        self._present[:] = False
        self._looked_at, self._covered, self.absent = now, 0, ()

    @property
    def due(self) -> float:
        """When to look again, even if the summary has not changed."""
        whole = self._covered == (1 << self._nodes) - 1
        return self._looked_at + (self._heartbeat if whole else self._detect / _LOOKS_PER_DETECTION)

    def look(self, covered: int, now: float) -> None:
        """Note which positions are in the summary, and which have not been for too long; nothing before that is due."""
        if covered == self._covered and now < self.due:
            return
        self._seen[self._present] = np.maximum(self._seen[self._present], now)
        if covered != self._covered:
            bits = np.frombuffer(covered.to_bytes((self._nodes + 7) // 8, "little"), dtype=np.uint8)
            self._present = np.unpackbits(bits, count=self._nodes, bitorder="little").astype(bool)
        absent = ~self._present & (now >= self._seen + GRACE * self._detect)
        self.absent = tuple(map(int, np.flatnonzero(absent)[:LOST_LIMIT]))
        self._looked_at, self._covered = now, covered

    def skip(self, seconds: float, now: float) -> None:
        """Do not count `seconds`, for which this process could hear no one."""
        self._seen = np.maximum(self._seen, np.minimum(self._seen + seconds, now))
