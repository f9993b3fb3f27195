"""The state of a job of another data-parallel size, found in the memory of the nodes: which version of it, from where.

Invariant: all ranks find the same one, verified or put together anew, and older state gives way only to what every
former rank has. State of this size that is as new goes first. What is there but cannot be taken over is refused by
name, never taken for nothing. Every call is made by every rank of the job.

In: what the SMPs have set aside (`smp.former`). Out: `Takeover`; the segments that hold it, on the nodes it names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from ..errors import FtError, ResumeError
from ..model.host import resizable
from ..redundancy.plan import ExchangePlan
from ..smp.protection import Protection
from ..snapshot.segment import Segment, set_aside
from ..snapshot.slots import Slot, SlotState, Version
from .collective import Collective
from .nodes import SeenNodes
from .plan import NodeFacts, RankFacts, RecoveryPlan, Way, plan_recovery

Place = tuple[int, int]


@dataclass(frozen=True)
class Size:
    """The job as it was with `world_size` ranks: what its ranks have, by node as it stands now."""

    world_size: int
    ranks: Mapping[int, RankFacts]
    nodes: tuple[NodeFacts, ...]
    places: Mapping[int, Place]
    protection: Protection | None

    @property
    def exchange(self) -> ExchangePlan | None:
        return self.protection.plan() if self.protection else None

    def holder(self, rank: int, version: Version) -> int | None:
        """The node that holds a rank's version."""
        return next((i for i, node in enumerate(self.nodes) if version in node.slots.get(rank, ())), None)


@dataclass(frozen=True)
class Takeover:
    """`version` of the job of `world_size` ranks becomes `now`, of this size.

    `holders[rank]` is the node, as it stands now, that has what a former rank captured; `places` where in the model
    that rank stood; `completed` the last iteration that all of them had completed.
    """

    world_size: int
    version: Version
    now: Version
    holders: Mapping[int, int]
    places: Mapping[int, Place]
    completed: int

    def of_place(self, place: Place) -> tuple[int, ...]:
        """The former ranks whose state a rank at `place` takes over."""
        return tuple(sorted(rank for rank, found in self.places.items() if found == place))


def read_sizes(told: Sequence[Mapping[str, Any]]) -> tuple[Size, ...]:
    """What every node's SMP says of other sizes, by size. Raises ProtocolError."""
    worlds = sorted({int(size) for answer in told for size, _ in answer["sizes"]})
    return tuple(_read_size(world_size, told) for world_size in worlds)


