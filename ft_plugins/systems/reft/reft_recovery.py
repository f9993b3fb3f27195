"""Recovery of one rank of REFT: state of another size -> version -> tensors -> lineage -> protection.

Invariant: no version becomes void before every rank has restored, and no rank captures before every SMP has opened the
new lineage. Every rank of the job makes each call, and errors are raised on all of them.

In: the mapped segment, the capture plan, the job's nodes. Out: `Recovered`; this rank's part in the exchange.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...base import faults
from ...collective import Collective
from ...errors import ResumeError
from ...events import say
from ...model.host import Host, Lacking, Planning
from ...recovery.nodes import JobNodes, SeenNodes
from ...recovery.proof_plan import ProofPlan, refused_proof
from ...recovery.recovery_plan import RecoveryPlan
from ...recovery.restore import agree_on_proof, agree_on_version, load_tensors, small_state_of
from ...recovery.source_choice import choose_source, iteration_bound
from ...recovery.storage import StorageTier
from ...redundancy.neighbour import CopyAndParityPlan, CopyPlan, NeighbourPlan
from ...smp.serve.client import Client
from ...snapshot.capture import codec, manifest
from ...snapshot.checkpoint import checkpoint
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import Version
from ..transcript import disturb
from .captured_groups import require_same_groups
from .carried import ABSENT
from .reft_nodes import ReftNodes
from .reft_plan import CapturePlan
from .reft_reports import ReftReports, protection_table


@dataclass(frozen=True)
class Recovered:
    """`small` is the small state of the version that was loaded, None if none was; by `proof` that may be the one
    before the plan's. `verify_seconds` is also for taking over a previous size, reaching the nodes and rebuilding."""

    plan: RecoveryPlan
    proof: ProofPlan
    small: dict[str, Any] | None
    nodes: SeenNodes
    verify_seconds: float
    load_seconds: float


@dataclass(frozen=True)
class ExchangeRole:
    """What this rank sends to other nodes with each version."""

    copies: NeighbourPlan | None = None  # which node keeps which copy; None if there are no copies
    links: Mapping[int, float] = field(default_factory=dict)  # bytes per second by position, if measured
    holders: int = 1  # nodes that keep its small state and digest table
    parity_bytes: int = 0  # sent in addition to copies


