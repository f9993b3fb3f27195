"""The host memory that protection of a job would claim, from the sizes of its model and its parallelism alone.

The ranks are planned as those of a running job are: the same layout, slots, parity and node tier (`CapturePlan`,
`ReftNodes`), for a host that has no tensors. So the figures are those of the claim. They leave out what depends on the
framework: how parameters are divided among stages (here evenly), and small state beyond what is reserved anyway.

Invariant: pure; nothing is claimed, and no other process is needed. Of a large job the ranks of some nodes are planned
one by one, and the others are taken to be like them: nodes may then differ by a page for each rank and slot.

In: `DryJob`, a configuration. Out: `NodeClaim` of each kind of node. Raises ConfigError, TopologyError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ...config import Config, ReftConfig
from ...errors import ConfigError
from ...events import Events
from ...model.inventory import Inventory, Item, Role
from ...model.topology import Topology
from ...recovery.nodes import RankLayout
from ...redundancy.exchange_plan import positions
from ...snapshot.capture.double import replica_shares
from ...snapshot.capture.layout import Layout, plan_layout
from ...snapshot.segment.slots import FIRST
from .failure_domains import JobNodeNames
from .reft_nodes import ReftNodes
from .reft_plan import CapturePlan

_PLANNED_RANKS = 1024  # of a larger job, those of some nodes
_ELEMENT = 4  # bytes
ORDER = "tp-cp-ep-dp-pp"  # Megatron-LM's default


@dataclass(frozen=True)
class DryJob:
    """A model of `parameters`, of which `bytes_each` are captured. `sharded`: data parallelism shards them (distributed
    optimizer, ZeRO, FSDP); else all replicas hold them, and `whole`: each captures all of them, because replicas may
    differ (PAFT's averaging)."""

    parameters: float
    bytes_each: float
    tp: int
    pp: int
    dp: int
    ranks_per_node: int
    sharded: bool = True
    whole: bool = False
    order: str = ORDER

    @cached_property
    def topology(self) -> Topology:
        """The ranks. Raises TopologyError."""
        return Topology(self.tp, self.pp, self.dp, order=self.order)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"node{rank // self.ranks_per_node}" for rank in range(self.topology.world_size))

    def inventory(self, rank: int) -> Inventory:
        """The state of a rank as one item."""
        replicas = (rank,) if self.sharded or self.whole else self.topology.replicas(rank)
        count = self.parameters * self.bytes_each / (self.tp * self.pp * _ELEMENT)
        elements = -(-int(count) // self.dp) if self.sharded else int(count)
        item = Item("state", "float32", (elements,), elements * _ELEMENT, Role.MAIN_PARAMETER, replicas)
        return Inventory.of(rank, [item])


@dataclass(frozen=True)
class NodeClaim:
    """What one kind of node claims at start, in bytes: `count` such nodes of `ranks` each, of which every rank has
    `slots`. While the job trains, it may claim up to `most_slots`, which take `more`."""

    count: int
    ranks: int
    slots: int
    most_slots: int
    captured: int  # by one version
    snapshots: int  # slots, with their digests and small state
    own_parity: int  # computed by the ranks from their replicas
    store: int  # parity or copies of other nodes
    more: int

    @property
    def total(self) -> int:
        return self.snapshots + self.own_parity + self.store

    @property
    def most(self) -> int:
        return self.total + self.more


@dataclass(frozen=True)
class DryClaim:
    """The kinds of nodes, the largest claim first. `losses`: lost nodes that each redundancy group survives;
    `unprotected`: why nodes do not protect each other, '' if they do or are not to."""

    kinds: tuple[NodeClaim, ...]
    losses: int
    unprotected: str


class _DryHost:
    """A host without tensors: only what planning reads."""

    def __init__(self, job: DryJob, rank: int) -> None:
        self._job, self.rank = job, rank

    def topology(self) -> Topology:
        return self._job.topology

    def inventory(self) -> Inventory:
        return self._job.inventory(self.rank)

    def tensors(self) -> dict[str, Any]:
        return {}

    def small_state(self) -> dict[str, Any]:
        return {}

    def names(self) -> None:
        return None


def plan_claim(job: DryJob, config: Config) -> DryClaim:
    """What each node of the job would claim. Raises ConfigError for redundancy that is named and not possible."""
    reft = config.capture
    if reft is None:
        raise ConfigError("no system is on that claims host memory; expected --reft or --baft")
    size = job.topology.world_size
    collective = SimpleNamespace(rank=size - 1, world_size=size)
    nodes = ReftNodes(
        cast(Any, _DryHost(job, size - 1)), config, cast(Any, collective), JobNodeNames(job.nodes), Path(), 0, Events()
    )  # fmt: skip
    names, ranks = positions(job.nodes)
    chosen = range(len(names)) if size <= _PLANNED_RANKS else _some(nodes, ranks)
    facts = _facts(job, config, reft, nodes, [rank for position in chosen for rank in ranks[position]])
    stores = nodes.store_bytes(facts, list(chosen))
    claims = [_claim(facts, ranks[at], store) for at, store in zip(chosen, stores, strict=True)]
    kinds = {claim: sum(other == claim for other in claims) for claim in claims}
    if len(kinds) == 1:
        kinds = {claim: len(names) for claim in kinds}
    counted = (replace(claim, count=count) for claim, count in kinds.items())
    largest = tuple(sorted(counted, key=lambda claim: claim.total, reverse=True))
    return DryClaim(largest, nodes.losses, nodes.unprotected)


def _some(nodes: ReftNodes, ranks: tuple[tuple[int, ...], ...]) -> list[int]:
    """The positions whose nodes share a redundancy group with the first or the last node."""
    at = {rank: position for position, members in enumerate(ranks) for rank in members}
    ends = {0, len(ranks) - 1}
    groups = ({at[rank] for rank in group} for group in nodes.groups)
    return sorted(ends.union(*(group for group in groups if group & ends)))


def _facts(job: DryJob, config: Config, reft: ReftConfig, nodes: ReftNodes, planned: Iterable[int]) -> list[RankLayout]:
    """The facts of all ranks. Those of ranks that are not `planned` are like one that is, of the same stage."""
    size = job.topology.world_size
    facts: dict[int, RankLayout] = {}
    layouts: dict[tuple[int, int], tuple[Layout, RankLayout]] = {}
    for rank in planned:
        layout = nodes.with_parity(plan_layout(job.inventory(rank), job.nodes, reft.bucket_mib << 20))
        host = cast(Any, _DryHost(job, rank))
        plan = CapturePlan(host, config, reft, layout, nodes.losses, size)
        facts[rank] = RankLayout(plan.shape, replica_shares(layout))
        layouts[_stage(job, rank)] = layout, facts[rank]
    if len(facts) < size:
        for rank in range(size):
            like = layouts.get(_stage(job, rank)) or next(iter(layouts.values()))
            facts.setdefault(rank, RankLayout(like[1].shape, _shares_of(rank, like[0], like[1])))
    return [facts[rank] for rank in range(size)]


def _stage(job: DryJob, rank: int) -> tuple[int, int]:
    at = job.topology.coords(rank)
    return at.pp, at.tp


def _shares_of(rank: int, layout: Layout, like: RankLayout) -> list[tuple[int, int, int, int]]:
    """The part of `rank` in the replica sets of a layout of another of their ranks."""
    digests = [digest for digest, *_ in like.replicated]
    streams = [stream for stream in layout.streams if stream.background and len(stream.replicas) > 1]
    shares = []
    for digest, stream in zip(digests, streams, strict=True):
        if rank in stream.replicas:
            own = stream.share_of(rank)
            shares.append((digest, own.start, stream.slot_offset, own.stop - own.start))
    return shares


def _claim(facts: list[RankLayout], ranks: tuple[int, ...], store: int) -> NodeClaim:
    shapes = [facts[rank].shape for rank in ranks]
    bare = [replace(each, nbytes=each.data_nbytes, parity_nbytes=0, checks=0) for each in shapes]
    snapshots, all_of_it = sum(each.first_total for each in bare), sum(each.first_total for each in shapes)
    more = sum(each.total - each.first_total for each in shapes)
    captured = sum(each.data_nbytes for each in shapes)
    slots, most = shapes[0].first_slots, shapes[0].slots
    return NodeClaim(1, len(ranks), slots, most, captured, snapshots, all_of_it - snapshots, store, more)


def block_of(claim: DryClaim) -> dict[str, Any]:
    kinds: list[Mapping[str, Any]] = [{**vars(kind), "total": kind.total} for kind in claim.kinds]
    return {"nodes": kinds, "losses": claim.losses, "unprotected": claim.unprotected}


def smaller_claims(config: Config, losses: int) -> str:
    """Ways for a message, separated by semicolons; '' for none. `losses`: lost nodes that a group survives."""
    reft, ways = config.capture, []
    if reft is None:
        return ""
    if losses and (reft.slots or 0) > FIRST:
        ways.append(
            f"no --reft-slots ({FIRST} of the {reft.slots} snapshots are then claimed at start, others when needed)"
        )
    if losses and reft.redundancy in ("raim5", "raim6", "both"):
        ways.append(
            "larger redundancy groups (--reft-group-nodes, and data parallelism over more nodes), in which each node "
            "keeps less parity"
        )
    if losses and reft.redundancy == "raim6":
        ways.append("--reft-redundancy raim5 (one lost node of a group instead of two)")
    if losses and config.baft is None:
        ways.append("--reft-redundancy none (a lost node is then survived from checkpoints only)")
    return "; ".join(ways)
