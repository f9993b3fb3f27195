"""Divide what local SGD synchronises into modules, and the ranks into replicas and groups. Pure.

A module (the embedding, a layer, the head) is judged and synchronised as a whole, although its parameters may be
divided over several ranks of a replica: over tensor-parallel ranks, over ZeRO or FSDP shards, a tied embedding over two
pipeline stages. Ranks that hold the same parameters on different replicas form a sync group. All ranks at the same
place of their sync groups form a replica.

Invariant: all ranks of a sync group derive the same modules with the same buckets in the same order, because they
follow from the inventory; groups are derived from what all ranks reported, so all ranks derive the same ones.

In: an inventory, the host's names of modules; the reports of all ranks. Out: `ModulePlan`s, `GroupPlan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import ConfigError, UnsupportedError
from ...model.inventory import Inventory, Item
from ..buckets import FLOATING, PARAMETERS, ReplicaBucket, plan_buckets

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ModulePlan:
    """The part of one module that this rank holds, in buckets of bounded size."""

    name: str
    items: tuple[Item, ...]
    buckets: tuple[ReplicaBucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


@dataclass(frozen=True)
class GroupPlan:
    """The groups of one rank. `replica`: all ranks of its copy of the model; `holders`: by module, the ranks of its
    replica that hold a part of it; `modules`: the names of all modules, on any rank, in one order; `order`: those whose
    forwards this rank runs, in the order in which they are exchanged; `spanning`: those of them of which a rank that
    runs other forwards holds a part too."""

    position: int  # of this rank's replica among the replicas
    replica: Ranks
    holders: Mapping[str, Ranks]
    modules: tuple[str, ...]
    order: tuple[str, ...]
    spanning: frozenset[str]


def synchronised(inventory: Inventory) -> tuple[Item, ...]:
    """The items that local SGD averages: what the optimizer updates. Raises UnsupportedError for one that has no
    replica to be averaged with, or whose values cannot be averaged."""
    items = tuple(item for item in inventory.items if item.role in PARAMETERS and item.changed_by and item.nbytes)
    for item in items:
        if not item.background:
            raise UnsupportedError(
                f"rank {inventory.rank}: parameter '{item.name}' may change at any time, not in the update alone: "
                "local SGD cannot synchronise it; give it to the optimizer, or drop --sync"
            )
        if item.dtype not in FLOATING:
            raise UnsupportedError(
                f"rank {inventory.rank}: parameter '{item.name}' is {item.dtype}, which has no mean; drop --sync"
            )
    return items


def sync_group(items: Sequence[Item], rank: int, framework: str) -> Ranks:
    """The sync group of a rank. Raises UnsupportedError if its items have different replicas."""
    sets = {item.replicas for item in items}
    if not sets:
        return (rank,)
    if len(sets) > 1:
        raise UnsupportedError(
            f"{framework}: rank {rank} holds parameters with different replicas, {sorted(sets)[:2]} (experts of a "
            "mixture, or shared ones): local SGD does not support that; drop --sync"
        )
    (members,) = sets
    return members


def require_replicas(members: Ranks, rank: int, framework: str) -> None:
    """Raises UnsupportedError for a sync group of one rank."""
    if len(members) == 1:
        raise UnsupportedError(
            f"{framework}: rank {rank} holds parameters of which there is no other replica, so there is nothing to "
            "synchronise: raise the data-parallel size above the shards (--sync-shard-ranks, "
            "--num-distributed-optimizer-instances), or drop --sync"
        )


def require_shard_ranks(rank: int, group: Ranks, configured: int | None) -> None:
    """Raises ConfigError if a replica shards over `group`, but is configured to shard over another number of ranks."""
    if configured not in (None, len(group)):
        raise ConfigError(
            f"--sync-shard-ranks {configured}: expected {len(group)}, because rank {rank} shares its gradients with "
            f"ranks {list(group)} in every iteration; change one of the two, or drop this flag"
        )


def plan_modules(inventory: Inventory, modules: Mapping[str, str], bucket_bytes: int) -> tuple[ModulePlan, ...]:
    """The modules of a rank, in the order of `modules`, which names the module of each item."""
    items = synchronised(inventory)
    order = list(dict.fromkeys(modules.values()))
    plans = []
    for name in order:
        own = tuple(item for item in items if modules[item.name] == name)
        if own:
            buckets = plan_buckets(Inventory.of(inventory.rank, own), bucket_bytes, alone=True)
            plans.append(ModulePlan(name, own, buckets.all))
    return tuple(plans)


@dataclass(frozen=True)
class JobGroups:
    """The groups of a job: `sync` and `modules` are the sync group and the modules of each rank, as reported;
    `replicas` are the ranks of each replica; `holders` those of its ranks that hold a part of a module; `computed`: the
    modules whose forwards each rank runs, in the order of the forward; `shards`: the ranks that gather them together,
    this rank alone if it holds them whole."""

    sync: tuple[Ranks, ...]
    modules: tuple[tuple[str, ...], ...]
    replicas: tuple[Ranks, ...]
    holders: tuple[Mapping[str, Ranks], ...]  # by replica
    computed: tuple[tuple[str, ...], ...]
    shards: tuple[Ranks, ...]

    def all(self) -> tuple[Ranks, ...]:
        """Every group of more than one rank, ascending."""
        shared = {ranks for by_module in self.holders for ranks in by_module.values()}
        groups = {*self.sync, *self.replicas, *shared, *self.shards}
        return tuple(sorted(ranks for ranks in groups if len(ranks) > 1))

    def of(self, rank: int) -> GroupPlan:
        position, computed = self.sync[rank].index(rank), self.computed[rank]
        holders = self.holders[position]
        own = tuple(name for name in computed if name in holders)
        elsewhere = (name for name in own if any(self.computed[number] != computed for number in holders[name]))
        spanning = frozenset(elsewhere)
        return GroupPlan(
            position=position,
            replica=self.replicas[position],
            holders=holders,
            modules=tuple(sorted({name for names in self.modules for name in names})),
            # spanning ones first, by name: ranks that have several of them in common exchange them in one order
            order=(*sorted(spanning), *(name for name in own if name not in spanning)),
            spanning=spanning,
        )


def plan_groups(
    sync: Sequence[Ranks], modules: Sequence[Sequence[str]], computed: Sequence[Sequence[str]] | None = None,
    shards: Sequence[Ranks] = (),
) -> JobGroups:  # fmt: skip
    """The groups of the job, from the sync group and the modules that each rank reports; without `computed` ranks run
    the forwards of the modules that they hold. One pass over the ranks. Raises UnsupportedError if sync groups differ
    in size."""
    sizes = {len(group) for group in sync}
    if len(sizes) > 1:
        raise UnsupportedError(f"local SGD: expected sync groups of one size, found sizes {sorted(sizes)}; drop --sync")
    replicas: list[list[int]] = [[] for _ in range(max(sizes))]
    holders: list[dict[str, list[int]]] = [{} for _ in replicas]
    for rank, group in enumerate(sync):
        position = group.index(rank)
        replicas[position].append(rank)
        for name in modules[rank]:
            holders[position].setdefault(name, []).append(rank)
    return JobGroups(
        sync=tuple(sync), modules=tuple(map(tuple, modules)), replicas=tuple(map(tuple, replicas)),
        holders=tuple({name: tuple(ranks) for name, ranks in by_module.items()} for by_module in holders),
        computed=tuple(map(tuple, modules if computed is None else computed)), shards=tuple(shards),
    )  # fmt: skip
