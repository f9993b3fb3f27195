"""A node's checkpoints on their way: its ranks' files are written, those of other nodes are waited for.

Invariant: whatever goes wrong ends the one checkpoint, as an event, and what this node has of it is removed; those
before it stay. What is pinned is let go of when it is written, or, where replicas are compared, when it is complete:
until then a verdict may say that they differ. The SMP of rank 0 puts the manifest under a checkpoint when the files of
all ranks are there, and removes what is older than those to be kept; the others see that it has.

In: versions that are due (`persister`), a storage. Out: checkpoints; answers to calls; events.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import faults
from ..errors import FtError, SegmentError, StorageError
from ..events import Events, EventType, catalogue
from ..snapshot import checkpoint, persist, retention
from ..snapshot.checkpoint import Origin
from ..snapshot.index import staged_path
from ..snapshot.retention import Storage, StoredCheckpoint
from ..snapshot.segment import Segment
from ..snapshot.slots import Mark, Pin, SlotState, Version
from .alarms import Alarms, Failing
from .checkpoint_schedule import CheckpointCall, NodeView
from .notices import Notices


class WriterStopped(Exception):
    """The SMP ends: nothing more is written."""


@dataclass
class Unfinished:
    """This node's files of `version` are durable; those of other nodes are waited for."""

    version: Version
    origin: Origin
    ranks: list[int]
    begun: float
    written: float
    nbytes: int
    calls: list[CheckpointCall]
    pinned: Sequence[tuple[Segment, int]] = ()  # slots that are still watched for a verdict
    heard: Mark = Mark.NONE

    def look(self) -> None:
        """Update the verdict on its replicas. Raises StorageError if they differed, or none can arrive any more."""
        slots = {segment.rank: segment.slot(index) for segment, index in self.pinned}
        lost = [rank for rank, slot in slots.items() if (slot.version, slot.state) != (self.version, SlotState.CLEAN)]
        differing = [rank for rank in slots.keys() - lost if slots[rank].mark is Mark.DIFFERING]
        if differing:
            raise StorageError(checkpoint.mixture_reason(self.version, sorted(differing)))
        if lost and not self.heard.preferred:
            raise StorageError(f"ranks {lost} overwrote it before it was known whether its replicas agree")
        self.heard = max([self.heard, *(slot.mark for rank, slot in slots.items() if rank not in lost)])

    def let_go(self, ranks: Container[int] | None = None) -> None:
        """Unpin its slots, or those of `ranks`: they are not watched any more."""
        watched = self.pinned
        self.pinned = [each for each in watched if ranks is not None and each[0].rank not in ranks]
        for segment, index in watched:
            if (segment, index) not in self.pinned:
                segment.unpin(index, Pin.STORAGE)


