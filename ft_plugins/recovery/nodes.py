"""The nodes of a job as its ranks reach them: what their SMPs hold, and how they protect each other from now on.

Invariant: the lowest rank of each node asks the SMP of that node, and all ranks receive all answers. Unless stated
otherwise every rank of the job makes each call, in the same order, and errors are raised on all of them.

In: nodes, redundancy groups and segment shapes of all ranks. Out: `SeenNodes` for a recovery; after it,
`JobNodes.protect` makes the SMPs protect each other's slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ..collective import Collective
from ..collective.transfers import spread
from ..errors import BudgetError, FencedError, FtError, ProtocolError
from ..redundancy.exchange_plan import ExchangePlan, positions
from ..smp.serve import job_file
from ..smp.serve.client import Client
from ..smp.serve.job_file import ProtectionReference
from ..smp.tree.protection import Protection
from ..snapshot.capture.double import ReplicaShare, replica_extents
from ..snapshot.segment.shape import Shape
from ..snapshot.segment.slots import Mark, Version
from .facts import NodeFacts
from .recovery_plan import RecoveryPlan, Way, newest_committed

Endpoint = tuple[str, int]
_BUSY_SECONDS = 0.2  # between two requests to a node whose trainers have not ended yet


@dataclass(frozen=True)
class NodeTierConfig:
    """The configuration of the node tier, and how this rank reaches its SMP."""

    losses: int  # 0: nodes reach each other, but do not protect each other
    stages: tuple[tuple[int, ...], ...]  # pipelines, if copies go to a neighbouring stage; else ()
    interval: int  # iterations
    exchange_mbps: float
    detect_seconds: float
    secret_file: str
    run_dir: Path
    token: int
    both: bool = False  # parity and copies
    audited: bool = False  # a version is committed only if its replicas agree
    measure: bool = False  # measure the links by which copies go
    encrypt: bool = False  # traffic between nodes
    domains: tuple[str, ...] = ()  # failure domains by which groups were cut, by position


@dataclass(frozen=True)
class Spare:
    """A node without a part in the job. `report` of its SMP at `endpoint` lists what it holds of previous sizes; it was
    received by the node at the position `asker`."""

    name: str
    endpoint: Endpoint
    report: Mapping[str, Any]
    asker: int = 0


def read_marks(entries: Sequence[Sequence[int]]) -> dict[Version, Mark]:
    """The marks in an SMP's report: [lineage, iteration, mark] of each version that its ranks hold."""
    return {Version(lineage, iteration): Mark(mark) for lineage, iteration, mark in entries}


class SeenNodes:
    """The nodes of a job whose SMPs report what they hold but send each other nothing."""

    def __init__(self, collective: Collective, nodes: Sequence[str], run_dir: Path) -> None:
        self._collective = collective
        self._run_dir = run_dir
        self._names, self.ranks = positions(nodes)
        self._position = self._names.index(nodes[collective.rank])
        self._leads = self.ranks[self._position][0] == collective.rank
        self.exchange: ExchangePlan | None = None
        self.digest = 0

    def ask(self, request: Callable[[Client], Any]) -> list[Any]:
        """The answer of every node's SMP, in the order of the nodes. Raises the error of any of them."""
        answer: Any = None
        with self._collective.agreement():
            if self._leads:
                with Client(self._run_dir) as client:
                    answer = request(client)
        answers = self._collective.gather(msgpack.packb(answer))
        return [msgpack.unpackb(answers[ranks[0]], strict_map_key=False) for ranks in self.ranks]

    def facts(self) -> list[NodeFacts]:
        return [
            NodeFacts(
                {rank: frozenset(Version(*version) for version in held) for rank, held in inventory["slots"]},
                frozenset(Version(*version) for version in inventory["parity"]),
                inventory["position"],
                inventory["plan"],
                dict(inventory["completed"]),
                inventory["lineage"],
                Version(*inventory["committed"]) if inventory["committed"] else None,
                inventory["released"],
                read_marks(inventory["marks"]),
                inventory["damage"],
                (inventory["run"][0], inventory["run"][1]),
            )
            for inventory in self.ask(lambda client: client.inventory())
        ]

    def share_jobs(self, known: Sequence[tuple[ProtectionReference, Collection[int]]]) -> None:
        """Copy the job file of each reference to the nodes that lack it, from the nodes at its positions, which have
        it; the first rank of each node takes part."""
        if all(len(holders) == len(self.ranks) for _, holders in known):
            return
        leads = [ranks[0] for ranks in self.ranks]
        with self._collective.transfers() as transfers, self._collective.agreement():
            for reference, holders in known:
                have = [lead for position, lead in enumerate(leads) if position in holders]
                lack = [lead for position, lead in enumerate(leads) if position not in holders]
                if not self._leads or not lack:
                    continue
                holds = self._position in holders
                content = np.empty(reference.nbytes, dtype=np.uint8)
                if holds:
                    content[:] = np.frombuffer(job_file.read_content(self._run_dir, reference.job), dtype=np.uint8)
                spread(transfers, self._collective.rank, have, lack, content)
                if not holds:
                    job_file.write_content(self._run_dir, reference.job, content.tobytes())

    def protection(self, reference: ProtectionReference) -> Protection:
        """The protection that a reference names, from this node's files. Called by one rank. Raises ProtocolError."""
        return job_file.read(self._run_dir, reference)

    def rebuild(self, plan: RecoveryPlan) -> None:
        """Raises ProtocolError: nothing can be rebuilt."""
        raise ProtocolError(f"rank {self._collective.rank}: nodes do not protect each other, but got '{plan.table()}'")

    def spares(self, previous: Protection, report: Callable[[FtError], None]) -> list[Spare]:
        """None: these nodes reach no other SMPs."""
        return []

    def rebuild_previous(
        self, rank: int, plan: RecoveryPlan, protection: Protection, fingerprint: Mapping[str, Any],
        spare: Endpoint | None, spares: Sequence[Endpoint],
    ) -> None:  # fmt: skip
        """Raises ProtocolError: nothing can be rebuilt."""
        self.rebuild(plan)


