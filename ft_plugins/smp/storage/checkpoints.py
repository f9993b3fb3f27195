"""Write a node's checkpoints: the files of its ranks, then wait for those of other nodes and complete the checkpoint.

Invariant: a failure ends one checkpoint, as an event, and what this node wrote of it is removed; earlier checkpoints
stay. Slots are unpinned once they are written, or, if replicas are compared, once the checkpoint is complete: until
then a verdict may be that they differ. The SMP of rank 0 writes the manifest when the files of all ranks are there, and
removes checkpoints beyond those that retention keeps; the other SMPs notice the manifest.

In: versions that are due (`persister`), a storage. Out: checkpoints; answers to calls; events.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...base import faults
from ...errors import FtError, SegmentError, StorageError
from ...events import EventType, catalogue
from ...snapshot.capture import retention
from ...snapshot.capture.retention import Storage, StoredCheckpoint
from ...snapshot.checkpoint import checkpoint, persist
from ...snapshot.checkpoint.checkpoint import Origin
from ...snapshot.checkpoint.index import staged_path
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import Mark, Pin, SlotState, Version
from ..serve.node_context import NodeContext
from ..watch.alarms import RepeatedFailure
from .checkpoint_schedule import CheckpointCall, NodeView
from .notices import Notices

_TOO_OFTEN = "nothing is broken; if it repeats, give a longer --reft-interval or --reft-checkpoint-interval"


class WriterStopped(Exception):
    """The SMP ends, so writing stops."""


@dataclass
class Unfinished:
    """A checkpoint of which this node's files are durable, and those of other nodes are awaited."""

    version: Version
    origin: Origin
    ranks: list[int]
    begun: float
    written: float
    nbytes: int
    calls: list[CheckpointCall]
    pinned: Sequence[tuple[Segment, int]] = ()  # slots that are watched for a verdict
    heard: Mark = Mark.NONE  # the newest verdict on its replicas

    def update_verdict(self) -> None:
        """Read the verdict on its replicas. Raises StorageError if they are mismatched, or if none can arrive."""
        slots = {segment.rank: segment.slot(index) for segment, index in self.pinned}
        lost = [rank for rank, slot in slots.items() if (slot.version, slot.state) != (self.version, SlotState.CLEAN)]
        mismatched = [rank for rank in slots.keys() - lost if slots[rank].mark is Mark.MISMATCHED]
        if mismatched:
            raise StorageError(checkpoint.mixture_reason(self.version, sorted(mismatched)))
        if lost and not self.heard.preferred:
            raise StorageError(f"ranks {lost} overwrote it before its replicas were compared; {_TOO_OFTEN}")
        self.heard = max([self.heard, *(slot.mark for rank, slot in slots.items() if rank not in lost)])

    def unpin(self, ranks: Container[int] | None = None) -> None:
        """Unpin its slots, or those of `ranks`, and stop watching them."""
        watched = self.pinned
        self.pinned = [each for each in watched if ranks is not None and each[0].rank not in ranks]
        for segment, index in watched:
            if (segment, index) not in self.pinned:
                segment.unpin(index, Pin.STORAGE)


