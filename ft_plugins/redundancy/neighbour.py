"""Whose copy lives where: each rank's slot, whole, on the node of a neighbouring pipeline stage. Pure.

The nodes of a pipeline, in the order of its stages, keep each other's copies in pairs; of an odd number the last three
are a ring. The receiver of a rank is the rank at its own tp, cp, dp of the nearest stage on that node. What is copied
is the rank's slot: its part of the state that n replicas hold (each of them carries 1/n) and all of what it alone
holds, so every byte of the job is copied once.

    node  0         1         2         3         stages 0 1 | 2 3 | 4 5 | 6 7 of one pipeline
          0 1  <->  2 3       4 5  <->  6 7       0 and 1 go to 2, 2 and 3 to 1; 4 and 5 to 6, 6 and 7 to 5

BAFT (section 4.2.1) sends to the stage before, and from the first to the last, as a ring. These two hardly ever idle at
once, so the first stage decides how rare checkpoints are: in pairs they come about twice as often, as often as the
others of the ring had them (planner.fitting has both). A copy is lost with one other node instead of one of two.

Invariant: no copy is on the node of what it copies. Lost nodes are survived exactly when none of them keeps a copy of
what another of them held; so any one node may be lost, and of several those of which no two are partners.

To the executor a copy is parity of one source: a `Section` for each rank, of two nodes, whose second keeps a `Mirror`
of the stream of the first. So SMPs carry it out, seal it, let it count, and rebuild from it, as they do for RAIM5.

With parity beside them (`BothPlan`) the sections of sharding groups come behind those of copies. What is lost comes
from its copy where that is left, else from parity: so two nodes may be lost as well that keep each other's copies.

In: node of each rank, pipelines in the order of their stages, bytes of slot data of each rank. Out: `NeighbourPlan`,
and by `exchange()` the `ExchangePlan` that carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import TopologyError
from ..model.topology import Topology
from .exchange_plan import ExchangePlan, plan_exchange, positions
from .parity import ALIGNMENT, OnDemand, Placement, Stripe, StripePiece
from .sections import Extent, Section

NAME = "a copy on the neighbouring stage"
LOSSES = 1  # of a rank's two nodes: its own, or the one that keeps its copy
VERSIONS = 2  # that a node keeps of what it receives: the one that counts, and the one that is being received
TABLE_COPIES = 64
_PAIRS = 6  # of nodes, named one by one


@dataclass(frozen=True)
class Mirror(Placement):
    """Two nodes: the second keeps what the first has. One stripe, whose P is a copy of its only piece."""

    @cached_property
    def stripes(self) -> Sequence[Stripe]:
        """The one stripe."""
        return OnDemand(1, self._stripe)

    def _parity_of(self, stripe: int) -> tuple[int, ...]:
        return (1,)

    def piece(self, stripe: int, node: int) -> StripePiece | None:
        """The whole stream of node 0; None for everything else."""
        return StripePiece(0, 0, self.sizes[0], 0) if (stripe, node) == (0, 0) else None

    def kept_on(self, node: int) -> tuple[tuple[int, int], ...]:
        """The P of the one stripe, on node 1."""
        return ((0, 0),) if node == 1 else ()


@dataclass(frozen=True)
class NeighbourCopy:
    """`nbytes` of slot data of `rank`, whose node stands at `source`, are kept at `target`, where `receiver` runs.

    `stages_back`: how many pipeline stages earlier that is; 1 for the previous one, -1 for the next one.
    """

    rank: int
    source: int
    receiver: int
    target: int
    nbytes: int
    stages_back: int


@dataclass(frozen=True)
class NeighbourPlan:
    """Copies of a job, by rank. `nodes[position]` and `ranks[position]` say who stands where."""

    nodes: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    copies: tuple[NeighbourCopy, ...]

    # who keeps what

    @cached_property
    def sent_from(self) -> tuple[tuple[NeighbourCopy, ...], ...]:
        """By position, what its ranks send, by rank."""
        return tuple(tuple(self.copies[rank] for rank in ranks) for ranks in self.ranks)

    @cached_property
    def kept_on(self) -> tuple[tuple[NeighbourCopy, ...], ...]:
        """By position, what its node keeps, by rank."""
        kept: list[list[NeighbourCopy]] = [[] for _ in self.nodes]
        for copy in self.copies:
            kept[copy.target].append(copy)
        return tuple(map(tuple, kept))

    def kept_bytes(self, position: int) -> int:
        """Bytes of one version of the copies that a node keeps, each in whole cache lines."""
        return sum(_aligned(copy.nbytes) for copy in self.kept_on[position])

    def budget_bytes(self, position: int, versions: int = VERSIONS) -> int:
        """Bytes that a node claims for copies of `versions` versions."""
        return versions * self.kept_bytes(position)

    def sent_bytes(self, position: int) -> int:
        """Bytes that a node sends of one version."""
        return sum(copy.nbytes for copy in self.sent_from[position])

    def together(self, rank: int) -> tuple[NeighbourCopy, ...]:
        """The copies of all nodes that share links with the node of `rank`, directly or through others, by rank: what
        these may send when is decided by them alone."""
        neighbours: list[set[int]] = [set() for _ in self.nodes]
        for copy in self.copies:
            neighbours[copy.source].add(copy.target)
            neighbours[copy.target].add(copy.source)
        reached, waiting = set(), {self.copies[rank].source}
        while waiting:
            position = waiting.pop()
            reached.add(position)
            waiting |= neighbours[position] - reached
        return tuple(copy for copy in self.copies if copy.source in reached)

    # what may be lost

    @cached_property
    def keepers(self) -> tuple[frozenset[int], ...]:
        """By position, where the copies of its ranks are."""
        return tuple(frozenset(copy.target for copy in sent) for sent in self.sent_from)

    @cached_property
    def fatal_pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs of positions that must not be lost together: one of them keeps a copy of what the other has."""
        pairs = {(min(at, to), max(at, to)) for at, keepers in enumerate(self.keepers) for to in keepers}
        return tuple(sorted(pairs))

    def loses(self, lost: Collection[int]) -> tuple[int, ...]:
        """The ranks whose state is gone when the nodes at the positions `lost` are lost at the same time."""
        gone = set(lost)
        return tuple(copy.rank for at in sorted(gone) for copy in self.sent_from[at] if copy.target in gone)

    def survives(self, lost: Collection[int]) -> bool:
        """Whether the nodes at the positions `lost` may be lost at the same time, once a version counts."""
        return not self.loses(lost)

    # how it is carried out

    def exchange(self) -> CopyPlan:
        """What the SMPs carry out: section `rank` is the copy of that rank, from the start of its slot to the end."""
        sections = []
        for copy in self.copies:
            stream = (Extent(copy.rank, 0, copy.nbytes),)
            placement = Mirror((copy.nbytes, 0), LOSSES, _aligned(copy.nbytes))
            sections.append(Section(copy.rank, (copy.source, copy.target), (stream, ()), placement))
        sizes = tuple(copy.nbytes for copy in self.copies)
        return CopyPlan(self.nodes, self.ranks, LOSSES, tuple(sections), sizes, NAME, self)

    # for people

    def table(self) -> str:
        """Who may be lost; what each node sends and keeps; then whose copy lives where, the first 64."""
        pairs = [f"{self.nodes[a]}+{self.nodes[b]}" for a, b in self.fatal_pairs]
        shown = ", ".join(pairs[:_PAIRS]) + (f" and {len(pairs) - _PAIRS} more" if len(pairs) > _PAIRS else "")
        lines = [
            f"copies on the nearest stage of the partner node, {len(self.nodes)} nodes: any one may be lost; "
            f"of several, all but those with {shown}"
        ]
        for position, node in enumerate(self.nodes):
            targets = ", ".join(self.nodes[at] for at in sorted(self.keepers[position]))
            lines.append(
                f"  {node}: sends {self.sent_bytes(position)} bytes per version to {targets}; keeps "
                f"{self.kept_bytes(position)} bytes of others, {self.budget_bytes(position)} for {VERSIONS} versions"
            )
        for copy in self.copies[:TABLE_COPIES]:
            away = abs(copy.stages_back)
            back = f"{away} stage{'s' if away > 1 else ''} {'back' if copy.stages_back > 0 else 'on'}"
            lines.append(
                f"  rank {copy.rank} on {self.nodes[copy.source]}: {copy.nbytes} bytes to {self.nodes[copy.target]} "
                f"(rank {copy.receiver}, {back})"
            )
        if len(self.copies) > TABLE_COPIES:
            lines.append(f"  ... and {len(self.copies) - TABLE_COPIES} more ranks")
        return "\n".join(lines)


