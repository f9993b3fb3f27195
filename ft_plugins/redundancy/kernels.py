"""Parity of bytes: sums of products over GF(256) of uint8 arrays, in place.

Invariant: a source that is shorter than a target is padded with zeros; one that is longer than all targets is rejected.
The loop is compiled by llvmlite, or NumPy over blocks that stay in cache; both give the same bytes.
One source is XORed as fast by NumPy, so LLVM, which takes 50 ms and 40 MB, is loaded when there is first more to do.
Compiled, a call of many megabytes is one native call without the GIL; NumPy takes the GIL at every block. Calls share
no state: threads may call at the same time, for different targets.

Encoding, adding one frame to a parity, and decoding one or several lost blocks are all the same call; the factors come
from `parity.py`. `loops` overrides the implementation, for tests and benchmarks/parity.py.

In: one-dimensional contiguous uint8 arrays at any address, of any length; sources may be read-only.
Out: changed targets. Raises ValueError for arrays that do not match, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from . import blocked

Bytes = npt.NDArray[np.uint8]
Rows = tuple[tuple[int, ...], ...]  # factors: a row for each target, in it one for each source
_UINT8 = np.dtype(np.uint8)

MAX_SOURCES = 8  # sources per loop: with more, their memory streams evict each other


class Loops(Protocol):
    """The interface of blocked.py and compiled.py."""

    def combine(self, targets: Sequence[Bytes], sources: Sequence[Bytes], factors: Rows, overwrite: bool) -> None:
        """targets[i] += sum_j factors[i][j] * sources[j]. At least one source and target, all of one size."""


@cache
def fastest_loops() -> Loops:
    """Compiled, if that is possible here."""
    try:
        from . import compiled
    except (ImportError, AttributeError):  # AttributeError: a folder named llvmlite in the working directory
        return blocked
    return compiled


def combine_into(
    targets: Sequence[Bytes], sources: Sequence[Bytes], factors: Sequence[Sequence[int]], *, overwrite: bool = False,
    loops: Loops | None = None,
) -> None:  # fmt: skip
    """targets[i] += sum_j factors[i][j] * sources[j], as far as each target reaches.

    += is XOR; with `overwrite` the previous content of the targets is ignored, which saves clearing them. Memory is
    passed once per MAX_SOURCES sources.
    """
    rows = tuple(map(tuple, factors))
    _check_rows(rows, len(targets), len(sources))
    _check_arrays(targets, sources)
    if loops is None:
        loops = blocked if rows == ((1,),) else fastest_loops()
    if len({array.size for array in (*targets, *sources)}) == 1 and targets and 0 < len(sources) <= MAX_SOURCES:
        loops.combine(targets, sources, rows, overwrite)  # the usual case, without slicing
        return
    for start, stop, reaching, present in _ranges(targets, sources):
        into = [targets[at][start:stop] for at in reaching]
        for first in range(0, len(present), MAX_SOURCES):
            some = present[first : first + MAX_SOURCES]
            used = tuple(tuple(rows[row][at] for at in some) for row in reaching)
            loops.combine(into, [sources[at][start:stop] for at in some], used, overwrite and first == 0)
    if overwrite:
        longest = max((source.size for source in sources), default=0)
        for target in targets:
            target[longest:].fill(0)


def _ranges(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Ranges over which the same targets and sources have bytes, and the indices of those targets and sources."""
    start = 0
    for stop in sorted({array.size for array in (*targets, *sources)} - {0}):
        reaching, present = (
            [at for at, array in enumerate(arrays) if array.size >= stop] for arrays in (targets, sources)
        )
        if reaching and present:
            yield start, stop, reaching, present
        start = stop


def _check_arrays(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for array in (*targets, *sources):
        if array.dtype != _UINT8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(
                f"expected contiguous uint8 arrays of one dimension, found {array.dtype}, shape {array.shape}, "
                f"strides {array.strides}"
            )
    if not all(target.flags.writeable for target in targets):
        raise ValueError("a target is read-only; parity is added in place")
    size = max((target.size for target in targets), default=0)
    for source in sources:
        if source.size > size:
            raise ValueError(f"a source of {source.size} bytes does not fit a target of {size}")


@lru_cache(1024)
def _check_rows(rows: Rows, targets: int, sources: int) -> None:
    if [len(row) for row in rows] != [sources] * targets:
        raise ValueError(
            f"{targets} targets and {sources} sources have factors {rows}: expected a row for each target, with a "
            "factor for each source"
        )
    for factor in (factor for row in rows for factor in row):
        if not 0 <= factor <= 255:
            raise ValueError(f"factor {factor} is not in GF(256): expected 0 to 255")
