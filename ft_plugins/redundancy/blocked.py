"""The parity loops in NumPy, over blocks that stay in cache; used if numba is not installed.

Invariant: the same bytes as compiled.py. All arrays are uint8, contiguous and of the target's size; any length, any
alignment. With `overwrite` the previous content of the target is ignored. Doubling takes four passes over bytes, half
the time of the usual arithmetic on masked words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .field import POLYNOMIAL

Bytes = npt.NDArray[np.uint8]

XOR_BYTES = 256 << 10  # a block of the target stays in the L2 cache while all sources are added
FIELD_BYTES = 64 << 10  # so do one block each of P, Q, the sum and the scratch buffer
_REDUCTION = np.uint8(POLYNOMIAL & 0xFF)


def xor(target: Bytes, sources: Sequence[Bytes], overwrite: bool) -> None:
    """target += sum of sources."""
    for start in range(0, target.size, XOR_BYTES):
        block = target[start : start + XOR_BYTES]
        if overwrite:
            np.copyto(block, sources[0][start : start + XOR_BYTES])
        for source in sources[1:] if overwrite else sources:
            np.bitwise_xor(block, source[start : start + XOR_BYTES], out=block)


def scale(target: Bytes, source: Bytes, factor: int, overwrite: bool) -> None:
    """target += factor * source."""
    whole, scratch = np.empty((2, min(FIELD_BYTES, target.size)), dtype=np.uint8)
    for start in range(0, target.size, FIELD_BYTES):
        block = target[start : start + FIELD_BYTES]
        if overwrite:
            block.fill(0)
        power = whole[: block.size]
        np.copyto(power, source[start : start + FIELD_BYTES])
        _add_scaled(block, power, factor, scratch[: block.size])


def pq(p: Bytes, q: Bytes, sources: Sequence[Bytes], factor: int, overwrite: bool) -> None:
    """p += sum_j sources[j], q += factor * sum_j 2**j sources[j]."""
    whole, scratch = np.empty((2, min(FIELD_BYTES, p.size)), dtype=np.uint8)
    for start in range(0, p.size, FIELD_BYTES):
        block, weighted = p[start : start + FIELD_BYTES], q[start : start + FIELD_BYTES]
        if overwrite:
            block.fill(0)
            weighted.fill(0)
        total = whole[: block.size]
        for place, source in enumerate(reversed(sources)):  # Horner's rule
            part = source[start : start + FIELD_BYTES]
            np.bitwise_xor(block, part, out=block)
            if place == 0:
                np.copyto(total, part)
            else:
                _double(total, scratch[: block.size])
                np.bitwise_xor(total, part, out=total)
        _add_scaled(weighted, total, factor, scratch[: block.size])


def _double(values: Bytes, scratch: Bytes) -> None:
    """values *= 2: shift left by one bit, and reduce on overflow."""
    np.less(values.view(np.int8), 0, out=scratch.view(np.bool_))
    np.multiply(scratch, _REDUCTION, out=scratch)
    np.add(values, values, out=values)
    np.bitwise_xor(values, scratch, out=values)


def _add_scaled(target: Bytes, values: Bytes, factor: int, scratch: Bytes) -> None:
    """target += factor * values, one bit of the factor at a time. Overwrites `values`."""
    while factor:
        if factor & 1:
            np.bitwise_xor(target, values, out=target)
        factor >>= 1
        if factor:
            _double(values, scratch)