@dataclass(frozen=True)
class CopyPlan(ExchangePlan):
    """The exchange that carries out `neighbours`."""

    neighbours: NeighbourPlan

    def table(self) -> str:
        """For people."""
        return self.neighbours.table()


@dataclass(frozen=True)
class BothPlan(CopyPlan):
    """Copies, and beside them `parity`, whose sections come behind those of copies."""

    parity: ExchangePlan

    def ways(self, rank: int, lost: Collection[int]) -> tuple[Section, ...] | None:
        """The copy where it is left; of that no parity is had, which the rank computes again. Else parity."""
        if self.neighbours.copies[rank].target not in lost:
            return (self.sections[rank],)
        return self.parity.ways(rank, lost)

    def copy_holders(self, rank: int) -> tuple[int, ...]:
        """Where its copy is, and where parity wants it."""
        return tuple(dict.fromkeys((self.neighbours.copies[rank].target, *self.parity.copy_holders(rank))))

    def copies_on(self, position: int) -> tuple[int, ...]:
        """Likewise."""
        kept = {copy.rank for copy in self.neighbours.kept_on[position]}
        return tuple(sorted(kept.union(self.parity.copies_on(position))))

    def sent_beside(self, rank: int) -> int:
        """Bytes that go out for parity beside the copy of a rank; those of several ranks with the first of them."""
        found = 0
        for send in self.parity.sends[self.position_of_rank[rank]]:
            members = self.sections[send.area.section].members(send.node)
            found += send.stop - send.start if members[:1] == (rank,) else 0
        return found

    def table(self) -> str:
        """For people."""
        return f"{self.neighbours.table()}\n{self.parity.table()}"