class Checkpoints:
    """The checkpoints of one node. For the thread that writes them; other threads read the public attributes."""

    def __init__(self, smp: NodeContext, patience: float, stopping: threading.Event) -> None:
        """`patience`: seconds to wait for other nodes' files. Setting `stopping` abandons what is being written."""
        self._run_dir, self._node, self._events = smp.run_dir, smp.node, smp.events
        self._patience = patience
        self._stopping = stopping
        self._failures = RepeatedFailure(
            smp.alarms, f"storage of {smp.node}", catalogue.CHECKPOINT_FAILED, catalogue.CHECKPOINT_COMPLETED, smp.node
        )
        self._scanned: Origin | None = None  # the job whose checkpoints in storage are known
        self.adopted = 0  # segments of an SMP that died
        self.unfinished: list[Unfinished] = []
        self.writing: Version | None = None
        self.last: Version | None = None  # the newest that was written or abandoned
        self.done: tuple[Version, Path] | None = None  # the newest complete one
        self.seconds = 0.0  # that it took
        self.failed = ""  # why the last one is not complete
        self.kept: frozenset[Version] = frozenset()  # known checkpoints that retention never removes

    def forget(self) -> None:
        """Forget what is in storage: checkpoints go to another folder from now on."""
        self._scanned, self.last = None, None

    def begin(self, version: Version) -> None:
        """`version` will be written next."""
        self.writing, self.last = version, max(version, self.last or version)

    def settle(self, base: Path) -> None:
        """Free the slots that unfinished checkpoints keep pinned, because another version is about to be written:
        abandon those that have no good verdict yet."""
        for item in [each for each in self.unfinished if each.pinned]:
            try:
                item.update_verdict()
                if not item.heard.preferred:
                    raise StorageError(f"another one was begun before its replicas were compared; {_TOO_OFTEN}")
                item.unpin()
            except StorageError as error:
                self._abandon(base, item, error)

    def scan(self, base: Path, origin: Origin, seen: NodeView) -> None:
        """Once for each job: find complete checkpoints in storage, and give one that lacks only its name that name."""
        if self._scanned == origin:
            return
        self._scanned, self.last, self.done = origin, None, None
        with suppress(OSError):  # writing will report it
            own = retention.candidates(origin.own(self._list(base)), origin.fingerprint_digest)
            for stored in sorted(own, key=lambda each: each.version):
                if stored.problem or stored.version.lineage > seen.lineage:
                    continue
                path, final = base / stored.name, checkpoint.folder_of(base, stored.version)
                if path != final and 0 in seen.segments:
                    checkpoint.publish(path, final)
                self.last, self.done = stored.version, (stored.version, final)

    def write(
        self,
        base: Path,
        origin: Origin,
        seen: NodeView,
        version: Version,
        calls: list[CheckpointCall],
        pinned: Sequence[tuple[Segment, int]],
        watched: bool,
        held: Callable[[], None],
    ) -> None:
        """Write this node's ranks of `version`, after `begin`, unless `held` raises: another run has the folder. If the
        `pinned` slots are to be `watched` for a verdict, they stay pinned until the checkpoint is complete. Every
        failure is an event. Raises WriterStopped."""
        begun = time.monotonic()
        segments, ranks = list(seen.segments.values()), list(seen.segments)
        folder, final = checkpoint.partial_of(base, version), checkpoint.folder_of(base, version)
        reason = calls[0].reason if calls else "interval"
        item: Unfinished | None = None
        try:
            held()
            if checkpoint.is_complete(final, origin):
                self._finished(Unfinished(version, origin, ranks, begun, begun, 0, calls), final)
                return
            if len(pinned) < len(segments):
                raise SegmentError(f"it was overwritten on this node before it could be pinned; {_TOO_OFTEN}")
            self._events.emit(catalogue.CHECKPOINT_STARTED, **facts_of(version), reason=reason, ranks=ranks)
            nbytes = 0
            for segment in segments:
                faults.reach(
                    "persist.rank.before", rank=segment.rank, iteration=version.iteration, adopted=self.adopted
                )
                staged = staged_path(self._run_dir, segment.rank, segment.shape.layout)
                record = persist.write_rank(
                    folder, segment, version, origin, self._stop_if_ending, staged_index=staged, adopted=self.adopted
                )
                nbytes += record.nbytes
            slots = pinned if watched else ()
            item = Unfinished(version, origin, ranks, begun, time.monotonic(), nbytes, calls, slots)
            self.unfinished.append(item)
        except WriterStopped:
            raise
        except Exception as error:  # a file system, an overwritten slot, a bug: it ends this checkpoint
            checkpoint.withdraw(folder, ranks, origin.run)
            self._fail_version(base, version, describe(error), calls)
        finally:
            self.writing = None
            for segment, index in pinned if item is None or not watched else ():
                segment.unpin(index, Pin.STORAGE)

    def _stop_if_ending(self, nbytes: int) -> None:
        if self._stopping.is_set():
            raise WriterStopped

    def complete(self, storage: Storage, base: Path, item: Unfinished, held: Callable[[], None]) -> None:
        """Write the manifest of a checkpoint if all files are there, or notice that another node has written it.
        Abandon the checkpoint if that takes too long. `held` raises if this run may not write any more."""
        final, folder = checkpoint.folder_of(base, item.version), checkpoint.partial_of(base, item.version)
        facts = {"adopted": self.adopted}
        late = time.monotonic() - item.written > max(self._patience, 10 * (item.written - item.begun))
        try:
            if 0 in item.ranks:
                absent = checkpoint.unusable(folder, item.origin, item.version)
                item.update_verdict()
                if not absent:
                    held()
                    audited = bool(storage.audits)
                    path = checkpoint.commit(base, item.version, item.origin, audited=audited, mark=item.heard, **facts)
                    self._finished(item, path)
                    self._prune(storage, base, item.origin)
                    return
                if late:
                    raise StorageError(_absent(absent, item, folder))
            elif checkpoint.is_complete(final, item.origin):
                self._finished(item, final)
            elif late:
                raise StorageError(
                    f"the SMP of rank 0 did not complete it within {self._patience:.0f} s; see the events of its node, "
                    f"and whether --reft-checkpoint-dir names a folder that all nodes share, as {base} has to be"
                )
            else:
                item.update_verdict()
        except Exception as error:
            self._abandon(base, item, error)

    def _abandon(self, base: Path, item: Unfinished, error: Exception) -> None:
        """Remove what this node wrote of a checkpoint, because it will not become complete."""
        self.unfinished.remove(item)
        item.unpin()
        checkpoint.withdraw(checkpoint.partial_of(base, item.version), item.ranks, item.origin.run)
        self._fail_version(base, item.version, describe(error), item.calls)

    def _finished(self, item: Unfinished, path: Path) -> None:
        """A checkpoint is complete: answer its calls, and abandon those begun before it."""
        self.done, self.failed = (item.version, path), ""
        self._failures.worked(f"iteration {item.version.iteration} is in {path}")
        if item in self.unfinished:
            self.unfinished.remove(item)
            item.unpin()
            self.seconds = time.monotonic() - item.begun
            self._events.emit(
                catalogue.CHECKPOINT_COMPLETED, **facts_of(item.version), seconds=self.seconds,
                bytes=item.nbytes, path=str(path),
            )  # fmt: skip
        notices = Notices(path.parent, self._node)
        notices.withdraw()
        notices.have(item.version)
        for call in item.calls:
            self.answer(call, item.version, path)
        for older in [each for each in self.unfinished if each.version < item.version]:
            self.unfinished.remove(older)
            older.unpin()
            reason = "a newer checkpoint was complete first"
            self._report(path.parent, older.version, reason, older.calls, catalogue.CHECKPOINT_SUPERSEDED)

    def answer(self, call: CheckpointCall, version: Version, path: Path) -> None:
        """Answer a call whose version is complete; mark the checkpoint to be kept if the call asks for that."""
        try:
            if call.keep:
                checkpoint.keep(path)
                self.kept |= {version}
                self._events.emit(catalogue.CHECKPOINT_KEPT, **facts_of(version), path=str(path))
        except OSError as error:
            reason = f"{path} is written, but cannot be marked as kept: {describe(error)}"
            call.answer("failed", **facts_of(version), reason=reason)
            return
        call.answer("done", **facts_of(version), path=str(path))

    def _list(self, base: Path) -> tuple[StoredCheckpoint, ...]:
        """The checkpoints in storage; updates `kept`. Raises OSError."""
        stored = checkpoint.listing(base)
        self.kept = frozenset(each.version for each in stored if each.kept)
        return stored

    def fail(self, reason: str, iteration: int | None = None) -> None:
        """Raise an alarm: checkpoints cannot be written, or the one of `iteration` could not."""
        self.failed = reason
        which = "checkpoints cannot be written" if iteration is None else f"iteration {iteration} was not written"
        newest = f"the newest checkpoint is {self.done[1]}" if self.done else "none is complete yet"
        self._failures.failed(f"{which}: {reason}; training continues, {newest}")

    def _fail_version(self, base: Path, version: Version, reason: str, calls: Sequence[CheckpointCall]) -> None:
        self.fail(reason, version.iteration)
        self._report(base, version, reason, calls, catalogue.CHECKPOINT_FAILED)

    def _report(
        self, base: Path, version: Version, reason: str, calls: Sequence[CheckpointCall], kind: EventType
    ) -> None:
        newest = str(self.done[1]) if self.done else None
        self._events.emit(kind, **facts_of(version), reason=reason, newest_complete=newest)
        Notices(base, self._node).withdraw()
        print(f"checkpoint of version {version}: {reason}; newest complete: {newest}", file=sys.stderr, flush=True)
        for call in calls:
            call.answer("failed", **facts_of(version), reason=reason)

    def _prune(self, storage: Storage, base: Path, origin: Origin) -> None:
        """Remove checkpoints beyond those that retention keeps. One that cannot be removed does not stop the others."""
        removed: list[str] = []
        surplus: Sequence[StoredCheckpoint] = ()
        failed = ""
        try:
            surplus = retention.surplus(origin.own(self._list(base)), storage.keep, origin.fingerprint_digest)
        except OSError as error:
            failed = describe(error)
        for stored in surplus:
            try:
                checkpoint.remove(base / stored.name)
                removed.append(stored.name)
            except OSError as error:
                failed = failed or f"{base / stored.name}: {describe(error)}"
        if failed:
            self._events.emit(catalogue.CHECKPOINT_FAILED, reason=f"older checkpoints could not be removed: {failed}")
        if removed:
            self._events.emit(catalogue.CHECKPOINT_PRUNED, removed=removed)


