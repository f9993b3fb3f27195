"""Where each captured byte lies in a slot: the inventory, split over the ranks that hold it identically. Pure.

Invariant: the shares of a replica set are disjoint and cover its bytes once (REFT, section 4.1); two ranks of a set
compute the same cuts without talking. The cut has two levels, nodes first: every node of the set receives an equal
part, then the ranks of a node share its part, so that a lost node takes the same amount of state with it whatever the
number of its ranks. Unique items (a set of one) belong to their holder whole.

In: `Inventory`, node of each rank. Out: `Layout`: pieces in slot order, grouped into buckets; and `shares`, with which
the readers of a set put it together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model.inventory import Inventory, Item

ALIGNMENT = 64  # bytes: items start on a cache line, so that views of any dtype are aligned and copies are fast


@dataclass(frozen=True)
class Piece:
    """Bytes `item_offset .. item_offset + nbytes` of an item lie at `offset` of the slot's data area."""

    item: str
    item_offset: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """A contiguous run of the data area that is copied and digested as one."""

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


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


@dataclass(frozen=True)
class Layout:
    """A rank's slot: `synchronous` buckets are copied at the version point, `background` ones behind the next step.

    Buckets are numbered in that order; digest i belongs to bucket i.
    """

    rank: int
    streams: tuple[ReplicaStream, ...]
    synchronous: tuple[Bucket, ...]
    background: tuple[Bucket, ...]
    nbytes: int

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, in the order of their digests."""
        return self.synchronous + self.background

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
        return "\n".join(lines)


def cut(nbytes: int, parts: int) -> list[tuple[int, int]]:
    """`parts` consecutive ranges of near equal size, on multiples of ALIGNMENT but for the end."""
    lines = -(-nbytes // ALIGNMENT)
    edges = [min(nbytes, lines * i // parts * ALIGNMENT) for i in range(parts)] + [nbytes]
    return list(zip(edges, edges[1:], strict=False))


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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pieces_of(stream: ReplicaStream, rank: int) -> list[Piece]:
    """The parts of the stream's items that lie in the rank's share. Padding between items belongs to no piece."""
    own = stream.share_of(rank)
    pieces = []
    for item, start in zip(stream.items, stream.offsets, strict=True):
        low, high = max(start, own.start), min(start + item.nbytes, own.stop)
        if low < high:
            pieces.append(Piece(item.name, low - start, stream.slot_offset + low - own.start, high - low))
    return pieces


def _buckets(pieces: Sequence[Piece], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Consecutive pieces, cut where a bucket is full."""
    buckets: list[Bucket] = []
    held: list[Piece] = []

    def close() -> None:
        if held:
            start, end = held[0].offset, held[-1].offset + held[-1].nbytes
            buckets.append(Bucket(start, end - start, tuple(held)))
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
            held.append(Piece(piece.item, piece.item_offset + done, piece.offset + done, nbytes))
            done += nbytes
    close()
    return tuple(buckets)