class LinkedNodes(SeenNodes):
    """The nodes of a job whose SMPs reach each other and the SMPs of spares."""

    def __init__(self, collective: Collective, nodes: Sequence[str], config: NodeTierConfig) -> None:
        """Raises ConfigError (secret, interface), ProtocolError, on all ranks."""
        super().__init__(collective, nodes, config.run_dir)
        self._config = config

        def listen(client: Client) -> list[Any]:
            return list(client.endpoint(collective.address, config.secret_file, config.encrypt))

        endpoints = self.ask(listen)
        self._endpoints = tuple((str(host), int(port)) for host, port in endpoints)

    def spares(self, previous: Protection, report: Callable[[FtError], None]) -> list[Spare]:
        """The spares among the nodes that `previous` protected, and nodes that joined too late to take part, with the
        reports of their SMPs. One that does not answer is left out, and its error passed to `report`."""
        names = previous.plan().nodes
        absent = [at for at, name in enumerate(names) if name not in self._names]
        mine = absent[self._position :: len(self._names)]

        def ask(client: Client) -> list[Any]:
            answers = [[at, self._ask_spare(client, names[at], previous.endpoints[at], report)] for at in mine]
            return [answer for answer in answers if answer[1] is not None]

        reports = {at: (received, asker) for asker, answers in enumerate(self.ask(ask)) for at, received in answers}
        return [Spare(names[at], previous.endpoints[at], *received) for at, received in sorted(reports.items())]

    def _ask_spare(
        self, client: Client, name: str, where: Endpoint, report: Callable[[FtError], None]
    ) -> dict[str, Any] | None:
        """The report of one spare; None if it does not answer. Waits for its trainers to end, if it has not yet noticed
        that it has no part in the job."""
        config, deadline = self._config, time.monotonic() + 2 * self._config.detect_seconds
        rank, size = self._collective.rank, self._collective.world_size
        while True:
            try:
                answer = client.spare(rank, config.token, size, name, where, config.detect_seconds)
            except FencedError:  # this incarnation is over; the spare is not lost
                raise
            except FtError as error:
                report(error)
                return None
            if "busy" not in answer:
                return answer
            if time.monotonic() > deadline:
                report(ProtocolError(f"node {name} is not a spare: trainers of ranks {answer['busy']} still run there"))
                return None
            time.sleep(_BUSY_SECONDS)

    def rebuild_previous(
        self, rank: int, plan: RecoveryPlan, protection: Protection, fingerprint: Mapping[str, Any],
        spare: Endpoint | None, spares: Sequence[Endpoint],
    ) -> None:  # fmt: skip
        """Rebuild on this node the slot of a rank of the previous job described by `protection`. Called by one rank.

        It is fetched from `spare`, or decoded from parity. Nodes of `plan` beyond those of this job are `spares`.
        """
        assert plan.version is not None
        endpoints = (*self._endpoints, *spares)
        holders = {position: endpoints[node] for position, node in plan.holders.items()}
        with Client(self._config.run_dir) as client:
            client.rebuild(rank, self._config.token, plan.version, protection, spare, holders, plan.gone, fingerprint)


