"""Where each captured byte lies in a slot: the inventory, split over the ranks that hold it identically. Pure.

Invariant: the shares of a replica set are disjoint and cover its bytes once (REFT, section 4.1); two ranks of a set
compute the same cuts without talking. The cut has two levels, nodes first: every node of the set receives an equal
part, then the ranks of a node share its part, so that a lost node takes the same amount of state with it whatever the
number of its ranks. Unique items (a set of one) belong to their holder whole.

Behind the data there may be parity, computed from the replicas that this rank holds of other nodes' shares: `double`
plans it.

In: `Inventory`, node of each rank. Out: `Layout`: pieces in slot order, grouped into buckets; and `shares`, with which
the readers of a set put it together again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from ..model.inventory import Inventory, Item
from ..redundancy.parity import ALIGNMENT, cut


@dataclass(frozen=True)
class SlotPiece:
    """Bytes `item_offset .. item_offset + nbytes` of an item lie at `offset` of the slot's data area."""

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
    """Bytes of the share of `rank` that are XORed into a parity bucket from its byte `at` on, as they lie in the items.

    `direct`: no source before it has bytes at the same place, so it may be copied instead. Pieces count their offset
    from the bucket's start; what lies between them is zeros.
    """

    rank: int
    at: int
    nbytes: int
    direct: bool
    pieces: tuple[SlotPiece, ...]


@dataclass(frozen=True)
class ParityBucket:
    """A contiguous run of parity behind the data, computed and digested as one."""

    offset: int
    nbytes: int
    sources: tuple[ParitySource, ...]


@dataclass(frozen=True)
class Share:
    """The part `start .. stop` of a replica set's byte stream that `rank` captures."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class ReplicaStream:
    """The items of one replica set as one byte stream, each item starting on a multiple of ALIGNMENT.

    `offsets[i]` is where item i starts; `slot_offset` is where the own share lies in the slot's data area.
    """

    replicas: tuple[int, ...]
    background: bool
    items: tuple[Item, ...]
    offsets: tuple[int, ...]
    nbytes: int
    shares: tuple[Share, ...]
    slot_offset: int

    def share_of(self, rank: int) -> Share:
        """The share of `rank`."""
        return self.shares[self.replicas.index(rank)]

    def pieces(self, start: int, stop: int, offset: int) -> Iterator[SlotPiece]:
        """The parts of items in bytes `start .. stop`, the first byte of which lies at `offset`. Padding is in none."""
        for number in range(max(0, bisect_right(self.offsets, start) - 1), len(self.items)):
            item, begin = self.items[number], self.offsets[number]
            if begin >= stop:
                return
            low, high = max(begin, start), min(begin + item.nbytes, stop)
            if low < high:
                yield SlotPiece(item.name, low - begin, offset + low - start, high - low)


@dataclass(frozen=True)
class Layout:
    """A rank's slot: `synchronous` buckets are copied at the version point, `background` ones behind the next step.

    `parity` buckets come last, behind `nbytes` of data. Buckets are numbered in that order; digest i belongs to bucket
    i, and behind all those are the digests of the parity buckets' sources, in order.
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
        """(offset, bytes) in a slot of each bucket, of data and of parity."""
        data = [(bucket.offset, bucket.nbytes) for bucket in self.buckets]
        return data + [(bucket.offset, bucket.nbytes) for bucket in self.parity]

    @property
    def parity_nbytes(self) -> int:
        """Bytes of parity behind the data."""
        return sum(bucket.nbytes for bucket in self.parity)

    @property
    def checks(self) -> int:
        """How many digests of sources a slot has."""
        return sum(len(bucket.sources) for bucket in self.parity)

    def table(self) -> str:
        """The layout for people."""
        lines = [f"rank {self.rank}: {self.nbytes} bytes in {len(self.buckets)} buckets"]
        for stream in self.streams:
            own = stream.share_of(self.rank)
            kind = "behind the step" if stream.background else "at the version point"
            lines.append(
                f"  {len(stream.items):5d} items x {len(stream.replicas)} replicas: {stream.nbytes} bytes, "
                f"own share {own.start}..{own.stop}, {kind}"
            )
        if self.parity:
            read = sum(source.nbytes for bucket in self.parity for source in bucket.sources)
            buckets = f"{self.parity_nbytes} bytes in {len(self.parity)} buckets"
            lines.append(f"  parity: {buckets}, made of {read} bytes of own replicas")
        return "\n".join(lines)


