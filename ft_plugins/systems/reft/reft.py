"""REFT: capture each rank's share of the training state, at an interval, in shared memory that outlives training.

    start       inventory -> layout -> segment (claimed from the SMP)         claim
    recovery    agree on a version -> restore it -> open a new lineage        resume
    iteration   version point -> capture behind the next iteration -> fence   iteration_end, before_update

Invariant: training waits only at the fence, `before_update`; the step path sends no message, but the figures by which
ranks choose an interval (`capture_times`).

In: host, collective, the SMP's run directory. Out: versions in the segment; `resume` restores one of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...base import faults
from ...bubbles.gate.gate import Gate
from ...collective import Collective
from ...config import Config
from ...errors import BudgetError, ConfigError, FtError
from ...events import Events
from ...model.host import Host
from ...model.timeline import SenderFacts
from ...recovery.proof_plan import ProofPlan
from ...recovery.recovery_plan import RecoveryPlan
from ...recovery.source_choice import iteration_bound
from ...smp.serve.client import Client
from ...snapshot.capture import codec, manifest
from ...snapshot.capture.capture import Capture
from ...snapshot.capture.layout import layer_bytes, plan_layout
from ...snapshot.checkpoint import index
from ...snapshot.segment import claims
from ...snapshot.segment.claims import CaptureOwner
from ...snapshot.segment.header import END
from ...snapshot.segment.ledger import digest_of
from ...snapshot.segment.paths import SPARE, check_room, memory_bytes, path_of
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.shape import Shape
from ...snapshot.segment.slots import Commit, Mark, Version, captured_after
from ..iteration_ledger import IterationLedger
from .capture_times import DEGRADED, CaptureTimes, PeerDegraded
from .captured_groups import naming_parameters
from .carried import CarryingHost
from .failure_domains import JobNodeNames
from .proof import Judging, RestoreProof
from .reft_nodes import ReftNodes
from .reft_plan import CapturePlan
from .reft_recovery import ExchangeRole, ReftRecovery
from .reft_reports import ReftReports
from .replica_look import ReplicaLook

UNJUDGED = (1 << 32) - 1  # `agreed` of a job that lost protection: what its framework saves then is all there is
HOLD_SECONDS = 300.0  # maximum for which a rank is held: less than a collective of the others waits for it
_HELD_SECONDS = 0.005  # between two looks whether it still is
_ASK_SECONDS = 1.0  # timeout of a request to the SMP by a rank that has lost protection


def unproven(config: Config) -> str:
    """Why no restore of a job is proven; '' if they are."""
    if config.prove == "off":
        return "--ftp-prove off"
    own_pace = config.sync is not None and config.sync.policy == "a_edit"
    return "replicas train at their own pace" if own_pace else ""


class Reft(CaptureOwner):
    """REFT on one rank. From `claim` to `close` it has a mapped segment, from `resume` on a capture thread."""

    def __init__(
        self, host: Host, config: Config, collective: Collective, names: JobNodeNames, run_dir: Path, token: int,
        events: Events, ledger: IterationLedger,
    ) -> None:  # fmt: skip
        """Raises ConfigError, TopologyError."""
        if config.capture is None:
            raise ConfigError("REFT is not on")
        self._host, self._collective = host, collective
        self._audits = config.paft is not None and config.paft.mode == "audit"
        self._run_dir, self._token = run_dir, token
        self.nodes = ReftNodes(host, config, collective, names, run_dir, token, events)
        layout = self.nodes.with_parity(plan_layout(host.inventory(), names.nodes, config.capture.bucket_mib << 20))
        self.plan = CapturePlan(host, config, config.capture, layout, self.nodes.losses, collective.world_size)
        self._times = CaptureTimes(self.plan.schedule, config.capture, self.nodes.choosing, collective, events)
        differ = config.sync is not None or config.paft is not None  # which compare, or train apart
        self._look = None if differ else ReplicaLook(host, collective, events)
        self._reports = ReftReports(events, run_dir if self.nodes.leads else None)
        self._recovery = ReftRecovery(
            host, collective, self.plan, self.nodes, run_dir, token, self._reports, config.transcript_dir is not None,
            unproven(config),
        )  # fmt: skip
        job, node = run_dir.parent.name, run_dir.name  # a run directory is job / node
        self._path = path_of(job, node, host.rank)
        here = [rank for rank, name in enumerate(names.nodes) if name == names.nodes[host.rank]]
        self._paths = [path_of(job, node, rank) for rank in here]  # the segments of all ranks of this node
        self._ledger, self._events, self._mode = ledger, events, config.on_difference
        self._proof: RestoreProof | None = None
        self._restored_small: Mapping[str, Any] | None = None  # of the restored version, where it is proven
        self._segment: Segment | None = None
        self._capture: Capture | None = None
        self._lineage = 0
        self._base: Version | None = None  # the restored version
        self._agreed: Version | None = None  # the last one whose replicas were found equal
        self.exchange = ExchangeRole()
        self._small_bytes = 0  # of the newest version

    # ---- start ----

    @property
    def claimed(self) -> bool:
        """Whether this rank's segment exists, of this or an earlier incarnation."""
        return self._path.exists()

    @property
    def claimed_slots(self) -> int:
        return len(self._mapped().claimed)

    def find_previous_size(self, mode: str) -> None:
        """Find state of this job at another data-parallel size: see `ReftNodes.find_previous_size`."""
        self.nodes.find_previous_size(mode, self.plan.shape, self.plan.layout, self._reports.damage)

    def claim(self, fresh: bool) -> Shape:
        """Have the SMP create or find this rank's segment, and map every page of it.

        Raises BudgetError, ResumeError, SegmentError, FencedError; ProtectionError if no SMP answers.
        """
        rank = self._host.rank
        fingerprint = dict(self._host.fingerprint())
        if self.plan.storage is not None:
            if (names := self._host.names()) and names.get("problem"):
                self._reports.not_exportable(names["problem"])
            index.stage(self._run_dir, self.plan.index(names))
        faults.reach("attach.before")
        with naming_parameters(self._host, self._path, self._paths), Client(self._run_dir) as client:
            path = client.attach(
                rank, self._token, self.plan.shape, fingerprint, fresh=fresh, world_size=self._collective.world_size,
                storage=self.plan.storage,
            )  # fmt: skip
        faults.reach("attach.after")
        segment = self._segment = Segment(path, populate=True)
        resident, claimed = segment.resident_bytes, segment.claimed_bytes
        segment.ranges = self.plan.layout.ranges
        if resident < claimed:
            raise BudgetError(
                f"rank {rank}: {claimed} bytes were claimed for {path}, but only {resident} are resident: another "
                "process changed that file; remove it with 'ft-plugins end'"
            )
        self._reports.attached(self._token, segment.shape, claimed, resident)
        return segment.shape  # an existing segment keeps its room for small state

    # ---- recovery ----

    def resume(self, mode: str, loaded: int) -> tuple[RecoveryPlan, int, dict[str, Any] | None]:
        """Restore the newest version that all ranks can have, subject to `mode` (`--ftp-resume`) and `loaded`.
        `loaded` is the iteration of the framework's own checkpoint, 0 for none. Every rank has opened the new lineage
        before any captures. Returns the plan, the iteration at which the live state is now, which is the one before the
        plan's if its restore is proven, and the small state, None if nothing was restored. Raises ResumeError, on all
        ranks and before any version becomes void.
        """
        started, segment = time.perf_counter(), self._mapped()
        self._end_capture()  # called again, before any capture: the framework has loaded a checkpoint
        if self._proof is not None and self._proof.iteration:  # this incarnation's own
            segment.header.proving = 0
        if self._deterministic():
            segment.header.varies = False
        recovered = self._recovery.run(segment, mode, loaded)
        plan, proof = recovered.plan, recovered.proof
        self.exchange = self._recovery.protect(recovered, first=not self._lineage)
        self._times.resume(segment.header, plan.version.iteration if plan.version else None)
        faults.reach("restore.end")
        self._lineage, self._base = plan.lineage, plan.version
        if self._look is not None:
            self._look.begun = plan.loaded if plan.version is None else plan.version.iteration
        at = plan.loaded if plan.version is None else (proof.start or plan.version).iteration
        again = plan.version is not None and iteration_bound(mode) is None  # else the user wants another course
        ended = self._collective.gather(b"1" if segment.ledger.condemned else b"")
        condemned = [rank for rank, ending in enumerate(ended) if ending]
        proven = None if proof.start is None or plan.version is None else plan.version.iteration
        self._ledger.open(segment.ledger, at if again else None, condemned, proven)
        if self._audits:
            segment.header.agreed = plan.loaded if plan.version is None else plan.version.iteration
        self._capture = Capture(segment, self.plan.layout, self._host.tensors, self._token, self)
        restored = plan.loaded if plan.version is None else plan.version.iteration
        self._proof = None if plan.tier == "none" else self._proof_of(proof, restored)
        if plan.version is not None and proof.start is None:
            # exchanged first; the SMPs have settled by now which parity has to stay
            self._capture.add_parity(plan.version)
        self._reports.restored(
            plan, seconds=time.perf_counter() - started, verify_seconds=recovered.verify_seconds,
            load_seconds=recovered.load_seconds,
        )  # fmt: skip
        return plan, at, recovered.small

    def _proof_of(self, plan: ProofPlan, base: int) -> RestoreProof:
        items = {piece.item for bucket in self.plan.layout.buckets for piece in bucket.pieces}
        judging = Judging(len(items), self._deterministic(), self._mode, self.nodes.leads)
        header = self._mapped().header
        return RestoreProof(plan, base, judging, header, self._ledger, self._collective, self._events)

    @staticmethod
    def _deterministic() -> bool:
        """Whether kernels give the same each time: those of a CPU do."""
        on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        return not on_device or torch.are_deterministic_algorithms_enabled()

    # ---- events of the capture ----

    def compared(self, found: Mapping[str, tuple[int, float]] | None, error: str = "") -> bool:
        if self._proof is None:
            return False
        self._proof.compared(found, error)
        return found == {} and self._deterministic()  # else another rank's share may not be what it was

    def sealed(self, commit: Commit) -> None:
        if commit.version == self._agreed:
            self._mapped().mark(commit.version, Mark.CERTIFIED)
        digests = self._mapped().digests(commit.slot)[: len(self.plan.layout.buckets)]
        self._ledger.sealed(commit.version.iteration, digest_of(digests.tobytes()))
        self._reports.sealed(commit)

    def updated(self) -> None:
        self._reports.print_alarms()

    def left_out(self, version: Version) -> None:
        self._reports.left_out(version)

    def check_room(self, nbytes: int) -> None:
        """Raises BudgetError if this node has no room for another slot of each of its ranks: most need one together.
        What others of them have claimed already, a moment ago, is no longer needed."""
        claim = f"rank {self._host.rank}: another slot for each of the {len(self._paths)} ranks of this node, with 1/"
        claim += f"{SPARE} of its memory left for everything else,"
        needed = max(nbytes, claims.missing(self._paths, len(self._mapped().claimed) + 1))
        check_room(needed, claim, spare=memory_bytes() // SPARE)

    def slot_claimed(self, refused: BudgetError | None) -> None:
        segment = self._mapped()
        self._reports.slot_claimed(len(segment.claimed), segment.claimed_bytes, refused)

    # ---- hooks ----

    def iteration_end(self, step: int, kept: Mapping[str, torch.Tensor] | None = None, last: bool = False) -> None:
        """The version point: start a capture at the interval, and of the `last` version before an end, for which all
        ranks call. `kept`: copies of the items that changed since it, if it is past. Raises PeerDegraded.

        A rank whose capture failed announces that at its fence, before its update, and goes on when all ranks know it;
        this rank needed the gradients of that rank for its own update. So the last version that all ranks hold is not
        overwritten.
        """
        self.record_completed(step)
        if self._collective.announced(DEGRADED):
            raise PeerDegraded()
        if self._capture is not None and self._proves(step):
            assert self._base is not None
            now = codec.decode(codec.encode(self._host.small_state()))  # as what is read from a slot
            self._ledger.end(step, now, self._restored_small)
            self._capture.compare(self._base, kept)
            return
        if last and not self._times.captures(step):
            self._collective.barrier()  # each rank has passed its fence, as after a whole interval
        if self._capture is not None and (last or self._times.captures(step)):
            state = self._host.small_state()
            self._ledger.end(step, state)
            small = self.plan.encoded(state)
            self._small_bytes = len(small)
            self._capture.start(Version(self._lineage, step), small, kept)
            self._times.captured(step)
        else:
            self._ledger.end(step, None)
        if self._capture is not None and self._look is not None:
            self._look.begin(step)

    def recomputed(self, step: int) -> None:
        """The version point `step`, before anything is read there: if it is proven, compare what the restored version
        has of values that are not captured."""
        slot = self._mapped().sealed_in(self._base) if self._base is not None and self._proves(step) else None
        if isinstance(self._host, CarryingHost) and self._proof is not None and slot is not None:
            self._restored_small = codec.decode(manifest.split(self._mapped().small(slot))[1])
            self._proof.uncaptured = self._host.recomputed(self._restored_small)

    def _proves(self, step: int) -> bool:
        """Whether version `step` is the restored one, which is compared in place of being captured."""
        return self._proof is not None and self._proof.iteration == step != 0

    def defer(self, step: int) -> None:
        """The version point of one that is captured later: `iteration_end` with what was `kept`."""
        self.record_completed(step)
        if self._capture is not None:
            self._capture.hold()

    def hold(self) -> bool:
        """Between two iterations, wait while this node is to leave the job, if the version behind is the one that is
        exchanged next: no rank of the job completes another iteration then, so none is lost. Bounded. Returns whether
        the whole job is to end after the next iteration."""
        header = self._mapped().header
        awaited = self._capture is not None and header.is_awaited(Version(self._lineage, header.completed))
        if header.held not in (0, END) and awaited and self._times.captures(header.completed):
            until = time.monotonic() + HOLD_SECONDS
            header.held_at = header.completed
            while header.held not in (0, END) and time.monotonic() < until:
                time.sleep(_HELD_SECONDS)
            header.held_at = 0
        return header.held == END

    def record_ending(self, ending: int) -> None:
        """Record for ft-run whether training is at its own end: see `Header.ending`."""
        self._mapped().header.ending = ending

    def before_update(self, step: int, following: int, rate: float | None = None) -> float:
        """The fence: the running capture is sealed when this returns. `following`: the version after this update, 0 if
        there is none, or if that is not known yet. `rate`: its learning rate, None if that is not known. Returns the
        seconds waited. Raises LoopError."""
        waited = self._capture.wait() if self._capture else 0.0
        if self._capture is not None:
            waited += self._times.fence(step, waited)
            if self._look is not None:
                self._look.fence(DEGRADED)
        self._reports.record_wait(step, waited)
        proof = self._proof
        self._ledger.fence(rate, lambda: proof.fence(step) if proof is not None else None)
        if self._capture is not None:
            captured = self._times.captures(following) and not self._proves(following)
            self._capture.run_after_update(Version(self._lineage, following) if captured else None)
        return waited

    def wait_for_capture(self) -> None:
        """An additional fence, before tensors are changed at another time: seal the running capture."""
        if self._capture is not None:
            self._capture.wait()

    def record_completed(self, step: int) -> None:
        """Record that iteration `step` is over, captured or not; a recovery counts the lost iterations from it."""
        self._mapped().header.completed = step

    def mark(self, step: int, mark: Mark) -> None:
        """Record the verdict on the replicas of version `step`, if it was captured. Its capture is sealed.

        The restored version keeps its mark: its replicas are identical because they were restored from the same parts.
        """
        if self._audits and mark is Mark.CERTIFIED:
            restored = 0 if self._base is None else self._base.iteration  # its proof passes the one before
            self._mapped().header.agreed = max(step, restored)
        if self._base is None or step > self._base.iteration:
            self._mapped().mark(Version(self._lineage, step), mark)

    def agreed(self, step: int) -> None:
        """The replicas of version `step` are equal: nodes may commit it before the fence, where `mark` says so again.
        Called on any thread, when the version may be sealed or not: `sealed` looks too."""
        self._agreed = version = Version(self._lineage, step)
        if self._segment is not None:
            self._segment.mark(version, Mark.CERTIFIED)

    def void(self, since: int) -> None:
        """Discard the versions captured after iteration `since`, which hold a wrong replica. No capture is running.
        A pinned version, which is being sent or written, is marked instead: it is never restored, and an incomplete
        checkpoint of it is withdrawn. A complete checkpoint stays; its manifest says that it is not certified, and
        certified ones are preferred.
        """
        segment = self._mapped()
        if self._audits:  # what the framework has saved since is not used either
            segment.header.doubt(since + 1, max(segment.header.completed, since + 1))
        discarded, tainted = list[int](), list[int]()
        for slot, version in captured_after(segment.slots(), self._lineage, since):
            if slot.pins:
                segment.mark(version, Mark.MISMATCHED)
                tainted.append(version.iteration)
            else:
                segment.dirty(slot.index, None, self._token)
                discarded.append(version.iteration)
        self._reports.voided(since, discarded, tainted)

    def close(self, *, in_order: bool) -> None:
        """Seal the running capture and unmap the segment, which the SMP keeps. If protection was lost (not `in_order`)
        it stays mapped, so that `record_completed` still works."""
        try:
            self.wait_for_capture()
            if in_order:
                self._mapped().header.ended = self._mapped().header.completed
            if self._proof is not None and in_order:
                self._proof.close(self._mapped().header.completed)
        finally:
            self._end_capture()
            self._ledger.close()
            if self._segment is not None and self._audits and not in_order:
                self._segment.header.agreed = UNJUDGED
            if self._segment is not None and in_order:
                self._segment.close()
                self._segment = None
            if self.plan.storage and not in_order:  # the SMP, if it is alive, writes the newest version
                with contextlib.suppress(FtError), Client(self._run_dir, timeout=_ASK_SECONDS) as client:
                    client.checkpoint("protection lost", 0.0)
        self._reports.report_waits()
        self._reports.print_alarms()
        if in_order:
            faults.reach("shutdown.before")
            with Client(self._run_dir) as client:
                client.shutdown(self._host.rank, self._token)
            faults.reach("shutdown.after")

    # ---- for BAFT ----

    @property
    def gate(self) -> Gate:
        """The gate by which this rank lets its SMP send its copy."""
        return Gate(self._mapped().gate)

    @property
    def sender_facts(self) -> SenderFacts:
        """When a version is ready, and what this rank sends of it in addition to the slot's data: small state and
        digest table, to each node that keeps them, and parity if there are copies too."""
        layout, exchange = self.plan.layout, self.exchange
        small = self._small_bytes + 8 * (len(layout.ranges) + layout.source_digest_count)
        more = exchange.parity_bytes + exchange.holders * small
        return SenderFacts(self._reports.capture_seconds, more, layers=layer_bytes(layout))

    def _mapped(self) -> Segment:
        if self._segment is None:
            raise FtError(f"rank {self._host.rank}: REFT was used before `claim` or after `close`")
        return self._segment

    def _end_capture(self) -> None:
        if self._capture is not None:
            self._capture.close()
            self._capture = None
