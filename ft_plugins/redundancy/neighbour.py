"""Choose the neighbour that keeps each rank's copy: its whole slot, on the node of an adjacent pipeline stage. Pure.

The nodes of a pipeline, in stage order, keep each other's copies in pairs; if their number is odd, the last three form
a ring. A rank's receiver has the same tp, cp and dp coordinates, on the nearest stage of that node. The copy is the
rank's slot: its 1/n of the state that n replicas hold, and all of the state that it alone holds, so every byte of the
job is copied once.

    node  0         1         2         3         stages 0 1 | 2 3 | 4 5 | 6 7 of one pipeline
          0 1  <->  2 3       4 5  <->  6 7       0 and 1 go to 2, 2 and 3 to 1; 4 and 5 to 6, 6 and 7 to 5

BAFT (section 4.2.1) sends to the previous stage, and from the first stage to the last, as a ring. The first and last
stages are rarely idle at the same time, so in a ring the first stage limits how often copies complete. Pairs complete
about twice as often, as often as the other stages of the ring (planner.fitting compares both). Each copy is then lost
with one particular other node instead of one of two.

Invariant: no copy is on the node it protects. Lost nodes are survived exactly if none of them keeps a copy of what
another held: any one node, or several of which no two are partners.

The executor treats a copy as parity of one source: a `Section` of two nodes for each rank, whose second node keeps a
`Mirror` of the stream of the first. SMPs exchange, seal, commit and rebuild it as they do for RAIM5.

With parity in addition (`CopyAndParityPlan`) the sections of redundancy groups follow those of the copies. A lost slot
is rebuilt from its copy if that is left, else from parity, so even two nodes that keep each other's copies may be lost.

In: node of each rank, pipelines in stage order, bytes of slot data of each rank. Out: `NeighbourPlan`; its `exchange()`
is the `ExchangePlan` that the SMPs execute.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import TopologyError
from ..model.topology import Topology
from .exchange_plan import ExchangePlan, plan_exchange, positions
from .node_kinds import node_lines
from .parity import OnDemand, Placement, Stripe, StripePiece, aligned
from .sections import Extent, Section

NAME = "a copy on the neighbouring stage"
LOSSES = 1  # of a rank's two nodes: its own, or the one that keeps its copy
VERSIONS = 2  # stored by a receiving node: the committed one and the one being received
TABLE_COPIES = 16
_PAIRS = 6  # pairs of nodes listed by name


@dataclass(frozen=True)
class Mirror(Placement):
    """Two nodes; the second keeps a copy of the first. One stripe, whose P is a copy of its only piece."""

    @cached_property
    def stripes(self) -> Sequence[Stripe]:
        return OnDemand(1, self._stripe)

    def _parity_nodes(self, stripe: int) -> tuple[int, ...]:
        return (1,)

    def piece(self, stripe: int, node: int) -> StripePiece | None:
        """The whole stream of node 0; None for everything else."""
        return StripePiece(0, 0, self.sizes[0], 0) if (stripe, node) == (0, 0) else None

    def parities_on(self, node: int) -> tuple[tuple[int, int], ...]:
        """The P of the one stripe, on node 1."""
        return ((0, 0),) if node == 1 else ()


@dataclass(frozen=True)
class NeighbourCopy:
    """A copy of `nbytes` of slot data of `rank`, from position `source` to `target`, where the rank `receiver` runs.

    `stages_back`: how many pipeline stages earlier the receiver is; 1 for the previous stage, -1 for the next.
    """

    rank: int
    source: int
    receiver: int
    target: int
    nbytes: int
    stages_back: int


@dataclass(frozen=True)
class NeighbourPlan:
    """The copies of a job, by rank. `nodes[position]` is a node's name, `ranks[position]` its ranks."""

    nodes: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    copies: tuple[NeighbourCopy, ...]

    @cached_property
    def sent_from(self) -> tuple[tuple[NeighbourCopy, ...], ...]:
        """By position, what its ranks send, by rank."""
        return tuple(tuple(self.copies[rank] for rank in ranks) for ranks in self.ranks)

    @cached_property
    def kept_on(self) -> tuple[tuple[NeighbourCopy, ...], ...]:
        """By position, the copies that its node keeps, by rank."""
        by_target: list[list[NeighbourCopy]] = [[] for _ in self.nodes]
        for copy in self.copies:
            by_target[copy.target].append(copy)
        return tuple(map(tuple, by_target))

    def kept_bytes(self, position: int) -> int:
        """Bytes of one version of the copies that a node keeps, each rounded up to whole cache lines."""
        return sum(aligned(copy.nbytes) for copy in self.kept_on[position])

    def sent_bytes(self, position: int) -> int:
        return sum(copy.nbytes for copy in self.sent_from[position])

    def linked_copies(self, rank: int) -> tuple[NeighbourCopy, ...]:
        """The copies of all nodes that share links with the node of `rank`, directly or through others. Their send
        windows are planned together, independently of all other nodes."""
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

    @cached_property
    def keepers(self) -> tuple[frozenset[int], ...]:
        """By position, the positions that keep the copies of its ranks."""
        return tuple(frozenset(copy.target for copy in sent) for sent in self.sent_from)

    @cached_property
    def fatal_pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs of positions that must not be lost together: one of them keeps a copy of the other's state."""
        pairs = {(min(at, to), max(at, to)) for at, keepers in enumerate(self.keepers) for to in keepers}
        return tuple(sorted(pairs))

    def exchange(self) -> CopyPlan:
        """The plan that the SMPs execute: section `rank` is the copy of that rank's whole slot data."""
        sections = []
        for copy in self.copies:
            stream = (Extent(copy.rank, 0, copy.nbytes),)
            placement = Mirror((copy.nbytes, 0), LOSSES, aligned(copy.nbytes))
            sections.append(Section(copy.rank, (copy.source, copy.target), (stream, ()), placement))
        sizes = tuple(copy.nbytes for copy in self.copies)
        return CopyPlan(self.nodes, self.ranks, LOSSES, tuple(sections), sizes, NAME, self)

    def table(self) -> str:
        """The plan as text: which losses are survived, what each kind of node sends and keeps, and the first copies."""
        pairs = [f"{self.nodes[a]}+{self.nodes[b]}" for a, b in self.fatal_pairs]
        shown = ", ".join(pairs[:_PAIRS]) + (f" and {len(pairs) - _PAIRS} more" if len(pairs) > _PAIRS else "")
        lines = [
            f"copies on the nearest stage of the partner node, {len(self.nodes)} nodes: any one may be lost; "
            f"of several, all but those with {shown}"
        ]
        lines += node_lines(map(self._node_text, range(len(self.nodes))), self.nodes)
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

    def _node_text(self, position: int) -> str:
        targets, kept = len(self.keepers[position]), self.kept_bytes(position)
        return (
            f"sends {self.sent_bytes(position)} bytes per version to {targets} node{'s' * (targets > 1)}; keeps {kept} "
            f"bytes of others, {VERSIONS * kept} for {VERSIONS} versions"
        )


