"""Read a complete checkpoint without the job: assemble whole tensors from the shares in the ranks' files.

Invariant: only bytes of buckets that match their digest are returned, and only complete tensors. Memory: the requested
tensor, at most CACHE_BYTES of verified buckets (or one bucket, if that is larger), and the index and header of each
rank's file; names are read again on each request.

The parts of a replicated item are in the files of its replicas. An item that data parallelism shards is in pieces of
the flattened whole, each in its owner's file. Both are returned as the bytes of the whole tensor. Where replicas
differ, `chosen` are the ranks of one of them: what they have whole is read from their files alone.

In: a checkpoint's folder. Out: indices, small state, bytes of tensors. Raises StorageError for incomplete or damaged
files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from pydantic import TypeAdapter

from ...base.intake import Count, Unfit, json_value, open_regular, shown, typed
from ...errors import ProtocolError, SegmentError, StorageError
from ..capture import codec, manifest
from . import index
from .checkpoint import CheckpointManifest, Origin, data_file, index_file, read_manifest, read_record
from .index import Entry, Index
from .persist import read_head

CACHE_BYTES = 512 << 20
_RANGES = TypeAdapter(list[tuple[Count, Count]])

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Head:
    """Of a rank's file: the start of its data, and the buckets by offset, with their digests."""

    start: int
    offsets: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]
    small: bytes


