"""Write a CLEAN slot to storage as a safetensors file, and read it back into a slot.

Invariant: every byte is copied and compared with the digests taken at capture before it is written, and the file is
renamed into place only when it is complete and durable. Reading compares the same digests before the slot is sealed.
All sizes that are read come from the rank's record, which has a digest.

    rank-00003.safetensors
        ft_plugins.digests      uint64, one per bucket
        <item>                  an item of which this rank has captured all, with its dtype and shape
        <item>[2048:4096]       of other items the captured elements, of the flattened tensor
        ft_plugins.gap.<at>     zeros between two items: each begins at a multiple of 64 bytes, as in the slot
        ft_plugins.small        uint8, the encoded small state
        metadata                job, fingerprint, rank, version, layout; the index, for an export: see `index`

Any reader of safetensors reads the items; a dtype that the format lacks is stored as uint8. The library is not used
here: it writes whole tensors at once, cannot be interrupted, and holds the GIL while the SMP has requests to answer; on
reading it trusts the header.

Parity is not written: it protects against lost nodes, whose files are in storage too. After reading, a rank computes it
again.

In: a segment, a checkpoint's folder. Out: durable files; sealed slots. Memory: COPY_BYTES and, if the file system
follows the advice, at most SYNC_BYTES in the page cache.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...base import faults, files
from ...base.files import write_digested
from ...base.intake import Unfit, open_regular
from ...errors import CorruptSlotError, FencedError, ResumeError, StorageError
from ...redundancy.parity import ALIGNMENT
from ..capture import manifest
from ..capture.manifest import TensorRange
from ..segment.claims import slot_to_rebuild
from ..segment.segment import NOT_COMPUTED, Segment
from ..segment.slots import Mark, SlotState, Version
from .checkpoint import (
    FORMAT,
    HEAD_LIMIT,
    Origin,
    RankRecord,
    data_file,
    mixture_reason,
    read_manifest,
    read_record,
    record_file,
    require_own,
)
from .index import staged_text

COPY_BYTES = 8 << 20
SYNC_BYTES = 32 << 20
SMALL_LIMIT = 1 << 30  # bytes of small state, and of a digest table: thousands of times the usual size
_OWN = "ft_plugins."  # before the names of entries that are no items
_DTYPES = {  # of torch: code and bytes of an element
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int64": ("I64", 8),
    "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint64": ("U64", 8), "uint32": ("U32", 4),
    "uint16": ("U16", 2), "bool": ("BOOL", 1), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
}  # fmt: skip


# ---- writing ----


def write_rank(
    folder: Path, segment: Segment, version: Version, origin: Origin,
    proceed: Callable[[int], None] = lambda nbytes: None, *, staged_index: Path | None = None, **facts: object,
) -> RankRecord:  # fmt: skip
    """Durably write the slot of `version` into `folder`, which is created if needed; do nothing if the file exists.

    `proceed` is called before each piece with its size in bytes, and may raise to stop. `staged_index` is the index
    that the trainer left. `facts` go to the fault points. An unfinished file is removed. Raises CorruptSlotError if the
    slot does not match its digests or no longer holds `version`; SegmentError or StorageError if its manifest cannot be
    read or written; OSError.
    """
    rank = segment.rank
    facts = {**facts, "rank": rank, "iteration": version.iteration}
    files.make_private(folder)
    index, digests, small = _sealed(segment, version)
    head = _head(segment, version, origin, small, staged_index)
    seal = xxhash.xxh3_64(head)
    seal.update(digests.tobytes())
    seal.update(small)
    shape = segment.shape
    nbytes = len(head) + digests.nbytes + shape.data_nbytes + len(small)
    record = RankRecord(
        rank, version.lineage, version.iteration, origin.world_size, origin.fingerprint_digest,
        nbytes, shape.data_nbytes, len(digests), shape.layout, seal.hexdigest(), origin.run,
    )  # fmt: skip
    if _present(folder, record):
        return record
    require_own(folder, rank, origin.run)
    (folder / record_file(rank)).unlink(missing_ok=True)  # it would vouch for data that it does not describe
    with _durable(folder / data_file(rank), facts) as write:
        write(head)
        write(digests.tobytes())
        for piece in _verified(segment, index, digests):
            proceed(len(piece))
            if faults.reach("persist.write", **facts) == "enospc":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / data_file(rank)))
            write(piece)
        write(small)
        index_after, digests_after, _ = _sealed(segment, version)
        if index_after != index or not np.array_equal(digests_after, digests):
            raise CorruptSlotError(f"rank {rank}: the slot of version {version} changed while it was being written")
    record = replace(record, mark=int(segment.slot(index).mark))
    write_digested(folder / record_file(rank), asdict(record), shared=True)
    return record


def _head(segment: Segment, version: Version, origin: Origin, small: bytes, staged_index: Path | None) -> bytes:
    """The file's header: length, then JSON, padded so that the data starts at a multiple of ALIGNMENT bytes."""
    shape, rank, buckets = segment.shape, segment.rank, len(segment.data_ranges)
    held = manifest.read(manifest.split(small, f"rank {rank}")[0], f"rank {rank}").tensors
    metadata = {
        "format": FORMAT, "job": origin.job, "run": origin.run, "fingerprint": origin.fingerprint_digest,
        "rank": str(rank),
        "world_size": str(origin.world_size), "lineage": str(version.lineage), "iteration": str(version.iteration),
        "layout": str(shape.layout),
    }  # fmt: skip
    if staged_index is not None and (text := staged_text(staged_index)) is not None:
        metadata["index"] = text
    tensors: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, dtype, sizes, nbytes in (
        (f"{_OWN}digests", "U64", [buckets], 8 * buckets),
        *_entries(held, shape.data_nbytes),
        (f"{_OWN}small", "U8", [len(small)], len(small)),
    ):
        if name in tensors:
            raise StorageError(f"rank {rank}: two tensors are called '{name}'; give one of them another name")
        tensors[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(tensors, separators=(",", ":"))
    if len(text) > HEAD_LIMIT - ALIGNMENT:
        raise StorageError(f"rank {rank}: the names of its tensors take {len(text)} bytes; at most {HEAD_LIMIT} fit")
    text += " " * (-(8 + len(text) + 8 * buckets) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text.encode()


def _entries(held: Sequence[TensorRange], nbytes: int) -> Iterator[tuple[str, str, list[int], int]]:
    """Name, dtype, shape and bytes of each entry of a data area of `nbytes`, in order. Raises StorageError."""
    at = 0
    for one in sorted(held, key=lambda one: one.offset):
        if one.offset > at:
            yield f"{_OWN}gap.{at}", "U8", [one.offset - at], one.offset - at
        size, (dtype, width) = one.stop - one.start, _DTYPES.get(one.dtype, ("U8", 1))
        if one.offset < at or size <= 0 or size % width or one.start % width:
            raise StorageError(f"the manifest has {size} bytes of '{one.name}' at {one.offset}, expected from {at} on")
        first, count = one.start // width, size // width
        if size == one.whole:
            yield one.name, dtype, list(one.shape) if math.prod(one.shape) == count else [count], size
        else:
            yield f"{one.name}[{first}:{first + count}]", dtype, [count], size
        at = one.offset + size
    if at > nbytes:
        raise StorageError(f"the manifest has tensors up to byte {at} of {nbytes}")
    if at < nbytes:
        yield f"{_OWN}gap.{at}", "U8", [nbytes - at], nbytes - at


def _sealed(segment: Segment, version: Version) -> tuple[int, Any, bytes]:
    """The slot of `version`, its data digests and its small state, covered by the seal. Raises CorruptSlotError."""
    for slot in segment.slots():
        if slot.version == version and slot.state is SlotState.CLEAN:
            digests = segment.digests(slot.index)[: len(segment.data_ranges)].copy()
            small = segment.small(slot.index)
            after = segment.slot(slot.index)
            if (after.version, after.state) == (version, SlotState.CLEAN):  # still sealed after the copy
                return slot.index, digests, small
    raise CorruptSlotError(f"rank {segment.rank}: no slot holds version {version} any more")


def _verified(segment: Segment, index: int, digests: Any) -> Iterator[memoryview]:
    """The data area of a slot in order, copied piece by piece into one buffer; gaps between buckets are zeros.

    The last piece of a bucket is yielded only if the whole bucket matched its digest. Raises CorruptSlotError.
    """
    data = segment.data(index)
    buffer = np.empty(COPY_BYTES, dtype=np.uint8)
    at = 0
    for number, (offset, nbytes) in sorted(enumerate(segment.data_ranges), key=lambda entry: entry[1][0]):
        for start in range(at, offset, COPY_BYTES):
            yield memoryview(bytes(min(COPY_BYTES, offset - start)))
        digest, at = xxhash.xxh3_64(), offset + nbytes
        for start in range(offset, at, COPY_BYTES):
            piece = buffer[: min(COPY_BYTES, at - start)]
            piece[:] = data[start : start + len(piece)]
            digest.update(piece.data)
            if start + len(piece) == at and digest.intdigest() != int(digests[number]):
                raise CorruptSlotError(
                    f"rank {segment.rank}: bucket {number} of slot {index} does not match its digest"
                )
            yield piece.data
    for start in range(at, segment.shape.data_nbytes, COPY_BYTES):
        yield memoryview(bytes(min(COPY_BYTES, segment.shape.data_nbytes - start)))


@contextmanager
def _durable(path: Path, facts: Mapping[str, object]) -> Iterator[Callable[[Any], None]]:
    """A file that is renamed into place once it is complete and durable, and removed on failure."""
    unsynced = 0

    def write(piece: Any) -> None:
        nonlocal unsynced
        files.write_all(descriptor, piece)
        unsynced += len(piece)
        if unsynced >= SYNC_BYTES:  # else the page cache holds the whole file, and the last fsync waits for it
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            unsynced = 0

    def synced(descriptor: int) -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        faults.reach("persist.rename", **facts)

    with files.replacing(path, durable=True, before_rename=synced, shared=True) as descriptor:
        yield write
        faults.reach("persist.file", **facts)


# ---- reading ----


def read_rank(folder: Path, segment: Segment, version: Version, token: int) -> int:
    """Read this rank's file into a slot of `segment` and seal it, without parity. Returns the slot.

    Raises StorageError if a file is missing or damaged (the slot may be DIRTY then), ResumeError if its layout differs
    from the segment's, FencedError if `token` is superseded.
    """
    rank = segment.rank
    path = folder / data_file(rank)
    try:
        record = read_record(folder, rank, read_manifest(folder))
    except FileNotFoundError as error:
        raise StorageError(f"{folder}: its manifest is gone") from error
    shape, buckets = segment.shape, segment.data_ranges
    if (record.data_nbytes, record.buckets, record.layout) != (shape.data_nbytes, len(buckets), shape.layout):
        raise ResumeError(
            f"rank {rank}: checkpoint {folder} has another layout ({record.data_nbytes} bytes in {record.buckets} "
            f"buckets, now {shape.data_nbytes} in {len(buckets)}: ranks per node, bucket size or model changed); start "
            "with the settings it was written with, or give --ftp-resume memory to continue from memory, or "
            "--ftp-resume fresh to start from the beginning"
        )
    if (record.rank, record.version) != (rank, version):
        raise StorageError(f"{folder / record_file(rank)}: it belongs to rank {record.rank}, version {record.version}")
    if record.mark == Mark.MISMATCHED:
        raise StorageError(f"{folder}: {mixture_reason(version, [rank])}")
    head, digests, small = read_head(path, record)
    if len(small) > shape.small_nbytes:
        raise StorageError(
            f"rank {rank}: checkpoint {folder} has {len(small)} bytes of small state; this job claimed "
            f"{shape.small_nbytes} at start"
        )
    start = len(head) + digests.nbytes
    slots = segment.slots()
    same = [slot.index for slot in slots if slot.state is SlotState.CLEAN and slot.version == version]
    index = same[0] if same else slot_to_rebuild(segment)  # two slots never hold the same version
    segment.dirty(index, version, token)
    _read_data(path, start, segment, index, digests, token)
    segment.write_small(index, small)
    table = np.full(shape.digests, NOT_COMPUTED, dtype=np.uint64)
    table[: len(digests)] = digests
    segment.digests(index)[:] = table
    segment.set_cursor(index, None)
    segment.seal(index, version, token, small, table)
    if Mark(record.mark).preferred:
        segment.mark(version, Mark(record.mark))
    return index


def read_head(path: Path, record: RankRecord) -> tuple[bytes, Any, bytes]:
    """Read a rank's file without its data: header, digest table and small state, verified by the seal. The data follows
    the digest table. Raises StorageError."""
    try:
        with open(open_regular(path), "rb") as file:  # not mapped: an I/O error would end the process
            size = os.fstat(file.fileno()).st_size
            if size != record.nbytes:
                raise StorageError(f"{path}: {size} bytes, but {record.nbytes} were written")
            length = file.read(8)
            head = length + file.read(min(int.from_bytes(length, "little"), HEAD_LIMIT))
            sizes = 8 * record.buckets, record.nbytes - len(head) - 8 * record.buckets - record.data_nbytes
            if not all(0 <= nbytes <= SMALL_LIMIT for nbytes in sizes):
                raise StorageError(f"{path}: its header does not match its record")
            table = file.read(sizes[0])
            file.seek(record.data_nbytes, os.SEEK_CUR)
            small = file.read(sizes[1])
    except (OSError, Unfit) as error:
        raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    seal = xxhash.xxh3_64(head)
    seal.update(table)
    seal.update(small)
    if seal.hexdigest() != record.seal:
        raise StorageError(f"{path}: header, digest table or small state does not match the digest")
    return head, np.frombuffer(table, dtype=np.uint64), small


def _read_data(path: Path, start: int, segment: Segment, index: int, digests: Any, token: int) -> None:
    """Read the data of a rank's file into a slot, bucket by bucket, and compare each with its digest in the slot."""
    data = segment.data(index)
    try:
        descriptor = open_regular(path)
    except (OSError, Unfit) as error:
        raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    with open(descriptor, "rb", buffering=0) as file:
        for number, (offset, nbytes) in enumerate(segment.data_ranges):
            if segment.header.token != token:
                raise FencedError(f"rank {segment.rank}: token {token} was superseded by {segment.header.token}")
            faults.reach("restore.storage", bucket=number)
            area = data[offset : offset + nbytes]
            done = 0
            while done < nbytes:
                try:
                    count = os.preadv(file.fileno(), [area[done:].data], start + offset + done)
                except OSError as error:
                    raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
                if not count:
                    raise StorageError(f"{path}: the file ends within bucket {number}")
                done += count
            if xxhash.xxh3_64_intdigest(area.data) != int(digests[number]):
                raise StorageError(f"{path}: bucket {number} does not match the digest taken when it was captured")


def _present(folder: Path, record: RankRecord) -> bool:
    """Whether a rank's file exists and matches `record`, except for its mark."""
    try:
        return replace(read_record(folder, record.rank), mark=record.mark) == record and (
            (folder / data_file(record.rank)).stat().st_size == record.nbytes
        )
    except (StorageError, OSError):
        return False
