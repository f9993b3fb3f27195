"""The index of a rank's checkpoint file: its items as the framework knows them, for an export without the job.

The trainer stages the index in the node's run directory once per start, before it attaches, under a name with rank and
layout. The SMP copies its text into the header of each checkpoint file of that layout, so no step pays for it. It is
JSON with its own digest. Resuming the job does not need it.

In: an inventory, names from the host. Out: `Index`; the text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...base.files import checked, write_digested
from ...base.intake import Count, Text, Unfit, Word, read_bytes, typed
from ...errors import StorageError
from ...model.inventory import Inventory

FORMAT = "ft_plugins index 2"
LIMIT = 32 << 20  # bytes; thousands of tensors take a fiftieth of it


@dataclass(frozen=True, slots=True)
class Entry:
    """An item of the rank; see `model.inventory.Item`."""

    name: Text
    dtype: Text
    shape: tuple[Count, ...]
    replicas: tuple[Count, ...]
    piece: tuple[Count, Count, Count] | None

    @property
    def empty(self) -> bool:
        """Whether the whole tensor has no elements."""
        return 0 in self.shape if self.piece is None else not self.piece[2]


@dataclass(frozen=True)
class Index:
    """The index of one rank. `names`: the host's names for an export, None if it has none."""

    rank: Count
    layout: Word
    items: Mapping[str, Entry]
    names: Mapping[str, Any] | None


_INDEX = TypeAdapter(Index)
_ROW = tuple(field.name for field in fields(Entry))


def describe(inventory: Inventory, digest: int, names: Mapping[str, Any] | None) -> dict[str, Any]:
    """An index as plain values. `digest` is the layout's, as in the segment's shape."""
    sets = sorted({item.replicas for item in inventory.items})
    items = [
        [item.name, item.dtype, list(item.shape), sets.index(item.replicas), list(item.piece) if item.piece else None]
        for item in inventory.items
    ]
    replicas = [list(ranks) for ranks in sets]
    return {
        "format": FORMAT, "rank": inventory.rank, "layout": digest, "replicas": replicas, "items": items, "names": names
    }  # fmt: skip


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


def read(text: str, where: str) -> Index:
    """Read the text of an index, found in `where`. Raises StorageError."""
    content = checked(text.encode(errors="replace"), f"{where}: its index")
    try:
        return parse(content)
    except StorageError as error:
        raise StorageError(f"{where}: {error}") from error


# ---- staged for the SMP ----


def staged_path(run_dir: Path, rank: int, layout: int) -> Path:
    """The file in which a trainer leaves its index."""
    return run_dir / f"index-{rank}-{layout:016x}.json"


def stage(run_dir: Path, content: dict[str, Any]) -> None:
    """Leave an index, and remove those of other layouts of this rank."""
    rank = content["rank"]
    path = staged_path(run_dir, rank, content["layout"])
    for other in run_dir.glob(f"index-{rank}-*.json"):
        if other != path:
            other.unlink(missing_ok=True)
    write_digested(path, content)


def staged_text(path: Path) -> str | None:
    """The text of a staged index; None if it cannot be read."""
    try:
        return read_bytes(path, LIMIT).decode()
    except (OSError, ValueError):
        return None