def plan_both(
    nodes: Sequence[str],
    stages: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    replicated: Sequence[Sequence[Extent]] = (),
) -> BothPlan:
    """Copies on pipeline neighbours, and parity that makes up for one node of each sharding group: arguments as those
    of `plan_neighbours` and `plan_exchange`. Raises TopologyError where either cannot be had."""
    copies = plan_neighbours(nodes, stages, nbytes).exchange()
    parity = plan_exchange(nodes, groups, nbytes, LOSSES, replicated, len(copies.sections))
    sections = (*copies.sections, *parity.sections)
    name = f"{NAME} or {parity.name}"
    return BothPlan(copies.nodes, copies.ranks, LOSSES, sections, copies.nbytes, name, copies.neighbours, parity)


def pipelines(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """The ranks of each pipeline, in the order of its stages."""
    found: list[tuple[int, ...]] = []
    for rank in range(topology.world_size):
        group = topology.group("pp", rank)
        if group[0] == rank:
            found.append(group)
    return tuple(found)


def unplaced(nodes: Sequence[str], stages: Sequence[Sequence[int]]) -> str:
    """Why copies on pipeline neighbours cannot be had in this job; '' where they can.

    `nodes[rank]` is the node of each rank, `stages` are the pipelines.
    """
    if len(set(nodes)) < 2:
        return "all ranks stand on one node"
    for pipeline in stages:
        there = {nodes[rank] for rank in pipeline}
        if len(there) < 2:
            ranks = f"rank {pipeline[0]} has" if len(pipeline) == 1 else f"ranks {', '.join(map(str, pipeline))} have"
            why = "no other stage" if len(pipeline) == 1 else f"all their stages on node {min(there)}"
            return (
                f"a copy goes to a pipeline stage on another node, but {ranks} {why}; spread the pipeline "
                "over the nodes (Megatron-LM: an order with pp last), or protect with parity (raim5)"
            )
    return ""


def plan_neighbours(nodes: Sequence[str], stages: Sequence[Sequence[int]], nbytes: Sequence[int]) -> NeighbourPlan:
    """Whose copy lives where: `nodes[rank]`, pipelines as ranks in the order of their stages, `nbytes[rank]` of data.

    Raises TopologyError where a rank has no neighbour on another node (`unplaced` says why), or is in no pipeline or in
    two.
    """
    if reason := unplaced(nodes, stages):
        raise TopologyError(reason)
    if sorted(rank for pipeline in stages for rank in pipeline) != list(range(len(nodes))):
        raise TopologyError(f"{len(nodes)} ranks, but the pipelines are {[list(pipeline) for pipeline in stages]}")
    names, ranks = positions(nodes)
    at = {name: position for position, name in enumerate(names)}
    copies: dict[int, NeighbourCopy] = {}
    for pipeline in stages:
        there = list(dict.fromkeys(nodes[rank] for rank in pipeline))
        keeper = {node: there[partner(place, len(there))] for place, node in enumerate(there)}
        for stage, rank in enumerate(pipeline):
            kept = [other for other, held in enumerate(pipeline) if nodes[held] == keeper[nodes[rank]]]
            nearest = min(kept, key=lambda other: (abs(stage - other), other))  # noqa: B023
            receiver = pipeline[nearest]
            copies[rank] = NeighbourCopy(
                rank, at[nodes[rank]], receiver, at[nodes[receiver]], nbytes[rank], stage - nearest
            )
    return NeighbourPlan(names, ranks, tuple(copies[rank] for rank in range(len(nodes))))


def partner(node: int, nodes: int) -> int:
    """Which of a pipeline's `nodes`, two or more, counted in the order of its stages, keeps the copy of `node`."""
    if nodes % 2 == 0 or node < nodes - 3:
        return node ^ 1
    return nodes - 1 if node == nodes - 3 else node - 1


def partners(nodes: int) -> tuple[frozenset[int], ...]:
    """Of each of a pipeline's `nodes`, two or more: the others any of which takes a copy with it when both are lost."""
    kept = [partner(node, nodes) for node in range(nodes)]
    return tuple(
        frozenset({kept[node], *(other for other in range(nodes) if kept[other] == node)}) for node in range(nodes)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
