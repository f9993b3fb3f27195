"""What lies where in a rank's file of a checkpoint, and what the framework calls it: for readers without the job.

Invariant: the trainer writes it once a start, before it attaches, into the node's run directory, under a name that
tells rank and layout; the SMP puts it as it is beside each file of that layout. No step pays for it. It is plain JSON
that carries its own digest, and nothing that resumes the job needs it.

    rank-00003.index.json   items: name, dtype, shape, bytes, replicas, piece of a shard, and the part of them that lies
                            in this rank's file: from which byte of the item on, where in the data, how many bytes;
                            names: what the host's `names` said, None where it knows of no format of a framework

In: a layout, what a host says. Out: `Index`; files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from .. import files
from ..errors import StorageError
from ..intake import Count, Text, Unfit, Word, read_bytes, typed
from ..model.inventory import Inventory, Item
from . import checkpoint
from .checkpoint import index_file
from .layout import Layout

FORMAT = "ft_plugins index 1"
LIMIT = 64 << 20  # bytes; a rank of thousands of tensors needs a hundredth of it


@dataclass(frozen=True, slots=True)
class Entry:
    """An item and the part of it in this rank's file: `held` bytes, from its byte `start`, at `offset` of the data."""

    name: Text
    dtype: Text
    shape: tuple[Count, ...]
    nbytes: Count
    replicas: tuple[Count, ...]
    piece: tuple[Count, Count, Count] | None
    start: Count
    offset: Count
    held: Count


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
    """An index as plain values. `digest` is that of the layout, as the segment's shape has it."""
    found: dict[str, list[int]] = {}
    for bucket in layout.buckets:
        for piece in bucket.pieces:  # an item's part of a share is one run of bytes, cut only by the buckets
            found.setdefault(piece.item, [piece.item_offset, piece.offset, 0])[2] += piece.nbytes
    sets = sorted({item.replicas for item in inventory.items})
    items = [_row(item, sets.index(item.replicas), found.get(item.name, [0, 0, 0])) for item in inventory.items]
    return {
        "format": FORMAT,
        "rank": inventory.rank,
        "layout": digest,
        "replicas": [list(replicas) for replicas in sets],
        "items": items,
        "names": names,
    }


def _row(item: Item, replicas: int, found: list[int]) -> list[Any]:
    piece = list(item.piece) if item.piece else None
    return [item.name, item.dtype, list(item.shape), item.nbytes, replicas, piece, *found]


def parse(content: Mapping[str, Any]) -> Index:
    """What `describe` gave. Raises StorageError."""
    try:
        if content["format"] != FORMAT:
            raise StorageError(f"expected format '{FORMAT}', found {content['format']!r}")
        sets = content["replicas"]
        rows = [dict(zip(_ROW, row, strict=True)) for row in content["items"]]
        items = {sys.intern(row["name"]): {**row, "replicas": sets[row["replicas"]]} for row in rows}
        block = {"rank": content["rank"], "layout": content["layout"], "items": items, "names": content["names"]}
        return typed(_INDEX, block)
    except Unfit as error:
        raise StorageError(f"it is no index of a checkpoint ({error})") from error
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StorageError(f"it is no index of a checkpoint ({type(error).__name__}: {error})") from error


# ---- files ----


def kept_path(run_dir: Path, rank: int, layout: int) -> Path:
    """Where a trainer leaves it for the SMP."""
    return run_dir / f"index-{rank}-{layout:016x}.json"


def keep(run_dir: Path, content: dict[str, Any]) -> None:
    """Leave an index for the SMP; those of other layouts of this rank go."""
    rank = content["rank"]
    path = kept_path(run_dir, rank, content["layout"])
    for other in run_dir.glob(f"index-{rank}-*.json"):
        if other != path:
            other.unlink(missing_ok=True)
    checkpoint.write_json(path, content)


def copy_into(folder: Path, rank: int, kept: Path) -> None:
    """Put the index that was left at `kept` into a checkpoint, durably; nothing where there is none that can be read.
    Raises OSError."""
    try:
        content = read_bytes(kept, LIMIT)
    except (OSError, ValueError):
        return
    files.write(folder / index_file(rank), content, durable=True)


def read(folder: Path, rank: int) -> Index:
    """The index of a rank in a checkpoint. Raises FileNotFoundError where there is none, StorageError."""
    path = folder / index_file(rank)
    try:
        found = parse(checkpoint.read_json(path, LIMIT))
    except StorageError as error:
        raise error if str(path) in str(error) else StorageError(f"{path}: {error}") from error
    if found.rank != rank:
        raise StorageError(f"{path}: it is of rank {found.rank}")
    return found
