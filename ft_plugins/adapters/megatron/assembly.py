"""Plan a Megatron checkpoint: the blocks of each global tensor, and the ranks whose shares each is made from. Pure.

Invariant: every element of every global tensor is covered once. If several ranks hold a block (replicas over tensor
parallelism, tied embeddings on two stages), the one with the smallest replica id provides it, as in Megatron's own
save.

In: the indices of all ranks. Out: `Assembly`. Raises StorageError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import StorageError
from ...snapshot.checkpoint.index import Index


@dataclass(frozen=True)
class TensorBlock:
    """The block `size` at `offset` of the global tensor `key` of `shape`, stored as `dtype`.

    It is made from item `source` of `ranks`, a tensor of `local_shape`: from all of it in order or, with `view` =
    (first element, strides), from a strided view of its elements; the strides are for the last dimensions of `size`.
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
    """The tensors of a checkpoint by blocks, and its sharded objects by key, as the indices hold them."""

    blocks: tuple[TensorBlock, ...]
    objects: Mapping[str, list[str]]


def assemble(indices: Iterable[Index], offset_of: Callable[[str, tuple[int, ...]], int]) -> Assembly:
    """The blocks that cover every global tensor once, sorted by group of ranks, then by `offset_of` their item in the
    file of the first rank. Raises StorageError for a gap, an overlap, or a tensor whose shape or dtype differs."""
    blocks: dict[tuple[str, tuple[int, ...]], tuple[list[int], TensorBlock]] = {}
    objects: dict[str, tuple[list[int], list[str]]] = {}
    for index in indices:
        names = index.names or {}
        for tensor in names["tensors"]:
            for block in _blocks(tensor, names["groups"]):
                at = block.key, block.offset
                if at not in blocks or tensor["replica"] < blocks[at][0]:
                    blocks[at] = tensor["replica"], block
        for entry in names["objects"]:
            if entry["key"] not in objects or entry["replica"] < objects[entry["key"]][0]:
                objects[entry["key"]] = entry["replica"], entry["value"]
    chosen = [block for _, block in blocks.values()]
    _require_whole(chosen)
    chosen.sort(key=lambda block: (block.ranks, offset_of(block.source, block.ranks), block.key, block.offset))
    return Assembly(tuple(chosen), {key: value for key, (_, value) in sorted(objects.items())})


def _blocks(tensor: Mapping[str, Any], groups: list[list[int]]) -> Iterable[TensorBlock]:
    ranks, local = tuple(groups[tensor["group"]]), tuple(tensor["shape"])
    for key, shape, offset, size, view in tensor["blocks"]:
        yield TensorBlock(
            key, tuple(shape), tuple(offset), tuple(size), tensor["dtype"], tensor["source"], ranks, local,
            (view[0], tuple(view[1])) if view else None,
        )  # fmt: skip


def _require_whole(blocks: Iterable[TensorBlock]) -> None:
    """Raises StorageError for a gap or an overlap. Offsets are distinct, so comparing volumes is enough."""
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
    for key, volume in covered.items():
        if volume != (whole := math.prod(known[key].shape)):
            problem = "the checkpoint is incomplete, an index is missing" if volume < whole else "blocks overlap"
            raise StorageError(f"'{key}' has {whole} elements, but the blocks of all ranks cover {volume}: {problem}")
