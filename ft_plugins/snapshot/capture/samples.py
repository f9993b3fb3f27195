"""Detect that a tensor was changed while it was copied in the background: samples of its bytes, before and after.

Invariant: if a sampled byte of a copy is not the byte of the version point, the copy is refused. The version counter of
a tensor does not count changes through `.data`, nor those by code outside of torch; nor does it see a change that is
undone before the fence, as when averaged weights are swapped in for an evaluation. A sample is up to four runs of
bytes, spread evenly, so a change of a few elements may be missed.

Only host memory is sampled: reading from a device would make the training thread wait for it.

In: views of live tensors, and of their copies. Out: nothing, or StateChangedError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ...errors import StateChangedError
from .layout import CaptureBucket, SlotPiece

Bytes = npt.NDArray[np.uint8]

_RUNS, _RUN = 4, 256  # of a sample; bytes of each: fewer and longer runs touch fewer pages


def sample_of(data: Bytes) -> Bytes:
    """A view of up to 1 KiB of contiguous bytes, from the first to the last but two."""
    if data.nbytes <= _RUNS * _RUN:
        return data
    step = (data.nbytes - _RUN) // (_RUNS - 1)
    return np.ndarray((_RUNS, _RUN), np.uint8, buffer=data.data, strides=(step, 1))


def digest_of(sample: Bytes) -> int:
    """The digest of a sample's present bytes."""
    return xxhash.xxh3_64_intdigest(sample.tobytes())


class CopySamples:
    """Samples of the pieces of buckets that are copied in the background."""

    def __init__(self, buckets: Sequence[CaptureBucket], bytes_of: Mapping[str, torch.Tensor]) -> None:
        """`bytes_of` are the bytes of the live tensors, by item."""
        self._samples = [
            [
                (piece, sample_of(_part(piece, bytes_of)))
                for piece in bucket.pieces
                if bytes_of[piece.item].device.type == "cpu"
            ]
            for bucket in buckets
        ]
        self._digests: list[list[int]] = []

    def take(self) -> None:
        """Digest all samples, at the version point, in the training thread."""
        self._digests = [[digest_of(sample) for _, sample in samples] for samples in self._samples]

    def require_unchanged(self, bucket: int, slot: Bytes | None, rank: int, iteration: int) -> None:
        """Compare a bucket as copied to `slot` (None: as the live tensors are now) with `take`. `rank` and
        `iteration` are for the message. Raises StateChangedError, naming the item that differs."""
        for (piece, sample), digest in zip(self._samples[bucket], self._digests[bucket], strict=True):
            copied = sample if slot is None else sample_of(slot[piece.offset : piece.offset + piece.nbytes])
            if digest_of(copied) != digest:
                raise StateChangedError(
                    f"rank {rank}: '{piece.item}' was changed after the end of iteration {iteration} and before the "
                    "next update, while its snapshot was being copied; that snapshot is dropped, the one before it "
                    "stays: swap averaged weights in and back within one iteration, after its update, or evaluate a "
                    "copy of the model"
                )

    def close(self) -> None:
        self._samples.clear()


def _part(piece: SlotPiece, bytes_of: Mapping[str, torch.Tensor]) -> Bytes:
    part: Bytes = bytes_of[piece.item][piece.item_offset : piece.item_offset + piece.nbytes].numpy()
    return part
