"""The other nodes of a job as its ranks see them: where their SMPs are, what those hold, and what protects it from now.

Invariant: one rank of each node, the lowest, speaks to the SMP of that node; what it hears all ranks hear. Every call
is made by every rank of the job, in the same order, and fails on all of them alike.

In: nodes, sharding groups and segments' shapes of all ranks. Out: `recovery.restore.Nodes` for a recovery; after it,
`protect` has the SMPs guard each other's slots.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import psutil

from ..collective import Collective
from ..errors import BudgetError, ConfigError, FencedError, FtError, ProtocolError
from ..redundancy.exchange_plan import ExchangePlan, positions
from ..smp.client import Client
from ..smp.protection import Protection
from ..snapshot.double import ReplicaShare, replica_extents
from ..snapshot.shape import Shape
from ..snapshot.slots import Mark, Version
from .recovery_plan import NodeFacts, RecoveryPlan, Way, counted


@dataclass(frozen=True)
class NodeTierConfig:
    """What the user decided about the node tier, and where this rank's SMP is."""

    losses: int  # 0 where nodes only reach each other
    stages: tuple[tuple[int, ...], ...]  # pipelines, where copies go to a neighbouring stage; else ()
    interval: int  # iterations
    exchange_mbps: float
    detect_seconds: float
    secret_file: str
    interface: str | None
    towards: str  # a host of the job: the interface is the one that leads there, unless named
    run_dir: Path
    token: int
    both: bool = False  # parity beside copies
    audited: bool = False  # a version counts only when its replicas were found to agree
    measure: bool = False  # what the links carry by which copies go
    encrypt: bool = False  # what nodes send each other


Endpoint = tuple[str, int]
_BUSY_SECONDS = 0.2  # between two questions to a node whose trainers have not ended yet


@dataclass(frozen=True)
class Spare:
    """A node without a part in the job, whose SMP is at `where` and has `told` what it holds of other sizes."""

    name: str
    where: Endpoint
    told: Mapping[str, Any]


def read_marks(told: Sequence[Sequence[int]]) -> dict[Version, Mark]:
    """What an SMP says of the replicas of the versions that its ranks hold: [lineage, iteration, mark] of each."""
    return {Version(lineage, iteration): Mark(mark) for lineage, iteration, mark in told}


class SeenNodes:
    """The nodes of the job as far as their SMPs say what they hold: nothing is moved between them."""

    def __init__(self, collective: Collective, nodes: Sequence[str], run_dir: Path) -> None:
        self._collective = collective
        self._run_dir = run_dir
        self._names, self.ranks = positions(nodes)
        self._position = self._names.index(nodes[collective.rank])
        self._leads = self.ranks[self._position][0] == collective.rank
        self.exchange: ExchangePlan | None = None
        self.digest = 0

    def ask(self, question: Callable[[Client], Any]) -> list[Any]:
        """The answers of every node's SMP, in the order of the nodes. Raises what any of them refused with."""
        answer: Any = None
        with self._collective.agreement():
            if self._leads:
                with Client(self._run_dir) as client:
                    answer = question(client)
        told = self._collective.gather(msgpack.packb(answer))
        return [msgpack.unpackb(told[ranks[0]], strict_map_key=False) for ranks in self.ranks]

    def facts(self) -> list[NodeFacts]:
        """What every node's SMP can hand out now. Every rank of the job calls."""
        return [
            NodeFacts(
                {rank: frozenset(Version(*version) for version in held) for rank, held in found["slots"]},
                frozenset(Version(*version) for version in found["parity"]),
                found["position"],
                found["plan"],
                dict(found["completed"]),
                found["lineage"],
                Version(*found["counted"]) if found["counted"] else None,
                found["released"],
                read_marks(found["marks"]),
            )
            for found in self.ask(lambda client: client.inventory())
        ]

    def rebuild(self, plan: RecoveryPlan) -> None:
        """Nothing can be rebuilt. Raises ProtocolError."""
        raise ProtocolError(f"rank {self._collective.rank}: nodes do not protect each other, yet '{plan.table()}'")

    def spares(self, previous: Protection, report: Callable[[FtError], None]) -> list[Spare]:
        """None: these nodes reach no SMP but their own."""
        return []

    def rebuild_previous(
        self, rank: int, plan: RecoveryPlan, protection: Protection, fingerprint: Mapping[str, Any],
        spare: Endpoint | None, spares: Sequence[Endpoint],
    ) -> None:  # fmt: skip
        """Nothing can be rebuilt. Raises ProtocolError."""
        self.rebuild(plan)


