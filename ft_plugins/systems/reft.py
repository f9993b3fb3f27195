"""REFT: each rank's share of the training state, after every interval, in shared memory that outlives training.

Composes loop 1 inside a node: inventory -> layout -> segment (claimed from the SMP) -> capture; and back through
recovery. Invariant: training waits here only at the fence, `before_update`; the step path sends no message.

In: host, collective, the SMP's run directory. Out: versions in the segment; `resume` hands one back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from .. import faults
from ..config import ReftConfig
from ..errors import BudgetError, CorruptSlotError, FtError, InventoryError, ProtectionError, ResumeError
from ..events import Events
from ..model.host import Host
from ..recovery.collective import Collective
from ..recovery.plan import RecoveryPlan, choose_source
from ..recovery.run import agree_on_version, load_tensors
from ..smp.client import Client
from ..snapshot import codec
from ..snapshot.capture import Capture, Commit
from ..snapshot.layout import Layout, plan_layout
from ..snapshot.segment import Segment, Shape, path_of
from ..snapshot.slots import Version

DEGRADED = "degraded"  # the word that a rank leaves for the others when it can capture no more
_SMALL_FLOOR = 64 << 10  # bytes claimed for small state at least; twice its first size otherwise


class PeerDegraded(ProtectionError):
    """Another rank can capture no more, so this one stops too."""


class Reft:
    """The system as one rank runs it. Between `claim` and `close` it holds a mapped segment and a capture thread."""

    def __init__(
        self,
        host: Host,
        config: ReftConfig,
        collective: Collective,
        nodes: tuple[str, ...],
        run_dir: Path,
        token: int,
        events: Events,
    ) -> None:
        self._host = host
        self._config = config
        self._collective = collective
        self._run_dir = run_dir
        self._token = token
        self._events = events
        self.layout: Layout = plan_layout(host.inventory(), nodes, config.bucket_mib << 20)
        self._segment: Segment | None = None
        self._capture: Capture | None = None
        self._lineage = 0
        self._path = path_of(run_dir.parent.name, run_dir.name, host.rank)  # a run directory is job / node
        self._peer_degraded = False
        self._waits: list[tuple[int, float]] = []  # fences not yet reported: that is left to the capture thread

    @cached_property
    def shape(self) -> Shape:
        """What the segment has to hold."""
        small = max(_SMALL_FLOOR, 2 * len(self._small()))
        layout = xxhash.xxh3_64_intdigest(repr((self.layout.buckets, self._config.bucket_mib)).encode())
        return Shape(self.layout.nbytes, small, len(self.layout.buckets), layout)

    @property
    def claimed(self) -> bool:
        """Whether this rank's segment is there already, of this or an earlier incarnation."""
        return self._path.exists()

    def check_replicas(self) -> None:
        """Compare the inventories of each replica set's ranks. Every rank of the job calls. Raises InventoryError."""
        sets = self._host.inventory().replica_sets()
        digests = {
            replicas: xxhash.xxh3_64_intdigest(repr([(i.name, i.dtype, i.shape, i.background) for i in items]).encode())
            for replicas, items in sets.items()
            if len(replicas) > 1
        }
        gathered = self._collective.gather(msgpack.packb([[list(key), value] for key, value in digests.items()]))
        told = [{tuple(key): value for key, value in msgpack.unpackb(part)} for part in gathered]
        for replicas, digest in digests.items():
            for rank in replicas:
                if told[rank].get(replicas) != digest:
                    raise InventoryError(
                        f"rank {self._host.rank}: rank {rank} should hold the same {len(sets[replicas])} items as "
                        f"replicas {replicas} do, but names others; the replicas of a parameter must be built alike"
                    )

    def claim(self, fresh: bool) -> Shape:
        """Have the SMP create or find this rank's segment, and map every page of it.

        Raises BudgetError, ResumeError, SegmentError, FencedError, ProtectionError when no SMP answers.
        """
        shape = self.shape
        fingerprint = dict(self._host.fingerprint())
        faults.reach("attach.before")
        with Client(self._run_dir) as client:
            path = client.attach(self._host.rank, self._token, shape, fingerprint, fresh=fresh)
        faults.reach("attach.after")
        self._segment = Segment(path, populate=True)
        self._segment.ranges = [(bucket.offset, bucket.nbytes) for bucket in self.layout.buckets]
        shape = self._segment.shape  # the room for small state is that of the first start
        if self._segment.resident_bytes < shape.total:
            raise BudgetError(
                f"rank {self._host.rank}: {shape.total} bytes were claimed for {path}, but the kernel has given "
                f"{self._segment.resident_bytes}; something has taken pages of it, 'ft-plugins end' removes it"
            )
        self._events.emit(
            "rank.attach",
            token=self._token,
            share_bytes=shape.slot_room,
            budget_bytes=shape.total,
            resident_bytes=self._segment.resident_bytes,
        )
        return shape

    def resume(self, mode: str, loaded: int) -> tuple[RecoveryPlan, dict[str, Any] | None]:
        """Restore the newest version that all ranks hold, as `mode` (`--ftp-resume`) and `loaded` have it.

        `loaded` is the iteration of the framework's own checkpoint, 0 for none. Opens a lineage on every rank before
        any captures. Returns the plan and the small state, None where nothing was restored. Raises ResumeError, on all
        ranks alike and before anything is void.
        """
        segment = self._mapped()
        started = time.perf_counter()
        faults.reach("restore.begin")
        found = agree_on_version(segment, self._collective, self._report_corrupt)
        try:
            plan = choose_source(found, mode, loaded)
        except ResumeError as error:
            error.echo = self._host.rank != 0  # all ranks know the same facts: one of them says so
            raise
        verified = time.perf_counter()
        restored = load_tensors(plan, segment, self.layout, self._host.tensors(), self._collective)
        small: dict[str, Any] | None = None
        if restored.small is not None:
            small = codec.decode(restored.small)
            self._host.restore(small)
        self._collective.barrier()  # every rank has restored: only now may anything be void
        with Client(self._run_dir) as client:
            client.restore(self._host.rank, self._token, plan.lineage, plan.version)
        faults.reach("restore.opened")
        self._collective.barrier()  # every SMP has opened the lineage before anyone captures into it
        faults.reach("restore.end")
        self._lineage = plan.lineage
        self._capture = Capture(segment, self.layout, self._host.tensors, self._token, self._committed)
        self._report_restore(plan, time.perf_counter() - started, verified - started)
        return plan, small

    def _report_restore(self, plan: RecoveryPlan, seconds: float, verify_seconds: float) -> None:
        if plan.tier == "none":
            self._events.emit("restore.scratch", reason=plan.reason, completed=plan.completed, lost=plan.lost)
            return
        self._events.emit(
            "restore.done",
            lineage=plan.version.lineage if plan.version else None,
            iteration=plan.version.iteration if plan.version else plan.loaded,
            tier=plan.tier,
            completed=plan.completed,
            lost=plan.lost,
            seconds=seconds,
            verify_seconds=verify_seconds,
        )

    def before_update(self, step: int) -> float:
        """The fence: the running capture is sealed when this returns. Returns the seconds waited."""
        waited = self._capture.wait() if self._capture else 0.0
        self._waits.append((step, waited))
        return waited

    def iteration_end(self, step: int) -> None:
        """The version point: capture, when it is this version's turn."""
        self._mapped().completed = step
        if self._peer_degraded:
            raise PeerDegraded("another rank lost its protection: what all ranks still hold is kept, nothing is added")
        if self._capture is not None and step % self._config.interval == 0:
            self._capture.start(Version(self._lineage, step), self._small())

    def close(self, *, in_order: bool) -> None:
        """Let the running capture finish and let go of the segment; it stays with the SMP."""
        try:
            if self._capture is not None:
                self._capture.wait()
        finally:
            if self._capture is not None:
                self._capture.close()
                self._capture = None
            if self._segment is not None:
                self._segment.close()
                self._segment = None
        self._report_waits()
        if in_order:
            faults.reach("shutdown.before")
            with Client(self._run_dir) as client:
                client.shutdown(self._host.rank, self._token)
            faults.reach("shutdown.after")

    def _small(self) -> bytes:
        return codec.encode(self._host.small_state())

    def _mapped(self) -> Segment:
        if self._segment is None:
            raise FtError(
                f"rank {self._host.rank}: REFT is used before it has claimed its segment or after it was closed"
            )
        return self._segment

    def _report_corrupt(self, error: CorruptSlotError) -> None:
        self._events.emit("slot.corrupt", reason=str(error))

    def _report_waits(self) -> None:
        waits, self._waits = self._waits, []
        for step, seconds in waits:
            self._events.emit("fence.wait", iteration=step, seconds=seconds)

    def _committed(self, commit: Commit) -> None:
        self._report_waits()
        # asked here, behind the step: at most one version is captured after a peer has stopped, so the last one that
        # all ranks hold is not overwritten
        self._peer_degraded = self._collective.told(DEGRADED)
        self._events.emit(
            "capture.commit", lineage=commit.version.lineage, iteration=commit.version.iteration,
            seconds=commit.seconds, bytes=commit.nbytes, slot=commit.slot,
        )  # fmt: skip


def budget_table(shapes: Mapping[int, Shape], node: str) -> str:
    """The memory claimed on a node, printed before step 0: slots x bytes, by rank and together, with what that is for.

    A slot holds the captured share, its digests and small state, in whole pages; the kernel's figure was compared.
    """
    total = sum(shape.total for shape in shapes.values())
    share = sum(shape.nbytes for shape in shapes.values())
    lines = [f"host memory for protection on node {node}: {total} bytes for {share} bytes captured, all of it resident"]
    lines += [f"  rank {rank}: {shape.slots} slots x {shape.slot_room} bytes" for rank, shape in sorted(shapes.items())]
    return "\n".join(lines)
