"""REFT between nodes: which losses are survivable, how nodes protect each other, and state of another size of the job.

Invariant: redundancy that the user named is provided or refused with the reason; if the default one is impossible, that
is printed. Nothing here is in the step path.

In: host, configuration, the nodes and their failure domains. Out: the job's `Nodes` for a recovery; a slot filled with
state of another data-parallel size; the numbers of nodes with which the job could continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from ...collective import Collective
from ...config import Config, ReftConfig
from ...errors import ConfigError, FtError, ResumeError
from ...events import Events, catalogue, say
from ...model.host import Host
from ...model.topology import Topology
from ...planner.group_survival import choose_group_nodes
from ...planner.job_intervals import MeasuredJob
from ...recovery.nodes import JobNodes, LinkedNodes, NodeTierConfig, RankLayout, SeenNodes, describe_protection
from ...recovery.resize import sizes
from ...recovery.resize.previous_job import PreviousJob
from ...recovery.resize.previous_size import ResizePlan
from ...recovery.resize.refill import TakingOver, refill
from ...recovery.source_choice import iteration_bound
from ...redundancy import neighbour
from ...redundancy.exchange_plan import NAMES, positions, why_unprotected
from ...redundancy.grouping import copies_possible, parity_possible, redundancy_groups, shared_domains
from ...smp.exchange.parity_store import store_bytes
from ...snapshot.capture.double import replica_shares, with_parity
from ...snapshot.capture.layout import Layout
from ...snapshot.capture.manifest import Manifest
from ...snapshot.schedule import SnapshotSchedule
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.shape import Shape
from .failure_domains import JobNodeNames

_SHOWN = 4  # entries of a list in a message


def schedule_of(config: Config) -> SnapshotSchedule:
    """When versions are captured, exchanged and compared. Raises ConfigError without REFT."""
    if config.capture is None:
        raise ConfigError("REFT is not on")
    audits = config.paft.audits_every if config.paft is not None else 0
    return SnapshotSchedule.of(config.capture.begins_with[0], config.capture.exchange_interval, audits)


class ReftNodes:
    """The nodes of one incarnation of a job. `losses`: how many of a redundancy group may be lost, 0 for none. `leads`:
    whether this rank is the lowest of its node, which acts for it."""

    def __init__(
        self, host: Host, config: Config, collective: Collective, names: JobNodeNames, run_dir: Path, token: int,
        events: Events,
    ) -> None:  # fmt: skip
        """Raises ConfigError."""
        if config.capture is None:
            raise ConfigError("REFT is not on")
        self._host = host
        self._job = config
        self._config: ReftConfig = config.capture
        self._collective = collective
        self._names = names
        self._nodes = self.by_rank = names.nodes
        self.leads = names.nodes.index(names.nodes[host.rank]) == host.rank
        self._run_dir = run_dir
        self._token = token
        self._events = events
        self._copied = self._config.redundancy in ("neighbour", "both")
        self._encoded = self._config.redundancy in ("raim5", "raim6", "both")
        self._resize_plan: ResizePlan | None = None
        self.lineage = 0  # the newest that any node knew at start, at any size of the job
        self.run = ""  # that of state of another size, '' if there is none
        self.unprotected = ""  # why nodes do not protect each other although they were to
        self.losses = self._survivable(names.nodes)
        self.groups = self._cut_groups()  # as ranks; the sharding groups if no parity is kept

    def with_parity(self, layout: Layout) -> Layout:
        """`layout` with the parity that this rank computes of other nodes' shares."""
        if not self.losses or not self._encoded:
            return layout
        return with_parity(layout, self._nodes, self.groups, self.losses, self._config.bucket_mib << 20)

    def _cut_groups(self) -> tuple[tuple[int, ...], ...]:
        """The redundancy groups, as ranks; the sharding groups if no parity is kept."""
        groups = tuple(self._host.topology().sharding_groups().values())
        if not self.losses or not self._encoded:
            return groups
        wanted = self._config.group_nodes
        most = choose_group_nodes(len(set(self._nodes)), self.losses) if wanted == "auto" else wanted
        return redundancy_groups(self._nodes, groups, most, self.losses, self._names.domains)

    def describe_domains(self) -> list[str]:
        """Messages on failure domains: those whose loss is not survived, and those that do not count yet."""
        names, reported = self._names, self._names.reported
        if not self.losses or not self._encoded:
            return []
        shared = list(shared_domains(names.nodes, self.groups, self.losses, reported))
        lines = [
            f"the loss of failure domain {one.domain} is not survived: nodes {_listed(one.nodes)} are in one "
            f"redundancy group, {NAMES[self.losses]} makes up for {self.losses}; spread data parallelism over more "
            "domains"
            for one in shared[:_SHOWN]
        ]
        if len(shared) > _SHOWN:
            lines.append(f"nor is that of {len(shared) - _SHOWN} more failure domains")
        if names.domains != reported:
            there = positions(names.nodes)[0]
            counted, given = names.domains or [""] * len(there), reported or [""] * len(there)
            changed = [
                f"{name} ({after or 'none'}, so far {before or 'none'})"
                for name, before, after in zip(there, counted, given, strict=True)
                if before != after
            ]
            lines.append(
                "redundancy groups stay as they are for the snapshots in memory: other failure domains count after a "
                f"resize or with --ftp-resume fresh, of nodes {_listed(changed)}"
            )
        return lines

    @property
    def _named(self) -> bool:
        """Whether the user named this redundancy."""
        return self._job.baft is not None or (self._job.reft is not None and self._job.reft.redundancy is not None)

    def _survivable(self, nodes: tuple[str, ...]) -> int:
        """How many nodes of a redundancy group may be lost. Raises ConfigError if a named redundancy is impossible."""
        redundancy = self._config.redundancy or "none"
        losses = {"none": 0, "raim5": 1, "raim6": 2, "neighbour": neighbour.LOSSES, "both": 1}[redundancy]
        reason = self._impossible(self._host.topology(), nodes, losses) if losses else ""
        self.unprotected = reason
        if not reason:
            return losses
        if self._named:
            by_reft = self._job.reft is not None and self._job.reft.redundancy is not None
            flag = f"--reft-redundancy {redundancy}" if by_reft else "--baft"
            raise ConfigError(f"{flag}: {reason}")
        if self._host.rank == 0 and len(set(nodes)) > 1:
            say(f"a lost node cannot be survived: {reason}")
        if self._host.rank == 0 and self._job.encrypt:
            say("--ftp-encrypt has no effect on snapshots: no node of this job sends any to another")
        return 0

    def _impossible(self, topology: Topology, nodes: Sequence[str], losses: int) -> str:
        """Why that many losses cannot be survived if `nodes[rank]` is the node of each rank; '' if they can."""
        reason = neighbour.why_unplaced(nodes, neighbour.pipelines(topology)) if self._copied else ""
        if reason or not self._encoded:
            return reason
        return why_unprotected(nodes, tuple(topology.sharding_groups().values()), losses, whole=False)

    def of_job(self, shape: Shape, layout: Layout) -> SeenNodes:
        """The nodes of the job, of which there may be one: it may have been a spare while the job went on elsewhere.

        `shape` and `layout` are this rank's. Every rank of the job calls. Raises ConfigError, ProtocolError.
        """
        if not self.losses:
            return SeenNodes(self._collective, self._nodes, self._run_dir)
        if self._job.secret_file is None:
            raise ConfigError(
                "--ftp-secret-file: needed because nodes protect each other; make one with "
                "(umask 077; head -c 32 /dev/urandom | base64 > FILE), the same on all nodes, or "
                + ("drop --baft" if self._job.baft else "give --reft-redundancy none"),
                echo=self._host.rank != 0,
            )
        config = self._tier_config(self._job.secret_file)
        return JobNodes(self._collective, self._nodes, self.groups, shape, replica_shares(layout), config)

    def _tier_config(self, secret_file: str) -> NodeTierConfig:
        stages = neighbour.pipelines(self._host.topology()) if self._copied else ()
        schedule = schedule_of(self._job)
        return NodeTierConfig(
            self.losses, stages, schedule.exchanged, self._config.exchange_mbps,
            self._job.detect_seconds, secret_file, self._run_dir, self._token,
            both=self._copied and self._encoded, audited=schedule.compared > 0, domains=self._names.domains,
            measure=self._job.baft is not None and self._job.baft.link_mbps is None, encrypt=self._job.encrypt,
        )  # fmt: skip

    @property
    def choosing(self) -> MeasuredJob:
        """What the choice of intervals depends on, and does not change."""
        config, nodes = self._config, self._nodes
        sizes = [len({nodes[rank] for rank in group}) for group in self.groups]
        return MeasuredJob(
            config.interval == "auto", config.checkpoint_interval == "auto", len(set(nodes)), max(2, *sizes),
            self.losses, config.exchange_interval, config.hw_rate, config.sw_rate,
        )  # fmt: skip

    def store_bytes(self, ranks: Sequence[RankLayout], at: Sequence[int]) -> list[int]:
        """The bytes that the nodes `at` some positions claim to protect other nodes; 0 if nodes do not protect each
        other. `ranks` are the facts of all ranks. Pure."""
        if not self.losses:
            return [0 for _ in at]
        protection = describe_protection(ranks, self._nodes, self.groups, self._tier_config(""), at[0])
        return [store_bytes(protection, position) for position in at]

    def _reachable(self, seen: SeenNodes, shape: Shape, layout: Layout) -> SeenNodes:
        """The nodes for a resize: their SMPs reach each other, even if they protect each other only at a previous
        size."""
        if self.losses:
            return self.of_job(shape, layout)
        if self._job.secret_file is None:
            return seen
        return LinkedNodes(self._collective, self._nodes, self._tier_config(self._job.secret_file))

    def find_previous_size(self, mode: str, shape: Shape, layout: Layout, report: Callable[[FtError], None]) -> None:
        """Find state of this job at a previous data-parallel size, for `restore_previous_size`.

        Every rank of the job calls, before any claims memory. `mode` is `--ftp-resume`: `fresh` removes the state,
        `storage` leaves it alone. Raises ResumeError, ProtectionError, on all ranks.
        """
        rank, token = self._host.rank, self._token
        seen = SeenNodes(self._collective, self._nodes, self._run_dir)
        size = self._collective.world_size
        resized = any(seen.ask(lambda client: client.resize(rank, token, size)))
        self.lineage = max(node.lineage for node in seen.facts())
        if not resized or mode == "storage":
            return
        if iteration_bound(mode) is not None:
            raise ResumeError(
                f"--ftp-resume {mode} cannot be combined with another data-parallel size; start with the previous "
                "number of nodes",
                echo=rank != 0,
            )
        nodes = seen if mode == "fresh" else self._reachable(seen, shape, layout)
        previous = PreviousJob(self._collective, nodes, token, self._run_dir, report)
        if mode == "fresh":
            previous.drop()
            return
        if self._host.topology().ep > 1:
            raise ResumeError(
                "state of another data-parallel size cannot be restored with expert parallelism (ep > 1); start with "
                " the previous number of nodes, or from the beginning with --ftp-resume fresh",
                echo=rank != 0,
            )
        self._resize_plan = previous.plan_resize(self._host.fingerprint())
        self.run = previous.run
        if self._resize_plan is not None:
            self.lineage = max(self.lineage, self._resize_plan.now.lineage - 1)
            previous.keep_only(self._resize_plan)

    def report_sizes(self) -> str:
        """Report to the rendezvous with how many nodes the job could continue. Returns a message, '' for one node and
        on all ranks but 0, which computes the numbers. Every rank of the job calls.

        If the user named the redundancy, each of those numbers provides it.
        """
        numbers: tuple[int, ...] = ()
        message = ""
        if self._host.rank == 0:
            numbers, message = self._find_sizes()
        numbers = sizes.unpacked(self._collective.gather(sizes.packed(numbers))[0])
        if self.leads:
            sizes.write(self._run_dir, sizes.SizeReport(numbers, spares_asked=self.losses > 0))
        return message

    def _find_sizes(self) -> tuple[tuple[int, ...], str]:
        """The numbers of nodes with which the job could continue, and a message on them, '' for one node."""
        topology, admits = self._host.topology(), self._host.admits
        numbers = protected = sizes.admissible(topology, self._nodes, admits, self._survives)
        if not self._named:
            numbers = sizes.admissible(topology, self._nodes, admits, lambda resized, per_node: True)
        count = len(set(self._nodes))
        return numbers, sizes.describe(numbers, count, set(protected)) if count > 1 and numbers else ""

    def _survives(self, topology: Topology, per_node: int) -> bool:
        """Whether a lost node could be survived if ranks were in order on nodes of that many ranks."""
        if not self.losses:
            return True
        if self._copied and not copies_possible(topology, per_node):
            return False
        return not self._encoded or parity_possible(topology, per_node, self.losses)

    def restore_previous_size(self, segment: Segment, manifest: Manifest) -> None:
        """Fill a slot with the state that `find_previous_size` found, if any, once. Every rank of the job calls.

        Raises ResumeError.
        """
        plan = self._resize_plan
        if plan is None:
            return
        started = time.perf_counter()
        members = SeenNodes(self._collective, self._nodes, self._run_dir).ranks
        moved = refill(
            plan, segment, manifest, members, self._collective, self._run_dir, self._token,
            cast(TakingOver, self._host),  # a `CarryingHost`
        )  # fmt: skip
        self._resize_plan = None  # a second `resume` finds the slot; the previous segments may be gone by then
        seconds = time.perf_counter() - started
        self._events.emit(
            catalogue.STATE_RESHARDED, ranks=plan.world_size, iteration=plan.version.iteration,
            lineage=plan.version.lineage, bytes=moved, seconds=seconds,
        )  # fmt: skip
        if self._host.rank == 0:
            say(
                f"iteration {plan.version.iteration} of {plan.world_size} ranks restored on "
                f"{self._collective.world_size} ranks, {seconds:.1f} s"
            )


def _listed(entries: Sequence[str]) -> str:
    """The first entries of a list, and how many more there are."""
    more = [f"and {len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
    return ", ".join([*entries[:_SHOWN], *more])