class Checkpoints:
    """Those of one node, for the thread that writes them; other threads read what is public."""

    def __init__(
        self, run_dir: Path, node: str, events: Events, patience: float, stopping: threading.Event, alarms: Alarms
    ) -> None:
        """`patience`: seconds for other nodes' files. When `stopping` is set, what is being written is abandoned."""
        self._run_dir = run_dir
        self._node = node
        self._events = events
        self._patience = patience
        self._stopping = stopping
        self._failing = Failing(
            alarms, f"storage of {node}", catalogue.CHECKPOINT_FAILED, catalogue.CHECKPOINT_COMPLETED, node
        )
        self._looked: Origin | None = None  # whose checkpoints in storage are known
        self.adopted = 0  # segments of an SMP that died
        self.unfinished: list[Unfinished] = []
        self.writing: Version | None = None
        self.last: Version | None = None  # the newest that was written or given up
        self.done: tuple[Version, Path] | None = None  # the newest that is complete
        self.failed = ""  # why the last one is not
        self.kept: frozenset[Version] = frozenset()  # those that stay, as far as is known

    def forget(self) -> None:
        """Checkpoints go elsewhere from now on: what is there already is not known."""
        self._looked, self.last = None, None

    def begin(self, version: Version) -> None:
        """`version` will be written next."""
        self.writing, self.last = version, max(version, self.last or version)

    def settle(self, base: Path) -> None:
        """Another version needs the slots pinned for storage: decide by what is known now on what waits for nodes."""
        for item in [each for each in self.unfinished if each.pinned]:
            try:
                item.look()
                if not item.heard.preferred:
                    raise StorageError("another version was begun before it was known whether its replicas agree")
                item.let_go()
            except StorageError as error:
                self._leave_off(base, item, error)

    def look(self, base: Path, origin: Origin, seen: NodeView) -> None:
        """Once for each job: find what is complete in storage already, and name a checkpoint that lacks only that."""
        if self._looked == origin:
            return
        self._looked, self.last, self.done = origin, None, None
        with suppress(OSError):  # writing will report it
            own = retention.candidates(self._list(base), origin.digest)
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
    ) -> None:
        """Write this node's ranks of `version`, after `begin`; its slots stay `pinned` until it is complete if they are
        to be `watched` for a verdict. Every failure is an event. Raises WriterStopped."""
        begun = time.monotonic()
        segments, ranks = list(seen.segments.values()), list(seen.segments)
        folder, final = checkpoint.partial_of(base, version), checkpoint.folder_of(base, version)
        reason = calls[0].reason if calls else "interval"
        item: Unfinished | None = None
        try:
            if checkpoint.is_complete(final, origin):
                self._finished(Unfinished(version, origin, ranks, begun, begun, 0, calls), final)
                return
            if len(pinned) < len(segments):
                raise SegmentError("it was overwritten on this node before it was kept")
            self._events.emit(catalogue.CHECKPOINT_STARTED, **facts_of(version), reason=reason, ranks=ranks)
            nbytes = 0
            for segment in segments:
                faults.reach(
                    "persist.rank.before", rank=segment.rank, iteration=version.iteration, adopted=self.adopted
                )
                staged = staged_path(self._run_dir, segment.rank, segment.shape.layout)
                record = persist.write_rank(
                    folder, segment, version, origin, self._proceed, staged_index=staged, adopted=self.adopted
                )
                nbytes += record.nbytes
            slots = pinned if watched else ()
            item = Unfinished(version, origin, ranks, begun, time.monotonic(), nbytes, calls, slots)
            self.unfinished.append(item)
        except WriterStopped:
            raise
        except Exception as error:  # of the file system, of an overwritten slot, of our own: it ends this checkpoint
            checkpoint.withdraw(folder, ranks)
            self._give_up(base, version, words(error), calls)
        finally:
            self.writing = None
            for segment, index in pinned if item is None or not watched else ():
                segment.unpin(index, Pin.STORAGE)

    def _proceed(self, nbytes: int) -> None:
        if self._stopping.is_set():
            raise WriterStopped

    def complete(self, storage: Storage, base: Path, item: Unfinished) -> None:
        """Write the manifest of a checkpoint once all files are there; or notice that another node has."""
        final, folder = checkpoint.folder_of(base, item.version), checkpoint.partial_of(base, item.version)
        facts = {"adopted": self.adopted}
        late = time.monotonic() - item.written > max(self._patience, 10 * (item.written - item.begun))
        try:
            if 0 in item.ranks:
                absent = checkpoint.missing(folder, item.origin, item.version)
                item.look()
                if not absent:
                    audited = bool(storage.audits)
                    path = checkpoint.commit(
                        base, item.version, item.origin, audited=audited, mark=item.heard, **facts
                    )
                    self._finished(item, path)
                    self._prune(storage, base, item.origin)
                    return
                if late:
                    raise StorageError(_absent(absent, item, folder))
            elif checkpoint.is_complete(final, item.origin):
                self._finished(item, final)
            elif late:
                raise StorageError(
                    f"the SMP of rank 0 has not completed it in {self._patience:.0f} s: is {base} a folder that all "
                    "nodes share? --reft-checkpoint-dir has to name one"
                )
            else:
                item.look()
        except Exception as error:
            self._leave_off(base, item, error)

    def _leave_off(self, base: Path, item: Unfinished, error: Exception) -> None:
        """A checkpoint will not become complete: remove what this node has of it."""
        self.unfinished.remove(item)
        item.let_go()
        checkpoint.withdraw(checkpoint.partial_of(base, item.version), item.ranks)
        self._give_up(base, item.version, words(error), item.calls)

    def _finished(self, item: Unfinished, path: Path) -> None:
        """A checkpoint is complete: those begun before it are given up."""
        self.done, self.failed = (item.version, path), ""
        self._failing.worked(f"iteration {item.version.iteration} is in {path}")
        if item in self.unfinished:
            self.unfinished.remove(item)
            item.let_go()
            seconds = time.monotonic() - item.begun
            self._events.emit(
                catalogue.CHECKPOINT_COMPLETED,
                **facts_of(item.version),
                seconds=seconds,
                bytes=item.nbytes,
                path=str(path),
            )
        notices = Notices(path.parent, self._node)
        notices.withdraw()
        notices.have(item.version)
        for call in item.calls:
            self.answer(call, item.version, path)
        for older in [each for each in self.unfinished if each.version < item.version]:
            self.unfinished.remove(older)
            older.let_go()
            reason = "a newer checkpoint was complete first"
            self._report(path.parent, older.version, reason, older.calls, catalogue.CHECKPOINT_SUPERSEDED)

    def answer(self, call: CheckpointCall, version: Version, path: Path) -> None:
        """The version of a call is complete; mark it to be kept if the call wants that."""
        try:
            if call.keep:
                checkpoint.keep(path)
                self.kept |= {version}
                self._events.emit(catalogue.CHECKPOINT_KEPT, **facts_of(version), path=str(path))
        except OSError as error:
            call.answer("failed", **facts_of(version), reason=f"{path} is written, but cannot be kept: {words(error)}")
            return
        call.answer("done", **facts_of(version), path=str(path))

    def _list(self, base: Path) -> tuple[StoredCheckpoint, ...]:
        """What is in storage; updates `kept`. Raises OSError."""
        found = checkpoint.listing(base)
        self.kept = frozenset(each.version for each in found if each.kept)
        return found

    def fail(self, reason: str, iteration: int | None = None) -> None:
        """Raise an alarm: checkpoints cannot be written, or this one could not be."""
        self.failed = reason
        which = "checkpoints cannot be written" if iteration is None else f"iteration {iteration} was not written"
        newest = f"the newest checkpoint is {self.done[1]}" if self.done else "none is complete yet"
        self._failing.failed(f"{which}: {reason}; training goes on, {newest}")

    def _give_up(self, base: Path, version: Version, reason: str, calls: Sequence[CheckpointCall]) -> None:
        self.fail(reason, version.iteration)
        self._report(base, version, reason, calls, catalogue.CHECKPOINT_FAILED)

    def _report(
        self, base: Path, version: Version, reason: str, calls: Sequence[CheckpointCall], kind: EventType
    ) -> None:
        kept = str(self.done[1]) if self.done else None
        self._events.emit(kind, **facts_of(version), reason=reason, newest_complete=kept)
        Notices(base, self._node).withdraw()
        print(f"checkpoint of version {version}: {reason}; newest complete: {kept}", file=sys.stderr, flush=True)
        for call in calls:
            call.answer("failed", **facts_of(version), reason=reason)

    def _prune(self, storage: Storage, base: Path, origin: Origin) -> None:
        """Remove what is older than the checkpoints to be kept; one that cannot be removed does not stop the others."""
        removed: list[str] = []
        surplus: Sequence[StoredCheckpoint] = ()
        failed = ""
        try:
            surplus = retention.surplus(self._list(base), storage.keep, origin.digest)
        except OSError as error:
            failed = words(error)
        for stored in surplus:
            try:
                checkpoint.remove(base / stored.name)
                removed.append(stored.name)
            except OSError as error:
                failed = failed or f"{base / stored.name}: {words(error)}"
        if failed:
            self._events.emit(catalogue.CHECKPOINT_FAILED, reason=f"older checkpoints could not be removed: {failed}")
        if removed:
            self._events.emit(catalogue.CHECKPOINT_PRUNED, removed=removed)


def pin_all(seen: NodeView, version: Version) -> list[tuple[Segment, int]]:
    """Pin the slots of `version` in every rank; [] if one of them may be about to be overwritten."""
    found: list[tuple[Segment, int]] = []
    for segment in seen.segments.values():
        index = segment.pin(version, Pin.STORAGE)
        if index is None:
            for earlier, kept in found:
                earlier.unpin(kept, Pin.STORAGE)
            return []
        found.append((segment, index))
    return found


def facts_of(version: Version) -> dict[str, int]:
    return {"lineage": version.lineage, "iteration": version.iteration}


def _absent(absent: Sequence[int], item: Unfinished, folder: Path) -> str:
    """Why a checkpoint never became complete, with the remedy."""
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    if set(absent) | set(item.ranks) == set(range(item.origin.world_size)):
        return (
            f"nothing of ranks {shown} has appeared in {folder}: is it a folder that all nodes share? "
            "--reft-checkpoint-dir has to name one"
        )
    return f"the files of ranks {shown} have not appeared in {folder}; see the events of their nodes"


def words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, FtError) else f"{type(error).__name__}: {error}"
