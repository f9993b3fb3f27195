"""Which version is restored, from where, and what is lost by it. Pure.

Invariant: the plan names one version that every rank of the job can have complete, the newest such, or none; versions
are never mixed. Where replicas are compared it is the newest of those that are certified (or drift, and are captured
each in full), as long as one of them can be had; a version whose replicas were found to differ is never taken: what
ranks hold of it are parts of unlike replicas, which no later comparison could tell from a whole.

The plan opens a new lineage, one more than any rank has seen, so that what was captured after the restored version can
never be combined with what comes now.

A rank has a version in its own segment, or another node's SMP still holds it (ranks have moved), or it is decoded from
the parity of its section: as long as no more of the section's nodes have lost it than parity makes up for. A slot that
does not match its digests counts as lost.

What does not match its digest (a slot's header, a record of the segment's header) says nothing about versions or
lineages: the other slots and the other ranks decide, and the plan says what was damaged. Training never starts from
the beginning by itself while a version is sealed anywhere, or something that may have been one is damaged.

In: what every rank's segment and every node's SMP says. Out: `RecoveryPlan`, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ..errors import ResumeError
from ..redundancy.exchange_plan import ExchangePlan
from ..snapshot.slots import Mark, Slot, SlotState, Version, marks_of, recovery_order

_SHOWN = 8  # ranks of which a message says what they hold, or what of theirs is damaged


@dataclass(frozen=True)
class RankFacts:
    """What a rank's segment says before recovery. `damaged` names the records of its header that are not believed."""

    rank: int
    slots: tuple[Slot, ...]
    lineage: int  # the newest that was opened here; 0 where that is not known
    completed: int | None  # None where that is not known
    from_nothing: bool = False  # the newest lineage began from the beginning, as the user or all ranks had decided
    damaged: tuple[str, ...] = ()
    lost: bool = False  # the segment took the place of one whose header was damaged

    def holds(self) -> dict[Version, int]:
        """The restorable versions of this rank and the slots they lie in."""
        return {slot.version: slot.index for slot in self.slots if slot.state is SlotState.CLEAN and slot.version}

    @property
    def damaged_slots(self) -> tuple[int, ...]:
        """The slots whose headers cannot be read."""
        return tuple(slot.index for slot in self.slots if slot.damaged)

    def damage(self) -> str:
        """What is damaged, for people; '' for nothing."""
        found = [f"slot {index}" for index in self.damaged_slots]
        found += [f"the header's {name}" for name in self.damaged]
        words = [f"rank {self.rank}: {', '.join(found)} damaged and not used"] if found else []
        words += [f"rank {self.rank}: its segment was damaged and is lost"] if self.lost else []
        return "; ".join(words)


@dataclass(frozen=True)
class NodeFacts:
    """What a node's SMP can hand out before recovery; nodes are numbered as they stand now.

    `parity` are the versions that are complete in what it keeps for the `position` at which it stood then, by the plan
    with digest `plan`; `counted` is the one that counts, as far as it has heard. `completed` is what the ranks whose
    segments are there had reached, as in `RankFacts`; `lineage` the newest that was opened there. In `released` the job
    has gone on while this node was a spare: what is older is of no use. `marks` are those of the versions in `slots`.
    """

    slots: Mapping[int, frozenset[Version]]  # by rank
    parity: frozenset[Version] = frozenset()
    position: int | None = None
    plan: int = 0
    completed: Mapping[int, int] = field(default_factory=dict)
    lineage: int = 0
    counted: Version | None = None
    released: int = 0
    marks: Mapping[Version, Mark] = field(default_factory=dict)


class Way(str, Enum):
    """How a rank comes to a version."""

    OWN = "own segment"
    FETCH = "another node's"
    DECODE = "parity"


@dataclass(frozen=True)
class Source:
    """Where a rank has its version from; `node` as it stands now, where that is another one."""

    way: Way
    node: int | None = None


