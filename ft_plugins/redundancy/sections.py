"""Divide a job's state into sections, the units of parity, and choose how the parity of each is made. Pure.

Invariant: every captured byte is in one section, and all nodes of a section hold ranks of one redundancy group, so
each group survives the loss of a node whatever the encoding. REFT's two encodings:

    LOCAL      state that the ranks of a group hold identically on several nodes and that only the update changes. Each
               node computes its parity from its own replicas, into its ranks' slots, after their data. Only digests are
               sent, to compare the replicas.
    EXCHANGED  everything else: each node sends its blocks to the nodes whose parity stores hold their parity.

A replica set that spans several redundancy groups is cut into a section for each. Its ranks on one node share the work
on the parity of that node.

In: the extents of each replica set in the order of its byte stream. The cuts depend on sizes alone. A trainer, which
knows only its own slot, passes offsets in the stream; an SMP passes offsets in the slots.
Out: `Section`s; `ParityPart`s, the parity stored in slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..base.intake import Count
from .parity import Placement, cut, place_parity

LOCAL_LOSSES = 1  # losses that local parity covers; RAIM6 always uses the exchange


class Encoding(str, Enum):
    """How the parity of a section is made."""

    EXCHANGED = "sent"
    LOCAL = "computed locally"


@dataclass(frozen=True)
class Extent:
    """Bytes `offset .. offset + nbytes` of the slot data of `rank`; in a trainer, of the replica set's stream."""

    rank: Count
    offset: Count
    nbytes: Count


@dataclass(frozen=True)
class Section:
    """State of a redundancy group. `positions[i]` is the position in the job of its i-th node, `streams[i]` its bytes.

    A `node` below is such an i, not a position in the job.
    """

    index: int
    positions: tuple[int, ...]
    streams: tuple[tuple[Extent, ...], ...]
    placement: Placement
    encoding: Encoding = Encoding.EXCHANGED

    def extents(self, node: int, start: int, stop: int) -> Iterator[Extent]:
        """The extents of slots that make up bytes `start .. stop` of a node's stream, in order."""
        at = 0
        for extent in self.streams[node]:
            low, high = max(start, at), min(stop, at + extent.nbytes)
            if low < high:
                yield Extent(extent.rank, extent.offset + low - at, high - low)
            at += extent.nbytes

    def sources(self, stripe: int, start: int, stop: int) -> Iterator[tuple[int, int, Extent]]:
        """The sources of bytes `start .. stop` of a stripe's P (XOR): (node, offset from `start`, extent), in order."""
        for piece in self.placement.stripes[stripe].data:
            low, high = piece.start + start, min(piece.stop, piece.start + stop)
            at = 0
            for extent in self.extents(piece.node, low, high) if low < high else ():
                yield piece.node, at, extent
                at += extent.nbytes

    def members(self, node: int) -> tuple[int, ...]:
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
    positions: Sequence[int], groups: Sequence[Sequence[int]], replicated: Iterable[Sequence[Extent]], losses: int,
    first: int = 0,
) -> list[Section]:  # fmt: skip
    """The LOCAL sections, numbered from `first`: for each of the `replicated` streams (in the same order on every
    process), one for each redundancy group with ranks of the stream on two or more nodes.

    `positions[rank]` is the position of each rank's node.
    """
    if losses != LOCAL_LOSSES:
        return []
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    sections: list[Section] = []
    for stream in replicated:
        by_group: dict[int, dict[int, list[Extent]]] = {}
        for extent in stream:
            of_group = by_group.setdefault(group_of[extent.rank], {})
            of_group.setdefault(positions[extent.rank], []).append(extent)
        for _, by_node in sorted(by_group.items()):
            ordered = tuple(sorted(by_node))
            streams = tuple(tuple(by_node[position]) for position in ordered)
            sizes = [sum(extent.nbytes for extent in extents) for extents in streams]
            if len(ordered) > losses and any(sizes):
                index = first + len(sections)
                sections.append(Section(index, ordered, streams, place_parity(sizes, losses), Encoding.LOCAL))
    return sections


def lay_out(sections: Iterable[Section], data_nbytes: Mapping[int, int]) -> Iterator[ParityPart]:
    """Place the parity of LOCAL sections in the slots of some ranks, each after its `data_nbytes` of data."""
    ends = dict(data_nbytes)
    for section in sections:
        for node in range(len(section.positions)):
            ((stripe, _),) = section.placement.parities_on(node)  # one loss: P (XOR) alone, of one stripe
            members = section.members(node)
            for rank, (start, stop) in zip(members, cut(section.placement.block, len(members)), strict=True):
                if rank in ends and start < stop:
                    yield ParityPart(section.index, stripe, start, stop, rank, ends[rank])
                    ends[rank] += stop - start


def remainder(sections: Iterable[Section], nbytes: Sequence[int]) -> list[list[Extent]]:
    """By rank, the extents of its `nbytes` of slot data that are in no section; an empty one for a rank without any."""
    taken: list[list[Extent]] = [[] for _ in nbytes]
    for section in sections:
        for stream in section.streams:
            for extent in stream:
                taken[extent.rank].append(extent)
    left: list[list[Extent]] = []
    for rank, size in enumerate(nbytes):
        at, gaps = 0, []
        for extent in sorted(taken[rank], key=lambda extent: extent.offset):
            if at < extent.offset:
                gaps.append(Extent(rank, at, extent.offset - at))
            at = max(at, extent.offset + extent.nbytes)
        if at < size:
            gaps.append(Extent(rank, at, size - at))
        left.append(gaps or [Extent(rank, 0, 0)])
    return left
