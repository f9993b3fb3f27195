"""What replicas have in common, in buckets: the unit of averaging, of a digest, and of a repair. Pure.

Invariant: the ranks of a replica set cut the same buckets in the same order, without talking: they follow from the
inventory, in which the items of a set are alike. All of a bucket is of one replica set, role, type and layer, and
trained or not, so that a bucket that differs names a layer. Of the inventory only what the update alone changes takes
part: anything else is not at rest while it is read behind the forward. Copies that a rank computes with (`Role.COPY`)
are compared like the rest, and never averaged: they follow from what an optimizer holds.

In: an inventory, bytes per bucket. Out: `ReplicaBuckets`, and by item why it can be in none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..errors import ConfigError, UnsupportedError
from ..model.inventory import Inventory, Item, Role

PARAMETERS = frozenset({Role.PARAMETER, Role.MAIN_PARAMETER})
FLOATING = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # what can be averaged, and its bytes
TABLE_SETS = 16
TABLE_ITEMS = 8
_ALONE = "held by one rank alone"


@dataclass(frozen=True)
class ItemPiece:
    """The elements `start .. stop` of an item, flattened."""

    item: str
    start: int
    stop: int


@dataclass(frozen=True)
class ReplicaBucket:
    """`number` counts over all buckets of the rank. `in_norm`: of a norm over the whole model (`Item.in_norm`). What is
    frozen is not `trained`: no update changes it."""

    number: int
    replicas: tuple[int, ...]
    layer: int | None
    role: Role
    dtype: str
    in_norm: bool
    pieces: tuple[ItemPiece, ...]
    nbytes: int
    trained: bool = True

    @property
    def elements(self) -> int:
        """Of all its pieces."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def averages(self) -> bool:
        """Whether a mean of its elements means anything."""
        return self.dtype in FLOATING and not self.derived

    @property
    def derived(self) -> bool:
        """Whether it is made of what is elsewhere."""
        return self.role is Role.COPY

    @property
    def where(self) -> str:
        """For people: 'layer 3, parameter (transformer.h.3.weight, ...)'."""
        layer = "no layer" if self.layer is None else f"layer {self.layer}"
        names = list(dict.fromkeys(piece.item for piece in self.pieces))
        return f"{layer}, {self.role.value} ({names[0]}{', ...' if len(names) > 1 else ''})"


@dataclass(frozen=True)
class Buckets:
    """All of one rank's, by number; replica sets in ascending order, so that no two ranks wait for each other in turn.

    `left_out` has the items that are in none, with the reason.
    """

    rank: int
    all: tuple[ReplicaBucket, ...]
    left_out: tuple[tuple[str, str], ...]

    @cached_property
    def by_set(self) -> dict[tuple[int, ...], tuple[ReplicaBucket, ...]]:
        """The buckets of each replica set, sets ascending."""
        found: dict[tuple[int, ...], list[ReplicaBucket]] = {}
        for bucket in self.all:
            found.setdefault(bucket.replicas, []).append(bucket)
        return {replicas: tuple(those) for replicas, those in found.items()}

    @property
    def alone(self) -> tuple[str, ...]:
        """The items that no other rank holds."""
        return tuple(name for name, reason in self.left_out if reason.startswith(_ALONE))

    @property
    def fewest(self) -> int:
        """Replicas of the state that has fewest of them, copies left aside; 0 where no state is compared."""
        return min((len(bucket.replicas) for bucket in self.all if not bucket.derived), default=0)

    @property
    def copies(self) -> bool:
        """Whether copies are among them."""
        return any(bucket.derived for bucket in self.all)

    def averaged(self, optimizer_state: bool) -> tuple[ReplicaBucket, ...]:
        """Those that a synchronisation averages: parameters, and on request what the optimizer keeps beside them."""
        roles = PARAMETERS | ({Role.MOMENT} if optimizer_state else frozenset())
        return tuple(bucket for bucket in self.all if bucket.role in roles and bucket.averages)

    def table(self) -> str:
        """For people: a line for each replica set, then what takes no part."""
        lines = [f"rank {self.rank}: {len(self.all)} buckets of {sum(b.nbytes for b in self.all)} bytes are compared"]
        for replicas, those in list(self.by_set.items())[:TABLE_SETS]:
            shown = " ".join(map(str, replicas[:8])) + (f" ... ({len(replicas)})" if len(replicas) > 8 else "")
            layers = len({bucket.layer for bucket in those})
            nbytes = sum(bucket.nbytes for bucket in those)
            lines.append(f"  ranks {shown}: {len(those)} buckets, {nbytes} bytes, {layers} layer(s)")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_out:
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - TABLE_ITEMS} more" if len(names) > TABLE_ITEMS else ""
            shown = ", ".join(names[:TABLE_ITEMS]) + more
            lines.append(f"  not compared, {reason}: {shown}")
        return "\n".join(lines)


