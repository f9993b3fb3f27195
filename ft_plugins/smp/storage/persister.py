"""The SMP's storage thread: writes this node's ranks of the versions that are due, and completes checkpoints.

Invariant: training never waits for it. A storage error ends one checkpoint; the next one is attempted. A version is
pinned in every rank before its first byte is written. The thread has mappings of its own, so requests continue
meanwhile; another one keeps the lease on the folder, however long a write takes. `checkpoint_schedule` chooses the
version, `checkpoints` writes and completes it.

In: where trainers want checkpoints (recorded in the run directory for a successor), requests. Out: checkpoints;
`checkpoint.started`, `checkpoint.completed`, `checkpoint.failed` and `checkpoint.pruned` events.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import read_json, within
from ...events import catalogue
from ...snapshot.capture.retention import Storage
from ...snapshot.checkpoint.checkpoint import Origin
from ...snapshot.schedule import newest
from ...snapshot.segment.segment import Segment, newest_run
from ...snapshot.segment.slots import Pin, Version
from ..serve.node_context import NodeContext
from . import folder_lease
from .checkpoint_schedule import (
    FAR_SECONDS,
    NEAR_SECONDS,
    CheckpointCall,
    CheckpointSchedule,
    NodeView,
    taking_part,
    view,
)
from .checkpoints import Checkpoints, WriterStopped, describe, pin_all
from .folder_lease import FolderLease

PATIENCE_SECONDS = 300.0  # for other nodes' files; a network file system may show them a minute late
_STOP_SECONDS = 5.0  # for the piece that is being written
_AFTER_ERROR_SECONDS = 1.0
_STORAGE = TypeAdapter(Storage)


class Persister:
    """The storage tier of one node. Its thread runs once the job has a folder for checkpoints."""

    def __init__(
        self, smp: NodeContext, patience: float = PATIENCE_SECONDS, memory: str = "storage.json",
        lease: FolderLease | None = None,
    ) -> None:  # fmt: skip
        """`memory` is the file in the run directory that a successor reads; `lease`: this node's."""
        self.lease = lease or FolderLease(smp)
        self._memory = smp.run_dir / memory
        self._job, self._events = smp.job, smp.events
        self._lock = threading.Lock()
        self.storage: Storage | None = None  # where checkpoints go; None: nowhere
        self._segments: dict[int, Segment] = {}
        self._inodes: dict[int, int] = {}
        self._calls: list[CheckpointCall] = []
        self._schedule = CheckpointSchedule(smp.node)
        self._stopping = threading.Event()
        self._checkpoints = Checkpoints(smp, patience, self._stopping)
        self._wake = threading.Event()
        self._threads: list[threading.Thread] = []

    # ---- on the threads of requests ----

    def adopt(self, paths: Mapping[int, Path]) -> None:
        """Continue for an SMP that died: use its storage, release its pins."""
        self._checkpoints.adopted = len(paths)
        for rank, path in paths.items():
            segment = self._map(rank, path)
            for slot in segment.slots():
                segment.unpin(slot.index, Pin.STORAGE)
        with suppress(OSError, ValueError):  # otherwise the next attach names the storage
            self.storage = read_json(self._memory, _STORAGE)
            self._start()

    def attached(self, rank: int, path: Path, storage: Storage | None) -> None:
        """A trainer has attached. `storage` is where checkpoints go; None: nowhere."""
        with self._lock:
            self._map(rank, path)
            if storage != self.storage:
                self._remember(storage)
                self.storage = storage
                self._checkpoints.forget()
            if storage is not None:
                self._start()

    def write_for(self, storage: Storage, paths: Mapping[int, Path]) -> None:
        """Write checkpoints of segments to which no trainer attaches."""
        with self._lock:
            for rank, path in paths.items():
                segment = self._map(rank, path)
                for slot in segment.slots():
                    segment.unpin(slot.index, Pin.STORAGE)  # of an abandoned checkpoint
            self.storage = storage
            self._start()

    def release(self, ranks: Sequence[int]) -> None:
        """Unpin and unmap the segments of these ranks: this persister no longer writes them."""
        with self._lock:
            for item in list(self._checkpoints.unfinished):
                item.unpin(ranks)
            for rank in ranks:
                self._segments.pop(rank, None)
                self._inodes.pop(rank, None)

    def request(self, reason: str, seconds: float, only_due: bool = False, keep: bool = False) -> dict[str, Any]:
        """Have the newest version written, and wait up to `seconds` for it; as `client.Client.checkpoint`."""
        if self.storage is None:
            return {"state": "off"}
        call = CheckpointCall(reason, only_due, seconds / 2, keep)  # the other half is for writing
        with self._lock:
            self._calls.append(call)
        self._wake.set()
        call.over.wait(seconds)
        return call.outcome or {"state": "writing"}

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written or completed, or a call waits."""
        checkpoints = self._checkpoints
        return bool(self._calls or checkpoints.writing or checkpoints.unfinished)  # in the order that a call takes

    @property
    def needs_segments(self) -> bool:
        """Whether a checkpoint is being written, or is to be completed by this node; not if it waits for another's."""
        written = self._checkpoints
        return written.writing is not None or any(0 in item.ranks for item in list(written.unfinished))

    @property
    def newest(self) -> Version | None:
        """The newest complete checkpoint that is known."""
        done = self._checkpoints.done if self.storage is not None else None
        return done[0] if done else None

    def status(self) -> dict[str, Any]:
        """For people: where checkpoints go, the newest complete one that is known, what has failed since."""
        if self.storage is None:
            return {}
        done, writing = self._checkpoints.done, self._checkpoints.writing
        return {
            "path": str(Path(self.storage.folder) / self._job),
            "newest": [done[0].lineage, done[0].iteration] if done else None,
            "writing": [writing.lineage, writing.iteration] if writing else None,
            "failed": self._checkpoints.failed,
            "kept": [[version.lineage, version.iteration] for version in sorted(self._checkpoints.kept)],
        }

    def stop(self, in_order: bool = False) -> None:
        """End. A checkpoint being written is abandoned at its next piece. `in_order`: so has the job."""
        self._stopping.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)
        if in_order and (storage := self.storage) is not None:
            base, segments = Path(storage.folder) / self._job, list(self._segments.values())
            with suppress(OSError):  # otherwise it runs out
                within(_STOP_SECONDS, lambda: self.lease.release(base, segments))
        for item in list(self._checkpoints.unfinished):
            item.unpin()

    def _map(self, rank: int, path: Path) -> Segment:
        inode = path.stat().st_ino
        if self._inodes.get(rank) != inode:  # the old mapping may be in use: its last user frees it
            self._segments[rank] = Segment(path)
            self._inodes[rank] = inode
        return self._segments[rank]

    def _remember(self, storage: Storage | None) -> None:
        if storage is None:
            self._memory.unlink(missing_ok=True)
            return
        files.write_json(self._memory, asdict(storage))

    def _start(self) -> None:
        if not self._threads:
            loops = {"smp-persist": self._run, "smp-lease": self._keep_lease}
            self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()]
            for thread in self._threads:
                thread.start()

    # ---- the threads ----

    def _keep_lease(self) -> None:
        while not self._stopping.wait(folder_lease.LOOK_SECONDS / 10):
            storage, held = self.storage, dict(self._segments)
            segments = taking_part(held, storage.world_size) if storage else {}
            with suppress(Exception):  # writing, which looks at the lease as well, will report it
                if storage is not None and segments:
                    self.lease.keep(Path(storage.folder) / self._job, segments, storage.world_size)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                pause = self._step()
            except WriterStopped:
                return
            except Exception as error:  # any error: the next checkpoint has to be attempted
                reason = describe(error)
                if reason != self._checkpoints.failed:
                    self._events.emit(catalogue.CHECKPOINT_FAILED, reason=reason)
                self._checkpoints.fail(reason)
                self._answer_all("failed", reason=reason)
                pause = _AFTER_ERROR_SECONDS
            self._wake.wait(pause)
            self._wake.clear()

    def _step(self) -> float:
        """Complete and write what is due now; returns the seconds until the next step."""
        storage = self.storage
        segments = taking_part(dict(self._segments), storage.world_size) if storage else {}
        if storage is None:
            self._answer_all("nothing")
            return FAR_SECONDS
        storage = replace(storage, chosen=newest(segment.header.chosen for segment in segments.values()))
        base = Path(storage.folder) / self._job
        held = functools.partial(self.lease.keep, base, segments, storage.world_size, writes=True)
        waiting = list(self._calls)  # before the slots are read: a later call is for what is not seen here
        for item in list(self._checkpoints.unfinished):
            self._checkpoints.complete(storage, base, item, held)
            for segment in segments.values() if self._checkpoints.seconds else ():
                segment.header.stored_ms = round(1e3 * self._checkpoints.seconds)
        if not segments:  # they are not needed any more
            self._answer_all("nothing")
            return FAR_SECONDS
        if not (self._schedule.may_be_due(storage, segments, self._checkpoints.last) or waiting):
            return self._schedule.pause
        seen = view(segments, storage.world_size)
        # a header says it before a slot of that interval is filled: read again behind the slots
        storage = replace(storage, chosen=newest(segment.header.chosen for segment in segments.values()))
        if taking_part(dict(self._segments), storage.world_size) != segments:
            return NEAR_SECONDS  # a rank has attached meanwhile; without it the checkpoint would stay incomplete
        fingerprint, (_, run) = next(iter(segments.values())).fingerprint, newest_run(segments.values())
        origin = Origin(self._job, storage.world_size, fingerprint, run)
        self._checkpoints.scan(base, origin, seen)
        calls: list[CheckpointCall] = []
        ending = any(call.only_due for call in waiting)
        version = self._schedule.due(storage, base, seen, self._checkpoints.last, ending)
        if version is None:
            version, calls = self._called(waiting, storage, base, seen)
        if version is not None:
            self._checkpoints.settle(base)
            pinned = pin_all(seen, version)
            if len(pinned) < len(seen.segments) and seen.alone:
                return NEAR_SECONDS  # it was overwritten meanwhile, so there is a newer one
            self._checkpoints.begin(version)  # before the calls are taken, so that `busy` has no gap
            for call in calls:
                self._take(call)
            self._checkpoints.write(base, origin, seen, version, calls, pinned, bool(storage.audits), held)
            return 0.0
        return 4 * NEAR_SECONDS if self._calls else self._schedule.pause

    def _called(
        self, waiting: Sequence[CheckpointCall], storage: Storage, base: Path, seen: NodeView
    ) -> tuple[Version | None, list[CheckpointCall]]:
        """The version to write for calls, and those calls. Answers calls whose version is complete already."""
        version: Version | None = None
        calls: list[CheckpointCall] = []
        pending, done = {item.version: item for item in self._checkpoints.unfinished}, self._checkpoints.done
        for call in waiting:
            known = [*pending, *([done[0]] if done else [])]
            target = self._schedule.called(call, storage, base, seen, known)
            if target is None:
                if call.only_due or not seen.held:
                    self._take(call)
                    call.answer("nothing")
            elif target in pending:
                self._take(call)
                pending[target].calls.append(call)
            elif done is not None and target == done[0]:
                self._take(call)
                self._checkpoints.answer(call, *done)
            elif version in (None, target):
                version = target
                calls.append(call)
        return version, calls

    def _take(self, call: CheckpointCall) -> None:
        with self._lock:
            self._calls.remove(call)

    def _answer_all(self, state: str, **facts: Any) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call.answer(state, **facts)