@dataclass(frozen=True)
class CopyPlan(ExchangePlan):
    """The exchange that executes `neighbours`."""

    neighbours: NeighbourPlan

    def table(self) -> str:
        return self.neighbours.table()


@dataclass(frozen=True)
class CopyAndParityPlan(CopyPlan):
    """Copies, and in addition `parity`, whose sections follow those of the copies."""

    parity: ExchangePlan

    def recovery_sections(self, rank: int, lost: Collection[int]) -> tuple[Section, ...] | None:
        """The copy if it is left (it holds no parity: the rank computes that again), else the sections of parity."""
        if self.neighbours.copies[rank].target not in lost:
            return (self.sections[rank],)
        return self.parity.recovery_sections(rank, lost)

    def small_state_holders(self, rank: int) -> tuple[int, ...]:
        """The position that keeps the rank's copy, then those that parity requires."""
        return tuple(dict.fromkeys((self.neighbours.copies[rank].target, *self.parity.small_state_holders(rank))))

    def small_state_on(self, position: int) -> tuple[int, ...]:
        """The ranks whose small state and digest table the node at `position` stores, for copies or for parity."""
        copied = {copy.rank for copy in self.neighbours.kept_on[position]}
        return tuple(sorted(copied.union(self.parity.small_state_on(position))))

    def parity_sent_bytes(self, rank: int) -> int:
        """Bytes sent for parity in addition to the copy of a rank. What several ranks share is attributed to the first
        of them."""
        nbytes = 0
        for send in self.parity.sends[self.position_of_rank[rank]]:
            members = self.sections[send.area.section].members(send.node)
            nbytes += send.stop - send.start if members[:1] == (rank,) else 0
        return nbytes

    def table(self) -> str:
        return f"{self.neighbours.table()}\n{self.parity.table()}"


