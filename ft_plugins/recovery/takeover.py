"""The state of a job of another data-parallel size, found in the memory of the nodes: which version of it, from where.

Invariant: all ranks find the same one, verified or put together anew, and older state gives way only to what every
former rank has. State of this size that is as new goes first. What is there but cannot be taken over is refused by
name, never taken for nothing. Every call is made by every rank of the job.

Nodes of the former job that have no part in this one (spares, and those that come too late) are sources like any other:
their SMPs are asked at the endpoints that the others remember. What only they have is fetched, verified, before any is
taken over; from then on the job needs none of them. One that is lost meanwhile is a lost node: it is planned anew.

In: what the SMPs have set aside (`smp.former`), or hold as spares. Out: `Takeover`; the segments that hold it, on the
nodes it names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from ..collective import Collective
from ..errors import FtError, ResumeError
from ..model.host import resizable
from ..redundancy.plan import ExchangePlan
from ..smp.protection import Protection
from ..snapshot.paths import set_aside
from ..snapshot.segment import Segment
from ..snapshot.slots import Mark, Slot, SlotState, Version
from .nodes import Endpoint, SeenNodes, Spare, read_marks
from .plan import NodeFacts, RankFacts, RecoveryPlan, Way, plan_recovery

Place = tuple[int, int]


@dataclass(frozen=True)
class Size:
    """The job as it was with `world_size` ranks: what its ranks have, by node as it stands now, then by spare.

    `members` of the nodes take part in the job as it is now. `protection` is the newest that any of them knows of.
    """

    world_size: int
    members: int
    ranks: Mapping[int, RankFacts]
    nodes: tuple[NodeFacts, ...]
    places: Mapping[int, Place]
    protection: Protection | None
    fingerprint: Mapping[str, Any]  # of the job at that size

    @property
    def exchange(self) -> ExchangePlan | None:
        return self.protection.plan() if self.protection else None

    def holder(self, rank: int, version: Version) -> int | None:
        """The node that holds a rank's version; a spare where no other does."""
        return next((i for i, node in enumerate(self.nodes) if version in node.slots.get(rank, ())), None)


@dataclass(frozen=True)
class Takeover:
    """`version` of the job of `world_size` ranks becomes `now`, of this size.

    `holders[rank]` is the node, as it stands now, that has what a former rank captured; `places` where in the model
    that rank stood; `completed` the last iteration that all of them had completed; `mark` what is known of the former
    replicas.
    """

    world_size: int
    version: Version
    now: Version
    holders: Mapping[int, int]
    places: Mapping[int, Place]
    completed: int
    mark: Mark = Mark.NONE

    def of_place(self, place: Place) -> tuple[int, ...]:
        """The former ranks whose state a rank at `place` takes over."""
        return tuple(sorted(rank for rank, found in self.places.items() if found == place))


def read_sizes(told: Sequence[Mapping[str, Any]], spares: Sequence[Mapping[str, Any]] = ()) -> tuple[Size, ...]:
    """What every node's SMP says of other sizes, and those of spares, by size. Raises ProtocolError."""
    everyone = (*told, *spares)
    worlds = sorted({int(size) for answer in everyone for size, _ in answer["sizes"]})
    return tuple(_read_size(world_size, everyone, len(told)) for world_size in worlds)


def _read_size(world_size: int, told: Sequence[Mapping[str, Any]], members: int) -> Size:
    ranks: dict[int, RankFacts] = {}
    places: dict[int, Place] = {}
    nodes: list[NodeFacts] = []
    protection: Protection | None = None
    fingerprint: Mapping[str, Any] = {}
    for answer in told:
        fingerprint = dict(answer["fingerprints"]).get(world_size, fingerprint)
        held: dict[int, frozenset[Version]] = {}
        for rank, place, lineage, completed, from_nothing, versions in dict(answer["sizes"]).get(world_size, []):
            held[rank] = frozenset(Version(*version) for version in versions)
            slots = tuple(
                Slot(index, SlotState.CLEAN, version) for index, version in enumerate(sorted(held[rank]))
            )
            if [world_size, rank] in answer.get("damaged", ()):  # never taken for a rank that had captured nothing
                slots += (Slot(len(slots), SlotState.DIRTY, None, damaged=True),)
            facts = RankFacts(rank, slots, lineage, completed, from_nothing)
            known = ranks.get(rank)
            ranks[rank] = facts if known is None or known.lineage < lineage else known
            if place is not None:
                places[rank] = (place[0], place[1])
        block = answer["protection"]
        own = block is not None and len(block["nodes"]) == world_size
        counted = Version(*answer["counted"]) if own and answer["counted"] else None
        if own and (protection is None or block["lineage"] > protection.lineage):
            protection = Protection.read(block)
        nodes.append(
            NodeFacts(
                held, frozenset(Version(*version) for version in answer["parity"]) if own else frozenset(),
                answer["position"] if own else None, answer["plan"] if own else 0, counted=counted,
                released=answer["released"], marks=read_marks(answer.get("marks", ())),
            )
        )  # fmt: skip
    return Size(world_size, members, ranks, tuple(nodes), places, protection, fingerprint)


