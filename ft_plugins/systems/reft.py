"""REFT: each rank's share of the training state, after every interval, in shared memory that outlives training.

Composes loop 1 inside a node: inventory -> layout -> segment (claimed from the SMP) -> capture; and back through
recovery. Invariant: training waits here only at the fence, `before_update`; the step path sends no message.

In: host, collective, the SMP's run directory. Out: versions in the segment; `resume` hands one back.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
import xxhash
from pydantic import TypeAdapter

from .. import faults
from ..bubbles.gate import Gate
from ..config import Config, ReftConfig
from ..errors import (
    BudgetError,
    ConfigError,
    CorruptHeaderError,
    CorruptSlotError,
    FtError,
    InventoryError,
    ProtectionError,
    ResumeError,
    printable,
)
from ..events import Events, EventType, catalogue, say
from ..intake import Text, read_json
from ..model.host import Host
from ..recovery.collective import Collective
from ..recovery.nodes import JobNodes
from ..recovery.plan import RecoveryPlan, choose_source
from ..recovery.run import agree_on_version, load_tensors
from ..recovery.storage import StorageTier
from ..redundancy.neighbour import BothPlan, CopyPlan, NeighbourPlan
from ..smp.client import Client
from ..smp.protocol import ALARM
from ..snapshot import codec, index, manifest
from ..snapshot.capture import Capture, Commit
from ..snapshot.layout import Layout, plan_layout
from ..snapshot.manifest import Manifest
from ..snapshot.paths import path_of
from ..snapshot.retention import Storage
from ..snapshot.segment import Segment
from ..snapshot.shape import Shape
from ..snapshot.slots import Mark, Pin, SlotState, Version, slots_for
from .reft_nodes import ReftNodes, audits_every

_ALARMS = TypeAdapter(dict[Text, Text])
DEGRADED = "degraded"  # the word that a rank leaves for the others when it can capture no more
_ASK_SECONDS = 1.0  # for an SMP to answer a rank that has lost its protection
_CAPTURES = 9  # of late, by which it is judged how long one takes
_SMALL_FLOOR = 64 << 10  # bytes claimed for small state at least; twice its first size otherwise


class PeerDegraded(ProtectionError):
    """Another rank can capture no more, so this one stops too."""


class Reft:
    """The system as one rank runs it. Between `claim` and `close` it holds a mapped segment and a capture thread."""

    def __init__(
        self,
        host: Host,
        config: Config,
        collective: Collective,
        nodes: tuple[str, ...],
        run_dir: Path,
        token: int,
        events: Events,
        towards: str = "localhost",
    ) -> None:
        """`nodes[rank]` is the node of each rank; `towards` a host of the job. Raises ConfigError, TopologyError."""
        if config.capture is None:
            raise ConfigError("REFT is not on")
        self._host = host
        self._job = config
        self._config: ReftConfig = config.capture
        self.nodes = ReftNodes(host, config, collective, nodes, run_dir, token, events, towards)
        self._collective = collective
        self._run_dir = run_dir
        self._token = token
        self._events = events
        layout = plan_layout(host.inventory(), nodes, self._config.bucket_mib << 20)
        self.layout: Layout = self.nodes.with_parity(layout)
        self.copies: NeighbourPlan | None = None  # whose copy lives where, of this incarnation
        self.links: dict[int, float] = {}  # bytes per second by position, where that was to be measured
        self._segment: Segment | None = None
        self._capture: Capture | None = None
        self._lineage = 0
        self._base: Version | None = None  # what was restored
        self._path = path_of(run_dir.parent.name, run_dir.name, host.rank)  # a run directory is job / node
        self._peer_degraded = False
        self._alarms: dict[str, str] = {}  # printed last, by what each is about
        self._waits: list[tuple[int, float]] = []  # fences not yet reported: that is left to the capture thread
        self._captures: deque[float] = deque(maxlen=_CAPTURES)  # seconds until they were sealed
        self._small_bytes = 0  # of the newest version
        self._holders = 1  # nodes that keep it
        self._sent_beside = 0  # bytes for parity, where there are copies too

    @cached_property
    def shape(self) -> Shape:
        """What the segment has to hold."""
        small = max(_SMALL_FLOOR, 2 * len(self._small()))
        kinds = [(item.name, item.dtype, item.shape) for item in self._host.inventory().items]
        layout = xxhash.xxh3_64_intdigest(repr((self.layout.buckets, self._config.bucket_mib, kinds)).encode())
        pins = [*([Pin.NODE, Pin.SOURCE] if self.nodes.losses else []), *([Pin.STORAGE] if self._storage else [])]
        pins += [Pin.CERTIFIED] if self.certifies else []
        nbytes, parity = self.layout.nbytes, self.layout.parity_nbytes
        ranges = len(self.layout.ranges)
        return Shape(nbytes + parity, small, ranges, layout, slots_for(*pins), parity, self.layout.checks)

    @property
    def certifies(self) -> int:
        """Iterations between two versions whose replicas are compared, the newest of which is kept; 0 for none."""
        audits = audits_every(self._job)
        return math.lcm(self._config.interval, audits) if audits else 0

    @cached_property
    def _storage(self) -> Storage | None:
        """What the SMP is told of storage; None where there is none."""
        config = self._config
        if config.checkpoint_dir is None:
            return None
        folder = str(Path(config.checkpoint_dir).absolute())
        world_size = self._collective.world_size
        return Storage(
            folder, config.checkpoint_interval, config.interval, config.checkpoint_keep, world_size, self.certifies
        )

    @property
    def gate(self) -> Gate:
        """By which this rank's trainer says when its copy may go."""
        return Gate(self._mapped().gate)

    @property
    def capture_seconds(self) -> float:
        """From the end of an iteration until what is captured of it is sealed; 0 before any was."""
        return statistics.median(tuple(self._captures) or (0.0,))  # the capture thread adds to them

    @property
    def beside_bytes(self) -> int:
        """What goes to other nodes with each version beside its slot's data: small state and digest table, to each node
        that keeps them; and what parity needs, where there is both."""
        return self._sent_beside + self._holders * (
            self._small_bytes + 8 * (len(self.layout.ranges) + self.layout.checks)
        )

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

    def look_back(self, mode: str) -> None:
        """Find state of this job at another data-parallel size: `ReftNodes.look_back`."""
        self.nodes.look_back(mode, self.shape, self.layout, self._report_corrupt)

    def claim(self, fresh: bool) -> Shape:
        """Have the SMP create or find this rank's segment, and map every page of it.

        Raises BudgetError, ResumeError, SegmentError, FencedError, ProtectionError when no SMP answers.
        """
        shape = self.shape
        fingerprint = dict(self._host.fingerprint())
        self._leave_index(shape)
        faults.reach("attach.before")
        with Client(self._run_dir) as client:
            path = client.attach(
                self._host.rank, self._token, shape, fingerprint, fresh=fresh,
                world_size=self._collective.world_size, storage=self._storage,
            )  # fmt: skip
        faults.reach("attach.after")
        self._segment = Segment(path, populate=True)
        self._segment.ranges = self.layout.ranges
        shape = self._segment.shape  # the room for small state is that of the first start
        if self._segment.resident_bytes < shape.total:
            raise BudgetError(
                f"rank {self._host.rank}: {shape.total} bytes were claimed for {path}, but the kernel has given "
                f"{self._segment.resident_bytes}; something has taken pages of it, 'ft-plugins end' removes it"
            )
        self._events.emit(
            catalogue.RANK_ATTACHED,
            token=self._token,
            share_bytes=shape.slot_room,
            budget_bytes=shape.total,
            resident_bytes=self._segment.resident_bytes,
        )
        return shape

    def _leave_index(self, shape: Shape) -> None:
        """For checkpoints of this start: what lies where, and what the framework calls it."""
        if self._storage is None:
            return
        names = self._host.names()
        if names and names.get("problem"):
            self._events.emit(catalogue.EXPORT_DISABLED, reason=names["problem"])
        index.keep(self._run_dir, index.describe(self._host.inventory(), self.layout, shape.layout, names))

    def resume(self, mode: str, loaded: int) -> tuple[RecoveryPlan, dict[str, Any] | None]:
        """Restore the newest version that all ranks hold, as `mode` (`--ftp-resume`) and `loaded` have it.

        `loaded` is the iteration of the framework's own checkpoint, 0 for none. Opens a lineage on every rank before
        any captures. Returns the plan and the small state, None where nothing was restored. Raises ResumeError, on all
        ranks alike and before anything is void.
        """
        segment = self._mapped()
        started = time.perf_counter()
        if self._capture is not None:  # asked again before anything was captured: a framework's checkpoint was loaded
            self._capture.close()
            self._capture = None
        faults.reach("restore.begin")
        self.nodes.take_over(segment, self._manifest)
        nodes = self.nodes.of_job(segment.shape, self.layout)
        found = agree_on_version(segment, self._collective, self._report_corrupt, nodes)
        found = replace(found, lineage=max(found.lineage, self.nodes.lineage + 1))
        try:
            plan = self._choose(found, mode, loaded)
        except ResumeError as error:
            error.echo = self._host.rank != 0  # all ranks know the same facts: one of them says so
            raise
        verified = time.perf_counter()
        restored = load_tensors(plan, segment, self.layout, self._host.tensors(), self._collective)
        if plan.version is not None and segment.lacks_parity(plan.version):  # from storage, or of another size
            with contextlib.closing(Capture(segment, self.layout, self._host.tensors, self._token)) as once:
                once.add_parity(plan.version)
        small: dict[str, Any] | None = None
        if restored.small is not None:
            small = codec.decode(manifest.split(restored.small)[1])
            self._host.restore(small)
        if plan.version is not None and plan.mark:  # one rank may have heard it alone, or the slot was made anew
            segment.mark(plan.version, plan.mark)
        loaded_at = time.perf_counter()
        self._collective.barrier()  # every rank has restored: only now may anything be void
        with Client(self._run_dir) as client:
            client.restore(self._host.rank, self._token, plan.lineage, plan.version)
        faults.reach("restore.opened")
        self._collective.barrier()  # every SMP has opened the lineage before anyone captures into it
        if isinstance(nodes, JobNodes):
            self._report_protection(nodes, nodes.protect(plan.lineage, plan.version))
            self.links = nodes.links
            self.copies = nodes.exchange.neighbours if isinstance(nodes.exchange, CopyPlan) else None
            if isinstance(nodes.exchange, BothPlan):
                self._holders = len(nodes.exchange.copy_holders(self._host.rank))
                self._sent_beside = nodes.exchange.sent_beside(self._host.rank)
        faults.reach("restore.end")
        self._lineage, self._base = plan.lineage, plan.version
        self._capture = Capture(
            segment, self.layout, self._host.tensors, self._token, self._committed, self._look_for_peers
        )
        ended = time.perf_counter()
        self._report_restore(
            plan, seconds=ended - started, verify_seconds=verified - started, load_seconds=loaded_at - verified
        )
        return plan, small

    def _report_protection(self, nodes: JobNodes, claimed: list[tuple[str, int]]) -> None:
        if self._host.rank != 0 or self._lineage:
            return
        lines = [nodes.exchange.table() if nodes.exchange else ""]
        lines += [f"  {name}: {nbytes} bytes claimed for two versions of parity and copies" for name, nbytes in claimed]
        for (name, _), rate in zip(claimed, nodes.links.values(), strict=False):
            lines.append(f"  {name}: its link carries {rate * 8e-6:.0f} megabits per second, as measured")
        say("\n".join(lines), who="")

    def _choose(self, found: RecoveryPlan, mode: str, loaded: int) -> RecoveryPlan:
        """What is restored; a checkpoint in storage, if it is that, lies in a slot then. Raises ResumeError."""
        if self._storage is None:
            return choose_source(found, mode, loaded)
        job = self._run_dir.parent.name
        tier = StorageTier(Path(self._storage.folder), job, self._collective, self._report_storage)
        return tier.recover(found, mode, loaded, self._mapped(), self._token)

    def _report_storage(self, kind: EventType, reason: str) -> None:
        self._events.emit(kind, reason=reason)

    def _report_restore(self, plan: RecoveryPlan, **seconds: float) -> None:
        """`seconds`: of all, until every slot was whole and verified, and from then until the tensors were loaded."""
        if plan.tier == "none":
            kind = catalogue.TRAINING_STARTED if plan.fresh else catalogue.STATE_LOST
            self._events.emit(kind, reason=plan.reason, completed=plan.completed, lost=plan.lost)
            return
        self._events.emit(
            catalogue.STATE_RESTORED,
            lineage=plan.version.lineage if plan.version else None,
            iteration=plan.version.iteration if plan.version else plan.loaded,
            tier=plan.tier,
            reason=plan.reason,
            completed=plan.completed,
            lost=plan.lost,
            **({"mark": plan.mark.word} if plan.mark else {}),
            **seconds,
        )

    def rest(self) -> None:
        """A fence of its own, for whoever changes tensors at another time: the running capture is sealed."""
        if self._capture is not None:
            self._capture.wait()

    def void(self, since: int) -> None:
        """What was captured after iteration `since` holds a replica that was found wrong, and is not to be restored:
        without this rank's share such a version is complete no more. No capture is running.

        One that is being sent or written already is kept, and marked: no recovery takes it, and a checkpoint that is
        not complete yet is withdrawn. One that is complete by now, written where a job ended before the verdict, stays
        in storage: its manifest says that it is not certified, and those that are go before it.
        """
        segment = self._mapped()
        gone: list[int] = []
        kept: list[int] = []
        for slot in segment.slots():
            version = slot.version if slot.state is SlotState.CLEAN else None
            if version is None or version.lineage != self._lineage or version.iteration <= since:
                continue
            (kept if slot.pins else gone).append(version.iteration)
            if slot.pins:
                segment.mark(version, Mark.DIFFERING)
            else:
                segment.dirty(slot.index, None, self._token)
        self._events.emit(catalogue.VERSION_VOIDED, since=since, iterations=sorted(gone))
        if kept:
            reason = f"snapshots of iterations {sorted(kept)} hold a wrong replica, but are being sent or written"
            self._events.emit(catalogue.VERSION_TAINTED, iterations=sorted(kept), reason=reason)

    def mark(self, step: int, mark: Mark) -> None:
        """What is known of the replicas of version `step`, which is sealed, if it was captured. Of what was restored
        nothing new is learnt: its replicas are alike because they were put together from the same parts."""
        if self._base is None or step > self._base.iteration:
            self._mapped().mark(Version(self._lineage, step), mark)

    def before_update(self, step: int) -> float:
        """The fence: the running capture is sealed when this returns. Returns the seconds waited."""
        waited = self._capture.wait() if self._capture else 0.0
        self._waits.append((step, waited))
        if self._capture is not None:
            self._capture.ask_behind()
        return waited

    def iteration_end(self, step: int) -> None:
        """The version point: capture, when it is this version's turn."""
        self.reached(step)
        if self._peer_degraded:
            raise PeerDegraded("another rank lost its protection: what all ranks still hold is kept, nothing is added")
        if self._capture is not None and step % self._config.interval == 0:
            small = self._small()
            self._small_bytes = len(small)
            self._capture.start(Version(self._lineage, step), small)

    def reached(self, step: int) -> None:
        """Iteration `step` is over, whether it is captured or not: a recovery tells from it what is lost."""
        self._mapped().completed = step

    def close(self, *, in_order: bool) -> None:
        """Let the running capture finish and let go of the segment; it stays with the SMP. Where protection was lost
        (not `in_order`) it stays mapped too, so that `reached` goes on."""
        try:
            if self._capture is not None:
                self._capture.wait()
        finally:
            if self._capture is not None:
                self._capture.close()
                self._capture = None
            if self._segment is not None and in_order:
                self._segment.close()
                self._segment = None
            if self._storage and not in_order:  # protection was lost: what there is, on disk, if the SMP still lives
                with contextlib.suppress(FtError), Client(self._run_dir, timeout=_ASK_SECONDS) as client:
                    client.checkpoint("protection lost", 0.0)
        self._report_waits()
        self._print_alarm()
        if in_order:
            faults.reach("shutdown.before")
            with Client(self._run_dir) as client:
                client.shutdown(self._host.rank, self._token)
            faults.reach("shutdown.after")

    def _small(self) -> bytes:
        return manifest.join(self._encoded_manifest, codec.encode(self._host.small_state()))

    @cached_property
    def _manifest(self) -> Manifest:
        """What lies where in this rank's slots."""
        topology = self._host.topology()
        at = topology.coords(self._host.rank)
        return manifest.manifest_of(self.layout, self._collective.world_size, (at.pp, at.tp))

    @cached_property
    def _encoded_manifest(self) -> bytes:
        return manifest.write(self._manifest)

    def _mapped(self) -> Segment:
        if self._segment is None:
            raise FtError(
                f"rank {self._host.rank}: REFT is used before it has claimed its segment or after it was closed"
            )
        return self._segment

    def _report_corrupt(self, error: FtError) -> None:
        match error:
            case CorruptSlotError():
                kind = catalogue.SLOT_CORRUPTED
            case CorruptHeaderError():
                kind = catalogue.SEGMENT_CORRUPTED
            case _:
                kind = catalogue.SLOT_LOST
        self._events.emit(kind, reason=str(error))

    def _report_waits(self) -> None:
        waits, self._waits = self._waits, []
        for step, seconds in waits:
            self._events.emit(catalogue.FENCE_WAITED, iteration=step, seconds=seconds)

    def _look_for_peers(self) -> None:
        """Whether another rank has stopped capturing: asked behind the update, answered before the next capture starts.

        A rank whose capture has failed says so at its fence, before the update that this one, too, is behind only after
        it had that rank's gradients: so the last version that all ranks hold is not overwritten.
        """
        self._peer_degraded = self._collective.told(DEGRADED)
        self._print_alarm()

    def _print_alarm(self) -> None:
        """What the SMP wants a person to see, once on each node."""
        if not self.nodes.leads:
            return
        with contextlib.suppress(OSError, ValueError):
            alarms = read_json(self._run_dir / ALARM, _ALARMS)
            for name, words in alarms.items():
                if words != self._alarms.get(name):
                    say(printable(words), alarm=True)
            self._alarms = alarms

    def _committed(self, commit: Commit) -> None:
        self._report_waits()
        self._captures.append(commit.seconds)
        self._events.emit(
            catalogue.SNAPSHOT_SEALED, lineage=commit.version.lineage, iteration=commit.version.iteration,
            seconds=commit.seconds, bytes=commit.nbytes, slot=commit.slot,
        )  # fmt: skip


def budget_table(shapes: Mapping[int, Shape], node: str, certifies: int = 0) -> str:
    """The memory claimed on a node, printed before step 0: slots x bytes, by rank and together, with what that is for.

    A slot holds the captured share, its digests and small state, in whole pages; the kernel's figure was compared.
    `certifies` are the iterations between two versions whose replicas are compared, 0 for none.
    """
    total = sum(shape.total for shape in shapes.values())
    share = sum(shape.data_nbytes for shape in shapes.values())
    parity = sum(shape.parity_nbytes for shape in shapes.values())
    what = f"{share} bytes captured" + (f" and {parity} of parity made of replicas" if parity else "")
    lines = [f"host memory for protection on node {node}: {total} bytes for {what}, all of it resident"]
    lines += [f"  rank {rank}: {shape.slots} slots x {shape.slot_room} bytes" for rank, shape in sorted(shapes.items())]
    if certifies:
        which = "each" if certifies == 1 else f"that of every {certifies} iterations"
        lines.append(f"  one slot of each keeps the newest snapshot whose replicas agreed; {which} is compared")
    return "\n".join(lines)
