"""What ranks and nodes report before a recovery, and how much of it a recovery believes. Pure.

Invariant: `usable` removes every version that must not be restored: one whose replicas are mismatched (ranks hold
parts of unlike replicas), and one that a start from the beginning made void. A damaged record says nothing about
versions or lineages: the other slots and the other ranks decide.

In: the content of segments, the inventories of SMPs. Out: `RankFacts`, `NodeFacts`, and what follows from them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..redundancy.node_kinds import runs, shortened
from ..snapshot.segment.slots import Mark, Slot, SlotState, Version, marks_of


@dataclass(frozen=True)
class RankFacts:
    """A rank's segment before recovery. `damaged` names the records of its header that failed their digest. `run`: the
    identity of the run that opened its lineage, '' if unknown; `drawn`: one for a run that begins now. `proving`,
    `varies`, `ended`: see `Header`; `condemned`: see `Ledger`."""

    rank: int
    slots: tuple[Slot, ...]
    lineage: int  # the newest opened here; 0 if unknown
    completed: int | None  # None if unknown
    from_nothing: bool = False  # the newest lineage began from the beginning, by decision of the user or of all ranks
    damaged: tuple[str, ...] = ()
    lost: bool = False  # the segment replaced one whose header was damaged
    agreed: int | None = None  # see `Segment`
    doubted: tuple[int, int] | None = None
    run: str = ""
    drawn: str = ""
    proving: int = 0
    varies: bool = False
    condemned: bool = False
    ended: int = 0

    def restorable(self) -> dict[Version, int]:
        """The versions that can be restored, and their slots."""
        return {slot.version: slot.index for slot in self.slots if slot.state is SlotState.CLEAN and slot.version}

    @property
    def damaged_slots(self) -> tuple[int, ...]:
        return tuple(slot.index for slot in self.slots if slot.damaged)

    def damage(self) -> str:
        """A message on what is damaged; '' for nothing."""
        parts = [f"slot {index}" for index in self.damaged_slots]
        parts += [f"the header's {name}" for name in self.damaged]
        messages = [f"rank {self.rank}: {', '.join(parts)} damaged and not used"] if parts else []
        lost = f"rank {self.rank}: its segment was damaged; only other nodes or storage can have its state"
        messages += [lost] if self.lost else []
        return "; ".join(messages)


@dataclass(frozen=True)
class NodeFacts:
    """What a node's SMP can provide before recovery; nodes are numbered as in the job now.

    `parity`: versions whose parity and copies are complete here. `position`, `plan_digest`: this node's position and
    the digest of the exchange plan when they were stored. `committed` is the newest committed version that it knows of,
    `lineage` the newest opened here, `completed` the iterations that ranks with segments of it here had completed.
    `released`: the lineage in which the job continued while this node was a spare; older versions are of no use.
    `marks` are those of the versions in `slots`; `damage` is a message on parity that is damaged. `run`: the newest
    lineage here whose run is known, and that run.
    """

    slots: Mapping[int, frozenset[Version]]  # by rank
    parity: frozenset[Version] = frozenset()
    position: int | None = None
    plan_digest: int = 0
    completed: Mapping[int, int] = field(default_factory=dict)
    lineage: int = 0
    committed: Version | None = None
    released: int = 0
    marks: Mapping[Version, Mark] = field(default_factory=dict)
    damage: str = ""
    run: tuple[int, str] = (0, "")


def run_of(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]) -> str:
    """The run that opened the newest lineage; '' if unknown, or if two did: memory of two jobs of one name has met."""
    known = {(rank.lineage, rank.run) for rank in facts if rank.run} | {node.run for node in nodes if node.run[1]}
    newest = max((lineage for lineage, _ in known), default=0)
    runs = [run for lineage, run in known if lineage == newest]
    return runs[0] if len(runs) == 1 else ""


def usable(
    facts: Sequence[RankFacts], nodes: Sequence[NodeFacts], run: str = ""
) -> tuple[Sequence[RankFacts], Sequence[NodeFacts], Mapping[Version, Mark], str]:
    """The facts without versions that must not be restored, of other runs than `run` too; the marks of all that are not
    void; a message on the ranks that hold versions of another run, '' for none."""
    facts, nodes = _without_void(facts, nodes)
    strange = [rank.rank for rank in facts if rank.run not in ("", run) and rank.restorable()]
    facts = [replace(rank, slots=()) if rank.rank in strange else rank for rank in facts]
    nodes = [node if node.run[1] in ("", run) else NodeFacts({}, lineage=node.lineage) for node in nodes]
    reported = [(slot.version, slot.mark) for rank in facts for slot in rank.slots]
    marks = marks_of([*reported, *(entry for node in nodes for entry in node.marks.items())])
    other = f"{_ranks(strange)}: memory of another run of this job's name" if strange else ""
    return *_only(lambda version: marks.get(version) is not Mark.MISMATCHED, facts, nodes), marks, other


def _without_void(
    facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]
) -> tuple[Sequence[RankFacts], Sequence[NodeFacts]]:
    """Remove the versions that a start from the beginning made void, also from ranks that have not recorded it yet. The
    damage of those ranks is ignored."""
    newest = max(rank.lineage for rank in facts)
    if not any(rank.from_nothing and rank.lineage == newest for rank in facts):
        return facts, nodes

    def without_old_damage(rank: RankFacts) -> RankFacts:
        if rank.lineage == newest or rank.damaged:
            return rank
        return replace(rank, slots=tuple(slot for slot in rank.slots if not slot.damaged), lost=False)

    return _only(lambda version: version.lineage >= newest, [without_old_damage(rank) for rank in facts], nodes)


def _only(
    valid: Callable[[Version], bool], facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]
) -> tuple[Sequence[RankFacts], Sequence[NodeFacts]]:
    """The facts with only the `valid` versions."""
    return [
        replace(rank, slots=tuple(slot for slot in rank.slots if slot.version is None or valid(slot.version)))
        for rank in facts
    ], [
        replace(
            node,
            slots={rank: frozenset(filter(valid, versions)) for rank, versions in node.slots.items()},
            parity=frozenset(filter(valid, node.parity)),
            committed=node.committed if node.committed and valid(node.committed) else None,
        )
        for node in nodes
    ]


def newest_lineage(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]) -> int:
    """The newest lineage that was opened or that a version has: versions show it if the record is lost."""
    versions = _all_versions(facts, nodes)
    versions |= {node.committed for node in nodes if node.committed}
    opened = [rank.lineage for rank in facts] + [node.lineage for node in nodes]
    return max([*opened, *(version.lineage for version in versions)])


def completed_by_all(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts], lineage: int, run: str) -> int | None:
    """The last iteration that every rank completed, by the memory of `lineage`, the job's newest, and of `run` alone:
    what an older lineage completed is not what the job has come to. None if there is no such memory. A rank's previous
    node may know it.

    A rank's 0 counts only with a lineage and without versions: a new segment has neither, a rebuilt one has versions.
    """

    def counts(rank: RankFacts) -> bool:
        newest = max(rank.restorable(), default=Version(0, 0))  # from another size: no rank has opened its lineage
        taken_over = newest.lineage == lineage and (rank.completed or 0) >= newest.iteration
        return (rank.lineage == lineage or taken_over) and rank.run in ("", run)

    completed = {
        rank.rank: rank.completed for rank in facts if counts(rank)
        if rank.completed is not None and (rank.completed or (rank.lineage and not rank.restorable()))
    }  # fmt: skip
    newest = [node.completed.items() for node in nodes if node.lineage == lineage]
    for rank, iteration in ((rank, done) for known in newest for rank, done in known if done):
        completed[rank] = max(iteration, completed.get(rank, 0))
    return min(completed.values(), default=None)


def trust_of(facts: Sequence[RankFacts]) -> tuple[int | None, tuple[int, int] | None]:
    """`agreed` and `doubted` of the job: a verdict holds for all ranks, so one that reports it suffices."""
    spans = [rank.doubted for rank in facts if rank.doubted is not None]
    agreed = max((rank.agreed for rank in facts if rank.agreed is not None), default=None)
    return agreed, (min(first for first, _ in spans), max(last for _, last in spans)) if spans else None


def first_capture_interrupted(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]) -> bool:
    """Whether a start from the beginning ended before every rank had its first version. Then no state is lost by
    starting again. Every rank has to confirm it by undamaged records."""
    versions = _all_versions(facts, nodes)
    if len(versions) != 1 or all(rank.restorable() for rank in facts):
        return False
    (first,) = versions
    return all(
        rank.from_nothing and rank.lineage == first.lineage and not rank.damaged and not rank.damaged_slots
        and all(slot.version in (None, first) for slot in rank.slots)
        for rank in facts
    )  # fmt: skip


def in_memory(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]) -> str:
    """A message on the sealed versions, by ranks that hold the same ones; '' for none."""
    held: dict[int, set[Version]] = {rank.rank: set(rank.restorable()) for rank in facts}
    for node in nodes:
        for rank, versions in node.slots.items():
            held.setdefault(rank, set()).update(versions)
    holders: dict[str, list[int]] = {}
    for rank in sorted(held):
        holders.setdefault(", ".join(map(str, sorted(held[rank]))) or "none", []).append(rank)
    parity = ", ".join(map(str, sorted(set[Version]().union(*(node.parity for node in nodes)))))
    entries = [f"parity: {parity}"] if parity else []
    entries += [f"{_ranks(ranks)}: {versions}" for versions, ranks in holders.items()]
    return "; ".join(shortened(entries)) if parity or any(held.values()) else ""


def _ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0-2, 5'; `ranks` ascend."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shortened(runs(ranks)))}"


def _all_versions(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]) -> set[Version]:
    versions = {version for rank in facts for version in rank.restorable()}
    return versions | {version for node in nodes for held in (*node.slots.values(), node.parity) for version in held}
