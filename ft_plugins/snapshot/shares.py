"""A complete checkpoint read without the job: whole tensors, put together from the shares of many ranks' files.

Invariant: no byte is given out whose bucket did not fit its digest when it was read, and no tensor of which a part is
missing. Memory: the tensor asked for, at most CACHE_BYTES of verified buckets (or one bucket, if that is larger), and
for each rank what its small files say of places; names are read again whenever they are asked for.

A replicated item lies in parts in the files of its replicas; one that data parallelism shards lies in pieces of the
flattened whole, each in its owner's file. Both come back as the whole tensor's bytes.

In: a checkpoint's folder. Out: indices, small state, bytes of tensors. Raises StorageError for whatever is not whole.
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

from ..errors import ProtocolError, SegmentError, StorageError
from ..intake import Count, Unfit, json_value, open_regular, shown, typed
from . import codec, index, manifest
from .checkpoint import CheckpointManifest, Origin, data_file, index_file, read_manifest, read_record
from .index import Entry, Index
from .persist import read_head

CACHE_BYTES = 512 << 20
_RANGES = TypeAdapter(list[tuple[Count, Count]])

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Head:
    """Of a rank's file: where its data begins, the buckets in the order of their offsets with their digests."""

    start: int
    offsets: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]
    small: bytes


