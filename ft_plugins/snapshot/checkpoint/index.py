"""The index of a rank's checkpoint file: what it holds and how the framework names it, for readers without the job.

The trainer stages the index in the node's run directory once per start, before it attaches, under a name with rank and
layout. The SMP copies it unchanged next to each checkpoint file of that layout, so no step pays for it. It is plain
JSON with its own digest. Resuming the job does not need it.

    rank-00003.index.json   items: name, dtype, shape, bytes, replicas, piece of a shard, and the part in this rank's
                            file: first byte of the item, offset in the data, number of bytes;
                            names: the host's names for an export, None if it has none

In: a layout, names from the host. Out: `Index`; files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import Count, Text, Unfit, Word, read_bytes, typed
from ...errors import StorageError
from ...model.inventory import Inventory, Item
from ..capture.layout import Layout
from .checkpoint import index_file
from .digested_json import read_digested, write_digested

FORMAT = "ft_plugins index 1"
LIMIT = 64 << 20  # bytes; thousands of tensors take a hundredth of it


@dataclass(frozen=True, slots=True)
class Entry:
    """An item, and its part in this rank's file: `stored` bytes, from its byte `start`, at `offset` of the data."""

    name: Text
    dtype: Text
    shape: tuple[Count, ...]
    nbytes: Count
    replicas: tuple[Count, ...]
    piece: tuple[Count, Count, Count] | None
    start: Count
    offset: Count
    stored: Count


@dataclass(frozen=True)
class Index:
    """The index of one rank."""

    rank: Count
    layout: Word
    items: Mapping[str, Entry]
    names: Mapping[str, Any] | None


_INDEX = TypeAdapter(Index)
_ROW = tuple(field.name for field in fields(Entry))


def describe(inventory: Inventory, layout: Layout, digest: int, names: Mapping[str, Any] | None) -> dict[str, Any]:
    """An index as plain values. `digest` is the layout's, as in the segment's shape."""
    parts: dict[str, list[int]] = {}
    for bucket in layout.buckets:
        for piece in bucket.pieces:  # an item's part of a share is one run of bytes, cut only by the buckets
            parts.setdefault(piece.item, [piece.item_offset, piece.offset, 0])[2] += piece.nbytes
    sets = sorted({item.replicas for item in inventory.items})
    items = [_row(item, sets.index(item.replicas), parts.get(item.name, [0, 0, 0])) for item in inventory.items]
    return {
        "format": FORMAT,
        "rank": inventory.rank,
        "layout": digest,
        "replicas": [list(replicas) for replicas in sets],
        "items": items,
        "names": names,
    }


def _row(item: Item, replicas: int, part: list[int]) -> list[Any]:
    piece = list(item.piece) if item.piece else None
    return [item.name, item.dtype, list(item.shape), item.nbytes, replicas, piece, *part]


def parse(content: Mapping[str, Any]) -> Index:
    """Parse the values of `describe`. Raises StorageError."""
    try:
        if content["format"] != FORMAT:
            raise StorageError(f"expected format '{FORMAT}', found {content['format']!r}")
        sets = content["replicas"]
        rows = [dict(zip(_ROW, row, strict=True)) for row in content["items"]]
        items = {sys.intern(row["name"]): {**row, "replicas": sets[row["replicas"]]} for row in rows}
        block = {"rank": content["rank"], "layout": content["layout"], "items": items, "names": content["names"]}
        return typed(_INDEX, block)
    except Unfit as error:
        raise StorageError(f"not an index of a checkpoint ({error})") from error
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StorageError(f"not an index of a checkpoint ({type(error).__name__}: {error})") from error


# ---- files ----


def staged_path(run_dir: Path, rank: int, layout: int) -> Path:
    """The file in which a trainer leaves its index for the SMP."""
    return run_dir / f"index-{rank}-{layout:016x}.json"


def stage(run_dir: Path, content: dict[str, Any]) -> None:
    """Leave an index for the SMP, and remove those of other layouts of this rank."""
    rank = content["rank"]
    path = staged_path(run_dir, rank, content["layout"])
    for other in run_dir.glob(f"index-{rank}-*.json"):
        if other != path:
            other.unlink(missing_ok=True)
    write_digested(path, content)


def copy_into(folder: Path, rank: int, staged: Path) -> None:
    """Durably copy the index at `staged` into a checkpoint, if it can be read. Raises OSError."""
    try:
        content = read_bytes(staged, LIMIT)
    except (OSError, ValueError):
        return
    files.write(folder / index_file(rank), content, durable=True)


def read(folder: Path, rank: int) -> Index:
    """Read the index of a rank in a checkpoint. Raises FileNotFoundError if there is none, StorageError."""
    path = folder / index_file(rank)
    try:
        parsed = parse(read_digested(path, LIMIT))
    except StorageError as error:
        raise error if str(path) in str(error) else StorageError(f"{path}: {error}") from error
    if parsed.rank != rank:
        raise StorageError(f"{path}: it belongs to rank {parsed.rank}")
    return parsed
