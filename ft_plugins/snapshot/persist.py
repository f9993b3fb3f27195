"""A rank's share in storage: a clean slot written as a safetensors file, and read back into a slot. No sockets.

Invariant: what is written are private copies of what fitted the digests taken at capture, and the file gets its name
when all of it did and is durable; what is read fits them again before the slot is sealed. Nothing is read that the
rank's record, which has a digest, does not give the size of.

    rank-00003.safetensors   tensors `digests` (uint64, one a bucket), `data` (uint8, the slot's data area), `small`
                             (uint8, the encoded small state); metadata: whose, which version, the buckets' ranges

The safetensors library reads the files. It is not used here: it writes whole tensors at one go, cannot be stopped and
holds the interpreter's lock meanwhile, while the SMP has requests to answer; and what it reads, it believes the header.

Parity that lies behind the data in a slot is not written: it protects against lost nodes, whose files are here. A slot
that is read lacks it (`NOT_COMPUTED`), and fits no digest until the trainer has computed it.

In: a segment, a checkpoint's folder. Out: files that outlive the machine; sealed slots. Beside the share itself
COPY_BYTES are held in memory and, where the file system heeds it, SYNC_BYTES in the page cache.
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

from .. import faults, files
from ..errors import CorruptSlotError, FencedError, ResumeError, StorageError
from ..intake import Unfit, open_regular
from .checkpoint import (
    FORMAT,
    HEAD_LIMIT,
    Origin,
    RankRecord,
    data_file,
    differed,
    make_folder,
    read_record,
    record_file,
    write_json,
)
from .index import copy_into
from .segment import NOT_COMPUTED, Segment
from .slots import Mark, SlotState, Version, choose

COPY_BYTES = 8 << 20
SYNC_BYTES = 32 << 20
SMALL_LIMIT = 1 << 30  # bytes of small state and of a digest table: thousands of times what is in one
_TENSORS = ["digests", "data", "small"]  # in the order in which they lie in the file


# ---- writing ----


def write_rank(
    folder: Path,
    segment: Segment,
    version: Version,
    origin: Origin,
    proceed: Callable[[int], None] = lambda nbytes: None,
    *,
    kept: Path | None = None,
    **facts: object,
) -> RankRecord:
    """Write the slot that holds `version` into `folder` (made if need be), durably; nothing if it is there already.

    `proceed` is called before each piece, with the bytes written since the last call: it may raise to stop. `kept` is
    where the trainer has left its index, which is put beside the file. `facts` go to the fault points. Raises
    CorruptSlotError when the slot is not what was captured, or no longer holds `version`; OSError as the file system
    has it. A file that is not finished is removed.
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
        found, again, _ = _sealed(segment, version)
        if found != index or not np.array_equal(again, digests):
            raise CorruptSlotError(f"rank {rank}: version {version} was given up while it was being written")
    if kept is not None:
        copy_into(folder, rank, kept)
    record = replace(record, mark=int(segment.slot(index).mark))
    write_json(folder / record_file(rank), asdict(record))
    return record


def _head(segment: Segment, version: Version, origin: Origin, small_nbytes: int) -> bytes:
    """The file's header: length, then JSON, padded so that the tensors lie on multiples of 8 bytes."""
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
    """Slot, digests of the data and small state of `version`, as their seal covers them. Raises CorruptSlotError."""
    for slot in segment.slots():
        if slot.version == version and slot.state is SlotState.CLEAN:
            digests = segment.digests(slot.index)[: len(segment.data_ranges)].copy()
            small = segment.small(slot.index)
            after = segment.slot(slot.index)
            if (after.version, after.state) == (version, SlotState.CLEAN):  # still sealed when the copy was taken
                return slot.index, digests, small
    raise CorruptSlotError(f"rank {segment.rank}: no slot holds version {version} any more")