def plan_size(
    size: Size, corrupt: Collection[tuple[int, Version]] = (), banned: Collection[Version] = ()
) -> RecoveryPlan:
    """The newest version of a former job that all of its ranks can have: where it is (`OWN`), or from parity. Pure."""
    nothing = RankFacts(0, (), 0, 0)
    facts = [replace(size.ranks.get(rank, nothing), rank=rank) for rank in range(size.world_size)]
    digest = size.protection.digest if size.protection else 0
    return plan_recovery(facts, corrupt, size.nodes, size.exchange, digest, banned)


def own_version(
    facts: Sequence[NodeFacts], world_size: int, exchange: ExchangePlan | None, digest: int
) -> RecoveryPlan:
    """What this size has of its own, before its ranks have attached. Pure."""
    held: dict[int, frozenset[Version]] = {}
    for node in facts:
        for rank, versions in node.slots.items():
            held[rank] = held.get(rank, frozenset()) | versions
    ranks = [
        RankFacts(rank, tuple(Slot(i, SlotState.CLEAN, v) for i, v in enumerate(sorted(held.get(rank, ())))), 0, 0)
        for rank in range(world_size)
    ]
    return plan_recovery(ranks, (), facts, exchange, digest)


class FormerJob:
    """Looks for state of another size, and has it whole on the nodes of this one."""

    def __init__(
        self,
        collective: Collective,
        nodes: SeenNodes,
        token: int,
        run_dir: Path,
        report: Callable[[FtError], None],
    ) -> None:
        self._collective = collective
        self._nodes = nodes
        self._token = token
        self._run_dir = run_dir
        self._report = report
        self._spares: list[Spare] = []

    def find(self, fingerprint: Mapping[str, Any]) -> Takeover | None:
        """The state to be taken over, on the nodes that the result names; None where there is none, or this size has
        as new a version of its own. Raises ResumeError, on all ranks alike."""
        told = self._nodes.ask(lambda client: client.former())
        self._spares = self._ask_spares(told)
        for answer in (*told, *(spare.told for spare in self._spares)):
            if any(resizable(former) != resizable(fingerprint) for _, former in answer["fingerprints"]):
                raise self._refusal(
                    "the state in memory belongs to another job, and not only at another data-parallel size; start as "
                    "before, name this job otherwise with --ftp-job, or --ftp-resume fresh drops it"
                )
        world_size = self._collective.world_size
        facts = self._nodes.facts()
        own = own_version(facts, world_size, self._nodes.exchange, self._nodes.digest)
        plans = [(plan_size(size), size) for size in read_sizes(told, [spare.told for spare in self._spares])]
        plan, size = max(plans, key=lambda found: found[0].version or Version(0, 0))
        if own.version is not None and (plan.version is None or own.version >= plan.version):
            return None
        if plan.version is None:
            if any(found.state_lost for found, _ in plans):
                raise self._refusal(
                    f"the state of the job of {size.world_size} ranks cannot be taken over by {world_size} "
                    f"({plan.reason}); start with the former number of nodes to try once more, --ftp-resume fresh "
                    "starts from the beginning"
                )
            return None
        newest = max([0, *(v.lineage for node in facts for held in node.slots.values() for v in held)])
        newest = max([newest, *(int(spare.told["lineage"]) for spare in self._spares)])
        found = self._whole(size)
        lineage = 1 + max(newest, found.version.lineage, *(node.lineage for node in facts))
        return replace(found, now=Version(lineage, found.version.iteration))

    def settle(self, found: Takeover) -> None:
        """Give back the memory of all that is not taken over; spares keep theirs until the job can do without."""
        rank, where = self._collective.rank, [spare.where for spare in self._spares]
        self._nodes.ask(lambda client: client.settle(rank, self._token, found.world_size, found.version, where))

    def drop(self) -> None:
        """Forget all state of other sizes, as the user has said."""
        rank = self._collective.rank
        self._nodes.ask(lambda client: client.settle(rank, self._token, 0, None))

    def _ask_spares(self, told: Sequence[Mapping[str, Any]]) -> list[Spare]:
        """Those that answer now, of the job that was protected last at another size; each of them once."""
        found: dict[Endpoint, Spare] = {}
        for size in read_sizes(told):
            if size.protection is not None:
                found |= {spare.where: spare for spare in self._nodes.spares(size.protection, self._report)}
        return list(found.values())

    def _look_again(self, size: Size) -> Size:
        """A spare did not hand out what it has: the size as it is with those that still answer."""
        told = self._nodes.ask(lambda client: client.former())
        self._spares = self._ask_spares(told)
        again = read_sizes(told, [spare.told for spare in self._spares])
        return next((found for found in again if found.world_size == size.world_size), size)

    def _refusal(self, words: str) -> ResumeError:
        error = ResumeError(words)
        error.echo = self._collective.rank != 0  # all ranks know the same facts: one of them says so
        return error

    def _whole(self, size: Size) -> Takeover:
        """Verify every former rank's slot, or have it put together on a node of this job."""
        corrupt: set[tuple[int, Version]] = set()
        banned: set[Version] = set()
        made: dict[tuple[int, Version], int] = {}
        while True:
            plan = plan_size(size, corrupt, banned)
            version = plan.version
            if version is None:
                raise self._refusal(
                    f"the state of the job of {size.world_size} ranks is damaged ({plan.reason}); start with the "
                    "former number of nodes to try once more, --ftp-resume fresh starts from the beginning"
                )
            where = place(size, plan, made)
            verdicts = self._look_at(size, plan, where, made)
            bad = {rank for rank, verdict in verdicts.items() if verdict == "corrupt"}
            failed = {rank for rank, verdict in verdicts.items() if verdict == "failed"}
            made |= {(rank, version): where[rank] for rank, verdict in verdicts.items() if verdict == "rebuilt"}
            unread = {rank for rank, verdict in verdicts.items() if verdict == "unread"}
            if (failed or unread) and self._spares:
                before = len(self._spares)
                size = self._look_again(size)
                if len(self._spares) < before:
                    continue  # it is planned anew without them
            bad |= unread
            corrupt |= {(rank, version) for rank in bad}
            if failed or any((rank, version) in made for rank in bad):
                banned.add(version)
            elif not bad:
                places = self._places(where, version, size)
                return Takeover(size.world_size, version, version, where, places, plan.completed, plan.mark)

    def _look_at(
        self, size: Size, plan: RecoveryPlan, where: Mapping[int, int], made: Collection[tuple[int, Version]]
    ) -> dict[int, str]:
        """Each former rank's slot is seen by one rank of the node that has it, or is to have it."""
        assert plan.version is not None
        own: list[list[Any]] = []
        for rank in sorted(where):
            if not self._is_mine(rank, where[rank]):
                continue
            made_already = (rank, plan.version) in made
            decode = plan.sources[rank].way is Way.DECODE and not made_already
            holder = size.holder(rank, plan.version)
            spare = None
            if not decode and not made_already and holder is not None and holder >= size.members:
                spare = self._spares[holder - size.members].where
            try:
                if decode or spare is not None:
                    assert size.protection is not None  # else nothing is decoded, and nobody knows of spares
                    others = [one.where for one in self._spares]
                    self._nodes.rebuild_former(rank, plan, size.protection, size.fingerprint, spare, others)
                    own.append([rank, "rebuilt"])
                else:
                    self._verify(size.world_size, rank, plan.version)
                    own.append([rank, "whole"])
            except FtError as error:
                self._report(error)
                own.append([rank, "failed" if decode else "unread" if spare else "corrupt"])
        gathered = self._collective.gather(msgpack.packb(own))
        return {rank: verdict for part in gathered for rank, verdict in msgpack.unpackb(part)}

    def _is_mine(self, former_rank: int, node: int) -> bool:
        members = self._nodes.ranks[node]
        return members[former_rank % len(members)] == self._collective.rank

    def _verify(self, world_size: int, rank: int, version: Version) -> None:
        segment = open_former(self._run_dir, world_size, rank)
        try:
            for slot in segment.slots():
                if slot.version == version and slot.state is SlotState.CLEAN:
                    segment.verify(slot.index)
                    return
            raise ResumeError(f"rank {rank} of {world_size}: version {version} is not in memory any more")
        finally:
            segment.close()

    def _places(self, where: Mapping[int, int], version: Version, size: Size) -> dict[int, Place]:
        """Where in the model each former rank stood. What was rebuilt says so now."""
        known = dict(size.places)
        if any(rank not in known for rank in where):
            for again in read_sizes(self._nodes.ask(lambda client: client.former())):  # members alone: all is there
                if again.world_size == size.world_size:
                    known |= again.places
        missing = [rank for rank in where if rank not in known]
        if missing:
            raise self._refusal(
                f"version {version}: ranks {missing} of {size.world_size} do not say which part of the model they "
                "hold; start with the former number of nodes"
            )
        return {rank: known[rank] for rank in where}


def place(size: Size, plan: RecoveryPlan, made: Mapping[tuple[int, Version], int]) -> dict[int, int]:
    """On which node of this job each former rank's version is, or is to be put together. Pure.

    `made` are those that were put together already.
    """
    assert plan.version is not None
    where: dict[int, int] = {}
    for rank, source in enumerate(plan.sources):
        holder = size.holder(rank, plan.version)
        if source.way is Way.DECODE:  # elsewhere than where a corrupt one lies, of which older versions stay
            holder = made.get((rank, plan.version), _beside(holder, rank, size.members))
        elif holder is not None and holder >= size.members:
            holder = made.get((rank, plan.version), rank % size.members)
        assert holder is not None
        where[rank] = holder
    return where


def _beside(node: int | None, rank: int, nodes: int) -> int:
    """A node for what is put together anew, another one than `node`; the lost ranks are spread over all."""
    return rank % nodes if rank % nodes != node else (rank + 1) % nodes


def open_former(run_dir: Path, world_size: int, rank: int) -> Segment:
    """Map a segment that is set aside on this node. Raises SegmentError."""
    return Segment(set_aside(run_dir.parent.name, run_dir.name, rank, world_size))
