"""Parity of bytes: sums over GF(256) of uint8 arrays, added in place, optionally verifying the sources.

Invariant: a source that is shorter than its target is padded with zeros; a longer one is rejected, except by
`digest_xor_into`. The loops are chosen once, on import: compiled by numba (the `fast` extra), or NumPy over blocks that
stay in cache. Both give the same bytes. With numba a call of many megabytes is one native call without the GIL; NumPy
takes the GIL at every block. Calls share no state: threads may call at the same time, for different targets.

The SMP calls only `scale_xor_into`, as frames arrive one by one. The other functions add several sources in one pass,
or verify while they add; tests and benchmarks/parity.py alone call them. `loops` selects the implementation, for these
two callers.

Below, += is XOR into the target. With `overwrite` the previous content of the target is ignored, which saves clearing
it.

In: one-dimensional contiguous uint8 arrays at any address, of any length; sources may be read-only.
Out: changed targets. Raises ValueError for arrays that do not match, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CorruptSlotError
from . import blocked
from .field import power

Bytes = npt.NDArray[np.uint8]

MAX_SOURCES = 8  # sources per loop: with more, their memory streams evict each other
WHOLE_BYTES = 1 << 20  # the largest bucket that is still in cache when its digest is known
DIGEST_BYTES = 256 << 10  # block of a larger bucket: digested, then added while in cache


class Loops(Protocol):
    """The interface of blocked.py and compiled.py. At least one source, all of the target's size."""

    def xor(self, target: Bytes, sources: Sequence[Bytes], overwrite: bool) -> None:
        """target += sum of sources."""
        ...

    def scale(self, target: Bytes, source: Bytes, factor: int, overwrite: bool) -> None:
        """target += factor * source."""
        ...

    def pq(self, p: Bytes, q: Bytes, sources: Sequence[Bytes], factor: int, overwrite: bool) -> None:
        """p += sum of sources, q += factor * sum_j 2**j sources[j]."""
        ...


def _choose() -> Loops:
    try:
        from . import compiled
    except (ImportError, AttributeError):  # AttributeError: a folder named numba in the working directory
        return blocked
    return compiled


LOOPS = _choose()


def xor_many_into(target: Bytes, sources: Sequence[Bytes], *, overwrite: bool = False, loops: Loops = LOOPS) -> None:
    """target += sum of sources; the target passes through the cache once per MAX_SOURCES sources."""
    _check((target,), sources)
    for start, stop, present in _ranges(sources):
        for first in range(0, len(present), MAX_SOURCES):
            parts = [sources[at][start:stop] for at in present[first : first + MAX_SOURCES]]
            loops.xor(target[start:stop], parts, overwrite and first == 0)
    if overwrite:
        target[_longest(sources) :].fill(0)


def scale_xor_into(target: Bytes, source: Bytes, factor: int, *, overwrite: bool = False, loops: Loops = LOOPS) -> None:
    """target += factor * source; factor 1 is plain XOR, 0 adds nothing."""
    _check((target,), (source,), factor)
    _add(target, source, factor, overwrite, loops)


def pq_into(
    p: Bytes,
    q: Bytes,
    sources: Sequence[Bytes],
    exponents: Sequence[int],
    *,
    overwrite: bool = False,
    loops: Loops = LOOPS,
) -> None:
    """p += sum_j sources[j] and q += sum_j 2**exponents[j] sources[j], reading each source once.

    Sources with consecutive exponents share a pass over memory, so a stripe's data is fastest all in one call.
    """
    _check((p, q), sources)
    if len(exponents) != len(sources):
        raise ValueError(f"{len(sources)} sources have {len(exponents)} exponents")
    for start, stop, present in _ranges(sources):
        for number, run in enumerate(_runs(present, exponents)):
            parts = [sources[at][start:stop] for at in run]
            loops.pq(p[start:stop], q[start:stop], parts, power(exponents[run[0]]), overwrite and number == 0)
    if overwrite:
        for target in (p, q):
            target[_longest(sources) :].fill(0)