@dataclass(frozen=True)
class RecoveryPlan:
    """`version` is restored from `tier` into the new `lineage`.

    `sources` says by rank where from, `holders` which node now has what lay at each position of the exchange plan,
    `gone` the positions of which that is nowhere.

    None: the framework's own checkpoint of iteration `loaded` stands (tier `storage`), or training starts from the
    beginning (`none`), because of `reason`. `completed` is the last iteration whose end every rank had reached, `lost`
    the iterations to be run again. `state_lost`: there is or was state of the job which cannot be had; `there` says
    where versions still are. `mark` is what is known of the version's replicas, `passed_over` are the iterations of
    newer versions of which less is known. `damage`: what in the segments did not match its digest.
    """

    version: Version | None
    tier: str
    lineage: int
    completed: int
    lost: int
    reason: str
    loaded: int = 0
    state_lost: bool = False
    sources: tuple[Source, ...] = ()
    holders: Mapping[int, int] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    mark: Mark = Mark.NONE
    passed_over: tuple[int, ...] = ()
    there: str = ""
    damage: tuple[str, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether training starts from the beginning and nothing is lost by that."""
        return self.tier == "none" and not self.completed

    def table(self) -> str:
        """The plan for people. Frameworks log an iteration before its end, so one that was not completed may be in
        their log: it is computed again, and that is said."""
        next_one = 1 + (self.version.iteration if self.version is not None else self.loaded)
        left = (
            f"every rank had completed {self.completed}, {self.lost} lost; iteration {next_one} is computed next, "
            f"again if it was logged before; lineage {self.lineage}"
        )
        if self.version is not None:
            why = f" ({self.reason})" if self.tier == "storage" else ""
            why += f", {self.mark.word}" if self.mark else ""
            lines = [
                f"recovery: iteration {self.version.iteration} of lineage {self.version.lineage} "
                f"from the {self.tier} tier{why}; {left}"
            ]
            for way in (Way.FETCH, Way.DECODE):
                ranks = [rank for rank, source in enumerate(self.sources) if source.way is way]
                if ranks:
                    lines.append(f"  ranks {', '.join(map(str, ranks))}: from {way.value}")
            if self.passed_over:
                newer = ", ".join(map(str, self.passed_over))
                lines.append(f"  newer, but it is not known whether their replicas agreed: iterations {newer}")
        elif self.tier == "storage":
            lines = [f"recovery: iteration {self.loaded} of the framework's own checkpoint ({self.reason}); {left}"]
        elif self.fresh:
            lines = [f"training starts from the beginning ({self.reason}); lineage {self.lineage}"]
        else:
            lines = [f"recovery: from the beginning ({self.reason}), {self.lost} lost; lineage {self.lineage}"]
        return "\n".join([*lines, *(f"  {words}" for words in _few(self.damage))])


def plan_recovery(
    facts: Sequence[RankFacts],
    corrupt: Collection[tuple[int, Version]] = (),
    nodes: Sequence[NodeFacts] = (),
    exchange: ExchangePlan | None = None,
    plan_digest: int = 0,
    banned: Collection[Version] = (),
) -> RecoveryPlan:
    """The newest version that all ranks can have, from `facts` by rank and `nodes` in the order of their lowest ranks;
    the newest that is preferred by its mark, where one can be had.

    `corrupt` slots (rank, version) are not used, nor is a `banned` version, which could not be put together.
    `exchange` is the plan for the job as it is now, `plan_digest` its digest: parity of another plan is of no use.
    """
    lineage = 1 + _newest_lineage(facts, nodes)  # so what comes now is newer than all that is anywhere
    damage = tuple(filter(None, (rank.damage() for rank in facts)))
    facts, nodes = _without_void(facts, nodes)
    said = [(slot.version, slot.mark) for rank in facts for slot in rank.slots]
    marks = marks_of([*said, *(told for node in nodes for told in node.marks.items())])
    facts, nodes = _without_differing(facts, nodes, marks)
    own = {rank.rank: {v for v in rank.holds() if (rank.rank, v) not in corrupt} for rank in facts}
    # a segment made just now, and one put back together, knows nothing of what its rank had reached; where a rank has
    # moved, its old one does
    reached = {
        r.rank: r.completed for r in facts
        if r.completed is not None and (r.completed or (r.lineage and not r.holds()))
    }  # fmt: skip
    for rank, iteration in ((rank, done) for node in nodes for rank, done in node.completed.items() if done):
        reached[rank] = max(iteration, reached.get(rank, 0))
    completed = min(reached.values(), default=0)
    candidates = set().union(*own.values(), *(held for node in nodes for held in node.slots.values())) - set(banned)
    released = max((node.released for node in nodes), default=0)
    young = recovery_order((each for each in candidates if each.lineage >= released), marks)
    for place, version in enumerate(young):
        found = _sources(version, own, corrupt, nodes, exchange, plan_digest)
        if found is None:
            continue
        sources, holders, gone = found
        tier = "process" if all(source.way is Way.OWN for source in sources) else "node"
        lost = max(0, completed - version.iteration)
        mark = marks.get(version, Mark.NONE)
        newer = tuple(sorted({each.iteration for each in young[place:] if each > version}))
        reason = f"newest {mark.word} that all ranks can have" if newer else "newest that all ranks can have"
        return RecoveryPlan(
            version, tier, lineage, completed, lost, reason, sources=sources, holders=holders, gone=gone, mark=mark,
            passed_over=newer, damage=damage,
        )  # fmt: skip
    held_by_all = set.intersection(*(set(rank.holds()) for rank in facts))
    held = {rank.rank: sorted(rank.holds()) for rank in facts}
    empty = [rank for rank, versions in held.items() if not versions]
    if held_by_all:
        reason = "every version that all ranks hold is corrupt"
    elif len(empty) == len(held):
        reason = "no version was captured before"
        reason = "no version can be read" if damage else reason
        reason = "the replicas of every version differ" if Mark.DIFFERING in marks.values() else reason
    elif empty:
        reason = f"rank {min(empty)} holds no version"
    else:
        reason = "no version is held by all ranks"
    gone, why = _too_much_lost(nodes, exchange, plan_digest) if exchange is not None else ((), "")
    reason = f"{reason}; {why}" if why else reason
    state_lost = any(rank.damaged_slots or rank.lost for rank in facts)
    there = _there(facts, nodes)
    if there and _first_capture_struck(facts, nodes):
        reason = f"the job ended within the capture of its first version ({reason})"
    else:
        state_lost = state_lost or bool(there)
    if released and not any(rank.from_nothing and rank.lineage > released for rank in facts):
        why = f"while a node that is here was a spare, the job went on in lineage {released} with others"
        reason, state_lost = f"{reason}; {why}", True
    if exchange is None and (why := _elsewhere(own, corrupt, nodes)):
        reason, state_lost = f"{reason}; {why}", True
    return RecoveryPlan(
        None, "none", lineage, completed, completed, reason, state_lost=state_lost, gone=gone, there=there,
        damage=damage,
    )  # fmt: skip


def counted(
    nodes: Sequence[NodeFacts], base: Version | None, exchange: ExchangePlan | None = None, plan_digest: int = 0
) -> Version | None:
    """The newest version that counts on any node, as far as going back to `base` leaves it: not all may have heard.

    None may have, where the one that decided it is gone: then the newest that all nodes hold, by `exchange`.
    """
    heard = max((node.counted for node in nodes if node.counted and base and node.counted <= base), default=None)
    if heard is not None or base is None or exchange is None:
        return heard
    everywhere = set.intersection(*(set(node.parity) for node in nodes))
    whole = (v for v in everywhere if len(_holders(v, (), nodes, exchange, plan_digest)) == len(exchange.nodes))
    return max((version for version in whole if version <= base), default=None)


def _without_differing(
    facts: Sequence[RankFacts], nodes: Sequence[NodeFacts], marks: Mapping[Version, Mark]
) -> tuple[Sequence[RankFacts], Sequence[NodeFacts]]:
    """The facts without the versions that must not be restored, whoever still holds them."""
    bad = {version for version, mark in marks.items() if mark is Mark.DIFFERING}
    if not bad:
        return facts, nodes
    return [replace(rank, slots=tuple(slot for slot in rank.slots if slot.version not in bad)) for rank in facts], [
        replace(
            node,
            slots={rank: frozenset(held - bad) for rank, held in node.slots.items()},
            parity=frozenset(node.parity - bad),
            counted=None if node.counted in bad else node.counted,
        )
        for node in nodes
    ]


def _without_void(
    facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]
) -> tuple[Sequence[RankFacts], Sequence[NodeFacts]]:
    """The facts without the versions that a start from the beginning made void, and without the damage of a rank that
    has not been told: one may have been told, others not yet."""
    newest = max(rank.lineage for rank in facts)
    if not any(rank.from_nothing and rank.lineage == newest for rank in facts):
        return facts, nodes

    def young(versions: Iterable[Version]) -> frozenset[Version]:
        return frozenset(version for version in versions if version.lineage >= newest)

    def left(rank: RankFacts) -> RankFacts:
        told = rank.lineage == newest or bool(rank.damaged)
        slots = (slot for slot in rank.slots if told or not slot.damaged)
        kept = tuple(slot for slot in slots if slot.version is None or slot.version.lineage >= newest)
        return replace(rank, slots=kept, lost=rank.lost and told)

    return [left(rank) for rank in facts], [
        replace(
            node,
            slots={rank: young(held) for rank, held in node.slots.items()},
            parity=young(node.parity),
            counted=node.counted if node.counted and node.counted.lineage >= newest else None,
        )
        for node in nodes
    ]


def _newest_lineage(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]) -> int:
    """The newest lineage that was opened, or that a version is of: where no record is left, versions still say it."""
    versions = [version for rank in facts for version in rank.holds()]
    versions += [version for node in nodes for held in (*node.slots.values(), node.parity) for version in held]
    versions += [node.counted for node in nodes if node.counted]
    opened = [rank.lineage for rank in facts] + [node.lineage for node in nodes]
    return max([*opened, *(version.lineage for version in versions)])


def _first_capture_struck(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]) -> bool:
    """Whether a start from the beginning ended before every rank had its first version: then there is nothing to go
    back to, and no other rank's state is given up. Every rank has to say so itself, by records that are whole."""
    versions = {version for rank in facts for version in rank.holds()}
    versions |= {version for node in nodes for held in (*node.slots.values(), node.parity) for version in held}
    if len(versions) != 1 or all(rank.holds() for rank in facts):
        return False
    (first,) = versions
    return all(
        rank.from_nothing and rank.lineage == first.lineage and not rank.damaged and not rank.damaged_slots
        and all(slot.version in (None, first) for slot in rank.slots)
        for rank in facts
    )  # fmt: skip


def _there(facts: Sequence[RankFacts], nodes: Sequence[NodeFacts]) -> str:
    """Which versions are sealed, of which ranks; '' for none."""
    held: dict[int, set[Version]] = {rank.rank: set(rank.holds()) for rank in facts}
    for node in nodes:
        for rank, versions in node.slots.items():
            held.setdefault(rank, set()).update(versions)
    words = [f"rank {rank}: {', '.join(map(str, sorted(held[rank])))}" for rank in sorted(held) if held[rank]]
    parity = sorted(set().union(*(node.parity for node in nodes)))
    words += [f"parity: {', '.join(map(str, parity))}"] if parity else []
    return "; ".join(_few(words))


def _few(words: Sequence[str]) -> list[str]:
    """So many of them as a person reads."""
    return [*words[:_SHOWN], *([f"and {len(words) - _SHOWN} more"] if len(words) > _SHOWN else [])]


def _sources(
    version: Version,
    own: Mapping[int, Collection[Version]],
    corrupt: Collection[tuple[int, Version]],
    nodes: Sequence[NodeFacts],
    exchange: ExchangePlan | None,
    plan_digest: int,
) -> tuple[tuple[Source, ...], dict[int, int], tuple[int, ...]] | None:
    """How every rank comes to `version`, and where its parts lie; None when one rank cannot."""
    held = {rank: index for index, node in enumerate(nodes) for rank in node.slots
            if version in node.slots[rank] and (rank, version) not in corrupt}  # fmt: skip
    ways: dict[int, Source] = {}
    for rank, versions in own.items():
        if version in versions:
            ways[rank] = Source(Way.OWN)
        elif rank in held:
            ways[rank] = Source(Way.FETCH, held[rank])
    missing = [rank for rank in own if rank not in ways]
    holders: dict[int, int] = {}
    gone: tuple[int, ...] = ()
    if exchange is None and any(source.way is not Way.OWN for source in ways.values()):
        return None  # it is elsewhere, and nobody fetches it
    if missing:
        if exchange is None:
            return None
        holders = _holders(version, corrupt, nodes, exchange, plan_digest)
        gone = tuple(position for position in range(len(exchange.nodes)) if position not in holders)
        for rank in missing:
            if exchange.recovery_sections(rank, gone) is None:
                return None
            ways[rank] = Source(Way.DECODE)
    return tuple(ways[rank] for rank in sorted(ways)), holders, gone


def _elsewhere(
    own: Mapping[int, Collection[Version]], corrupt: Collection[tuple[int, Version]], nodes: Sequence[NodeFacts]
) -> str:
    """Whose state is on a node where that rank does not run now; '' for nobody's."""
    for index, node in enumerate(nodes):
        for rank, versions in sorted(node.slots.items()):
            if rank in own and not own[rank] and any((rank, version) not in corrupt for version in versions):
                return (
                    f"rank {rank}'s is on node {index} of this job, where it does not run now: start the nodes in "
                    "their former order, or let nodes protect each other (--reft-redundancy), which moves it"
                )
    return ""


def _too_much_lost(
    nodes: Sequence[NodeFacts], exchange: ExchangePlan, plan_digest: int
) -> tuple[tuple[int, ...], str]:
    """The positions of a section which has lost more than parity makes up for, of the version that counts, and that in
    words; nothing where there is none."""
    version = max((node.counted for node in nodes if node.counted), default=None)
    if version is None:
        return (), ""
    there = _holders(version, (), nodes, exchange, plan_digest)
    everywhere = [position for position in range(len(exchange.nodes)) if position not in there]
    for section in exchange.sections:
        gone = tuple(position for position in section.positions if position not in there)
        ranks_of = {extent.rank for stream in section.streams for extent in stream}
        lost = [rank for rank in ranks_of if exchange.position_of_rank[rank] in gone]
        if len(gone) > exchange.losses and any(exchange.recovery_sections(rank, everywhere) is None for rank in lost):
            ranks = sorted(rank for position in gone for rank in exchange.ranks[position])
            return gone, (
                f"of version {version} the parts of ranks {', '.join(map(str, ranks))} are gone with {len(gone)} "
                f"nodes that protect each other, {exchange.name} makes up for {exchange.losses}"
            )
    return (), ""


def _holders(
    version: Version,
    corrupt: Collection[tuple[int, Version]],
    nodes: Sequence[NodeFacts],
    exchange: ExchangePlan,
    plan_digest: int,
) -> dict[int, int]:
    """Which node has all that lay at a position: the slots of its ranks and the parity that it kept."""
    found = {}
    for index, node in enumerate(nodes):
        position = node.position
        if position is None or node.plan != plan_digest or version not in node.parity:
            continue
        ranks = exchange.ranks[position]
        if all(version in node.slots.get(rank, ()) and (rank, version) not in corrupt for rank in ranks):
            found[position] = index
    return found


def choose_source(plan: RecoveryPlan, mode: str, loaded: int) -> RecoveryPlan:
    """`plan` as `--ftp-resume` and the framework's own checkpoint of iteration `loaded` (0: none) have it.

    With both at hand the larger iteration wins. Raises ResumeError when what was asked for is not there, and instead of
    a silent start from the beginning where there was state: nothing is void before the user has said so.
    """
    if mode == "storage" and not loaded:
        raise ResumeError(
            "--ftp-resume storage was asked for, but there is no checkpoint in --reft-checkpoint-dir and the framework "
            "has loaded none; name one by its own flags (Megatron-LM: --load), or --ftp-resume auto takes what is in "
            "memory"
        )
    if mode == "memory" and plan.version is None:
        raise ResumeError(f"--ftp-resume memory was asked for, but {plan.reason}; --ftp-resume auto starts without")
    if mode in ("auto", "memory"):
        if plan.version is not None and plan.version.iteration >= loaded:
            return plan
        if plan.state_lost and not loaded:
            moved = "" if plan.gone or plan.damage else "; were ranks moved between nodes?"
            found = f"; in memory are {plan.there}" if plan.there else ""
            damage = "".join(f"; {words}" for words in _few(plan.damage))
            raise ResumeError(
                f"the state in memory cannot be restored ({plan.reason}{moved}){found}{damage}; "
                "start again as before to try once more, --ftp-resume fresh starts from the beginning"
            )
        why = plan.reason if plan.version is None else f"newer than version {plan.version.iteration} in memory"
    else:
        why = f"--ftp-resume {mode}"
    lost = max(0, plan.completed - loaded)
    return RecoveryPlan(
        None, "storage" if loaded else "none", plan.lineage, plan.completed, lost, why, loaded, damage=plan.damage
    )
