"""Compare the live state with a sealed slot, bucket by bucket, and name the items that differ.

Invariant: nothing is written to the segment. The only extra memory is one bucket, as for parity (`copiers.Encoder`),
while it lasts.

In: the layout, flat views of live tensors, a slot. Out: `ItemDifference` by item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from ...model.inventory import Item
from ..segment.segment import Segment
from .copiers import Bytes, Copier, as_words
from .layout import CaptureBucket, Layout, SlotPiece

MEASURED = 4096  # elements of an item in a bucket: the fence waits for this


class ItemDifferences:
    """The items of a slot that differ from the live ones."""

    def __init__(self, segment: Segment, layout: Layout, index: int, copiers: Mapping[torch.device, Copier]) -> None:
        """`copiers`: those of capture, by device."""
        self._data, self._copiers = segment.data(index), copiers
        self._items = {item.name: item for stream in layout.streams for item in stream.items}
        pinned = any(device.type == "cuda" for device in copiers)
        largest = max((bucket.nbytes for bucket in layout.buckets), default=0)
        self._staging = torch.empty(largest, dtype=torch.uint8, pin_memory=pinned)
        self.found: dict[str, tuple[int, float]] = {}  # by item: elements that differ, by how much at most

    def compare(self, bucket: CaptureBucket, flat: Mapping[str, torch.Tensor]) -> None:
        """Compare one bucket. `flat`: the bytes of the live tensors by item."""
        copies: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for piece in bucket.pieces:
            at, live = piece.offset - bucket.offset, flat[piece.item]
            source = live[piece.item_offset : piece.item_offset + piece.nbytes]
            destinations, sources = copies.setdefault(live.device, ([], []))
            destination, source = as_words(self._staging[at : at + piece.nbytes], source)
            destinations.append(destination)
            sources.append(source)
        for device, (destinations, sources) in copies.items():
            self._copiers[device].copy(destinations, sources)
        staged: Bytes = self._staging.numpy()
        for piece in bucket.pieces:
            at = piece.offset - bucket.offset
            now, then = staged[at : at + piece.nbytes], self._data[piece.offset : piece.offset + piece.nbytes]
            if not np.array_equal(now, then):
                self._add(piece, now, then)

    def _add(self, piece: SlotPiece, now: Bytes, then: Bytes) -> None:
        elements, largest = difference(self._items[piece.item], now, then)
        before = self.found.get(piece.item, (0, 0.0))
        self.found[piece.item] = elements + before[0], largest if largest != largest else max(largest, before[1])


def difference(item: Item, now: Bytes, then: Bytes) -> tuple[int, float]:
    """How many elements of `item` differ in bytes that do, and by how much the first MEASURED of them at most; nan if
    they are no numbers."""
    dtype: torch.dtype = getattr(torch, item.dtype)
    word = np.dtype(f"i{min(dtype.itemsize, 8)}")  # a complex number is two
    words = [one.view(word) for one in (now, then)]
    apart = np.flatnonzero(words[0] != words[1])
    first = apart[:MEASURED]
    if dtype.itemsize > 8 or dtype.is_complex:
        return len(apart), math.nan
    values = [torch.from_numpy(one[first]).view(dtype).double() for one in words]
    finite = all(bool(torch.isfinite(one).all()) for one in values)
    return len(apart), float((values[0] - values[1]).abs().max()) if finite else math.nan
