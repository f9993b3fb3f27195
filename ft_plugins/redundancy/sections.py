"""What is protected together: the sections of a job's state, and how the parity of each comes to its place. Pure.

Invariant: every captured byte is in one section, and all nodes of a section hold ranks of one sharding group; so a lost
node of each group is survived whatever the encoding of its bytes. REFT's two encodings:

    LOCAL      state that the ranks of a group on several nodes hold identically, and that nothing but the update
               changes: each node computes the parity that it keeps from its own copy, into its ranks' slots, behind
               their data. Nothing is sent but digests, by which the copies are compared.
    EXCHANGED  everything else: each node sends its blocks to the nodes that keep their parity, in their vaults.

A replica set that spans several sharding groups is cut into a section for each. Its ranks on one node share the work on
the parity of that node.

In: the extents of each replica set in the order of its byte stream. The cuts depend on sizes alone: a trainer, which
knows its own slot only, counts the extents' offsets from the start of the stream; an SMP those of the slots.
Out: `Section`s; `ParityPart`s, the parity that lies in slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..intake import Count
from .parity import Placement, cut, place

LOCAL_LOSSES = 1  # that local parity makes up for: the Q of RAIM6 is left to the exchange


class Encoding(str, Enum):
    """How the parity of a section is made."""

    EXCHANGED = "sent"
    LOCAL = "computed where it lies"


@dataclass(frozen=True)
class Extent:
    """Bytes `offset .. offset + nbytes` of the slot data of `rank`."""

    rank: Count
    offset: Count
    nbytes: Count


@dataclass(frozen=True)
class Section:
    """State of a sharding group. `positions[i]` is where in the job its i-th node stands, `streams[i]` its bytes."""

    index: int
    positions: tuple[int, ...]
    streams: tuple[tuple[Extent, ...], ...]
    placement: Placement
    encoding: Encoding = Encoding.EXCHANGED

    def extents(self, node: int, start: int, stop: int) -> Iterator[Extent]:
        """The parts of slots that bytes `start .. stop` of a node's stream are made of, in order."""
        at = 0
        for extent in self.streams[node]:
            low, high = max(start, at), min(stop, at + extent.nbytes)
            if low < high:
                yield Extent(extent.rank, extent.offset + low - at, high - low)
            at += extent.nbytes

    def sources(self, stripe: int, start: int, stop: int) -> Iterator[tuple[int, int, Extent]]:
        """What adds up to bytes `start .. stop` of P of a stripe: (node, byte of these at which it is added, extent).

        By node, then in order.
        """
        for piece in self.placement.stripes[stripe].data:
            low, high = piece.start + start, min(piece.stop, piece.start + stop)
            at = 0
            for extent in self.extents(piece.node, low, high) if low < high else ():
                yield piece.node, at, extent
                at += extent.nbytes

    def members(self, node: int) -> tuple[int, ...]:
        """The ranks of a node that are in the section."""
        return tuple(dict.fromkeys(extent.rank for extent in self.streams[node]))


@dataclass(frozen=True)
class ParityPart:
    """Bytes `start .. stop` of the parity of a stripe of a LOCAL section lie at `offset` in the slots of `rank`."""

    section: int
    stripe: int
    start: int
    stop: int
    rank: int
    offset: int


def local_sections(
    positions: Sequence[int],
    groups: Sequence[Sequence[int]],
    replicated: Iterable[Sequence[Extent]],
    losses: int,
    first: int = 0,
) -> list[Section]:
    """The LOCAL sections, numbered from `first`: of each of the `replicated` streams (in an order that all know), one
    for each sharding group of which it has ranks on two nodes or more.

    `positions[rank]` is the position of each rank's node.
    """
    if losses != LOCAL_LOSSES:
        return []
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    found: list[Section] = []
    for stream in replicated:
        members: dict[int, dict[int, list[Extent]]] = {}
        for extent in stream:
            there = members.setdefault(group_of[extent.rank], {})
            there.setdefault(positions[extent.rank], []).append(extent)
        for _, by_node in sorted(members.items()):
            where = tuple(sorted(by_node))
            streams = tuple(tuple(by_node[position]) for position in where)
            sizes = [sum(extent.nbytes for extent in extents) for extents in streams]
            if len(where) > losses and any(sizes):
                index = first + len(found)
                found.append(Section(index, where, streams, place(sizes, losses), Encoding.LOCAL))
    return found


def lay_out(sections: Iterable[Section], behind: Mapping[int, int]) -> Iterator[ParityPart]:
    """The parity of LOCAL sections in the slots of the ranks that `behind` names, each after so many bytes of data."""
    ends = dict(behind)
    for section in sections:
        for node in range(len(section.positions)):
            ((stripe, _),) = section.placement.kept_on(node)
            members = section.members(node)
            for rank, (start, stop) in zip(members, cut(section.placement.block, len(members)), strict=True):
                if rank in ends and start < stop:
                    yield ParityPart(section.index, stripe, start, stop, rank, ends[rank])
                    ends[rank] += stop - start


def remainder(sections: Iterable[Section], nbytes: Sequence[int]) -> list[list[Extent]]:
    """By rank, what of `nbytes` of slot data is in none of the sections; one extent at least, if of no bytes."""
    taken: list[list[Extent]] = [[] for _ in nbytes]
    for section in sections:
        for stream in section.streams:
            for extent in stream:
                taken[extent.rank].append(extent)
    left: list[list[Extent]] = []
    for rank, size in enumerate(nbytes):
        at, found = 0, []
        for extent in sorted(taken[rank], key=lambda extent: extent.offset):
            if at < extent.offset:
                found.append(Extent(rank, at, extent.offset - at))
            at = max(at, extent.offset + extent.nbytes)
        if at < size:
            found.append(Extent(rank, at, size - at))
        left.append(found or [Extent(rank, 0, 0)])
    return left