class ReftRecovery:
    """The recovery of one rank."""

    def __init__(
        self, host: Host, collective: Collective, capture: CapturePlan, nodes: ReftNodes, run_dir: Path, token: int,
        reports: ReftReports, rehearses: bool = False, unproven: str = "",
    ) -> None:  # fmt: skip
        """`rehearses`: state is overwritten before a restore, so that what is not restored shows. `unproven`: why no
        restore of this job is proven, '' if they are."""
        self._rehearses, self._unproven = rehearses, unproven
        self._host = host
        self._collective = collective
        self._capture_plan = capture
        self._nodes = nodes
        self._run_dir = run_dir
        self._token = token
        self._reports = reports
        self._storage: StorageTier | None = None

    def run(self, segment: Segment, mode: str, loaded: int) -> Recovered:
        """Restore the newest version that all ranks can have, and open a lineage from it.

        `loaded`: iteration of the framework's own checkpoint, 0 for none. Raises ResumeError, on all ranks and before
        any version becomes void.
        """
        started = time.perf_counter()
        faults.reach("restore.begin")
        self._nodes.restore_previous_size(segment, self._capture_plan.manifest)
        nodes = self._nodes.of_job(segment.shape, self._capture_plan.layout)
        plan = self._agree_on_plan(segment, nodes, mode, loaded)
        refused = self._unproven or refused_proof(plan, mode, loaded)
        proof = agree_on_proof(plan, segment, self._collective, self._reports.damage, refused)
        verified = time.perf_counter()
        small = self._load(segment, plan, proof.start or plan.version)
        seconds = time.perf_counter() - verified
        if self._storage is not None:
            self._storage.take(plan)
        self._void_checkpoints(plan, mode)
        if plan.refused:  # also at later restarts, at which the framework loads it again
            segment.header.doubt(plan.agreed or 0, max(plan.completed, plan.refused))
        self._open_lineage(plan)
        return Recovered(plan, proof, small, nodes, verified - started, seconds)

    def _agree_on_plan(self, segment: Segment, nodes: SeenNodes, mode: str, loaded: int) -> RecoveryPlan:
        """The plan, with its version verified in a slot of every rank; one from storage was written there first. Raises
        ResumeError."""
        before = iteration_bound(mode)
        plan = agree_on_version(segment, self._collective, self._reports.damage, nodes, before)
        lacking = self._host.checkpoint_lacks if isinstance(self._host, Lacking) else ""
        run = plan.run or self._nodes.run
        plan = replace(plan, lineage=max(plan.lineage, self._nodes.lineage + 1), lacking=lacking, run=run)
        storage, job = self._capture_plan.storage, self._run_dir.parent.name
        try:
            if storage is None:
                plan = choose_source(plan, mode, loaded)
            else:
                folder, names = Path(storage.folder), self._nodes.by_rank
                self._storage = StorageTier(folder, job, self._collective, self._reports.storage, names)
                plan = self._storage.recover(plan, mode, loaded, segment, self._token)
            return replace(plan, run=plan.run or plan.drawn)
        except ResumeError as error:
            error.echo = self._host.rank != 0  # all ranks raise the same error: rank 0 prints it
            raise

    def _load(self, segment: Segment, plan: RecoveryPlan, version: Version | None) -> dict[str, Any] | None:
        """Copy `version` into the host. Returns its small state, None if nothing is restored."""
        if self._rehearses and plan.version is not None:
            disturb(self._host, plan.lineage)
        small: dict[str, Any] | None = None
        if version is not None:
            encoded = small_state_of(version, segment)
            small = codec.decode(manifest.split(encoded, f"rank {self._host.rank}, version {version}")[1])
            if isinstance(self._host, Planning):
                self._host.allocate(frozenset(small.get(ABSENT, ())))
            load_tensors(version, segment, self._capture_plan.layout, self._host.tensors(), self._collective)
            with self._collective.agreement():
                require_same_groups(self._host, small)
            self._host.restore(small)
        if plan.version is not None and plan.mark:  # known to other ranks only, perhaps, or the slot was just filled
            segment.mark(plan.version, plan.mark)
        return small

    def _void_checkpoints(self, plan: RecoveryPlan, mode: str) -> None:
        """With --ftp-resume before:N, take newer checkpoints of the job out of every later recovery. Raises
        ResumeError, on all ranks."""
        storage = self._capture_plan.storage
        if iteration_bound(mode) is None or storage is None:
            return
        restored = plan.loaded if plan.version is None else plan.version.iteration
        with self._collective.agreement():
            if self._host.rank == 0:
                base = Path(storage.folder) / self._run_dir.parent.name
                self._reports.checkpoints_voided(base, checkpoint.void(base, restored, plan.lineage))

    def _open_lineage(self, plan: RecoveryPlan) -> None:
        self._collective.barrier()  # every rank has restored: from now on a version may become void
        with Client(self._run_dir) as client:
            client.open_lineage(self._host.rank, self._token, plan.lineage, plan.version, plan.loaded, plan.run)
        faults.reach("restore.opened")
        self._collective.barrier()  # every SMP has opened the lineage before any rank captures into it

    def protect(self, recovered: Recovered, first: bool) -> ExchangeRole:
        """Have the nodes protect each other from now on, if so configured. `first`: rank 0 prints how."""
        nodes, plan, rank = recovered.nodes, recovered.plan, self._host.rank
        if not isinstance(nodes, JobNodes):
            return ExchangeRole()
        claimed = nodes.protect(plan.lineage, plan.version)
        if first and rank == 0:
            say(protection_table(nodes, claimed), who="")
        exchange = nodes.exchange
        copies = exchange.neighbours if isinstance(exchange, CopyPlan) else None
        if isinstance(exchange, CopyAndParityPlan):
            holders = len(exchange.small_state_holders(rank))
            return ExchangeRole(copies, nodes.links, holders, exchange.parity_sent_bytes(rank))
        return ExchangeRole(copies, nodes.links)
