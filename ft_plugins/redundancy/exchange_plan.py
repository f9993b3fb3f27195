"""Plan parity across nodes: the sections of a job, where their parity lies, and which node sends which bytes. Pure.

Invariant: trainers and SMPs compute the same plan from the same inputs without communicating. A section is captured
state of one redundancy group, spread over the nodes of its ranks; no two pieces of a stripe are on one node. A node is
identified by its position (nodes ordered by their lowest rank), so a substitute inherits the position of a lost node.

    slot data of ranks 0, 1 (node 0) | 4, 5 (node 1) | ...     extents, concatenated: one stream per node of the section
    stream of node i = block for stripe i+1 | block for stripe i+2 | ...      (parity.place_parity)
    parity of stripe x = XOR of its blocks, stored on node x. In an EXCHANGED section each node sends n-1 blocks, one to
    each other node; in a LOCAL section node x reads the blocks from its own replica (sections.Encoding)

In: node and captured bytes of each rank, redundancy groups, replica sets, losses to survive (1: RAIM5, 2: RAIM6).
Out: `ExchangePlan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import TopologyError
from .field import ORDER
from .node_kinds import SHOWN, node_lines, runs, shortened
from .parity import LEAST_NODES, OnDemand, StripePiece, place_parity
from .sections import Encoding, Extent, ParityPart, Section, lay_out, local_sections, remainder

NAMES = {1: "RAIM5", 2: "RAIM6"}  # by number of losses
_KINDS = {Encoding.EXCHANGED: ("group", ""), Encoding.LOCAL: ("replicas", f", {Encoding.LOCAL.value}")}


@dataclass(frozen=True)
class Area:
    """Where a parity block of an EXCHANGED section lies: `offset` in the parity slot of the node at `position`.

    `which`: 0 for P, 1 for Q.
    """

    section: int
    stripe: int
    which: int
    position: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Send:
    """Bytes `start .. stop` of the stream of the section's node `node` are added to `area`, times 2**exponent."""

    area: Area
    node: int
    start: int
    stop: int
    exponent: int


@dataclass(frozen=True)
class Check:
    """Compare the replica from which rank `keeper` computed parity with the original bytes that `source.rank` captured.

    `bucket` is the parity bucket in the keeper's slot, `entry` the index of the replica's digest in the keeper's table.
    """

    keeper: int
    bucket: int
    entry: int
    source: Extent


