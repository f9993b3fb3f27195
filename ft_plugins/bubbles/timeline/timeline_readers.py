"""Which ranks' timelines a rank's plan reads: those that share links with it, and the stages next to theirs. Pure.

A plan divides the links of all nodes that are linked by copies, directly or through others, and reserves time for the
messages between their stages and the neighbouring ones (bubbles.timeline.messages). In most jobs these are the ranks of
two or three nodes and of as many before and after them, however large the job is.

Invariant: a rank can say of any other what it reads, and so who reads its own, without a message. Linear in the number
of ranks.

In: the copies of a job, its pipelines. Out: sets of ranks; who receives which timeline, each once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ...model.timeline import SHOWN
from ...redundancy.neighbour import NeighbourPlan

_PRINTS = 0  # the rank that prints a table of the first timelines


class TimelineReaders:
    """The readers of each rank's timeline."""

    def __init__(self, copies: NeighbourPlan, pipelines: Sequence[Sequence[int]]) -> None:
        root = list(range(len(copies.nodes)))

        def find(position: int) -> int:
            while root[position] != position:
                root[position] = root[root[position]]
                position = root[position]
            return position

        for copy in copies.copies:
            root[find(copy.source)] = find(copy.target)
        self._set_of = [find(copy.source) for copy in copies.copies]  # by rank, its set of linked nodes
        self._members: dict[int, list[int]] = {}
        for rank, linked in enumerate(self._set_of):
            self._members.setdefault(linked, []).append(rank)
        self._near: dict[int, tuple[int, ...]] = {}  # by rank, the stages next to it
        for pipeline in pipelines:
            for place, rank in enumerate(pipeline):
                self._near[rank] = (pipeline[place - 1], pipeline[(place + 1) % len(pipeline)])
        self._reads: dict[int, frozenset[int]] = {}  # by set of linked nodes
        self._first = range(min(SHOWN, len(self._set_of)))

    def reads(self, rank: int) -> frozenset[int]:
        """The ranks whose timelines `rank` reads, its own included."""
        linked = self._set_of[rank]
        if linked not in self._reads:
            members = self._members[linked]
            near = (other for member in members for other in self._near.get(member, ()))
            self._reads[linked] = frozenset(members).union(near)
        return self._reads[linked].union(self._first) if rank == _PRINTS else self._reads[linked]

    def read_by(self, rank: int) -> frozenset[int]:
        """The ranks that read the timeline of `rank`, itself included."""
        sets = {self._set_of[other] for other in (rank, *self._near.get(rank, ()))}
        members = (member for linked in sets for member in self._members[linked])
        return frozenset((rank,)).union(members, (_PRINTS,) if rank in self._first else ())


def sources(rank: int, reads: Collection[int], digests: Sequence[int]) -> dict[int, int]:
    """By digest, the rank that sends `rank` the timeline: the lowest of those that it `reads` with that digest. Its own
    timeline, and those equal to it, are not sent."""
    found: dict[int, int] = {}
    for other in sorted(reads):
        if digests[other] != digests[rank]:
            found.setdefault(digests[other], other)
    return found


def receivers(rank: int, readers: TimelineReaders, digests: Sequence[int]) -> Iterable[int]:
    """The ranks to which `rank` sends its timeline."""
    by_set: dict[frozenset[int], bool] = {}
    for reader in sorted(readers.read_by(rank) - {rank}):
        reads = readers.reads(reader)
        if reads not in by_set:  # ranks that share links read the same
            by_set[reads] = min(other for other in reads if digests[other] == digests[rank]) == rank
        if by_set[reads] and digests[reader] != digests[rank]:
            yield reader
