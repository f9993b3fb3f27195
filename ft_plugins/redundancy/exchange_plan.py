"""Which bytes protect which others: the sections of a job, their parity, and who sends what to whom. Pure.

Invariant: trainers and SMPs compute the same plan from the same few facts, without talking. A section is captured state
of one sharding group, spread over the nodes that its ranks stand on; no two pieces of a stripe are on one node. A node
is known by its position (the order of the nodes' lowest ranks), so that a substitute inherits a place.

    slot data of ranks 0, 1 (node 0) | 4, 5 (node 1) | ...     extents, concatenated: one stream per node of the section
    stream of node i = block for stripe i+1 | block for stripe i+2 | ...      (parity.place)
    parity of stripe x = XOR of the blocks for it, kept on node x; in an EXCHANGED section each node sends n-1 blocks,
    one to each other node, in a LOCAL one node x has the blocks itself, in its replica (sections.Encoding)

In: node and captured bytes of each rank, sharding groups, replica sets, how many losses are to be survived (1: RAIM5,
2: RAIM6).
Out: `ExchangePlan`; `Loss`, the answer to 'which nodes may be lost now?'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import TopologyError
from .field import ORDER
from .parity import OnDemand, StripePiece, place
from .sections import Encoding, Extent, ParityPart, Section, lay_out, local_sections, remainder

NAMES = {1: "RAIM5", 2: "RAIM6"}  # by losses


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
    """Bytes `start .. stop` of the stream of the section's node `node` enter `area`, multiplied by 2**exponent."""

    area: Area
    node: int
    start: int
    stop: int
    exponent: int


@dataclass(frozen=True)
class Check:
    """The copy of `source` from which `keeper` has computed parity is to be compared with what `source.rank` holds.

    `bucket` is that of the keeper's slot, `entry` the place of the copy's digest in the keeper's table.
    """

    keeper: int
    bucket: int
    entry: int
    source: Extent


@dataclass(frozen=True)
class ExchangePlan:
    """The node tier of a job. `nodes[position]` and `ranks[position]` say who stands where.

    The first sections are EXCHANGED, one for each sharding group, the others LOCAL. `nbytes[rank]` is its slot data.
    """

    nodes: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    losses: int
    sections: tuple[Section, ...]
    nbytes: tuple[int, ...]
    name: str  # of the redundancy, for people

    def encoded(self, encoding: Encoding) -> Iterator[Section]:
        """The sections of one encoding."""
        return (section for section in self.sections if section.encoding is encoding)

    @cached_property
    def areas(self) -> tuple[tuple[Area, ...], ...]:
        """By position, the parity blocks that its node keeps, in the order in which they lie in its parity slot."""
        kept: list[list[Area]] = [[] for _ in self.nodes]
        for section in self.encoded(Encoding.EXCHANGED):
            for node, position in enumerate(section.positions):
                for stripe, which in section.placement.kept_on(node):
                    offset = kept[position][-1].offset + kept[position][-1].nbytes if kept[position] else 0
                    block = section.placement.block
                    kept[position].append(Area(section.index, stripe, which, position, offset, block))
        return tuple(map(tuple, kept))

    def parity_bytes(self, position: int) -> int:
        """Bytes of one version's parity in a node's vault."""
        areas = self.areas[position]
        return areas[-1].offset + areas[-1].nbytes if areas else 0

    @cached_property
    def area_of(self) -> dict[tuple[int, int, int], Area]:
        """By section, stripe and which."""
        return {(area.section, area.stripe, area.which): area for kept in self.areas for area in kept}

    @cached_property
    def sends(self) -> Sequence[tuple[Send, ...]]:
        """By position, what its node sends: n-1 blocks in each of its sections, twice that for two losses."""
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
        exponent = piece.coefficient if which else 0
        return Send(self.area_of[section.index, stripe, which], piece.node, piece.start, piece.stop, exponent)

    def gathered_on(self, position: int) -> Iterator[Send]:
        """What other nodes send to the one at `position`."""
        for area in self.areas[position]:
            section = self.sections[area.section]
            for piece in section.placement.stripes[area.stripe].data:
                yield self._send(section, area.stripe, area.which, piece)

    @cached_property
    def _sections_at(self) -> tuple[tuple[tuple[Section, int], ...], ...]:
        """By position, the EXCHANGED sections that its node is in, and as which of their nodes."""
        found: list[list[tuple[Section, int]]] = [[] for _ in self.nodes]
        for section in self.encoded(Encoding.EXCHANGED):
            for node, position in enumerate(section.positions):
                found[position].append((section, node))
        return tuple(map(tuple, found))

    @cached_property
    def position_of_rank(self) -> dict[int, int]:
        """Where each rank's node stands."""
        return {rank: position for position, ranks in enumerate(self.ranks) for rank in ranks}

    @cached_property
    def section_of_rank(self) -> dict[int, Section]:
        """The section of each rank's sharding group, on the nodes of which all that protects the rank is."""
        return {
            extent.rank: section
            for section in self.encoded(Encoding.EXCHANGED)
            for stream in section.streams
            for extent in stream
        }

    @cached_property
    def sections_of_rank(self) -> dict[int, tuple[Section, ...]]:
        """All sections that hold state of each rank."""
        found: dict[int, dict[int, Section]] = {rank: {} for rank in range(len(self.nbytes))}
        for section in self.sections:
            for stream in section.streams:
                for extent in stream:
                    found[extent.rank][section.index] = section
        return {rank: tuple(there.values()) for rank, there in found.items()}

    def ways(self, rank: int, lost: Collection[int]) -> tuple[Section, ...] | None:
        """The sections of which the slot of a rank is put together when what lay at the positions `lost` is gone; None
        where it cannot be."""
        if len(set(lost) & set(self.section_of_rank[rank].positions)) > self.losses:
            return None
        return self.sections_of_rank[rank]

    @cached_property
    def parts(self) -> tuple[tuple[ParityPart, ...], ...]:
        """By rank, the parity of LOCAL sections that lies in its slots, behind the data, in order."""
        found: list[list[ParityPart]] = [[] for _ in self.nbytes]
        for part in lay_out(self.encoded(Encoding.LOCAL), dict(enumerate(self.nbytes))):
            found[part.rank].append(part)
        return tuple(map(tuple, found))

    @cached_property
    def parts_of_stripe(self) -> dict[tuple[int, int], tuple[ParityPart, ...]]:
        """By (section, stripe), the parts of its parity, in order."""
        found: dict[tuple[int, int], list[ParityPart]] = {}
        for parts in self.parts:
            for part in parts:
                found.setdefault((part.section, part.stripe), []).append(part)
        return {key: tuple(sorted(parts, key=lambda part: part.start)) for key, parts in found.items()}

    def checks(self, rank: int, buckets: Sequence[tuple[int, int]]) -> Iterator[Check]:
        """What is compared of the parity in the slots of a rank, in the order of its table.

        `buckets` are (offset, bytes) of those of the slot, of which none holds bytes of two parts.
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

    def copy_holders(self, rank: int) -> tuple[int, ...]:
        """The positions that keep a whole copy of the rank's small state and digest table: as many as may be lost."""
        section = self.section_of_rank[rank]
        own = section.positions.index(self.position_of_rank[rank])
        count = len(section.positions)
        return tuple(section.positions[(own + step) % count] for step in range(1, self.losses + 1))

    def copies_on(self, position: int) -> tuple[int, ...]:
        """The ranks whose small state and digest table the node at `position` keeps."""
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
        """The plan for people."""
        lines = [f"{self.name} over {len(self.nodes)} nodes: any {self.losses} of each group may be lost"]
        for section in self.sections:
            ranks = sorted({extent.rank for stream in section.streams for extent in stream})
            where = ", ".join(self.nodes[position] for position in section.positions)
            if section.encoding is Encoding.EXCHANGED:
                name, how = f"group {section.index}", ""
            else:
                name, how = "  replicas", f", {section.encoding.value}"
            lines.append(f"  {name}: ranks {ranks} on {where}; blocks of {section.placement.block} bytes{how}")
        for position, node in enumerate(self.nodes):
            sent = sum(s.placement.losses * s.placement.sizes[n] for s, n in self._sections_at[position])
            line = f"  {node}: keeps {self.parity_bytes(position)} bytes of parity, sends {sent} per version"
            local = sum(part.stop - part.start for rank in self.ranks[position] for part in self.parts[rank])
            lines.append(f"{line}; computes {local} of its own" if local else line)
        return "\n".join(lines)


