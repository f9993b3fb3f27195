"""The parity loops compiled by numba: one pass over memory for all sources, without the GIL.

Invariant: the same bytes as blocked.py. All arrays are uint8, contiguous and of the target's size; any length, any
alignment. With `overwrite` the previous content of the target is ignored. The loops are written for bytes, and LLVM
vectorises them: a doubling is four instructions. There is one loop for each number of sources, compiled on first call:
0.2 to 1.2 s, once per process and number, with the GIL held. To avoid that delay later, call it once at start with a
few bytes. Nothing is cached on disk; threads may call, and compile, at the same time.

Importing this module raises ImportError if numba is missing or does not support this NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from .field import POLYNOMIAL

Bytes = npt.NDArray[np.uint8]

_REDUCTION = POLYNOMIAL & 0xFF


def xor(target: Bytes, sources: Sequence[Bytes], overwrite: bool) -> None:
    """target += sum of sources."""
    _xor_loop(len(sources))(target, _frozen(sources), _mask(overwrite))


def scale(target: Bytes, source: Bytes, factor: int, overwrite: bool) -> None:
    """target += factor * source."""
    _scale_loop(target, *_frozen((source,)), factor, _mask(overwrite))


def pq(p: Bytes, q: Bytes, sources: Sequence[Bytes], factor: int, overwrite: bool) -> None:
    """p += sum_j sources[j], q += factor * sum_j 2**j sources[j]."""
    _pq_loop(len(sources), factor == 1)(p, q, _frozen(sources), factor, _mask(overwrite))


def _mask(overwrite: bool) -> np.uint8:
    """The bits of the target to keep. Reading it even to overwrite it costs nothing: its memory is fetched anyway."""
    return np.uint8(0 if overwrite else 255)


def _frozen(sources: Sequence[Bytes]) -> tuple[Bytes, ...]:
    """Read-only views: numba compiles again for each mixture of writable and read-only arrays."""
    views = tuple(source.view() for source in sources)
    for view in views:
        view.flags.writeable = False
    return views


@numba.njit(inline="always")
def _double(value: Any) -> Any:
    return np.uint8((value << 1) ^ (_REDUCTION if value >= 128 else 0))


@numba.njit(inline="always")
def _times(value: Any, factor: Any) -> Any:
    """factor * value; LLVM hoists the masks of the factor's bits out of the caller's loop."""
    total = np.uint8(0)
    for bit in range(8):
        total = np.uint8(total ^ (value & np.uint8(255 * (factor >> bit & 1))))
        value = _double(value)
    return total


@numba.njit(nogil=True)
def _scale_loop(target: Any, source: Any, factor: Any, mask: Any) -> None:
    for at in range(target.size):
        target[at] = (target[at] & mask) ^ _times(source[at], factor)


@cache
def _plain_sum(count: int) -> Callable[..., Any]:
    """(sources, at) -> the sum of the first `count` sources at index `at`; unrolled, one function per count."""
    if count == 1:
        return numba.njit(lambda sources, at: sources[0][at])  # type: ignore[no-any-return]
    others, last = _plain_sum(count - 1), count - 1
    return numba.njit(lambda sources, at: np.uint8(others(sources, at) ^ sources[last][at]))  # type: ignore[no-any-return]


@cache
def _weighted_sum(count: int, first: int = 0) -> Callable[..., Any]:
    """(sources, at) -> sum_j 2**j sources[first + j] over `count` sources, by Horner's rule."""
    if count == 1:
        return numba.njit(lambda sources, at: sources[first][at])  # type: ignore[no-any-return]
    others = _weighted_sum(count - 1, first + 1)
    return numba.njit(lambda sources, at: np.uint8(_double(others(sources, at)) ^ sources[first][at]))  # type: ignore[no-any-return]


@cache
def _xor_loop(count: int) -> Callable[..., None]:
    total = _plain_sum(count)

    @numba.njit(nogil=True)
    def loop(target: Any, sources: Any, mask: Any) -> None:
        for at in range(target.size):
            target[at] = (target[at] & mask) ^ total(sources, at)

    return loop  # type: ignore[no-any-return]


@cache
def _pq_loop(count: int, plain: bool) -> Callable[..., None]:
    """The loop for `count` sources; with `plain`, for factor 1 only."""
    total, weighted = _plain_sum(count), _weighted_sum(count)

    @numba.njit(nogil=True)
    def plain_loop(p: Any, q: Any, sources: Any, factor: Any, mask: Any) -> None:
        for at in range(p.size):
            plain, own = total(sources, at), weighted(sources, at)
            p[at] = (p[at] & mask) ^ plain
            q[at] = (q[at] & mask) ^ own

    @numba.njit(nogil=True)
    def scaled_loop(p: Any, q: Any, sources: Any, factor: Any, mask: Any) -> None:
        for at in range(p.size):
            plain, own = total(sources, at), weighted(sources, at)
            p[at] = (p[at] & mask) ^ plain
            q[at] = (q[at] & mask) ^ _times(own, factor)

    return plain_loop if plain else scaled_loop  # type: ignore[no-any-return]
