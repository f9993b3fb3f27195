"""What a rank needs to resume exactly: one state item per tensor, with its bytes, its replica set and what changes it.

Invariant: facts only. An inventory is computed once, after the framework has built model and optimizer, holds no
tensors, and is equal on every restart of the same job. Items are ordered by name, so the ranks of a replica set cut the
same byte stream at the same places. Small state (counters, scheduler, RNG, data position) is not an item: every rank
copies it whole at the version point.

In: what an adapter knows. Out: `Inventory`, read by snapshot.capture.layout, recovery and the golden comparison.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import xxhash

from ..errors import InventoryError


class IterationSpan(str, Enum):
    """What a rank does at a point of an iteration; an item names the spans that may change it."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    UPDATE = "update"
    BETWEEN = "between"  # between two iterations: scheduler, evaluation, data loader


class Role(str, Enum):
    """The role of an item in training."""

    PARAMETER = "parameter"
    MAIN_PARAMETER = "main_parameter"  # the optimizer's fp32 copy, or a shard of it
    MOMENT = "moment"
    BUFFER = "buffer"
    OUTER = "outer"  # of local SGD: last synchronised parameters, momentum of the outer optimizer
    COPY = "copy"  # derived: cast or gathered from what an optimizer holds; never captured


@dataclass(frozen=True)
class Item:
    """One tensor of the training state as this rank holds it.

    `replicas`: the global ranks that hold identical bytes under the same name, this one included, ascending. A tensor
    that data parallelism shards is unique, a set of one, unless several groups of ranks shard it in the same way.
    `layer`: the global layer number, if any. `piece`, of a shard: its elements in the whole, flattened tensor as
    (start, stop, total), by which a job of another data-parallel size takes it over. `in_norm` is False if a rank of
    another TP or PP index holds the same item: a norm over the whole model includes it once.
    """

    name: str
    dtype: str  # as torch prints it, without 'torch.'
    shape: tuple[int, ...]
    nbytes: int
    role: Role
    replicas: tuple[int, ...]
    layer: int | None = None
    changed_by: frozenset[IterationSpan] = frozenset({IterationSpan.UPDATE})
    piece: tuple[int, int, int] | None = None
    in_norm: bool = True

    @property
    def background(self) -> bool:
        """Whether it may be captured during the next iteration's compute: only the update changes it."""
        return self.changed_by <= {IterationSpan.UPDATE}


@dataclass(frozen=True)
class Inventory:
    """All items of one rank, by name ascending."""

    rank: int
    items: tuple[Item, ...]

    @classmethod
    def of(cls, rank: int, items: Iterable[Item]) -> Inventory:
        """The inventory of `rank`. Raises InventoryError for a name that occurs twice or a set without the rank."""
        ordered = tuple(sorted(items, key=lambda item: item.name))
        for left, right in zip(ordered, ordered[1:], strict=False):
            if left.name == right.name:
                raise InventoryError(f"rank {rank}: two items are called '{left.name}'; names must be unique")
        for item in ordered:
            if rank not in item.replicas or tuple(sorted(set(item.replicas))) != item.replicas:
                raise InventoryError(
                    f"rank {rank}: item '{item.name}' has replicas {item.replicas}; "
                    f"expected ascending ranks with {rank} among them"
                )
        return cls(rank, ordered)

    @property
    def nbytes(self) -> int:
        """Bytes of all items as held; captured are fewer, replicated items once per set."""
        return sum(item.nbytes for item in self.items)

    def replica_sets(self) -> dict[tuple[int, ...], tuple[Item, ...]]:
        """The items by replica set; sets ascending, items in the inventory's order."""
        sets: dict[tuple[int, ...], list[Item]] = {}
        for item in self.items:
            sets.setdefault(item.replicas, []).append(item)
        return {replicas: tuple(sets[replicas]) for replicas in sorted(sets)}


def set_digest(ranks: Sequence[int]) -> int:
    """A digest of a replica set. Each of its ranks sends it in place of the ranks: those that send it are the set."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(ranks)}I", *ranks))