@dataclass(frozen=True)
class ExchangePlan:
    """The node tier of a job. `nodes[position]` is a node's name, `ranks[position]` its ranks.

    The first sections are EXCHANGED, one for each redundancy group; the others are LOCAL. `nbytes[rank]` is the size of
    its slot data.
    """

    nodes: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    losses: int
    sections: tuple[Section, ...]
    nbytes: tuple[int, ...]
    name: str  # of the redundancy, for messages

    def encoded(self, encoding: Encoding) -> Iterator[Section]:
        return (section for section in self.sections if section.encoding is encoding)

    @cached_property
    def areas(self) -> tuple[tuple[Area, ...], ...]:
        """By position, the parity blocks that its node stores, in the order of its parity slot."""
        areas: list[list[Area]] = [[] for _ in self.nodes]
        for section in self.encoded(Encoding.EXCHANGED):
            for node, position in enumerate(section.positions):
                for stripe, which in section.placement.parities_on(node):
                    offset = areas[position][-1].offset + areas[position][-1].nbytes if areas[position] else 0
                    block = section.placement.block
                    areas[position].append(Area(section.index, stripe, which, position, offset, block))
        return tuple(map(tuple, areas))

    def parity_bytes(self, position: int) -> int:
        """Bytes of one version's parity in a node's parity store."""
        areas = self.areas[position]
        return areas[-1].offset + areas[-1].nbytes if areas else 0

    @cached_property
    def area_of(self) -> dict[tuple[int, int, int], Area]:
        """By (section, stripe, which)."""
        return {(area.section, area.stripe, area.which): area for areas in self.areas for area in areas}

    @cached_property
    def sends(self) -> Sequence[tuple[Send, ...]]:
        """By position, what its node sends: n-1 blocks in each of its sections, twice as many for two losses."""
        return OnDemand(len(self.nodes), self._sends_of)

    def _sends_of(self, position: int) -> tuple[Send, ...]:
        return tuple(
            self._send(section, stripe, which, piece)
            for section, node in self._sections_at[position]
            for stripe in range(len(section.positions))
            if (piece := section.placement.piece(stripe, node)) is not None
            for which in range(section.placement.losses)
        )

    def _send(self, section: Section, stripe: int, which: int, piece: StripePiece) -> Send:
        exponent = piece.exponent if which else 0
        return Send(self.area_of[section.index, stripe, which], piece.node, piece.start, piece.stop, exponent)

    def sends_to(self, position: int) -> Iterator[Send]:
        """What other nodes send to the node at `position`."""
        for area in self.areas[position]:
            section = self.sections[area.section]
            for piece in section.placement.stripes[area.stripe].data:
                yield self._send(section, area.stripe, area.which, piece)

    @cached_property
    def _sections_at(self) -> tuple[tuple[tuple[Section, int], ...], ...]:
        """By position, the EXCHANGED sections of its node, each with the node's index in the section."""
        sections: list[list[tuple[Section, int]]] = [[] for _ in self.nodes]
        for section in self.encoded(Encoding.EXCHANGED):
            for node, position in enumerate(section.positions):
                sections[position].append((section, node))
        return tuple(map(tuple, sections))

    @cached_property
    def position_of_rank(self) -> dict[int, int]:
        return {rank: position for position, ranks in enumerate(self.ranks) for rank in ranks}

    @cached_property
    def section_of_rank(self) -> dict[int, Section]:
        """The section of each rank's redundancy group. All that protects the rank is on nodes of that section."""
        return {
            extent.rank: section
            for section in self.encoded(Encoding.EXCHANGED)
            for stream in section.streams
            for extent in stream
        }

    @cached_property
    def sections_of_rank(self) -> dict[int, tuple[Section, ...]]:
        """All sections that hold state of each rank."""
        sections: dict[int, dict[int, Section]] = {rank: {} for rank in range(len(self.nbytes))}
        for section in self.sections:
            for stream in section.streams:
                for extent in stream:
                    sections[extent.rank][section.index] = section
        return {rank: tuple(by_index.values()) for rank, by_index in sections.items()}

    def recovery_sections(self, rank: int, lost: Collection[int]) -> tuple[Section, ...] | None:
        """The sections from which the slot of a rank is rebuilt after the nodes at the positions `lost` are lost; None
        if it cannot be rebuilt."""
        if len(set(lost) & set(self.section_of_rank[rank].positions)) > self.losses:
            return None
        return self.sections_of_rank[rank]

    def nodes_for(self, rank: int) -> frozenset[int]:
        """The positions of which any may take part in rebuilding the slot of a rank: those of all sections with its
        state, and those that keep its small state."""
        sections = (section.positions for section in self.sections_of_rank[rank])
        return frozenset(self.small_state_holders(rank)).union(*sections)

    @cached_property
    def parts(self) -> tuple[tuple[ParityPart, ...], ...]:
        """By rank, the parity of LOCAL sections in its slots, after the data, in order."""
        by_rank: list[list[ParityPart]] = [[] for _ in self.nbytes]
        for part in lay_out(self.encoded(Encoding.LOCAL), dict(enumerate(self.nbytes))):
            by_rank[part.rank].append(part)
        return tuple(map(tuple, by_rank))

    @cached_property
    def parts_of_stripe(self) -> dict[tuple[int, int], tuple[ParityPart, ...]]:
        """By (section, stripe), the parts of its parity, in order."""
        by_stripe: dict[tuple[int, int], list[ParityPart]] = {}
        for parts in self.parts:
            for part in parts:
                by_stripe.setdefault((part.section, part.stripe), []).append(part)
        return {key: tuple(sorted(parts, key=lambda part: part.start)) for key, parts in by_stripe.items()}

    def checks(self, rank: int, buckets: Sequence[tuple[int, int]]) -> Iterator[Check]:
        """The comparisons for the parity in the slots of a rank, in the order of its digest table.

        `buckets` are the slot's buckets as (offset, bytes). No bucket spans two parts.
        """
        entry, parts = len(buckets), iter(self.parts[rank])
        part = next(parts, None)
        for number, (offset, nbytes) in enumerate(buckets):
            while part is not None and part.offset + part.stop - part.start <= offset:
                part = next(parts, None)
            if part is None or offset < part.offset:
                continue
            start = part.start + offset - part.offset
            for _, _, source in self.sections[part.section].sources(part.stripe, start, start + nbytes):
                yield Check(rank, number, entry, source)
                entry += 1

    def small_state_holders(self, rank: int) -> tuple[int, ...]:
        """The positions that store the rank's small state and digest table: as many as there may be losses."""
        section = self.section_of_rank[rank]
        own = section.positions.index(self.position_of_rank[rank])
        count = len(section.positions)
        return tuple(section.positions[(own + step) % count] for step in range(1, self.losses + 1))

    def small_state_on(self, position: int) -> tuple[int, ...]:
        """The ranks whose small state and digest table the node at `position` stores."""
        return tuple(
            sorted(
                {
                    extent.rank
                    for section, node in self._sections_at[position]
                    for step in range(1, self.losses + 1)
                    for extent in section.streams[(node - step) % len(section.positions)]
                }
            )
        )

    def table(self) -> str:
        """The plan as text: the first groups by name, the others by their size; nodes with equal figures once."""
        lines = [f"{self.name} over {len(self.nodes)} nodes: any {self.losses} of each group may be lost"]
        lines += [self._section_line(section) for section in self.sections[:SHOWN]]
        more = Counter(
            (len(section.positions), section.placement.block, section.encoding) for section in self.sections[SHOWN:]
        )
        for (count, block, encoding), times in list(more.items())[:SHOWN]:
            name, how = _KINDS[encoding]
            lines.append(f"  ... and {times} {name} more of {count} nodes; blocks of {block} bytes{how}")
        if len(more) > SHOWN:
            lines.append(f"  ... and {sum(list(more.values())[SHOWN:])} more of other sizes")
        return "\n".join([*lines, *node_lines(map(self._node_text, range(len(self.nodes))), self.nodes)])

    def _section_line(self, section: Section) -> str:
        ranks = sorted({extent.rank for stream in section.streams for extent in stream})
        nodes = ", ".join(shortened([self.nodes[position] for position in section.positions]))
        name, how = _KINDS[section.encoding]
        label = f"{name} {section.index}" if section.encoding is Encoding.EXCHANGED else f"  {name}"
        members = ", ".join(shortened(runs(ranks)))
        return f"  {label}: ranks {members} on {nodes}; blocks of {section.placement.block} bytes{how}"

    def _node_text(self, position: int) -> str:
        sent = sum(s.placement.losses * s.placement.sizes[n] for s, n in self._sections_at[position])
        local = sum(part.stop - part.start for rank in self.ranks[position] for part in self.parts[rank])
        text = f"keeps {self.parity_bytes(position)} bytes of parity, sends {sent} per version"
        return f"{text}; computes {local} of its own" if local else text