def _verified(segment: Segment, index: int, digests: Any) -> Iterator[memoryview]:
    """The data area of a slot in order, as copies in one buffer; zeros where it belongs to no bucket.

    The last piece of a bucket is given out only when all of the bucket has fitted its digest; else CorruptSlotError.
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
    """A file that gets its name when it is written and durable; removed when that fails."""
    unsynced = 0

    def write(piece: Any) -> None:
        nonlocal unsynced
        files.write_all(descriptor, piece)
        unsynced += len(piece)
        if unsynced >= SYNC_BYTES:  # else the page cache takes as much memory again, and the last fsync waits for all
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
    """Read this rank's file into a slot of `segment` and seal it, as a capture does, but for parity; returns the slot.

    Raises StorageError when a file is missing or damaged (the slot may be DIRTY then), ResumeError when it was laid out
    otherwise than `segment`, FencedError when `token` is superseded.
    """
    rank = segment.rank
    path = folder / data_file(rank)
    record = read_record(folder, rank)
    shape, buckets = segment.shape, segment.data_ranges
    if (record.data_nbytes, record.buckets, record.layout) != (shape.data_nbytes, len(buckets), shape.layout):
        raise ResumeError(
            f"rank {rank}: checkpoint {folder} was laid out otherwise ({record.data_nbytes} bytes in {record.buckets} "
            f"buckets, now {shape.data_nbytes} in {len(buckets)}: ranks per node, bucket size or model changed); start "
            "as it was written; --ftp-resume memory goes on with what memory has, --ftp-resume fresh from the beginning"
        )
    if (record.rank, record.version) != (rank, version):
        raise StorageError(f"{folder / record_file(rank)}: it is of rank {record.rank}, version {record.version}")
    if record.mark == Mark.DIFFERING:
        raise StorageError(f"{folder}: {differed(version, [rank])}")
    head, digests, small = read_head(path, record)
    if len(small) > shape.small_nbytes:
        raise StorageError(
            f"rank {rank}: checkpoint {folder} has small state of {len(small)} bytes, where this job has claimed room "
            f"for {shape.small_nbytes} at start"
        )
    start = len(head) + digests.nbytes
    slots = segment.slots()
    same = [slot.index for slot in slots if slot.state is SlotState.CLEAN and slot.version == version]
    index = same[0] if same else choose(slots)  # two slots never hold one version
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
    """Of a rank's file: its header, its digest table, behind which the data begins, and its small state, as its seal
    covers them. Raises StorageError."""
    try:
        with open(open_regular(path), "rb") as file:  # a mapping would kill us on an I/O error
            found = os.fstat(file.fileno()).st_size
            if found != record.nbytes:
                raise StorageError(f"{path}: {found} bytes where {record.nbytes} were written")
            length = file.read(8)
            head = length + file.read(min(int.from_bytes(length, "little"), HEAD_LIMIT))
            sizes = 8 * record.buckets, record.nbytes - len(head) - 8 * record.buckets - record.data_nbytes
            if not all(0 <= size <= SMALL_LIMIT for size in sizes):
                raise StorageError(f"{path}: its header and its record do not go together")
            table = file.read(sizes[0])
            file.seek(record.data_nbytes, os.SEEK_CUR)
            small = file.read(sizes[1])
    except (OSError, Unfit) as error:
        raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    seal = xxhash.xxh3_64(head)
    seal.update(table)
    seal.update(small)
    if seal.hexdigest() != record.seal:
        raise StorageError(f"{path}: header, digest table or small state do not match their digest")
    return head, np.frombuffer(table, dtype=np.uint64), small


def _read_data(path: Path, start: int, segment: Segment, index: int, digests: Any, token: int) -> None:
    """The data of a rank's file into a slot, bucket by bucket, each compared with its digest as it lies there."""
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
                    raise StorageError(f"{path}: it ends within bucket {number}")
                done += count
            if xxhash.xxh3_64_intdigest(area.data) != int(digests[number]):
                raise StorageError(f"{path}: bucket {number} does not match the digest taken when it was captured")


def _present(folder: Path, record: RankRecord) -> bool:
    """Whether a rank's file is there, as this record has it."""
    try:
        return replace(read_record(folder, record.rank), mark=record.mark) == record and (
            (folder / data_file(record.rank)).stat().st_size == record.nbytes
        )
    except (StorageError, OSError):
        return False