def positions(nodes: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Every node once, in the order of their lowest ranks, and its ranks; `nodes[rank]` is the node of each rank."""
    placed: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        placed.setdefault(node, []).append(rank)
    return tuple(placed), tuple(map(tuple, placed.values()))


def unprotected(nodes: Sequence[str], groups: Iterable[Sequence[int]], losses: int) -> str:
    """Why a lost node cannot be survived in this job; '' where it can."""
    if len(set(nodes)) < 2:
        return "all ranks stand on one node"
    needed = 2 if losses == 1 else 4
    for group in groups:
        found = len({nodes[rank] for rank in group})
        if found < needed:
            ranks = ", ".join(map(str, group))
            return (
                f"{NAMES[losses]} needs the ranks of each sharding group on at least {needed} nodes, but ranks {ranks} "
                f"stand on {found}; spread data parallelism over the nodes (Megatron-LM: an order with dp last)"
            )
        if losses == 2 and found > ORDER + losses:
            return (
                f"{NAMES[losses]} has factors for {ORDER + losses} nodes in a sharding group, but the {len(group)} "
                f"ranks of the one with rank {group[0]} stand on {found}; {NAMES[1]} has no such bound"
            )
    return ""


def plan_exchange(
    nodes: Sequence[str],
    groups: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    losses: int,
    replicated: Sequence[Sequence[Extent]] = (),
    first: int = 0,
) -> ExchangePlan:
    """The plan of a job: `nodes[rank]`, sharding groups as tuples of ranks, `nbytes[rank]` of slot data. Sections are
    numbered from `first`.

    `replicated` are the streams of the replica sets of which the ranks can compute parity themselves: whose share of
    each lies where in its slots, in the order of the stream.

    Raises TopologyError where a loss cannot be survived (`unprotected` says why), or a rank is in no group or in two.
    """
    if reason := unprotected(nodes, groups, losses):
        raise TopologyError(reason)
    if sorted(rank for group in groups for rank in group) != list(range(len(nodes))):
        raise TopologyError(f"{len(nodes)} ranks, but the sharding groups are {[list(group) for group in groups]}")
    names, ranks = positions(nodes)
    at = {name: position for position, name in enumerate(names)}
    local = local_sections([at[name] for name in nodes], groups, replicated, losses, first + len(groups))
    left = remainder(local, nbytes)
    sections = []
    for index, group in enumerate(groups):
        members: dict[int, list[Extent]] = {}
        for rank in sorted(group):
            members.setdefault(at[nodes[rank]], []).extend(left[rank])
        where = tuple(sorted(members))
        streams = tuple(tuple(members[position]) for position in where)
        placement = place([sum(extent.nbytes for extent in stream) for stream in streams], losses)
        sections.append(Section(first + index, where, streams, placement))
    return ExchangePlan(names, ranks, losses, (*sections, *local), tuple(nbytes), NAMES[losses])
