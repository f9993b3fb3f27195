"""Local parity: plan the parity that a rank computes from its own replicas of what other nodes capture. Pure.

Invariant: a rank and the SMPs of the job compute the same plan without communicating (redundancy.sections cuts for
both). Only state captured in the background takes part: reading the rest twice, at the version point, would stall the
step. A bucket lies in one `ParityPart` and a source in one rank's share, so the digest of each source can be compared
with what that rank captured.

In: a layout, the node of each rank. Out: the layout with parity buckets; the rank's replica shares, for other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...errors import InventoryError
from ...model.inventory import set_digest
from ...redundancy.exchange_plan import positions
from ...redundancy.sections import Extent, ParityPart, Section, lay_out, local_sections
from .layout import Layout, ParityBucket, ParitySource, ReplicaStream

ReplicaShare = tuple[int, int, int, int]  # digest of the replica set; start of the own share in stream, in slot; bytes


def with_parity(
    layout: Layout, nodes: Sequence[str], groups: Sequence[Sequence[int]], losses: int, bucket_bytes: int
) -> Layout:
    """`layout` with the parity that its rank computes; unchanged unless `losses` is LOCAL_LOSSES. `nodes[rank]` is the
    name of a rank's node, `groups` are the redundancy groups."""
    names, _ = positions(nodes)
    position_of = {name: position for position, name in enumerate(names)}
    streams = _replicated(layout)
    in_order = [sorted(one.shares, key=lambda share: (share.start, share.stop, share.rank)) for one in streams]
    extents = [[Extent(share.rank, share.start, share.stop - share.start) for share in one] for one in in_order]
    sections: list[tuple[Section, ReplicaStream]] = []
    for stream, stream_extents in zip(streams, extents, strict=True):
        local = local_sections([position_of[node] for node in nodes], groups, [stream_extents], losses, len(sections))
        sections += [(section, stream) for section in local]
    parts = lay_out([section for section, _ in sections], {layout.rank: layout.nbytes})
    parity = tuple(bucket for part in parts for bucket in _buckets(part, *sections[part.section], bucket_bytes))
    return replace(layout, parity=parity)


def replica_shares(layout: Layout) -> list[ReplicaShare]:
    """This rank's share of each replica set; `replica_extents` combines those of all ranks."""
    shares = []
    for stream in _replicated(layout):
        own = stream.share_of(layout.rank)
        shares.append((set_digest(stream.replicas), own.start, stream.slot_offset, own.stop - own.start))
    return shares


def replica_extents(by_rank: Sequence[Sequence[ReplicaShare]]) -> tuple[tuple[Extent, ...], ...]:
    """The replica sets of a job in order, each as the extents of slots that make up its stream. The members of a set
    are the ranks that have a share in it. Raises InventoryError if its digest is not that of its members."""
    sets: dict[int, list[tuple[int, int, Extent]]] = {}
    for rank, shares in enumerate(by_rank):
        for digest, start, offset, nbytes in shares:
            sets.setdefault(digest, []).append((start, start + nbytes, Extent(rank, offset, nbytes)))
    members = {digest: tuple(dict.fromkeys(extent.rank for *_, extent in sets[digest])) for digest in sets}
    for digest, ranks in members.items():
        if set_digest(ranks) != digest:
            raise InventoryError(
                f"ranks {ranks[0]} to {ranks[-1]} name a replica set that not all of its ranks, or others too, name; "
                "build the replicas of a parameter the same way on all ranks"
            )
    ordered = sorted(sets, key=lambda digest: members[digest])
    return tuple(tuple(extent for *_, extent in sorted(sets[digest], key=_order)) for digest in ordered)


def _order(entry: tuple[int, int, Extent]) -> tuple[int, int, int]:
    """The order of shares in a stream; empty shares may start at the same place."""
    start, stop, extent = entry
    return start, stop, extent.rank


def _replicated(layout: Layout) -> list[ReplicaStream]:
    """The streams that other ranks hold identically and that only the update changes."""
    return [stream for stream in layout.streams if stream.background and len(stream.replicas) > 1]


def _buckets(part: ParityPart, section: Section, stream: ReplicaStream, bucket_bytes: int) -> Iterator[ParityBucket]:
    """The buckets of a part. The offsets of the section's extents are in the stream."""
    for start in range(part.start, part.stop, bucket_bytes):
        stop = min(part.stop, start + bucket_bytes)
        sources = []
        first: int | None = None
        for node, at, extent in section.sources(part.stripe, start, stop):
            first = node if first is None else first
            pieces = tuple(stream.pieces(extent.offset, extent.offset + extent.nbytes, at))
            sources.append(ParitySource(extent.rank, at, extent.nbytes, node == first, pieces))
        yield ParityBucket(part.offset + start - part.start, stop - start, tuple(sources))