def _read_size(world_size: int, told: Sequence[Mapping[str, Any]]) -> Size:
    ranks: dict[int, RankFacts] = {}
    places: dict[int, Place] = {}
    nodes: list[NodeFacts] = []
    protection: Protection | None = None
    for answer in told:
        held: dict[int, frozenset[Version]] = {}
        for rank, place, lineage, completed, from_nothing, versions in dict(answer["sizes"]).get(world_size, []):
            held[rank] = frozenset(Version(*version) for version in versions)
            slots = tuple(
                Slot(index, SlotState.CLEAN, version) for index, version in enumerate(sorted(held[rank]))
            )
            facts = RankFacts(rank, slots, lineage, completed, from_nothing)
            known = ranks.get(rank)
            ranks[rank] = facts if known is None or known.lineage < lineage else known
            if place is not None:
                places[rank] = (place[0], place[1])
        block = answer["protection"]
        own = block is not None and len(block["nodes"]) == world_size
        counted = Version(*answer["counted"]) if own and answer["counted"] else None
        if own and protection is None:
            protection = Protection.read(block)
        nodes.append(
            NodeFacts(
                held, frozenset(Version(*version) for version in answer["parity"]) if own else frozenset(),
                answer["position"] if own else None, answer["plan"] if own else 0, counted=counted,
            )
        )  # fmt: skip
    return Size(world_size, ranks, tuple(nodes), places, protection)


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

    def find(self, fingerprint: Mapping[str, Any]) -> Takeover | None:
        """The state to be taken over, on the nodes that the result names; None where there is none, or this size has
        as new a version of its own. Raises ResumeError, on all ranks alike."""
        told = self._nodes.ask(lambda client: client.former())
        for answer in told:
            if answer["fingerprint"] is not None and resizable(answer["fingerprint"]) != resizable(fingerprint):
                raise self._refusal(
                    "the state in memory belongs to another job, and not only at another data-parallel size; start as "
                    "before, name this job otherwise with --ftp-job, or --ftp-resume fresh drops it"
                )
        world_size = self._collective.world_size
        facts = self._nodes.facts()
        own = own_version(facts, world_size, self._nodes.exchange, self._nodes.digest)
        plans = [(plan_size(size), size) for size in read_sizes(told)]
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
        found = self._whole(size, fingerprint)
        lineage = 1 + max(newest, found.version.lineage, *(node.lineage for node in facts))
        return replace(found, now=Version(lineage, found.version.iteration))

    def settle(self, found: Takeover) -> None:
        """Give back the memory of all that is not taken over."""
        rank = self._collective.rank
        self._nodes.ask(lambda client: client.settle(rank, self._token, found.world_size, found.version))

    def drop(self) -> None:
        """Forget all state of other sizes, as the user has said."""
        rank = self._collective.rank
        self._nodes.ask(lambda client: client.settle(rank, self._token, 0, None))

    def _refusal(self, words: str) -> ResumeError:
        error = ResumeError(words)
        error.echo = self._collective.rank != 0  # all ranks know the same facts: one of them says so
        return error

    def _whole(self, size: Size, fingerprint: Mapping[str, Any]) -> Takeover:
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
            where: dict[int, int] = {}
            for rank, source in enumerate(plan.sources):
                holder = size.holder(rank, version)
                if source.way is Way.DECODE:  # elsewhere than where a corrupt one lies, of which older versions stay
                    holder = made.get((rank, version), _beside(holder, rank, len(size.nodes)))
                assert holder is not None
                where[rank] = holder
            verdicts = self._look_at(size, plan, where, made, fingerprint)
            bad = {rank for rank, verdict in verdicts.items() if verdict == "corrupt"}
            failed = {rank for rank, verdict in verdicts.items() if verdict == "failed"}
            made |= {(rank, version): where[rank] for rank, verdict in verdicts.items() if verdict == "rebuilt"}
            corrupt |= {(rank, version) for rank in bad}
            if failed or any((rank, version) in made for rank in bad):
                banned.add(version)
            elif not bad:
                places = self._places(where, version, size)
                return Takeover(size.world_size, version, version, where, places, plan.completed)

    def _look_at(
        self, size: Size, plan: RecoveryPlan, where: Mapping[int, int], made: Collection[tuple[int, Version]],
        fingerprint: Mapping[str, Any],
    ) -> dict[int, str]:  # fmt: skip
        """Each former rank's slot is seen by one rank of the node that has it, or is to have it."""
        assert plan.version is not None
        own: list[list[Any]] = []
        for rank in sorted(where):
            if not self._is_mine(rank, where[rank]):
                continue
            rebuild = plan.sources[rank].way is Way.DECODE and (rank, plan.version) not in made
            try:
                if rebuild:
                    assert size.protection is not None  # else nothing is decoded
                    self._nodes.rebuild_former(rank, plan, size.protection, fingerprint)
                    own.append([rank, "rebuilt"])
                else:
                    self._verify(size.world_size, rank, plan.version)
                    own.append([rank, "whole"])
            except FtError as error:
                self._report(error)
                own.append([rank, "failed" if rebuild else "corrupt"])
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
            for again in read_sizes(self._nodes.ask(lambda client: client.former())):
                if again.world_size == size.world_size:
                    known |= again.places
        missing = [rank for rank in where if rank not in known]
        if missing:
            raise self._refusal(
                f"version {version}: ranks {missing} of {size.world_size} do not say which part of the model they "
                "hold; start with the former number of nodes"
            )
        return {rank: known[rank] for rank in where}


def _beside(node: int | None, rank: int, nodes: int) -> int:
    """A node for what is put together anew, another one than `node`; the lost ranks are spread over all."""
    return rank % nodes if rank % nodes != node else (rank + 1) % nodes


def open_former(run_dir: Path, world_size: int, rank: int) -> Segment:
    """Map a segment that is set aside on this node. Raises SegmentError."""
    return Segment(set_aside(run_dir.parent.name, run_dir.name, rank, world_size))
