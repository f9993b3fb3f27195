"""Which rectangles of which global tensors a Megatron checkpoint consists of, and from whose shares each is made. Pure.

Invariant: every element of every global tensor is covered once. Where several ranks could give a rectangle (replicas
over tensor parallelism, tied embeddings on two stages) it is taken from the one with the smallest replica id, which is
the one that Megatron itself saves.

In: the indices of all ranks. Out: `Assembly`. Raises StorageError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import StorageError
from ...snapshot.index import Index


@dataclass(frozen=True)
class TensorBlock:
    """The rectangle `size` at `offset` of the global tensor `key` of `shape`, stored as `dtype`.

    It is made from item `source` of `ranks`, a tensor of `local_shape`: all of it in order, or where `view` is given,
    from that element on with these strides, one for each of the last dimensions of `size`.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str
    source: str
    ranks: tuple[int, ...]
    local_shape: tuple[int, ...]
    view: tuple[int, tuple[int, ...]] | None


@dataclass(frozen=True)
class Assembly:
    """A checkpoint but for what is common to all ranks: tensors by blocks, objects by key, as the index has them."""

    blocks: tuple[TensorBlock, ...]
    objects: Mapping[str, list[str]]


def assemble(indices: Iterable[Index], place: Callable[[str, tuple[int, ...]], int]) -> Assembly:
    """`place` says where an item lies in its first file: blocks come in that order, group of ranks by group."""
    blocks: dict[tuple[str, tuple[int, ...]], tuple[list[int], TensorBlock]] = {}
    objects: dict[str, tuple[list[int], list[str]]] = {}
    for index in indices:
        names = index.names or {}
        for told in names["tensors"]:
            for block in _blocks(told, names["groups"]):
                at = block.key, block.offset
                if at not in blocks or told["replica"] < blocks[at][0]:
                    blocks[at] = told["replica"], block
        for told in names["objects"]:
            if told["key"] not in objects or told["replica"] < objects[told["key"]][0]:
                objects[told["key"]] = told["replica"], told["value"]
    chosen = [block for _, block in blocks.values()]
    _require_whole(chosen)
    chosen.sort(key=lambda block: (block.ranks, place(block.source, block.ranks), block.key, block.offset))
    return Assembly(tuple(chosen), {key: value for key, (_, value) in sorted(objects.items())})


def _blocks(told: Mapping[str, Any], groups: list[list[int]]) -> Iterable[TensorBlock]:
    ranks, local = tuple(groups[told["group"]]), tuple(told["shape"])
    for key, shape, offset, size, view in told["blocks"]:
        where = (view[0], tuple(view[1])) if view else None
        yield TensorBlock(
            key, tuple(shape), tuple(offset), tuple(size), told["dtype"], told["source"], ranks, local, where
        )  # fmt: skip


def _require_whole(blocks: Iterable[TensorBlock]) -> None:
    """Raises StorageError for a tensor with a gap or an overlap (offsets differ, so the volumes tell)."""
    covered: dict[str, int] = {}
    known: dict[str, TensorBlock] = {}
    for block in blocks:
        first = known.setdefault(block.key, block)
        if (block.shape, block.dtype) != (first.shape, first.dtype):
            raise StorageError(
                f"'{block.key}' is {block.dtype} {block.shape} on rank {block.ranks[0]} and {first.dtype} "
                f"{first.shape} on rank {first.ranks[0]}"
            )
        covered[block.key] = covered.get(block.key, 0) + math.prod(block.size)
    for key, found in covered.items():
        if found != math.prod(known[key].shape):
            raise StorageError(
                f"'{key}' has {math.prod(known[key].shape)} elements, but the ranks tell of {found} together"
            )
