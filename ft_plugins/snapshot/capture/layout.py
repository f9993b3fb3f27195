"""Lay out a rank's slot: the inventory, split over the ranks that hold it identically. Pure.

Invariant: the shares of a replica set are disjoint and cover its bytes once (REFT, section 4.1); the ranks of a set
compute the same cuts without communicating. A set is cut in two levels: every node receives an equal part, then the
ranks of a node divide its part. So a lost node takes the same amount of state with it whatever its number of ranks.
Unique items (a set of one) belong whole to the rank that has them.

Parity may follow the data, computed from this rank's replicas of other nodes' shares: see `double`.

In: `Inventory`, node of each rank. Out: `Layout`: pieces in slot order, grouped into buckets; `shares`, from which
readers reassemble a set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from ...model.inventory import Inventory, Item
from ...redundancy.parity import ALIGNMENT, aligned, cut


@dataclass(frozen=True)
class SlotPiece:
    """Bytes `item_offset .. item_offset + nbytes` of an item, at `offset` of the slot's data area."""

    item: str
    item_offset: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CaptureBucket:
    """A contiguous run of the data area that is copied and digested as one."""

    offset: int
    nbytes: int
    pieces: tuple[SlotPiece, ...]


@dataclass(frozen=True)
class ParitySource:
    """Bytes of the share of `rank` that are XORed into a parity bucket, from byte `at` of the bucket.

    `direct`: no earlier source has bytes at the same place, so it is copied instead. Offsets of pieces are from the
    bucket's start; gaps between them are zeros.
    """

    rank: int
    at: int
    nbytes: int
    direct: bool
    pieces: tuple[SlotPiece, ...]


@dataclass(frozen=True)
class ParityBucket:
    """A contiguous run of parity after the data, computed and digested as one."""

    offset: int
    nbytes: int
    sources: tuple[ParitySource, ...]


@dataclass(frozen=True)
class Share:
    """The part `start .. stop` of a `ReplicaStream` that `rank` captures."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class ReplicaStream:
    """The items of one replica set with equal `background` as one byte stream, each on a multiple of ALIGNMENT.

    `offsets[i]` is where item i starts; `slot_offset` is where this rank's share starts in the slot's data area.
    """

    replicas: tuple[int, ...]
    background: bool
    items: tuple[Item, ...]
    offsets: tuple[int, ...]
    nbytes: int
    shares: tuple[Share, ...]
    slot_offset: int

    def share_of(self, rank: int) -> Share:
        return self.shares[self.replicas.index(rank)]

    def pieces(self, start: int, stop: int, offset: int) -> Iterator[SlotPiece]:
        """The pieces of items in bytes `start .. stop`; `start` is at `offset` of the slot. Padding is in no piece."""
        for number in range(max(0, bisect_right(self.offsets, start) - 1), len(self.items)):
            item, begin = self.items[number], self.offsets[number]
            if begin >= stop:
                return
            low, high = max(begin, start), min(begin + item.nbytes, stop)
            if low < high:
                yield SlotPiece(item.name, low - begin, offset + low - start, high - low)


@dataclass(frozen=True)
class Layout:
    """A rank's slot: `synchronous` buckets are copied at the version point, `background` ones in the next iteration.

    `parity` buckets follow `nbytes` of data. Buckets are numbered in this order. Digest i belongs to bucket i; the
    digests of the parity buckets' sources follow, in order.
    """

    rank: int
    streams: tuple[ReplicaStream, ...]
    synchronous: tuple[CaptureBucket, ...]
    background: tuple[CaptureBucket, ...]
    nbytes: int
    parity: tuple[ParityBucket, ...] = ()

    @property
    def buckets(self) -> tuple[CaptureBucket, ...]:
        """All buckets of data, in the order of their digests."""
        return self.synchronous + self.background

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) in a slot of each bucket of data and parity."""
        data = [(bucket.offset, bucket.nbytes) for bucket in self.buckets]
        return data + [(bucket.offset, bucket.nbytes) for bucket in self.parity]

    @property
    def parity_nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.parity)

    @property
    def source_digest_count(self) -> int:
        return sum(len(bucket.sources) for bucket in self.parity)


def shares(replicas: Sequence[int], nodes: Sequence[str], nbytes: int) -> tuple[Share, ...]:
    """The part of a replica set of `nbytes` that each rank captures, in the order of `replicas`.

    `nodes[rank]` is the failure domain of each rank of the job; empty if all are on one node.
    """
    domains: dict[str, list[int]] = {}
    for rank in replicas:
        domains.setdefault(nodes[rank] if nodes else "", []).append(rank)
    by_rank: dict[int, Share] = {}
    for (start, stop), members in zip(cut(nbytes, len(domains)), domains.values(), strict=True):
        for (low, high), rank in zip(cut(stop - start, len(members)), members, strict=True):
            by_rank[rank] = Share(rank, start + low, start + high)
    return tuple(by_rank[rank] for rank in replicas)


