"""The parity loop in NumPy, over blocks that stay in cache; used where nothing can be compiled.

Invariant: the same bytes as compiled.py. All arrays are uint8, contiguous and of one size; any length, any alignment.
With `overwrite` the previous content of the targets is ignored.

A sum of products is computed by Horner's rule over the bits of the factors: double the sum, add the sources whose
factor has the next bit. So all sources share at most seven doublings, each of which takes four passes over a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .field import POLYNOMIAL

Bytes = npt.NDArray[np.uint8]
Rows = tuple[tuple[int, ...], ...]

XOR_BYTES = 256 << 10  # a block of the target stays in the L2 cache while all sources are added
FIELD_BYTES = 64 << 10  # so do a block of the target, the sum and the scratch buffer
_REDUCTION = np.uint8(POLYNOMIAL & 0xFF)


def combine(targets: Sequence[Bytes], sources: Sequence[Bytes], factors: Rows, overwrite: bool) -> None:
    """targets[i] += sum_j factors[i][j] * sources[j]."""
    size = targets[0].size
    step = XOR_BYTES if max(map(max, factors)) <= 1 else FIELD_BYTES
    whole, scratch = np.empty((2, min(step, size)), dtype=np.uint8)
    for start in range(0, size, step):
        parts = [source[start : start + step] for source in sources]
        for target, row in zip(targets, factors, strict=True):
            block = target[start : start + step]
            bits = max(row).bit_length()
            in_place = overwrite or bits <= 1
            total = block if in_place else whole[: block.size]
            empty = overwrite or not in_place
            for bit in reversed(range(bits)):
                if bit < bits - 1:
                    _double(total, scratch[: block.size])
                for part, factor in zip(parts, row, strict=True):
                    if factor >> bit & 1:
                        np.copyto(total, part) if empty else np.bitwise_xor(total, part, out=total)
                        empty = False
            if empty:
                total.fill(0)
            if not in_place:
                np.bitwise_xor(block, total, out=block)


def _double(values: Bytes, scratch: Bytes) -> None:
    """values *= 2: shift left by one bit, and reduce on overflow."""
    np.less(values.view(np.int8), 0, out=scratch.view(np.bool_))
    np.multiply(scratch, _REDUCTION, out=scratch)
    np.add(values, values, out=values)
    np.bitwise_xor(values, scratch, out=values)