class Shares:
    """The files of one checkpoint. Guards a cache of buckets."""

    def __init__(self, folder: Path, cache_bytes: int = CACHE_BYTES) -> None:
        """Read every rank's small files. Raises StorageError."""
        self.folder = folder
        try:
            self.manifest: CheckpointManifest = read_manifest(folder)
        except FileNotFoundError as error:
            raise StorageError(f"{folder} is no complete checkpoint: it has no manifest.json") from error
        self._items = tuple(found.items for found in self.indices())
        self._heads: dict[int, _Head] = {}
        self._room = cache_bytes
        self._cache: OrderedDict[tuple[int, int], Bytes] = OrderedDict()

    def indices(self) -> Iterator[Index]:
        """The index of every rank, one after the other. Raises StorageError."""
        return (self.index(rank) for rank in range(self.manifest.world_size))

    def index(self, rank: int) -> Index:
        """The index of `rank`, read. Raises StorageError."""
        manifest, where = self.manifest, self.folder / index_file(rank)
        record = read_record(self.folder, rank)
        origin = Origin(manifest.job, manifest.world_size, manifest.fingerprint)
        told = (record.lineage, record.iteration, record.world_size, record.fingerprint)
        if told != (manifest.lineage, manifest.iteration, manifest.world_size, origin.digest):
            raise StorageError(f"{self.folder}: the file of rank {rank} is of another version or job than the manifest")
        try:
            found = index.read(self.folder, rank)
        except FileNotFoundError as error:
            raise StorageError(f"{where}: there is no such file: this checkpoint was written without it") from error
        if found.layout != record.layout:
            raise StorageError(f"{where}: it is of another layout than the file of rank {rank}")
        for entry in found.items.values():
            if entry.offset + entry.held > record.data_nbytes or not isinstance(_dtype(entry), torch.dtype):
                raise StorageError(f"{where}: {shown(entry)} is not in the file of rank {rank}")
        return found

    # ---- small state ----

    def small(self, rank: int) -> dict[str, Any]:
        """The small state that `rank` had at the version point."""
        try:
            found = codec.decode(manifest.split(self._head(rank).small)[1])
            if type(found) is not dict:
                raise ProtocolError(f"small state is a {type(found).__name__} where a dict was expected")
            return found
        except (ProtocolError, SegmentError) as error:
            raise StorageError(f"{self.folder / data_file(rank)}: {error}") from error

    def _head(self, rank: int) -> _Head:
        if rank not in self._heads:
            path = self.folder / data_file(rank)
            head, digests, small = read_head(path, read_record(self.folder, rank))
            try:
                ranges = typed(_RANGES, json_value(json_value(head[8:])["__metadata__"]["buckets"]))
                if len(ranges) != len(digests):
                    raise ValueError(f"{len(ranges)} buckets of {len(digests)}")
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(f"{path}: its header cannot be read ({error})") from error
            offsets, sizes = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T
            order = np.argsort(offsets)
            start = len(head) + digests.nbytes
            self._heads[rank] = _Head(start, offsets[order], sizes[order], digests[order], small)
        return self._heads[rank]

    # ---- tensors ----

    def whole(self, name: str, ranks: Sequence[int]) -> tuple[Bytes, str]:
        """Bytes and dtype of item `name`, whole, from the files of `ranks`: its replicas, or who holds its pieces."""
        entries = [(rank, self._items[rank][name]) for rank in ranks if name in self._items[rank]]
        if not entries:
            raise StorageError(f"{self.folder}: no file of ranks {_shown(ranks)} has item '{name}'")
        nbytes, dtypes = {_whole_nbytes(entry) for _, entry in entries}, {entry.dtype for _, entry in entries}
        if len(nbytes) > 1 or len(dtypes) > 1:
            raise StorageError(f"{self.folder}: ranks {_shown(ranks)} have different tensors called '{name}'")
        at, needed = 0, []
        parts = sorted((_start_in_whole(entry), rank, entry.offset, entry.held) for rank, entry in entries)
        for start, rank, offset, held in parts:
            if start > at:
                break
            if start + held > at:  # of a tensor that several ranks have whole, the first one is enough
                needed.append((start, rank, offset, held))
                at = start + held
        if at != (size := nbytes.pop()):
            raise StorageError(
                f"{self.folder}: of the {size} bytes of '{name}', those from {at} on are in no file of ranks "
                f"{_shown(ranks)}"
            )
        whole = np.empty(size, dtype=np.uint8)
        for start, rank, offset, held in needed:
            self._read(rank, offset, whole[start : start + held])
        return whole, dtypes.pop()

    def place(self, name: str, ranks: Sequence[int]) -> int:
        """Where it lies in the first file that has a part: reading in this order reads each bucket about once."""
        return next((e.offset for rank in ranks if (e := self._items[rank].get(name)) and e.held), 0)

    def _read(self, rank: int, offset: int, target: Bytes) -> None:
        """Bytes of a rank's data, from verified buckets. Raises StorageError."""
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
            raise StorageError(f"{self.folder / index_file(rank)}: it tells of bytes that are in no bucket of the file")

    def _bucket(self, rank: int, number: int) -> Bytes:
        if (rank, number) in self._cache:
            self._cache.move_to_end((rank, number))
            return self._cache[rank, number]
        head, path = self._head(rank), self.folder / data_file(rank)
        offset, nbytes = int(head.offsets[number]), int(head.sizes[number])
        held = sum(bucket.nbytes for bucket in self._cache.values())
        while self._cache and held + nbytes > self._room:
            held -= self._cache.popitem(last=False)[1].nbytes
        try:
            with open(open_regular(path), "rb") as file:
                bucket = np.fromfile(file, dtype=np.uint8, count=nbytes, offset=head.start + offset)
        except (OSError, Unfit) as error:
            raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
        if bucket.nbytes != nbytes or xxhash.xxh3_64_intdigest(bucket.data) != int(head.digests[number]):
            raise StorageError(f"{path}: bucket at {offset} does not match the digest taken when it was captured")
        self._cache[rank, number] = bucket
        return bucket


def _whole_nbytes(entry: Entry) -> int:
    if entry.piece is None:
        return entry.nbytes
    return entry.piece[2] * _itemsize(entry)


def _start_in_whole(entry: Entry) -> int:
    return entry.start + (entry.piece[0] * _itemsize(entry) if entry.piece else 0)


def _itemsize(entry: Entry) -> int:
    return int(_dtype(entry).itemsize)


def _dtype(entry: Entry) -> Any:
    """The torch dtype; None where it is none, which `Shares.index` refuses."""
    return getattr(torch, entry.dtype, None)


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