def digest_xor_into(
    target: Bytes,
    source: Bytes,
    buckets: Sequence[tuple[int, int, int]],
    factor: int = 1,
    name: str = "source",
    *,
    overwrite: bool = False,
    loops: Loops = LOOPS,
) -> None:
    """target += factor * source, verifying every bucket (offset, nbytes, xxh3-64) of the source.

    The buckets cover the whole source, so no byte is added unverified. If the source is longer than the target, all of
    it is verified and what fits is added.

    Raises CorruptSlotError at the first bucket that does not match; discard the target then. Earlier buckets are
    already added, and so is a corrupt bucket larger than WHOLE_BYTES, because it is digested and added block by block.
    """
    _check((target,), (source[: target.size],), factor)
    _check_cover(source, buckets, name)
    for number, (offset, nbytes, digest) in enumerate(buckets):
        whole = source[offset : offset + nbytes]
        if nbytes <= WHOLE_BYTES:
            actual = xxhash.xxh3_64_intdigest(whole.data)
        else:
            actual = _digest_and_add(target[offset : offset + nbytes], whole, factor, overwrite, loops)
        if actual != digest:
            raise CorruptSlotError(
                f"{name}: bucket {number} ({nbytes} bytes at {offset}) does not match its digest: expected "
                f"{digest:016x}, found {actual:016x}; discard the parity that was computed from it"
            )
        if nbytes <= WHOLE_BYTES:
            _add(target[offset : offset + nbytes], whole, factor, overwrite, loops)
    if overwrite:
        target[source.size :].fill(0)


def _digest_and_add(target: Bytes, source: Bytes, factor: int, overwrite: bool, loops: Loops) -> int:
    """target += factor * source, block by block. Returns the digest of all of `source`."""
    running = xxhash.xxh3_64()
    for start in range(0, source.size, DIGEST_BYTES):
        block = source[start : start + DIGEST_BYTES]
        running.update(block.data)
        _add(target[start : start + DIGEST_BYTES], block, factor, overwrite, loops)
    return int(running.intdigest())


def _add(target: Bytes, source: Bytes, factor: int, overwrite: bool, loops: Loops) -> None:
    """target += factor * source, over the length of the shorter one; `overwrite` also clears the target beyond it."""
    nbytes = min(source.size, target.size) if factor else 0
    if overwrite:
        target[nbytes:].fill(0)
    if not nbytes:
        return
    target, source = target[:nbytes], source[:nbytes]
    if factor == 1:
        loops.xor(target, (source,), overwrite)
    else:
        loops.scale(target, source, factor, overwrite)


def _longest(sources: Sequence[Bytes]) -> int:
    return max((source.size for source in sources), default=0)


def _ranges(sources: Sequence[Bytes]) -> Iterator[tuple[int, int, list[int]]]:
    """Ranges over which the same sources have bytes, and the indices of those sources."""
    start = 0
    for stop in sorted({source.size for source in sources} - {0}):
        yield start, stop, [at for at, source in enumerate(sources) if source.size >= stop]
        start = stop


def _runs(present: Sequence[int], exponents: Sequence[int]) -> Iterator[list[int]]:
    """The indices of the sources in runs of consecutive ascending exponents, at most MAX_SOURCES in a run."""
    run: list[int] = []
    for at in sorted(present, key=lambda at: exponents[at]):
        if run and (exponents[at] != exponents[run[-1]] + 1 or len(run) == MAX_SOURCES):
            yield run
            run = []
        run.append(at)
    if run:
        yield run


def _check(targets: Sequence[Bytes], sources: Sequence[Bytes], factor: int = 1) -> None:
    for array in (*targets, *sources):
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(
                f"expected contiguous uint8 arrays of one dimension, found {array.dtype}, shape {array.shape}, "
                f"strides {array.strides}"
            )
    size = targets[0].size
    for target in targets:
        if not target.flags.writeable:
            raise ValueError("a target is read-only; parity is added in place")
        if target.size != size:
            raise ValueError(f"targets have {size} and {target.size} bytes; expected the same size")
    for source in sources:
        if source.size > size:
            raise ValueError(f"a source of {source.size} bytes does not fit a target of {size}")
    if not 0 <= factor <= 255:
        raise ValueError(f"factor {factor} is not in GF(256): expected 0 to 255")


def _check_cover(source: Bytes, buckets: Sequence[tuple[int, int, int]], name: str) -> None:
    end = 0
    for number, (offset, nbytes, _) in enumerate(buckets):
        if offset != end or nbytes < 0:
            raise ValueError(
                f"{name}: bucket {number} is {nbytes} bytes at {offset}, expected to start at {end}, with 0 bytes or "
                "more"
            )
        end += nbytes
    if end != source.size:
        raise ValueError(f"{name}: buckets cover {end} of {source.size} bytes; the rest would be added unverified")