def plan_copies_and_parity(
    nodes: Sequence[str], stages: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], nbytes: Sequence[int],
    replicated: Sequence[Sequence[Extent]] = (),
) -> CopyAndParityPlan:  # fmt: skip
    """Plan copies on pipeline neighbours, and parity against the loss of one node of each redundancy group. Arguments
    as for `plan_neighbours` and `plan_exchange`. Raises TopologyError if either is impossible."""
    copies = plan_neighbours(nodes, stages, nbytes).exchange()
    parity = plan_exchange(nodes, groups, nbytes, LOSSES, replicated, len(copies.sections))
    sections = (*copies.sections, *parity.sections)
    name = f"{NAME} or {parity.name}"
    return CopyAndParityPlan(
        copies.nodes, copies.ranks, LOSSES, sections, copies.nbytes, name, copies.neighbours, parity
    )


def pipelines(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """The ranks of each pipeline, in stage order."""
    groups = (topology.group("pp", rank) for rank in range(topology.world_size))
    return tuple(group for rank, group in enumerate(groups) if group[0] == rank)


def why_unplaced(nodes: Sequence[str], stages: Sequence[Sequence[int]]) -> str:
    """The reason why pipeline neighbours cannot keep copies in this job; '' if they can.

    `nodes[rank]` is the node of each rank, `stages` are the pipelines.
    """
    if len(set(nodes)) < 2:
        return "all ranks are on one node"
    for pipeline in stages:
        names = {nodes[rank] for rank in pipeline}
        if len(names) < 2:
            ranks = f"rank {pipeline[0]} has" if len(pipeline) == 1 else f"ranks {', '.join(map(str, pipeline))} have"
            why = "no other stage" if len(pipeline) == 1 else f"all their stages on node {min(names)}"
            return (
                f"a copy goes to a pipeline stage on another node, but {ranks} {why}; spread the pipeline "
                "over the nodes (Megatron-LM: an order with pp last), or protect with parity (raim5)"
            )
    return ""


def plan_neighbours(nodes: Sequence[str], stages: Sequence[Sequence[int]], nbytes: Sequence[int]) -> NeighbourPlan:
    """Plan the copies of a job: `nodes[rank]`, pipelines as ranks in stage order, `nbytes[rank]` of slot data.

    Raises TopologyError if a rank has no neighbour on another node (see `why_unplaced`) or is not in exactly one
    pipeline.
    """
    if reason := why_unplaced(nodes, stages):
        raise TopologyError(reason)
    if sorted(rank for pipeline in stages for rank in pipeline) != list(range(len(nodes))):
        raise TopologyError(f"{len(nodes)} ranks, but the pipelines are {[list(pipeline) for pipeline in stages]}")
    names, ranks = positions(nodes)
    position_of = {name: position for position, name in enumerate(names)}
    copies: dict[int, NeighbourCopy] = {}
    for pipeline in stages:
        ordered = list(dict.fromkeys(nodes[rank] for rank in pipeline))
        keeper = {node: ordered[partner(place, len(ordered))] for place, node in enumerate(ordered)}
        for stage, rank in enumerate(pipeline):
            stages_there = [other for other, member in enumerate(pipeline) if nodes[member] == keeper[nodes[rank]]]
            nearest = min(stages_there, key=lambda other: (abs(stage - other), other))  # noqa: B023
            receiver = pipeline[nearest]
            copies[rank] = NeighbourCopy(
                rank, position_of[nodes[rank]], receiver, position_of[nodes[receiver]], nbytes[rank], stage - nearest
            )
    return NeighbourPlan(names, ranks, tuple(copies[rank] for rank in range(len(nodes))))


def partner(node: int, nodes: int) -> int:
    """The node that keeps the copy of `node`: both are indices of a pipeline's `nodes` (two or more) in stage order."""
    if nodes % 2 == 0 or node < nodes - 3:
        return node ^ 1
    return nodes - 1 if node == nodes - 3 else node - 1