def pin_all(seen: NodeView, version: Version) -> list[tuple[Segment, int]]:
    """Pin the slots of `version` in every rank; [] if one of them may be about to be overwritten."""
    pinned: list[tuple[Segment, int]] = []
    for segment in seen.segments.values():
        index = segment.pin(version, Pin.STORAGE)
        if index is None:
            for earlier, slot in pinned:
                earlier.unpin(slot, Pin.STORAGE)
            return []
        pinned.append((segment, index))
    return pinned


def facts_of(version: Version) -> dict[str, int]:
    """The fields of an event that name a version."""
    return {"lineage": version.lineage, "iteration": version.iteration}


def _absent(absent: Sequence[int], item: Unfinished, folder: Path) -> str:
    """Why a checkpoint did not become complete, with the remedy."""
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    if set(absent) | set(item.ranks) == set(range(item.origin.world_size)):
        return (
            f"no file of ranks {shown} has appeared in {folder}; see the events of their nodes, and whether "
            "--reft-checkpoint-dir names a folder that all nodes share"
        )
    return f"the files of ranks {shown} have not appeared in {folder}; see the events of their nodes"


def describe(error: BaseException) -> str:
    """An error as a reason in an event or an alarm; of a storage, with what to do."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}; fix the storage"
    return str(error) if isinstance(error, FtError) else f"{type(error).__name__}: {error}"