class LinkedNodes(SeenNodes):
    """The nodes of a job whose SMPs reach each other, and those of nodes that have no part in it."""

    def __init__(self, collective: Collective, nodes: Sequence[str], config: NodeTierConfig) -> None:
        """Every rank of the job calls. Raises ConfigError (secret, interface), ProtocolError, on all ranks."""
        super().__init__(collective, nodes, config.run_dir)
        self._config = config
        told = self.ask(lambda client: list(client.endpoint(_address(config), config.secret_file, config.encrypt)))
        self._endpoints = tuple((str(host), int(port)) for host, port in told)

    def spares(self, previous: Protection, report: Callable[[FtError], None]) -> list[Spare]:
        """The spares among the nodes that `previous` protected, and nodes that joined too late to take part, with the
        reports of their SMPs. One that does not answer is lost. Every rank of the job calls."""
        names = previous.plan().nodes
        absent = [at for at, name in enumerate(names) if name not in self._names]
        mine = absent[self._position :: len(self._names)]

        def ask(client: Client) -> list[Any]:
            answers = [[at, self._ask_spare(client, names[at], previous.endpoints[at], report)] for at in mine]
            return [answer for answer in answers if answer[1] is not None]

        found = {at: told for answers in self.ask(ask) for at, told in answers}
        return [Spare(names[at], previous.endpoints[at], told) for at, told in sorted(found.items())]

    def _ask_spare(
        self, client: Client, name: str, where: Endpoint, report: Callable[[FtError], None]
    ) -> dict[str, Any] | None:
        """The answer of one; its trainers, if it has not noticed yet that it has no part, end soon."""
        config, deadline = self._config, time.monotonic() + 2 * self._config.detect_seconds
        rank, size = self._collective.rank, self._collective.world_size
        while True:
            try:
                told = client.spare(rank, config.token, size, name, where, config.detect_seconds)
            except FencedError:  # this incarnation is over, not that node
                raise
            except FtError as error:
                report(error)
                return None
            if "busy" not in told:
                return told
            if time.monotonic() > deadline:
                report(ProtocolError(f"node {name} is no spare: trainers of ranks {told['busy']} live there"))
                return None
            time.sleep(_BUSY_SECONDS)

    def rebuild_previous(
        self, rank: int, plan: RecoveryPlan, protection: Protection, fingerprint: Mapping[str, Any],
        spare: Endpoint | None, spares: Sequence[Endpoint],
    ) -> None:  # fmt: skip
        """Rebuild the slot of a rank of the previous job, which `protection` describes, on this node.

        It is fetched from `spare`, or decoded from parity. Nodes of `plan` beyond those of this job are `spares`.
        """
        assert plan.version is not None
        everyone = (*self._endpoints, *spares)
        holders = {position: everyone[node] for position, node in plan.holders.items()}
        with Client(self._config.run_dir) as client:
            client.rebuild(
                rank, self._config.token, plan.version, protection, spare, holders, plan.gone, fingerprint
            )