def shares(replicas: Sequence[int], nodes: Sequence[str], nbytes: int) -> tuple[Share, ...]:
    """Who captures which part of a replica set of `nbytes`, in the order of `replicas`.

    `nodes[rank]` is the failure domain of each rank of the job; empty when all stand on one.
    """
    domains: dict[str, list[int]] = {}
    for rank in replicas:
        domains.setdefault(nodes[rank] if nodes else "", []).append(rank)
    found: dict[int, Share] = {}
    for (start, stop), members in zip(cut(nbytes, len(domains)), domains.values(), strict=True):
        for (low, high), rank in zip(cut(stop - start, len(members)), members, strict=True):
            found[rank] = Share(rank, start + low, start + high)
    return tuple(found[rank] for rank in replicas)


def plan_layout(inventory: Inventory, nodes: Sequence[str], bucket_bytes: int) -> Layout:
    """The slot of `inventory.rank`. Buckets hold `bucket_bytes`, the last one of a kind less."""
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
                nbytes += _aligned(item.nbytes)
            parts = shares(replicas, nodes, nbytes)
            own = parts[replicas.index(inventory.rank)]
            streams.append(ReplicaStream(replicas, background, items, tuple(offsets), nbytes, parts, offset))
            offset += _aligned(own.stop - own.start)
    synchronous = [piece for stream in streams if not stream.background for piece in pieces_of(stream, inventory.rank)]
    behind = [piece for stream in streams if stream.background for piece in pieces_of(stream, inventory.rank)]
    return Layout(
        inventory.rank,
        tuple(streams),
        _buckets(synchronous, bucket_bytes),
        _buckets(behind, bucket_bytes),
        offset,
    )


def layer_bytes(layout: Layout) -> tuple[int, ...]:
    """Bytes of each layer of the model in a slot, in the order in which they lie there: runs of items of one layer, an
    item without a layer for itself. What is between two belongs to the first of them."""
    starts: list[int] = []
    before: tuple[int | None, str] | None = None
    for stream in layout.streams:
        items = {item.name: item for item in stream.items}
        for piece in pieces_of(stream, layout.rank):
            layer = items[piece.item].layer
            now = layer, piece.item if layer is None else ""
            if now != before:
                starts.append(piece.offset)
            before = now
    stops = [*starts[1:], layout.nbytes]
    return tuple(stop - start for start, stop in zip([0, *starts[1:]], stops, strict=True)) if starts else ()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pieces_of(stream: ReplicaStream, rank: int) -> Iterator[SlotPiece]:
    """The parts of the stream's items that lie in the rank's share, and where in its slot."""
    own = stream.share_of(rank)
    return stream.pieces(own.start, own.stop, stream.slot_offset)


def _buckets(pieces: Sequence[SlotPiece], bucket_bytes: int) -> tuple[CaptureBucket, ...]:
    """Consecutive pieces, cut where a bucket is full."""
    buckets: list[CaptureBucket] = []
    held: list[SlotPiece] = []

    def close() -> None:
        if held:
            start, end = held[0].offset, held[-1].offset + held[-1].nbytes
            buckets.append(CaptureBucket(start, end - start, tuple(held)))
            held.clear()

    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            start = held[0].offset if held else piece.offset + done
            room = bucket_bytes - (piece.offset + done - start)
            if room < ALIGNMENT:
                close()
                continue
            nbytes = min(piece.nbytes - done, room // ALIGNMENT * ALIGNMENT)
            held.append(SlotPiece(piece.item, piece.item_offset + done, piece.offset + done, nbytes))
            done += nbytes
    close()
    return tuple(buckets)


def layout_digest(layout: Layout, bucket_mib: int, kinds: Sequence[tuple[str, str, tuple[int, ...]]]) -> int:
    """Digest of the buckets of data and of each item's name, dtype and shape: different cuts never share a segment or a
    checkpoint.

    The digested text is part of the format of both: it stays as it is, whatever the classes here are called.
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
