"""Divide what replicas have in common into buckets: the unit of averaging, of a digest, and of a repair. Pure.

Invariant: the ranks of a replica set derive the same buckets in the same order without communication, because they
follow from the inventory. A bucket has one replica set, role, dtype and layer, and is trained or frozen as a whole, so
a bucket that differs identifies a layer. Only items that the update alone changes take part: others may change while
they are read behind the forward. Copies that a rank computes with (`Role.COPY`) are compared like the rest but never
averaged, because they are derived from optimizer state.

In: an inventory, bytes per bucket. Out: `Buckets`, with the reason for each item that is in none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..errors import ConfigError, UnsupportedError
from ..model.inventory import Inventory, Item, Role

PARAMETERS = frozenset({Role.PARAMETER, Role.MAIN_PARAMETER})
FLOATING = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # dtypes that can be averaged -> bytes per element
TABLE_SETS = 16
TABLE_ITEMS = 8
_UNREPLICATED = "held by a single rank"


@dataclass(frozen=True)
class ItemPiece:
    """The elements `start .. stop` of an item, flattened."""

    item: str
    start: int
    stop: int


@dataclass(frozen=True)
class ReplicaBucket:
    """Part of one or more items. `number` is unique on the rank. `in_norm`: see `Item.in_norm`. If not `trained`, it is
    frozen: no update changes it."""

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
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def can_be_averaged(self) -> bool:
        return self.dtype in FLOATING and not self.derived

    @property
    def derived(self) -> bool:
        return self.role is Role.COPY

    @property
    def where(self) -> str:
        """As text: 'layer 3, parameter (transformer.h.3.weight, ...)'."""
        layer = "no layer" if self.layer is None else f"layer {self.layer}"
        names = list(dict.fromkeys(piece.item for piece in self.pieces))
        return f"{layer}, {self.role.value} ({names[0]}{', ...' if len(names) > 1 else ''})"


@dataclass(frozen=True)
class Buckets:
    """All buckets of one rank, by number; replica sets ascend, so ranks in several sets cannot deadlock.

    `left_out` has the items that are in no bucket, with the reason.
    """

    rank: int
    all: tuple[ReplicaBucket, ...]
    left_out: tuple[tuple[str, str], ...]

    @cached_property
    def by_set(self) -> dict[tuple[int, ...], tuple[ReplicaBucket, ...]]:
        """The buckets of each replica set, sets ascending."""
        sets: dict[tuple[int, ...], list[ReplicaBucket]] = {}
        for bucket in self.all:
            sets.setdefault(bucket.replicas, []).append(bucket)
        return {replicas: tuple(buckets) for replicas, buckets in sets.items()}

    @property
    def unreplicated(self) -> tuple[str, ...]:
        """The items that no other rank holds."""
        return tuple(name for name, reason in self.left_out if reason.startswith(_UNREPLICATED))

    @property
    def fewest_replicas(self) -> int:
        """The fewest replicas of any bucket of state, copies excluded; 0 if there is none."""
        return min((len(bucket.replicas) for bucket in self.all if not bucket.derived), default=0)

    @property
    def has_copies(self) -> bool:
        return any(bucket.derived for bucket in self.all)

    def averaged(self, optimizer_state: bool) -> tuple[ReplicaBucket, ...]:
        """The buckets to average: parameters, and with `optimizer_state` the moments."""
        roles = PARAMETERS | ({Role.MOMENT} if optimizer_state else frozenset())
        return tuple(bucket for bucket in self.all if bucket.role in roles and bucket.can_be_averaged)

    def table(self) -> str:
        """As text: a line for each replica set, then the items that are not compared."""
        lines = [f"rank {self.rank}: {len(self.all)} buckets of {sum(b.nbytes for b in self.all)} bytes are compared"]
        for replicas, buckets in list(self.by_set.items())[:TABLE_SETS]:
            shown = " ".join(map(str, replicas[:8])) + (f" ... ({len(replicas)})" if len(replicas) > 8 else "")
            layers = len({bucket.layer for bucket in buckets})
            nbytes = sum(bucket.nbytes for bucket in buckets)
            lines.append(f"  ranks {shown}: {len(buckets)} buckets, {nbytes} bytes, {layers} layer(s)")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_out:
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - TABLE_ITEMS} more" if len(names) > TABLE_ITEMS else ""
            shown = ", ".join(names[:TABLE_ITEMS]) + more
            lines.append(f"  not compared, {reason}: {shown}")
        return "\n".join(lines)


def plan_buckets(inventory: Inventory, bucket_bytes: int, alone: bool = False) -> Buckets:
    """Divide an inventory into buckets; `alone`: also what a single rank holds.

    Raises ConfigError if a bucket would not hold an element."""
    if bucket_bytes < 8:
        raise ConfigError(f"buckets of {bucket_bytes} bytes hold no element: expected at least 8")
    groups: dict[tuple[tuple[int, ...], int, str, str, bool, bool], list[Item]] = {}
    left_out = []
    for item in inventory.items:
        reason = _reason_left_out(item, alone)
        if reason:
            left_out.append((item.name, reason))
        elif item.nbytes:
            layer = -1 if item.layer is None else item.layer
            key = (item.replicas, layer, item.role.value, item.dtype, item.in_norm, bool(item.changed_by))
            groups.setdefault(key, []).append(item)
    buckets: list[ReplicaBucket] = []
    for _, items in sorted(groups.items()):
        for pieces, nbytes in _cut(items, bucket_bytes):
            first = items[0]
            buckets.append(
                ReplicaBucket(
                    len(buckets), first.replicas, first.layer, first.role, first.dtype, first.in_norm, pieces, nbytes,
                    bool(first.changed_by),
                )
            )  # fmt: skip
    return Buckets(inventory.rank, tuple(buckets), tuple(left_out))


def require_replicas(buckets: Buckets, framework: str, replicas: int, averaging: bool) -> None:
    """Raises ConfigError if everything has one replica, UnsupportedError if no trained parameter has two.

    `replicas`: how many ranks data parallelism gives the same parameters to. `averaging` needs replicas of what the
    optimizers hold; for a comparison, replicas of what ranks compute with are enough.
    """
    if replicas == 1 and not buckets.all:
        raise ConfigError(
            "--paft: has no effect with one data-parallel replica; raise the data-parallel size or drop it"
        )
    trained = any(bucket.trained for bucket in buckets.averaged(False))
    if not (trained or (buckets.has_copies and not averaging)):
        instead = "compare the copies that ranks compute with instead (--paft-mode audit), or drop --paft"
        raise UnsupportedError(
            f"{framework}: each trained parameter is held by one of {replicas} replicas only (ZeRO, distributed "
            "optimizer): it cannot diverge, and an error in it reaches all replicas in the same way; "
            f"{instead if averaging else 'drop --paft'}"
        )


def _reason_left_out(item: Item, alone: bool) -> str:
    """'' if it takes part."""
    if len(item.replicas) == 1 and not alone:
        return (
            f"{_UNREPLICATED} (ZeRO, distributed optimizer): an error in it reaches all replicas in the same way"
            if item.piece is not None
            else _UNREPLICATED
        )
    return "" if item.background else "changed by more than the update"


def _cut(items: Iterable[Item], bucket_bytes: int) -> Iterable[tuple[tuple[ItemPiece, ...], int]]:
    """Items of one dtype, one after another, cut whenever a bucket is full."""
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
