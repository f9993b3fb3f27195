"""Describe which elements of which tensors are where in a rank's slot, independent of the job's size.

The manifest is part of the small state of every version. Invariant: the small state suffices to read a slot whose rank,
node or whole job is gone. The manifest names no node.

In: `Layout`, the rank's coordinates in the model. Out: bytes, stored before the host's small state; `Manifest`.
"""

from __future__ import annotations

import zlib
from collections.abc import Container
from dataclasses import astuple, dataclass, fields

import msgpack
from pydantic import TypeAdapter

from ...base.intake import Count, Text, Unfit, shown, typed
from ...errors import SegmentError
from .layout import Layout, pieces_of

REPLICATED, SHARDED, OWN = "replicated", "sharded", "own"
_LARGEST = 8 << 20  # bytes of a decompressed manifest: 80,000 pieces of tensors; decoding takes up to 80 times as much


@dataclass(frozen=True)
class TensorRange:
    """Bytes `start .. stop` of the whole tensor `name`, flattened, at `offset` of the slot's data area.

    `whole` is the size of the tensor in bytes, `role` its `model.inventory.Role`. `kind` is REPLICATED if other ranks
    hold the same bytes, SHARDED if they hold other pieces of the tensor, else OWN. `shape` is that of the item, if its
    memory is in the order of its elements.
    """

    name: Text
    dtype: Text
    role: Text
    kind: Text
    whole: Count
    start: Count
    stop: Count
    offset: Count
    shape: tuple[Count, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The slot of `rank` in a job of `world_size` ranks.

    `coordinates` (pipeline stage, tensor-parallel rank) are the same for all replicas. `ranges` are offset and bytes
    of each bucket. `tensors` says what the data area holds.
    """

    rank: Count
    world_size: Count
    coordinates: tuple[Count, Count]
    ranges: tuple[tuple[Count, Count], ...]
    tensors: tuple[TensorRange, ...]


_ADAPTER = TypeAdapter(Manifest)
_FIELDS = tuple(field.name for field in fields(Manifest))
_ROW = tuple(field.name for field in fields(TensorRange))


def manifest_of(
    layout: Layout, world_size: int, coordinates: tuple[int, int], permuted: Container[str] = ()
) -> Manifest:  # fmt: skip
    """The manifest of every version captured with `layout`. `permuted`: items whose memory has another order than their
    elements."""
    tensors = []
    for stream in layout.streams:
        items = {item.name: item for item in stream.items}
        for piece in pieces_of(stream, layout.rank):
            item = items[piece.item]
            first, _, elements = item.piece or (0, 0, 1)
            width = item.nbytes // (item.piece[1] - item.piece[0]) if item.piece else 0
            kind = REPLICATED if len(item.replicas) > 1 else SHARDED if item.piece else OWN
            whole = elements * width if item.piece else item.nbytes
            start = first * width + piece.item_offset
            stop, role = start + piece.nbytes, item.role.value
            shape = () if item.name in permuted else item.shape
            tensors.append(TensorRange(item.name, item.dtype, role, kind, whole, start, stop, piece.offset, shape))
    return Manifest(layout.rank, world_size, coordinates, tuple(layout.ranges), tuple(tensors))


def write(manifest: Manifest) -> bytes:
    """Encode a manifest. Raises SegmentError if it is larger than `read` accepts."""
    rows = [list(astuple(one)) for one in manifest.tensors]
    plain = msgpack.packb([manifest.rank, manifest.world_size, manifest.coordinates, manifest.ranges, rows])
    if len(plain) > _LARGEST:
        raise SegmentError(
            f"rank {manifest.rank}: the manifest of its {len(rows)} pieces of tensors has {len(plain)} bytes; expected "
            f"at most {_LARGEST}: spread the state over more ranks, or over fewer and larger tensors"
        )
    return zlib.compress(plain)


def read(encoded: bytes, where: str = "a slot") -> Manifest:
    """Decode the manifest of `where`, which errors name. Raises SegmentError for other bytes."""
    try:
        inflater = zlib.decompressobj()
        plain = inflater.decompress(encoded, _LARGEST)
        if inflater.unconsumed_tail:
            raise Unfit(f"it has more than {_LARGEST} bytes")
        *first, rows = msgpack.unpackb(plain, use_list=False)
        tensors = [dict(zip(_ROW, row, strict=True)) for row in rows]
        return typed(_ADAPTER, dict(zip(_FIELDS, [*first, tensors], strict=True)))
    except (zlib.error, ValueError, TypeError, msgpack.UnpackException) as error:
        raise SegmentError(f"the manifest of {where} cannot be read ({error})") from error


def join(encoded: bytes, state: bytes) -> bytes:
    """Join an encoded manifest and the host's state into the small state of a slot."""
    return bytes(msgpack.packb([encoded, state]))


def split(small: bytes, where: str = "a slot") -> tuple[bytes, bytes]:
    """Split the small state of `where` into the encoded manifest and the host's state. Raises SegmentError."""
    try:
        parts = msgpack.unpackb(small)
        if not (isinstance(parts, list) and len(parts) == 2 and all(type(part) is bytes for part in parts)):
            raise Unfit(f"expected two byte strings, found {shown(parts)}")
    except (ValueError, msgpack.UnpackException) as error:
        raise SegmentError(
            f"the small state of {where} cannot be read ({error}); was it written by an older ft_plugins?"
        ) from error
    return parts[0], parts[1]
