"""Double capture: the parity that a rank computes from its own replica of what other nodes capture. Pure.

Invariant: a rank and the SMPs of the job find the same parity at the same places without talking (redundancy.sections
cuts for both). Only state that is captured behind the step takes part: what is copied at the version point would have
to be read there twice. No bucket holds bytes of two parts, no source bytes of two ranks' shares, so that the digest of
each source can be compared with what that rank has captured.

In: a layout, who stands where. Out: the layout with parity buckets; what other nodes need to know of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..redundancy.exchange_plan import positions
from ..redundancy.sections import Extent, ParityPart, Section, lay_out, local_sections
from .layout import Layout, ParityBucket, ParitySource, ReplicaStream, Share

Told = tuple[tuple[int, ...], int, int, int]  # replicas; where the own share starts in the stream, in the slot; bytes


def with_parity(
    layout: Layout, nodes: Sequence[str], groups: Sequence[Sequence[int]], losses: int, bucket_bytes: int
) -> Layout:
    """`layout` with the parity that its rank computes; without any where `losses` is 0 or is more than parity of the
    own replicas makes up for."""
    names, _ = positions(nodes)
    at = {name: position for position, name in enumerate(names)}
    streams = _replicated(layout)
    extents = [[Extent(s.rank, s.start, s.stop - s.start) for s in _in_order(stream)] for stream in streams]
    found: list[tuple[Section, ReplicaStream]] = []
    for stream, known in zip(streams, extents, strict=True):
        sections = local_sections([at[node] for node in nodes], groups, [known], losses, len(found))
        found += [(section, stream) for section in sections]
    parts = lay_out([section for section, _ in found], {layout.rank: layout.nbytes})
    parity = tuple(bucket for part in parts for bucket in _buckets(part, *found[part.section], bucket_bytes))
    return replace(layout, parity=parity)


def told(layout: Layout) -> list[Told]:
    """What the other nodes need to know of this rank's part in each replica set: `gathered` puts it together."""
    found = []
    for stream in _replicated(layout):
        own = stream.share_of(layout.rank)
        found.append((stream.replicas, own.start, stream.slot_offset, own.stop - own.start))
    return found


def gathered(by_rank: Sequence[Sequence[Told]]) -> tuple[tuple[Extent, ...], ...]:
    """The replica sets of a job in order, each as the extents of slots that its stream is made of."""
    sets: dict[tuple[int, ...], list[tuple[int, int, Extent]]] = {}
    for rank, parts in enumerate(by_rank):
        for replicas, start, offset, nbytes in parts:
            sets.setdefault(tuple(replicas), []).append((start, start + nbytes, Extent(rank, offset, nbytes)))
    return tuple(tuple(extent for *_, extent in sorted(sets[key], key=_place)) for key in sorted(sets))


def _place(entry: tuple[int, int, Extent]) -> tuple[int, int, int]:
    """Where a share stands in its stream; several without bytes stand at one place."""
    start, stop, extent = entry
    return start, stop, extent.rank


def _in_order(stream: ReplicaStream) -> list[Share]:
    return sorted(stream.shares, key=lambda share: (share.start, share.stop, share.rank))


def _replicated(layout: Layout) -> list[ReplicaStream]:
    """The streams of which other ranks hold the same bytes, and which only the update changes."""
    return [stream for stream in layout.streams if stream.background and len(stream.replicas) > 1]


def _buckets(part: ParityPart, section: Section, stream: ReplicaStream, bucket_bytes: int) -> Iterator[ParityBucket]:
    """The buckets of a part. The section's extents count their offsets from the start of the stream."""
    for start in range(part.start, part.stop, bucket_bytes):
        stop = min(part.stop, start + bucket_bytes)
        sources = []
        first: int | None = None
        for node, at, extent in section.sources(part.stripe, start, stop):
            first = node if first is None else first
            pieces = tuple(stream.pieces(extent.offset, extent.offset + extent.nbytes, at))
            sources.append(ParitySource(extent.rank, at, extent.nbytes, node == first, pieces))
        yield ParityBucket(part.offset + start - part.start, stop - start, tuple(sources))
