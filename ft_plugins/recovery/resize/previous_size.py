"""Decide which version of the job at a previous size to restore, and on which nodes to gather its state. Pure; no I/O.

Invariant: the same reports give the same plan on every rank. A version is chosen only if every rank of the previous job
has it, in a slot, or rebuilt from parity or a copy. Spares are sources like other nodes, but the plan puts all state on
nodes of the job as it is now.

In: reports of the nodes' SMPs and of spares (`PreviousSegments.report`, with the parity that belongs to it and a
reference to the protection, which is read once). Out: `PreviousSize`s, a `RecoveryPlan` for each, a node for each rank
of the previous job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...base.intake import parsed
from ...redundancy.exchange_plan import ExchangePlan
from ...smp.serve.job_file import ProtectionReference
from ...smp.tree.protection import Protection
from ...snapshot.segment.slots import Mark, Slot, SlotState, Version
from ..facts import NodeFacts, RankFacts
from ..nodes import read_marks
from ..recovery_plan import RecoveryPlan, Way, plan_recovery

Coordinates = tuple[int, int]  # in the model: pipeline stage, tensor rank


@dataclass(frozen=True)
class PreviousSize:
    """The job when it had `world_size` ranks: what is left of its state, first on the nodes of the job as numbered now.

    The first `members` of `nodes` take part in the job now, the others are spares. `protection` is the newest that any
    of them reports.
    """

    world_size: int
    members: int
    ranks: Mapping[int, RankFacts]
    nodes: tuple[NodeFacts, ...]
    coordinates: Mapping[int, Coordinates]
    protection: Protection | None
    fingerprint: Mapping[str, Any]  # of the job at that size

    @property
    def exchange(self) -> ExchangePlan | None:
        return self.protection.plan() if self.protection else None

    def holder(self, rank: int, version: Version) -> int | None:
        """The node that holds a rank's version; a spare only if no other node does."""
        return next((i for i, node in enumerate(self.nodes) if version in node.slots.get(rank, ())), None)


@dataclass(frozen=True)
class ResizePlan:
    """`version` of the job of `world_size` ranks becomes version `now` of the current size.

    `holders[rank]` is the number, in the job now, of the node with the state of a previous rank; `coordinates[rank]`
    the part of the model that it held. `completed` is the last iteration that all of them completed; `mark` the result
    of comparing the replicas of `version`.
    """

    world_size: int
    version: Version
    now: Version
    holders: Mapping[int, int]
    coordinates: Mapping[int, Coordinates]
    completed: int
    mark: Mark = Mark.NONE

    def ranks_of(self, coordinates: Coordinates) -> tuple[int, ...]:
        """The ranks of the previous job whose state a rank at `coordinates` restores."""
        return tuple(sorted(rank for rank, its_own in self.coordinates.items() if its_own == coordinates))


Described = Callable[[ProtectionReference], Protection]


def newest_references(
    reports: Sequence[Mapping[str, Any]], spares: Sequence[tuple[Mapping[str, Any], int]] = ()
) -> list[tuple[ProtectionReference, set[int]]]:
    """The newest protection of each size that reports name, and the positions that have its job file.

    `reports` are by position; a spare's comes with the position that asked it, which has the file of the spare's
    protection. Raises ProtocolError.
    """
    every_report = [(report, position) for position, report in enumerate(reports)] + list(spares)
    named = [(_reference(report), position) for report, position in every_report]
    newest: dict[int, ProtectionReference] = {}
    for reference, _ in named:
        if reference is not None and (
            reference.ranks not in newest or reference.lineage > newest[reference.ranks].lineage
        ):
            newest[reference.ranks] = reference
    return [
        (reference, {position for other, position in named if other is not None and other.job == reference.job})
        for _, reference in sorted(newest.items())
    ]


def _reference(report: Mapping[str, Any]) -> ProtectionReference | None:
    block = report["protection"]
    return None if block is None else parsed(ProtectionReference, block, "protection")


def read_previous_sizes(
    reports: Sequence[Mapping[str, Any]], spares: Sequence[Mapping[str, Any]] = (), described: Described | None = None
) -> tuple[PreviousSize, ...]:
    """The previous sizes in the reports of every node's SMP and of spares, ascending. Raises ProtocolError.

    `described` reads the newest protection of a size; None: it is not needed.
    """
    every_report = (*reports, *spares)
    sizes = sorted({int(size) for report in every_report for size, _ in report["sizes"]})
    newest = {reference.ranks: reference for reference, _ in newest_references(every_report)}
    protections = {
        size: described(newest[size]) if described is not None and size in newest else None for size in sizes
    }
    return tuple(_read_previous_size(size, every_report, len(reports), protections[size]) for size in sizes)