class CheckpointReader:
    """Reads the files of one checkpoint. Owns a cache of buckets."""

    def __init__(self, folder: Path, cache_bytes: int = CACHE_BYTES) -> None:
        """Read every rank's small files. Raises StorageError."""
        self.folder = folder
        try:
            self.manifest: CheckpointManifest = read_manifest(folder)
        except FileNotFoundError as error:
            raise StorageError(f"{folder} is not a complete checkpoint: it has no manifest.json") from error
        self._items = tuple(index.items for index in self.indices())
        self.chosen: Sequence[int] = range(self.manifest.world_size)  # of one replica, if replicas differ
        self._heads: dict[int, _Head] = {}
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[int, int], Bytes] = OrderedDict()

    def indices(self) -> Iterator[Index]:
        """Read the index of every rank, one after the other. Raises StorageError."""
        return (self.index(rank) for rank in range(self.manifest.world_size))

    def index(self, rank: int) -> Index:
        """Read the index of `rank`. Raises StorageError."""
        manifest, path = self.manifest, self.folder / index_file(rank)
        record = read_record(self.folder, rank)
        origin = Origin(manifest.job, manifest.world_size, manifest.fingerprint)
        identity = (record.lineage, record.iteration, record.world_size, record.fingerprint)
        if identity != (manifest.lineage, manifest.iteration, manifest.world_size, origin.digest):
            raise StorageError(f"{self.folder}: the file of rank {rank} is of another version or job than the manifest")
        try:
            parsed = index.read(self.folder, rank)
        except FileNotFoundError as error:
            raise StorageError(f"{path}: no such file: this checkpoint was written without an index") from error
        if parsed.layout != record.layout:
            raise StorageError(f"{path}: its layout differs from that of the file of rank {rank}")
        for entry in parsed.items.values():
            if entry.offset + entry.stored > record.data_nbytes or not isinstance(_dtype(entry), torch.dtype):
                raise StorageError(f"{path}: {shown(entry)} is not in the file of rank {rank}")
        return parsed

    # ---- small state ----

    def small(self, rank: int) -> dict[str, Any]:
        """The small state that `rank` had at the version point."""
        try:
            state = codec.decode(manifest.split(self._head(rank).small, f"rank {rank}")[1])
            if type(state) is not dict:
                raise ProtocolError(f"small state is a {type(state).__name__}, expected a dict")
            return state
        except (ProtocolError, SegmentError) as error:
            raise StorageError(f"{self.folder / data_file(rank)}: {error}") from error

    def _head(self, rank: int) -> _Head:
        if rank not in self._heads:
            path = self.folder / data_file(rank)
            head, digests, small = read_head(path, read_record(self.folder, rank))
            try:
                ranges = typed(_RANGES, json_value(json_value(head[8:])["__metadata__"]["buckets"]))
                if len(ranges) != len(digests):
                    raise ValueError(f"{len(ranges)} buckets, expected {len(digests)}")
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(f"{path}: its header cannot be read ({error})") from error
            offsets, sizes = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T
            order = np.argsort(offsets)
            start = len(head) + digests.nbytes
            self._heads[rank] = _Head(start, offsets[order], sizes[order], digests[order], small)
        return self._heads[rank]

    # ---- tensors ----

    def whole(self, name: str, ranks: Sequence[int]) -> tuple[Bytes, str]:
        """Bytes and dtype of the whole item `name`, from the files of `ranks`, which hold its replicas or pieces."""
        entries = [(rank, self._items[rank][name]) for rank in ranks if name in self._items[rank]]
        if not entries:
            raise StorageError(f"{self.folder}: no file of ranks {_shown(ranks)} has item '{name}'")
        nbytes, dtypes = {_whole_nbytes(entry) for _, entry in entries}, {entry.dtype for _, entry in entries}
        if len(nbytes) > 1 or len(dtypes) > 1:
            raise StorageError(f"{self.folder}: ranks {_shown(ranks)} have different tensors called '{name}'")
        size = nbytes.pop()
        needed, at = _needed([(rank, entry) for rank, entry in entries if rank in self.chosen])
        if at != size:
            needed, at = _needed(entries)
        if at != size:
            raise StorageError(
                f"{self.folder}: bytes {at} to {size} of '{name}' are in no file of ranks {_shown(ranks)}"
            )
        whole = np.empty(size, dtype=np.uint8)
        for start, rank, offset, stored in needed:
            self._read(rank, offset, whole[start : start + stored])
        return whole, dtypes.pop()

    def place(self, name: str, ranks: Sequence[int]) -> int:
        """The item's offset in the first file that has a part: reading in this order reads each bucket about once."""
        return next((e.offset for rank in ranks if (e := self._items[rank].get(name)) and e.stored), 0)

    def _read(self, rank: int, offset: int, target: Bytes) -> None:
        """Read bytes of a rank's data, from verified buckets. Raises StorageError."""
        head = self._head(rank)
        done = 0
        number = max(0, int(np.searchsorted(head.offsets, offset, side="right")) - 1)
        while done < target.nbytes and number < len(head.offsets):
            nbytes = int(head.sizes[number])
            inside = offset + done - int(head.offsets[number])
            if not 0 <= inside < nbytes:
                break
            count = min(nbytes - inside, target.nbytes - done)
            target[done : done + count] = self._bucket(rank, number)[inside : inside + count]
            done += count
            number += 1
        if done < target.nbytes:
            raise StorageError(f"{self.folder / index_file(rank)}: some of its bytes are in no bucket of the file")

    def _bucket(self, rank: int, number: int) -> Bytes:
        if (rank, number) in self._cache:
            self._cache.move_to_end((rank, number))
            return self._cache[rank, number]
        head, path = self._head(rank), self.folder / data_file(rank)
        offset, nbytes = int(head.offsets[number]), int(head.sizes[number])
        cached = sum(bucket.nbytes for bucket in self._cache.values())
        while self._cache and cached + nbytes > self._cache_bytes:
            cached -= self._cache.popitem(last=False)[1].nbytes
        try:
            with open(open_regular(path), "rb") as file:
                bucket = np.fromfile(file, dtype=np.uint8, count=nbytes, offset=head.start + offset)
        except (OSError, Unfit) as error:
            raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
        if bucket.nbytes != nbytes or xxhash.xxh3_64_intdigest(bucket.data) != int(head.digests[number]):
            raise StorageError(f"{path}: bucket at {offset} does not match the digest taken when it was captured")
        self._cache[rank, number] = bucket
        return bucket


def _needed(entries: Sequence[tuple[int, Entry]]) -> tuple[list[tuple[int, int, int, int]], int]:
    """The parts of an item to be read, as (start in the whole, rank, offset, bytes), and where they end."""
    at, needed = 0, []
    for start, rank, offset, stored in sorted((_start_in_whole(e), rank, e.offset, e.stored) for rank, e in entries):
        if start > at:
            break
        if start + stored > at:  # if several ranks have the whole tensor, the first one suffices
            needed.append((start, rank, offset, stored))
            at = start + stored
    return needed, at


def _whole_nbytes(entry: Entry) -> int:
    if entry.piece is None:
        return entry.nbytes
    return entry.piece[2] * _itemsize(entry)


def _start_in_whole(entry: Entry) -> int:
    return entry.start + (entry.piece[0] * _itemsize(entry) if entry.piece else 0)


def _itemsize(entry: Entry) -> int:
    return int(_dtype(entry).itemsize)


def _dtype(entry: Entry) -> Any:
    """The torch dtype; None for an unknown name."""
    return getattr(torch, entry.dtype, None)


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