class JobNodes(LinkedNodes):
    """The nodes of a job that protect each other, for one incarnation."""

    def __init__(
        self,
        collective: Collective,
        nodes: Sequence[str],
        groups: Sequence[Sequence[int]],
        shape: Shape,
        replicated: Sequence[ReplicaShare],
        config: NodeTierConfig,
    ) -> None:
        """`replicated` is `double.replica_shares` of this rank's layout. Every rank of the job calls.

        Raises ConfigError (secret, interface), ProtocolError, on all ranks.
        """
        super().__init__(collective, nodes, config)
        facts = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb([astuple(shape), replicated]))]
        shapes = tuple(Shape(*values) for values, _ in facts)
        self._protection = Protection(
            lineage=0, base=None, nodes=tuple(nodes), groups=tuple(map(tuple, groups)), shapes=shapes,
            losses=config.losses, position=self._position, endpoints=self._endpoints, interval=config.interval,
            exchange_mbps=config.exchange_mbps, detect_seconds=config.detect_seconds,
            replicated=() if config.stages and not config.both else replica_extents([shares for _, shares in facts]),
            stages=config.stages, both=config.both, measure=config.measure, audited=config.audited,
        )  # fmt: skip
        self.exchange = self._protection.plan()
        self.digest = self._protection.digest
        self.links: dict[int, float] = {}  # bytes per second by position, as measured by `protect`

    def rebuild(self, plan: RecoveryPlan) -> None:
        """Have this rank's slot put back together. Raises what the SMP refused with; called by this rank alone."""
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
        """Have the SMPs guard each other's slots from now on; what each has claimed for that, in bytes, by node.

        Raises BudgetError, on all ranks, where the kernel has not given it.
        """
        counts = counted(self.facts(), base, self.exchange, self.digest)
        told = replace(self._protection, lineage=lineage, base=base, counted=counts)
        found = self.ask(lambda client: client.protect(self._collective.rank, self._config.token, told))
        for name, answer in zip(self._names, found, strict=True):
            if answer["resident_bytes"] < answer["bytes"]:
                raise BudgetError(
                    f"node {name}: {answer['bytes']} bytes were claimed for what other nodes send, but the kernel has "
                    f"given {answer['resident_bytes']}; something has taken pages of it, 'ft-plugins end' removes it"
                )
        self.links = links_of([answer["links"] for answer in found])
        return [(name, int(answer["bytes"])) for name, answer in zip(self._names, found, strict=True)]


def links_of(sent: Sequence[Sequence[tuple[int, float]]]) -> dict[int, float]:
    """What the link of each position carries each way, from what each has `sent` to others, in bytes per second: what
    went out of it or what came in, whichever is more. Positions of which neither is known have the least of all."""
    found = dict.fromkeys(range(len(sent)), 0.0)
    into = dict(found)
    for source, targets in enumerate(sent):
        for target, rate in targets:
            found[source] += rate
            into[target] += rate
    found = {position: max(rate, into[position]) for position, rate in found.items()}
    least = min((rate for rate in found.values() if rate > 0), default=0.0)
    return {position: rate or least for position, rate in found.items()} if least else {}


def _address(config: NodeTierConfig) -> str:
    """The address of this node on which its SMP is to be reached by others. Raises ConfigError."""
    if config.interface is None:
        try:
            family = socket.getaddrinfo(config.towards, 9, type=socket.SOCK_DGRAM)[0]
            with closing(socket.socket(family[0], socket.SOCK_DGRAM)) as probe:
                probe.connect(family[4])  # sends nothing: the kernel chooses a route
                return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(
                f"no interface leads to '{config.towards}' ({error}); name one by --ftp-interface"
            ) from error
    devices = psutil.net_if_addrs()
    addresses = {entry.address for device in devices.values() for entry in device}
    if config.interface in addresses:
        return config.interface
    for wanted in (socket.AF_INET, socket.AF_INET6):
        for entry in devices.get(config.interface, []):
            if entry.family == wanted:
                return str(entry.address)
    raise ConfigError(
        f"--ftp-interface {config.interface}: no device or address of this node; its devices are {', '.join(devices)}"
    )