def positions(nodes: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The nodes in the order of their lowest ranks, and the ranks of each; `nodes[rank]` is the node of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return tuple(ranks), tuple(map(tuple, ranks.values()))


def why_unprotected(nodes: Sequence[str], groups: Iterable[Sequence[int]], losses: int, whole: bool = True) -> str:
    """The reason why this job cannot survive the loss of a node; '' if it can.

    `whole`: parity is over each of the sharding groups as a whole; else these will be cut (`grouping`).
    """
    if len(set(nodes)) < 2:
        return "all ranks are on one node"
    needed = LEAST_NODES[losses]
    for group in groups:
        count = len({nodes[rank] for rank in group})
        if count < needed:
            ranks = ", ".join(map(str, group))
            return (
                f"{NAMES[losses]} needs the ranks of each sharding group on at least {needed} nodes, but ranks {ranks} "
                f"are on {count}; spread data parallelism over the nodes (Megatron-LM: an order with dp last)"
            )
        if whole and losses == 2 and count > ORDER + losses:
            return (
                f"{NAMES[losses]} supports at most {ORDER + losses} nodes in a sharding group, but the {len(group)} "
                f"ranks of the group of rank {group[0]} are on {count} nodes; use {NAMES[1]}, which has no such limit"
            )
    return ""


def plan_exchange(
    nodes: Sequence[str], groups: Sequence[Sequence[int]], nbytes: Sequence[int], losses: int,
    replicated: Sequence[Sequence[Extent]] = (), first: int = 0,
) -> ExchangePlan:  # fmt: skip
    """Plan the exchange of a job: `nodes[rank]`, redundancy groups as ranks, `nbytes[rank]` of slot data. Sections are
    numbered from `first`.

    `replicated` are the streams of the replica sets whose parity the ranks can compute themselves: for each, the
    extents of slots that make up the stream, in order.

    Raises TopologyError if a loss cannot be survived (see `why_unprotected`), or a rank is not in exactly one group.
    """
    if reason := why_unprotected(nodes, groups, losses):
        raise TopologyError(reason)
    if sorted(rank for group in groups for rank in group) != list(range(len(nodes))):
        raise TopologyError(f"{len(nodes)} ranks, but the sharding groups are {[list(group) for group in groups]}")
    names, ranks = positions(nodes)
    position_of = {name: position for position, name in enumerate(names)}
    local = local_sections([position_of[name] for name in nodes], groups, replicated, losses, first + len(groups))
    left = remainder(local, nbytes)
    sections = []
    for index, group in enumerate(groups):
        members: dict[int, list[Extent]] = {}
        for rank in sorted(group):
            members.setdefault(position_of[nodes[rank]], []).extend(left[rank])
        ordered = tuple(sorted(members))
        streams = tuple(tuple(members[position]) for position in ordered)
        placement = place_parity([sum(extent.nbytes for extent in stream) for stream in streams], losses)
        sections.append(Section(first + index, ordered, streams, placement))
    return ExchangePlan(names, ranks, losses, (*sections, *local), tuple(nbytes), NAMES[losses])
