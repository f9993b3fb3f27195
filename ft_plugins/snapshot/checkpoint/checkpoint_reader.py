"""Read a complete checkpoint without the job: assemble whole tensors from the shares in the ranks' files.

Invariant: only bytes of buckets that match their digest are returned, and only complete tensors. Memory: the requested
tensor, at most CACHE_BYTES of verified buckets (or one bucket, if that is larger), and digests, small state and
manifest of each rank; names are read again on each request.

The parts of a replicated item are in the files of its replicas. An item that data parallelism shards is in pieces of
the flattened whole, each in its owner's file. Both are returned as the bytes of the whole tensor. Where replicas
differ, `chosen` are the ranks of one of them: what they have whole is read from their files alone.

In: a checkpoint's folder. Out: indices, small state, bytes of tensors. Raises StorageError for incomplete or damaged
files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ...base.intake import Unfit, json_value, open_regular, shown
from ...errors import ProtocolError, SegmentError, StorageError
from ..capture import codec, manifest
from ..capture.manifest import TensorRange
from . import index
from .checkpoint import CheckpointManifest, Origin, RankRecord, data_file, read_manifest, read_record
from .index import Index
from .persist import read_head

CACHE_BYTES = 512 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Head:
    """Of a rank's file: the start of its data, the buckets by offset with their digests, the host's small state, and
    the parts of items in it by name."""

    start: int
    offsets: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]
    state: bytes
    held: Mapping[str, TensorRange]


class CheckpointReader:
    """Reads the files of one checkpoint. Owns a cache of buckets."""

    def __init__(self, folder: Path, cache_bytes: int = CACHE_BYTES) -> None:
        """Read every rank's files, but for their data. Raises StorageError."""
        self.folder = folder
        try:
            self.manifest: CheckpointManifest = read_manifest(folder)
        except FileNotFoundError as error:
            raise StorageError(f"{folder} is not a complete checkpoint: it has no manifest.json") from error
        self.chosen: Sequence[int] = range(self.manifest.world_size)  # of one replica, if replicas differ
        self._heads = [self._read_head(rank) for rank in range(self.manifest.world_size)]
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[int, int], Bytes] = OrderedDict()

    def _read(self, rank: int) -> tuple[RankRecord, bytes, Any, bytes]:
        """The record and `read_head` of a rank's file, which must be of this checkpoint."""
        own, record = self.manifest, read_record(self.folder, rank, self.manifest)
        origin = Origin(own.job, own.world_size, own.fingerprint)
        identity = (record.lineage, record.iteration, record.world_size, record.fingerprint, record.run)
        if identity != (own.lineage, own.iteration, own.world_size, origin.fingerprint_digest, own.run):
            raise StorageError(f"{self.folder}: the file of rank {rank} is of another version or job than the manifest")
        return record, *read_head(self.folder / data_file(rank), record)

    def _read_head(self, rank: int) -> _Head:
        path = self.folder / data_file(rank)
        record, head, digests, small = self._read(rank)
        try:
            encoded, state = manifest.split(small, f"rank {rank}")
            described = manifest.read(encoded, f"rank {rank}")
        except SegmentError as error:
            raise StorageError(f"{path}: {error}") from error
        for one in described.tensors:
            dtype = getattr(torch, one.dtype, None)
            fits = isinstance(dtype, torch.dtype) and not one.whole % dtype.itemsize
            if not (fits and 0 <= one.stop - one.start <= record.data_nbytes - one.offset):
                raise StorageError(f"{path}: its manifest has {shown(one)}, which is not in it")
        if len(described.ranges) < len(digests):
            raise StorageError(f"{path}: its manifest has {len(described.ranges)} buckets, expected {len(digests)}")
        for at, nbytes in described.ranges[: len(digests)]:
            if nbytes > record.data_nbytes - at:
                raise StorageError(f"{path}: its manifest has a bucket at {at} that is not in it")
        offsets, sizes = np.array(described.ranges[: len(digests)], dtype=np.uint64).reshape(-1, 2).T
        order = np.argsort(offsets)
        held = {one.name: one for one in described.tensors}
        return _Head(len(head) + digests.nbytes, offsets[order], sizes[order], digests[order], state, held)

    def indices(self) -> Iterator[Index]:
        """Read the index of every rank, one after the other. Raises StorageError."""
        return (self.index(rank) for rank in range(self.manifest.world_size))

    def index(self, rank: int) -> Index:
        """Read the index of `rank`. Raises StorageError."""
        path, (record, head, _, _) = self.folder / data_file(rank), self._read(rank)
        try:
            metadata = json_value(head[8:])["__metadata__"]
            if "index" not in metadata:
                raise StorageError(f"{path}: this checkpoint was written without an index")
            found = index.read(metadata["index"], str(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{path}: its header cannot be read ({error})") from error
        if (found.rank, found.layout) != (rank, record.layout):
            raise StorageError(f"{path}: its index is of rank {found.rank}, or of another layout")
        return found

    # ---- small state ----

    def small(self, rank: int) -> dict[str, Any]:
        """The small state that `rank` had at the version point."""
        try:
            state = codec.decode(self._heads[rank].state)
            if type(state) is not dict:
                raise ProtocolError(f"small state is a {type(state).__name__}, expected a dict")
            return state
        except ProtocolError as error:
            raise StorageError(f"{self.folder / data_file(rank)}: {error}") from error

    # ---- tensors ----

    def whole(self, name: str, ranks: Sequence[int]) -> tuple[Bytes, str]:
        """Bytes and dtype of the whole item `name`, from the files of `ranks`, which hold its replicas or pieces."""
        entries = [(rank, held) for rank in ranks if (held := self._heads[rank].held.get(name))]
        if not entries:
            for rank in ranks:
                if (entry := self.index(rank).items.get(name)) is not None and entry.empty:
                    return np.empty(0, dtype=np.uint8), entry.dtype
            raise StorageError(f"{self.folder}: no file of ranks {_shown(ranks)} has item '{name}'")
        nbytes, dtypes = {held.whole for _, held in entries}, {held.dtype for _, held in entries}
        if len(nbytes) > 1 or len(dtypes) > 1:
            raise StorageError(f"{self.folder}: ranks {_shown(ranks)} have different tensors called '{name}'")
        size = nbytes.pop()
        needed, at = _needed([(rank, held) for rank, held in entries if rank in self.chosen])
        if at != size:
            needed, at = _needed(entries)
        if at != size:
            raise StorageError(
                f"{self.folder}: bytes {at} to {size} of '{name}' are in no file of ranks {_shown(ranks)}"
            )
        whole = np.empty(size, dtype=np.uint8)
        for start, rank, offset, stored in needed:
            self._read_part(rank, offset, whole[start : start + stored])
        return whole, dtypes.pop()

    def place(self, name: str, ranks: Sequence[int]) -> int:
        """The item's offset in the first file that has a part: reading in this order reads each bucket about once."""
        return next((held.offset for rank in ranks if (held := self._heads[rank].held.get(name))), 0)

    def _read_part(self, rank: int, offset: int, target: Bytes) -> None:
        """Read bytes of a rank's data, from verified buckets. Raises StorageError."""
        head, done = self._heads[rank], 0
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
            raise StorageError(f"{self.folder / data_file(rank)}: bytes of a tensor are in none of its buckets")

    def _bucket(self, rank: int, number: int) -> Bytes:
        if (rank, number) in self._cache:
            self._cache.move_to_end((rank, number))
            return self._cache[rank, number]
        head, path = self._heads[rank], self.folder / data_file(rank)
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


def _needed(entries: Sequence[tuple[int, TensorRange]]) -> tuple[list[tuple[int, int, int, int]], int]:
    """The parts of an item to be read, as (start in the whole, rank, offset, bytes), and where they end."""
    at, needed = 0, []
    for start, stop, rank, offset in sorted((held.start, held.stop, rank, held.offset) for rank, held in entries):
        if start > at:
            break
        if stop > at:  # if several ranks have the whole tensor, the first one suffices
            needed.append((start, rank, offset, stop - start))
            at = stop
    return needed, at


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
