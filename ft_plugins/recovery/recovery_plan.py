"""Decide which version is restored, from where, and what is lost. Pure.

Invariant: the plan names one version that every rank can have complete, the newest such, or none; versions are never
mixed. If replicas are compared, certified versions, and diverged ones that are captured with each replica in full, are
preferred to newer ones. A version whose replicas are mismatched is never restored.

The plan opens a new lineage, one above any that a rank has seen, so that later captures can never be combined with what
was captured after the restored version.

A rank has a version in its own segment, or another node's SMP still holds it (ranks have moved), or it is decoded from
parity, as long as no more nodes have lost it than the parity makes up for. A slot that fails its digests is lost.

Training never starts from the beginning unasked while a version is sealed anywhere, or something damaged may have been
one.

In: the facts of every rank's segment and every node's SMP. Out: `RecoveryPlan`, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..redundancy.exchange_plan import ExchangePlan
from ..redundancy.node_kinds import shortened
from ..snapshot.segment.slots import Mark, Version, recovery_order
from .facts import (
    NodeFacts,
    RankFacts,
    completed_by_all,
    first_capture_interrupted,
    in_memory,
    newest_lineage,
    run_of,
    trust_of,
    usable,
)

Corrupt = Collection[tuple[int, Version]]  # slots, by rank and version, that failed their digests


class Way(str, Enum):
    """How a rank gets a version."""

    OWN = "own segment"
    FETCH = "another node's"
    DECODE = "parity"


@dataclass(frozen=True)
class Source:
    """Where a rank gets its version; `node`, numbered as in the job now, if it is fetched from another one."""

    way: Way
    node: int | None = None


@dataclass(frozen=True)
class RecoveryPlan:
    """`version` is restored from `tier` into the new `lineage`.

    `sources` has one entry per rank. `holders` maps each position of the exchange plan to the node that has its data
    now, `gone` lists the positions whose data no node has.

    If `version` is None, the framework's own checkpoint of iteration `loaded` is used (tier `storage`), or training
    starts from the beginning (`none`), because of `reason`. `completed` is the last iteration that every rank
    completed, `lost` the number of iterations to be computed again; `at_least`: both may be more, because no memory of
    the job's newest lineage is left that says so. `state_lost`: the job has or had state that cannot
    be restored; `in_memory` says which versions are left. `mark` is that of the restored version, `passed_over` are the
    iterations of newer versions that are not preferred. `damage`: what failed its digest, by rank. `agreed`, `doubted`:
    see `Segment`; `refused`: the iteration of a newer checkpoint of the framework's own that is therefore not used.
    `lacking`: what of the job's state the framework's own checkpoint lacks, '' for nothing; `repeated`: the iteration
    of a newer one that is therefore not used: this job comes to it again. `run`: the identity of the run that is
    continued, '' if none is; `drawn`: the one that begins then.
    """

    version: Version | None
    tier: str
    lineage: int
    completed: int
    lost: int
    reason: str
    loaded: int = 0
    at_least: bool = False
    state_lost: bool = False
    sources: tuple[Source, ...] = ()
    holders: Mapping[int, int] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    mark: Mark = Mark.NONE
    passed_over: tuple[int, ...] = ()
    in_memory: str = ""
    damage: tuple[str, ...] = ()
    agreed: int | None = None
    doubted: tuple[int, int] | None = None
    refused: int = 0
    lacking: str = ""
    repeated: int = 0
    run: str = ""
    drawn: str = field(default="", compare=False)

    @property
    def fresh(self) -> bool:
        """Whether training starts from the beginning and nothing is lost by that."""
        return self.tier == "none" and not self.completed

    def table(self, at: int | None = None) -> str:
        """A message for people. Frameworks log an iteration before it ends: one that not every rank completed may be in
        their log and is computed again, which the message says. `at`: the iteration at which the restored state is, if
        it is before the restored version."""
        restored = self.version.iteration if self.version is not None else self.loaded
        least = "at least " if self.at_least else ""
        rest = f"every rank had completed {least}{self.completed}, {least}{self.lost} lost; "
        if at is not None and at < restored:
            rest += f"iteration {restored} is computed once more first, to be compared; lineage {self.lineage}"
        else:
            rest += f"iteration {restored + 1} is computed next, again if it was logged before; lineage {self.lineage}"
        if self.version is not None:
            reason = f" ({self.reason})" if self.tier == "storage" else ""
            reason += f", {self.mark.word}" if self.mark else ""
            lines = [
                f"recovery: iteration {self.version.iteration} of lineage {self.version.lineage} "
                f"from the {self.tier} tier{reason}; {rest}"
            ]
            for way in (Way.FETCH, Way.DECODE):
                ranks = [rank for rank, source in enumerate(self.sources) if source.way is way]
                if ranks:
                    lines.append(f"  ranks {', '.join(map(str, ranks))}: from {way.value}")
            if self.passed_over:
                newer = ", ".join(map(str, self.passed_over))
                lines.append(f"  newer, but not known whether their replicas agree: iterations {newer}")
            if self.refused:
                lines.append(
                    f"  newer, but the framework's own, saved when replicas were not known to agree: {self.refused}"
                )
            if self.repeated:
                lines.append(f"  newer, but the framework's own, which lacks {self.lacking}: {self.repeated}")
        elif self.tier == "storage":
            lines = [f"recovery: iteration {self.loaded} of the framework's own checkpoint ({self.reason}); {rest}"]
        elif self.fresh:
            lines = [f"training starts from the beginning ({self.reason}); lineage {self.lineage}"]
        else:
            lines = [f"recovery: from the beginning ({self.reason}), {self.lost} lost; lineage {self.lineage}"]
        return "\n".join([*lines, *(f"  {entry}" for entry in shortened(self.damage))])


def plan_recovery(
    facts: Sequence[RankFacts], corrupt: Corrupt = (), nodes: Sequence[NodeFacts] = (),
    exchange: ExchangePlan | None = None, plan_digest: int = 0, banned: Collection[Version] = (),
    before: int | None = None,
) -> RecoveryPlan:  # fmt: skip
    """The newest version that all ranks can have, or the newest preferred one if there is any.

    `before`: only versions older than that iteration.
    `facts` are in the order of ranks, `nodes` in the order of their lowest ranks. `corrupt` slots are not used, nor is
    a `banned` version, whose rebuild failed. `exchange` is the plan for the job as it is now, `plan_digest` its digest:
    parity of another plan is of no use.
    """
    lineage = 1 + newest_lineage(facts, nodes)  # above every version anywhere
    agreed, doubted = trust_of(facts)
    damage = tuple(filter(None, (rank.damage() for rank in facts)))
    run, drawn = run_of(facts, nodes), facts[0].drawn
    facts, nodes, marks, other_run = usable(facts, nodes, run)
    known = completed_by_all(facts, nodes, lineage - 1, run)
    own = {rank.rank: {v for v in rank.restorable() if (rank.rank, v) not in corrupt} for rank in facts}
    candidates = set().union(*own.values(), *(held for node in nodes for held in node.slots.values())) - set(banned)
    candidates = {version for version in candidates if before is None or version.iteration < before}
    released = max((node.released for node in nodes), default=0)
    ordered = recovery_order((version for version in candidates if version.lineage >= released), marks)
    for place, version in enumerate(ordered):
        located = _locate(version, own, corrupt, nodes, exchange, plan_digest)
        if located is None:
            continue
        sources, holders, gone = located
        tier = "process" if all(source.way is Way.OWN for source in sources) else "node"
        completed = version.iteration if known is None else known
        lost = max(0, completed - version.iteration)
        mark = marks.get(version, Mark.NONE)
        newer = tuple(sorted({other.iteration for other in ordered[place:] if other > version}))
        reason = f"newest {mark.word} that all ranks can have" if newer else "newest that all ranks can have"
        return RecoveryPlan(
            version, tier, lineage, completed, lost, reason, at_least=known is None, sources=sources, holders=holders,
            gone=gone, mark=mark, passed_over=newer, damage=damage, agreed=agreed, doubted=doubted, run=run,
            drawn=drawn,
        )  # fmt: skip
    reason = _why_none(facts, marks, bool(damage))
    gone = ()
    if exchange is not None:
        gone, excess = _too_much_lost(nodes, exchange, plan_digest)
        reason = "; ".join(filter(None, [reason, excess, *(node.damage for node in nodes)]))
    state_lost = any(rank.damaged_slots or rank.lost for rank in facts)
    sealed = in_memory(facts, nodes)
    if sealed and first_capture_interrupted(facts, nodes):
        reason = f"the job ended within the capture of its first version ({reason})"
    else:
        state_lost = state_lost or bool(sealed)
    if released and not any(rank.from_nothing and rank.lineage > released for rank in facts):
        reason += f"; while a node of this job was a spare, the job went on in lineage {released} on other nodes"
        state_lost = True
    if exchange is None and (elsewhere := _on_another_node(own, corrupt, nodes)):
        reason, state_lost = f"{reason}; {elsewhere}", True
    if other_run:
        reason, state_lost = f"{reason}; {other_run}: end the job on the nodes that are not to go on", True
    return RecoveryPlan(
        None, "none", lineage, known or 0, known or 0, reason, at_least=known is None, state_lost=state_lost, gone=gone,
        in_memory=sealed, damage=damage, agreed=agreed, doubted=doubted, run=run, drawn=drawn,
    )  # fmt: skip


def newest_committed(
    nodes: Sequence[NodeFacts], base: Version | None, exchange: ExchangePlan | None, plan_digest: int
) -> Version | None:
    """The newest committed version not above `base`, the restored one. A commit may have reached only some nodes.

    If it reached none, because the coordinator is gone, this is the newest version that all nodes hold, by `exchange`.
    """
    known = [node.committed for node in nodes if node.committed and base and node.committed <= base]
    if known or base is None or exchange is None:
        return max(known, default=None)
    everywhere = set.intersection(*(set(node.parity) for node in nodes))
    complete = (v for v in everywhere if len(_holders(v, (), nodes, exchange, plan_digest)) == len(exchange.nodes))
    return max((version for version in complete if version <= base), default=None)


def _why_none(facts: Sequence[RankFacts], marks: Mapping[Version, Mark], damaged: bool) -> str:
    held = {rank.rank: set(rank.restorable()) for rank in facts}
    empty = [rank for rank, versions in held.items() if not versions]
    if set.intersection(*held.values()):
        return "every version that all ranks hold is corrupt"
    if len(empty) == len(held):
        if Mark.MISMATCHED in marks.values():
            return "the replicas of every version differ"
        return "no version can be read" if damaged else "no version was captured before"
    return f"rank {min(empty)} holds no version" if empty else "no version is held by all ranks"


def _locate(
    version: Version, own: Mapping[int, Collection[Version]], corrupt: Corrupt, nodes: Sequence[NodeFacts],
    exchange: ExchangePlan | None, plan_digest: int,
) -> tuple[tuple[Source, ...], dict[int, int], tuple[int, ...]] | None:  # fmt: skip
    """`sources`, `holders` and `gone` of a plan that restores `version`; None if some rank cannot have it."""
    node_of = {rank: index for index, node in enumerate(nodes) for rank in node.slots
               if version in node.slots[rank] and (rank, version) not in corrupt}  # fmt: skip
    sources: dict[int, Source] = {}
    for rank, versions in own.items():
        if version in versions:
            sources[rank] = Source(Way.OWN)
        elif rank in node_of:
            sources[rank] = Source(Way.FETCH, node_of[rank])
    missing = [rank for rank in own if rank not in sources]
    holders: dict[int, int] = {}
    gone: tuple[int, ...] = ()
    if exchange is None and (missing or any(source.way is not Way.OWN for source in sources.values())):
        return None  # nodes do not send each other anything
    if missing:
        assert exchange is not None
        holders = _holders(version, corrupt, nodes, exchange, plan_digest)
        gone = tuple(position for position in range(len(exchange.nodes)) if position not in holders)
        for rank in missing:
            if exchange.recovery_sections(rank, gone) is None:
                return None
            sources[rank] = Source(Way.DECODE)
    return tuple(sources[rank] for rank in sorted(sources)), holders, gone


def _on_another_node(own: Mapping[int, Collection[Version]], corrupt: Corrupt, nodes: Sequence[NodeFacts]) -> str:
    """A message on a rank whose state is on a node that the rank does not run on now; '' for none."""
    for index, node in enumerate(nodes):
        for rank, versions in sorted(node.slots.items()):
            if rank in own and not own[rank] and any((rank, version) not in corrupt for version in versions):
                return (
                    f"the state of rank {rank} is on node {index} of this job, but the rank runs on another one now: "
                    "start the nodes in their previous order, or let nodes protect each other (--reft-redundancy): "
                    "then state is moved"
                )
    return ""


def _too_much_lost(nodes: Sequence[NodeFacts], exchange: ExchangePlan, plan_digest: int) -> tuple[tuple[int, ...], str]:
    """The positions of a section that has lost more of the committed version than parity makes up for, and a message;
    nothing if there is none."""
    version = max((node.committed for node in nodes if node.committed), default=None)
    if version is None:
        return (), ""
    holders = _holders(version, (), nodes, exchange, plan_digest)
    all_gone = [position for position in range(len(exchange.nodes)) if position not in holders]
    for section in exchange.sections:
        gone = tuple(position for position in section.positions if position not in holders)
        section_ranks = {extent.rank for stream in section.streams for extent in stream}
        lost = [rank for rank in section_ranks if exchange.position_of_rank[rank] in gone]
        if len(gone) > exchange.losses and any(exchange.recovery_sections(rank, all_gone) is None for rank in lost):
            ranks = sorted(rank for position in gone for rank in exchange.ranks[position])
            return gone, (
                f"version {version}: the parts of ranks {', '.join(map(str, ranks))} are gone with {len(gone)} nodes "
                f"that protect each other, {exchange.name} makes up for {exchange.losses}"
            )
    return (), ""


def _holders(
    version: Version, corrupt: Corrupt, nodes: Sequence[NodeFacts], exchange: ExchangePlan, plan_digest: int
) -> dict[int, int]:
    """The node, by position, that has all of `version` at that position: the slots of its ranks and its parity."""
    holders = {}
    for index, node in enumerate(nodes):
        position = node.position
        if position is None or node.plan_digest != plan_digest or version not in node.parity:
            continue
        ranks = exchange.ranks[position]
        if all(version in node.slots.get(rank, ()) and (rank, version) not in corrupt for rank in ranks):
            holders[position] = index
    return holders