@dataclass(frozen=True)
class RankLayout:
    """What the plan of protection takes from one rank: the shape of its segment, and its part in each replica set
    (snapshot.capture.double)."""

    shape: Shape
    replicated: Sequence[ReplicaShare]

    def pack(self) -> bytes:
        return bytes(msgpack.packb([astuple(self.shape), self.replicated]))

    @classmethod
    def unpack(cls, packed: bytes) -> RankLayout:
        shape, replicated = msgpack.unpackb(packed)
        return cls(Shape(*shape), [(*share,) for share in replicated])


def describe_protection(
    ranks: Sequence[RankLayout], nodes: Sequence[str], groups: Sequence[Sequence[int]], config: NodeTierConfig,
    position: int, endpoints: Sequence[Endpoint] = (),
) -> Protection:  # fmt: skip
    """The protection of a job as the node at `position` takes part in it; `ranks`, `nodes`: by rank. Pure."""
    return Protection(
        lineage=0, base=None, nodes=tuple(nodes), groups=tuple(map(tuple, groups)),
        shapes=tuple(rank.shape for rank in ranks), losses=config.losses, position=position,
        endpoints=tuple(endpoints), interval=config.interval, exchange_mbps=config.exchange_mbps,
        detect_seconds=config.detect_seconds,
        replicated=() if config.stages and not config.both else replica_extents([rank.replicated for rank in ranks]),
        stages=config.stages, both=config.both, measure=config.measure, audited=config.audited,
        domains=config.domains,
    )  # fmt: skip


class JobNodes(LinkedNodes):
    """The nodes of a job that protect each other, for one incarnation."""

    def __init__(
        self, collective: Collective, nodes: Sequence[str], groups: Sequence[Sequence[int]], shape: Shape,
        replicated: Sequence[ReplicaShare], config: NodeTierConfig,
    ) -> None:  # fmt: skip
        """`replicated`: this rank's part in each replica set (snapshot.capture.double).

        Raises ConfigError (secret, interface), ProtocolError, on all ranks.
        """
        super().__init__(collective, nodes, config)
        ranks = [RankLayout.unpack(part) for part in collective.gather(RankLayout(shape, replicated).pack())]
        self._protection = describe_protection(ranks, nodes, groups, config, self._position, self._endpoints)
        self.exchange = self._protection.plan()
        self.digest = self._protection.digest
        self.links: dict[int, float] = {}  # bytes per second by position, as measured by `protect`

    def rebuild(self, plan: RecoveryPlan) -> None:
        """Have the SMP rebuild this rank's slot. Raises the SMP's error. Called by this rank alone."""
        source = plan.sources[self._collective.rank]
        if plan.version is None or source.way is Way.OWN:
            raise ProtocolError(f"rank {self._collective.rank}: there is nothing to rebuild in '{plan.table()}'")
        where = self._endpoints[source.node] if source.node is not None else None
        holders = {position: self._endpoints[node] for position, node in plan.holders.items()}
        with Client(self._config.run_dir) as client:
            client.rebuild(
                self._collective.rank, self._config.token, plan.version, self._protection, where, holders, plan.gone
            )

    def protect(self, lineage: int, base: Version | None) -> list[tuple[str, int]]:
        """Have the SMPs protect each other's slots from now on. Returns the bytes that each node claimed for that.

        Raises BudgetError, on all ranks, if they are not resident.
        """
        committed = newest_committed(self.facts(), base, self.exchange, self.digest)
        protection = replace(self._protection, lineage=lineage, base=base, committed=committed)
        # first, because it takes longest on a substitute, which the others would miss meanwhile
        self.ask(lambda client: client.claim(self._collective.rank, self._config.token, protection))
        answers = self.ask(lambda client: client.protect(self._collective.rank, self._config.token, protection))
        for name, answer in zip(self._names, answers, strict=True):
            if answer["resident_bytes"] < answer["bytes"]:
                raise BudgetError(
                    f"node {name}: {answer['bytes']} bytes were claimed for parity and copies, but only "
                    f"{answer['resident_bytes']} are resident: another process changed that memory; remove it with "
                    "'ft-plugins end'"
                )
        self.links = links_of([answer["links"] for answer in answers])
        return [(name, int(answer["bytes"])) for name, answer in zip(self._names, answers, strict=True)]


def links_of(sent: Sequence[Sequence[tuple[int, float]]]) -> dict[int, float]:
    """The speed of each position's link in bytes per second, from the rates at which each position `sent` to others.

    That is the sum of what it sent or of what it received, whichever is larger. A position without either gets the
    smallest speed of all; empty if none is known.
    """
    out = dict.fromkeys(range(len(sent)), 0.0)
    into = dict(out)
    for source, targets in enumerate(sent):
        for target, rate in targets:
            out[source] += rate
            into[target] += rate
    links = {position: max(rate, into[position]) for position, rate in out.items()}
    least = min((rate for rate in links.values() if rate > 0), default=0.0)
    return {position: rate or least for position, rate in links.items()} if least else {}