def plan_buckets(inventory: Inventory, bucket_bytes: int) -> Buckets:
    """Cut what replicas have in common. Raises ConfigError for buckets that would not hold an element."""
    if bucket_bytes < 8:
        raise ConfigError(f"buckets of {bucket_bytes} bytes hold no element: expected at least 8")
    groups: dict[tuple[tuple[int, ...], int, str, str, bool, bool], list[Item]] = {}
    left_out = []
    for item in inventory.items:
        reason = _left_out(item)
        if reason:
            left_out.append((item.name, reason))
        elif item.nbytes:
            layer = -1 if item.layer is None else item.layer
            key = (item.replicas, layer, item.role.value, item.dtype, item.in_norm, bool(item.changed_by))
            groups.setdefault(key, []).append(item)
    found: list[ReplicaBucket] = []
    for _, items in sorted(groups.items()):
        for pieces, nbytes in _cut(items, bucket_bytes):
            first = items[0]
            found.append(
                ReplicaBucket(
                    len(found), first.replicas, first.layer, first.role, first.dtype, first.in_norm, pieces, nbytes,
                    bool(first.changed_by),
                )
            )  # fmt: skip
    return Buckets(inventory.rank, tuple(found), tuple(left_out))


def require_replicas(buckets: Buckets, framework: str, replicas: int, averaging: bool) -> None:
    """Raises ConfigError where there is one replica of all, UnsupportedError where no trained parameter has two.

    `replicas`: how many ranks data parallelism gives the same parameters to. With `averaging` the optimizers must hold
    them more than once; to be compared, what ranks compute with is enough.
    """
    if replicas == 1 and not buckets.all:
        raise ConfigError(
            "--paft: has no effect with one data-parallel replica; raise the data-parallel size or drop it"
        )
    trained = any(bucket.trained for bucket in buckets.averaged(False))
    if not (trained or (buckets.copies and not averaging)):
        instead = "compare the copies that ranks compute with instead (--paft-mode audit), or drop --paft"
        raise UnsupportedError(
            f"{framework}: each trained parameter is held by one of {replicas} replicas alone (ZeRO, distributed "
            "optimizer): it cannot drift, and an error in it reaches all of them alike; "
            f"{instead if averaging else 'drop --paft'}"
        )


def _left_out(item: Item) -> str:
    if len(item.replicas) == 1:
        return (
            f"{_ALONE} (ZeRO, distributed optimizer): an error in it reaches all replicas alike"
            if item.piece is not None
            else _ALONE
        )
    return "" if item.background else "changed by more than the update"


def _cut(items: Iterable[Item], bucket_bytes: int) -> Iterable[tuple[tuple[ItemPiece, ...], int]]:
    """Items after each other, cut where a bucket is full; every item of one type."""
    pieces: list[ItemPiece] = []
    room = bucket_bytes
    for item in items:
        elements = 1
        for extent in item.shape:
            elements *= extent
        width = item.nbytes // elements
        at = 0
        while at < elements:
            if room < width:
                yield tuple(pieces), bucket_bytes - room
                pieces, room = [], bucket_bytes
            stop = min(elements, at + room // width)
            pieces.append(ItemPiece(item.name, at, stop))
            room -= (stop - at) * width
            at = stop
    if pieces:
        yield tuple(pieces), bucket_bytes - room