def _read_previous_size(
    world_size: int, reports: Sequence[Mapping[str, Any]], members: int, protection: Protection | None
) -> PreviousSize:
    ranks: dict[int, RankFacts] = {}
    coordinates: dict[int, Coordinates] = {}
    nodes: list[NodeFacts] = []
    fingerprint: Mapping[str, Any] = {}
    for report in reports:
        fingerprint = dict(report["fingerprints"]).get(world_size, fingerprint)
        held: dict[int, frozenset[Version]] = {}
        for rank, at, lineage, completed, from_nothing, versions in dict(report["sizes"]).get(world_size, []):
            held[rank] = frozenset(Version(*version) for version in versions)
            slots = tuple(Slot(index, SlotState.CLEAN, version) for index, version in enumerate(sorted(held[rank])))
            if [world_size, rank] in report.get("damaged", ()):  # else it would look as if it had captured nothing
                slots += (Slot(len(slots), SlotState.DIRTY, None, damaged=True),)
            facts = RankFacts(rank, slots, lineage, completed, from_nothing)
            known = ranks.get(rank)
            ranks[rank] = facts if known is None or known.lineage < lineage else known
            if at is not None:
                coordinates[rank] = (at[0], at[1])
        reference = _reference(report)
        of_this_size = reference is not None and reference.ranks == world_size
        committed = Version(*report["committed"]) if of_this_size and report["committed"] else None
        parity = frozenset(Version(*version) for version in report["parity"]) if of_this_size else frozenset()
        nodes.append(
            NodeFacts(
                held, parity, report["position"] if of_this_size else None, report["plan"] if of_this_size else 0,
                committed=committed, released=report["released"], marks=read_marks(report.get("marks", ())),
            )
        )  # fmt: skip
    return PreviousSize(world_size, members, ranks, tuple(nodes), coordinates, protection, fingerprint)


def plan_previous_size(
    size: PreviousSize, corrupt: Collection[tuple[int, Version]] = (), banned: Collection[Version] = ()
) -> RecoveryPlan:
    """The newest version that all ranks of the previous job can have: in a slot (`OWN`), or from parity."""
    nothing = RankFacts(0, (), 0, 0)
    facts = [replace(size.ranks.get(rank, nothing), rank=rank) for rank in range(size.world_size)]
    digest = size.protection.digest if size.protection else 0
    return plan_recovery(facts, corrupt, size.nodes, size.exchange, digest, banned)


def plan_current_size(
    facts: Sequence[NodeFacts], world_size: int, exchange: ExchangePlan | None, digest: int
) -> RecoveryPlan:
    """The newest version that the job has at its current size, before its ranks have attached."""
    held: dict[int, frozenset[Version]] = {}
    for node in facts:
        for rank, versions in node.slots.items():
            held[rank] = held.get(rank, frozenset()) | versions
    ranks = [
        RankFacts(rank, tuple(Slot(i, SlotState.CLEAN, v) for i, v in enumerate(sorted(held.get(rank, ())))), 0, 0)
        for rank in range(world_size)
    ]
    return plan_recovery(ranks, (), facts, exchange, digest)


def assign_nodes(size: PreviousSize, plan: RecoveryPlan, rebuilt: Mapping[tuple[int, Version], int]) -> dict[int, int]:
    """The node of the current job that has the state of each rank of the previous one, or rebuilds it.

    `rebuilt` holds the node of each rank and version that is rebuilt already.
    """
    assert plan.version is not None
    nodes: dict[int, int] = {}
    for rank, source in enumerate(plan.sources):
        holder = size.holder(rank, plan.version)
        if source.way is Way.DECODE:  # not where a slot is corrupt: rebuilding there would remove its older versions
            at = rank % size.members  # spreads the lost ranks over all nodes
            holder = rebuilt.get((rank, plan.version), at if at != holder else (rank + 1) % size.members)
        elif holder is not None and holder >= size.members:
            holder = rebuilt.get((rank, plan.version), rank % size.members)
        assert holder is not None
        nodes[rank] = holder
    return nodes
