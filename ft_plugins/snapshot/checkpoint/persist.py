"""Write a CLEAN slot to storage as a safetensors file, and read it back into a slot.

Invariant: every byte is copied and compared with the digests taken at capture before it is written, and the file is
renamed into place only when it is complete and durable. Reading compares the same digests before the slot is sealed.
All sizes that are read come from the rank's record, which has a digest.

    rank-00003.safetensors   tensors `digests` (uint64, one per bucket), `data` (uint8, the slot's data area), `small`
                             (uint8, the encoded small state); metadata: job, rank, version, bucket ranges

The safetensors library can read the files but is not used here: it writes whole tensors at once, cannot be interrupted,
and holds the GIL while the SMP has requests to answer; on reading it trusts the header.

Parity is not written: it protects against lost nodes, whose files are in storage too. After reading, a rank computes it
again.

In: a segment, a checkpoint's folder. Out: durable files; sealed slots. Memory: COPY_BYTES and, if the file system
follows the advice, at most SYNC_BYTES in the page cache.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...base import faults, files
from ...base.intake import Unfit, open_regular
from ...errors import CorruptSlotError, FencedError, ResumeError, StorageError
from ..segment.claims import slot_to_rebuild
from ..segment.segment import NOT_COMPUTED, Segment
from ..segment.slots import Mark, SlotState, Version
from .checkpoint import (
    FORMAT,
    HEAD_LIMIT,
    Origin,
    RankRecord,
    data_file,
    make_folder,
    mixture_reason,
    read_record,
    record_file,
)
from .digested_json import write_digested
from .index import copy_into

COPY_BYTES = 8 << 20
SYNC_BYTES = 32 << 20
SMALL_LIMIT = 1 << 30  # bytes of small state, and of a digest table: thousands of times the usual size
_TENSORS = ["digests", "data", "small"]  # in file order


# ---- writing ----


def write_rank(
    folder: Path,
    segment: Segment,
    version: Version,
    origin: Origin,
    proceed: Callable[[int], None] = lambda nbytes: None,
    *,
    staged_index: Path | None = None,
    **facts: object,
) -> RankRecord:
    """Durably write the slot of `version` into `folder`, which is created if needed; do nothing if the file exists.

    `proceed` is called before each piece with its size in bytes, and may raise to stop. `staged_index` is the index
    that the trainer left, which is copied next to the file. `facts` go to the fault points. An unfinished file is
    removed. Raises CorruptSlotError if the slot does not match its digests or no longer holds `version`; OSError.
    """
    rank = segment.rank
    facts = {**facts, "rank": rank, "iteration": version.iteration}
    make_folder(folder)
    index, digests, small = _sealed(segment, version)
    head = _head(segment, version, origin, len(small))
    seal = xxhash.xxh3_64(head)
    seal.update(digests.tobytes())
    seal.update(small)
    shape = segment.shape
    nbytes = len(head) + digests.nbytes + shape.data_nbytes + len(small)
    record = RankRecord(
        rank, version.lineage, version.iteration, origin.world_size, origin.digest,
        nbytes, shape.data_nbytes, len(digests), shape.layout, seal.hexdigest(),
    )  # fmt: skip
    if _present(folder, record):
        return record
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
    if staged_index is not None:
        copy_into(folder, rank, staged_index)
    record = replace(record, mark=int(segment.slot(index).mark))
    write_digested(folder / record_file(rank), asdict(record))
    return record


def _head(segment: Segment, version: Version, origin: Origin, small_nbytes: int) -> bytes:
    """The file's header: length, then JSON, padded so that tensors start at multiples of 8 bytes."""
    shape, buckets = segment.shape, segment.data_ranges
    sizes = [("U64", len(buckets), 8 * len(buckets)), ("U8", shape.data_nbytes, shape.data_nbytes)]
    sizes.append(("U8", small_nbytes, small_nbytes))
    tensors: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "job": origin.job,
            "fingerprint": origin.digest,
            "rank": str(segment.rank),
            "world_size": str(origin.world_size),
            "lineage": str(version.lineage),
            "iteration": str(version.iteration),
            "layout": str(shape.layout),
            "buckets": json.dumps(buckets, separators=(",", ":")),
        }
    }
    at = 0
    for name, (dtype, count, nbytes) in zip(_TENSORS, sizes, strict=True):
        tensors[name] = {"dtype": dtype, "shape": [count], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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

    with files.replacing(path, durable=True, before_rename=synced) as descriptor:
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
    record = read_record(folder, rank)
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
            if segment.token != token:
                raise FencedError(f"rank {segment.rank}: token {token} was superseded by {segment.token}")
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