def plan_layout(inventory: Inventory, nodes: Sequence[str], bucket_bytes: int) -> Layout:
    """Lay out the slot of `inventory.rank`. Buckets hold at most `bucket_bytes`."""
    streams: list[ReplicaStream] = []
    offset = 0
    ordered = sorted(inventory.replica_sets().items())
    for background in (False, True):
        for replicas, members in ordered:
            items = tuple(item for item in members if item.background == background)
            if not items:
                continue
            offsets, nbytes = [], 0
            for item in items:
                offsets.append(nbytes)
                nbytes += aligned(item.nbytes)
            parts = shares(replicas, nodes, nbytes)
            own = parts[replicas.index(inventory.rank)]
            streams.append(ReplicaStream(replicas, background, items, tuple(offsets), nbytes, parts, offset))
            offset += aligned(own.stop - own.start)
    synchronous = [piece for stream in streams if not stream.background for piece in pieces_of(stream, inventory.rank)]
    deferred = [piece for stream in streams if stream.background for piece in pieces_of(stream, inventory.rank)]
    return Layout(
        inventory.rank, tuple(streams), _buckets(synchronous, bucket_bytes), _buckets(deferred, bucket_bytes), offset
    )


def layer_bytes(layout: Layout) -> tuple[int, ...]:
    """Bytes of each layer of the model in a slot, in slot order. Consecutive items of one layer form one entry; an item
    without a layer has its own. A gap belongs to the entry before it."""
    starts: list[int] = []
    previous: tuple[int | None, str] | None = None
    for stream in layout.streams:
        items = {item.name: item for item in stream.items}
        for piece in pieces_of(stream, layout.rank):
            layer = items[piece.item].layer
            current = layer, piece.item if layer is None else ""
            if current != previous:
                starts.append(piece.offset)
            previous = current
    stops = [*starts[1:], layout.nbytes]
    return tuple(stop - start for start, stop in zip([0, *starts[1:]], stops, strict=True)) if starts else ()


def pieces_of(stream: ReplicaStream, rank: int) -> Iterator[SlotPiece]:
    """The pieces of the stream's items in the rank's share, with their place in its slot."""
    own = stream.share_of(rank)
    return stream.pieces(own.start, own.stop, stream.slot_offset)


def _buckets(pieces: Sequence[SlotPiece], bucket_bytes: int) -> tuple[CaptureBucket, ...]:
    """Group consecutive pieces into buckets, and cut a piece at the end of a full bucket."""
    buckets: list[CaptureBucket] = []
    current: list[SlotPiece] = []

    def close() -> None:
        if current:
            start, end = current[0].offset, current[-1].offset + current[-1].nbytes
            buckets.append(CaptureBucket(start, end - start, tuple(current)))
            current.clear()

    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            start = current[0].offset if current else piece.offset + done
            room = bucket_bytes - (piece.offset + done - start)
            if room < ALIGNMENT:
                close()
                continue
            nbytes = min(piece.nbytes - done, room // ALIGNMENT * ALIGNMENT)
            current.append(SlotPiece(piece.item, piece.item_offset + done, piece.offset + done, nbytes))
            done += nbytes
    close()
    return tuple(buckets)


def layout_digest(layout: Layout, bucket_mib: int, kinds: Sequence[tuple[str, str, tuple[int, ...]]]) -> int:
    """Digest of the data buckets, of `bucket_mib`, and of each item's name, dtype and shape (`kinds`): different
    layouts never share a segment or a checkpoint.

    The digested text is part of both formats: it must not change, even if the classes here are renamed.
    """

    def of_piece(piece: SlotPiece) -> str:
        at = f"item_offset={piece.item_offset}, offset={piece.offset}, nbytes={piece.nbytes}"
        return f"Piece(item={piece.item!r}, {at})"

    def of_bucket(bucket: CaptureBucket) -> str:
        pieces = _tuple_of([of_piece(piece) for piece in bucket.pieces])
        return f"Bucket(offset={bucket.offset}, nbytes={bucket.nbytes}, pieces={pieces})"

    buckets = _tuple_of([of_bucket(bucket) for bucket in layout.buckets])
    return xxhash.xxh3_64_intdigest(f"({buckets}, {bucket_mib}, {list(kinds)!r})".encode())


def _tuple_of(parts: list[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
