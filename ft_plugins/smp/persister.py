"""The SMP's thread for storage: writes this node's ranks of the versions whose turn it is, and completes checkpoints.

Invariant: training never waits for it, and no error of a storage ends anything but the one checkpoint: it is an event,
what was begun is removed, the checkpoints before it stay, and the next turn is tried anew. A version is pinned in every
rank before its first byte is written, and let go of when this node's files are durable; where replicas are compared
when it is complete, for until then a verdict may say that they differ: then it is withdrawn. The thread has mappings
of its own, so that requests go on meanwhile. Which version it is says `turns`, what a file is `persist`, when a
checkpoint is complete `checkpoint`: the SMP of rank 0 puts the manifest under it when the files of all ranks are there.

In: what trainers tell at attach (kept in the run directory for a successor), requests. Out: checkpoints;
`persist.begin`, `persist.done`, `persist.failed` and `persist.pruned` events.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import faults
from ..errors import FtError, ProtocolError, SegmentError, StorageError
from ..events import Events
from ..snapshot import checkpoint, persist, retention
from ..snapshot.checkpoint import Origin
from ..snapshot.index import kept_path
from ..snapshot.retention import Storage
from ..snapshot.segment import Segment
from ..snapshot.slots import Mark, Pin, SlotState, Version
from . import protocol
from .notices import Notices
from .turns import FAR_SECONDS, NEAR_SECONDS, Call, Turns, View, counting, view

PATIENCE_SECONDS = 300.0  # for other nodes' files; a network file system may show them a minute late
_STOP_SECONDS = 5.0  # for the piece that is being written
_AFTER_ERROR_SECONDS = 1.0


class _Stopped(Exception):
    """The SMP ends."""


@dataclass
class _Unfinished:
    """This node's files of `version` are durable; those of other nodes are waited for."""

    version: Version
    origin: Origin
    ranks: list[int]
    begun: float
    written: float
    nbytes: int
    calls: list[Call]
    pinned: Sequence[tuple[Segment, int]] = ()  # slots that are still watched for a verdict
    heard: Mark = Mark.NONE

    def look(self) -> None:
        """What is known of its replicas by now. Raises StorageError where they differed, or nobody will ever know."""
        slots = {segment.rank: segment.slot(index) for segment, index in self.pinned}
        lost = [rank for rank, slot in slots.items() if (slot.version, slot.state) != (self.version, SlotState.CLEAN)]
        differing = [rank for rank in slots.keys() - lost if slots[rank].mark is Mark.DIFFERING]
        if differing:
            raise StorageError(checkpoint.differed(self.version, sorted(differing)))
        if lost and not self.heard.preferred:
            raise StorageError(f"ranks {lost} gave it up before it was known whether its replicas agree")
        self.heard = max([self.heard, *(slot.mark for rank, slot in slots.items() if rank not in lost)])

    def let_go(self, ranks: Container[int] | None = None) -> None:
        """Its slots, or those of `ranks`, are watched no more."""
        watched = self.pinned
        self.pinned = [each for each in watched if ranks is not None and each[0].rank not in ranks]
        for segment, index in watched:
            if (segment, index) not in self.pinned:
                segment.unpin(index, Pin.STORAGE)


class Persister:
    """The storage tier of one node. Guards a thread, which runs once a job has a folder for checkpoints."""

    def __init__(
        self,
        run_dir: Path,
        job: str,
        node: str,
        events: Events,
        patience: float = PATIENCE_SECONDS,
        memory: str = "storage.json",
    ) -> None:
        """`memory` is the file of the run directory in which a successor finds what this one was told."""
        self._memory = run_dir / memory
        self._job = job
        self._node = node
        self._events = events
        self._patience = patience
        self._adopted = 0
        self._lock = threading.Lock()
        self._storage: Storage | None = None
        self._segments: dict[int, Segment] = {}
        self._inodes: dict[int, int] = {}
        self._calls: list[Call] = []
        self._unfinished: list[_Unfinished] = []
        self._writing: Version | None = None
        self._last: Version | None = None  # the newest that was dealt with, in whatever way
        self._looked: Origin | None = None  # whose checkpoints in storage are known of
        self._done: tuple[Version, Path] | None = None
        self._failed = ""
        self._turns = Turns(node)
        self._stopping = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- what it is told, on the threads of requests ----

    def adopt(self, paths: Mapping[int, Path]) -> None:
        """Go on for an SMP that died: with what it was told, its pins let go."""
        self._adopted = len(paths)
        for rank, path in paths.items():
            segment = self._map(rank, path)
            for slot in segment.slots():
                segment.unpin(slot.index, Pin.STORAGE)
        with suppress(FileNotFoundError, ValueError, TypeError):  # else the next attach tells
            self._storage = Storage(**json.loads(self._memory.read_text()))
            self._start()

    def told(self, rank: int, path: Path, fields: Mapping[str, Any] | None) -> None:
        """A trainer has attached: `fields` are those of a `Storage`, None for no storage. Raises ProtocolError."""
        storage = _storage(rank, fields)
        with self._lock:
            self._map(rank, path)
            if storage != self._storage:
                self._remember(storage)
                self._storage, self._looked, self._last = storage, None, None
            if storage is not None:
                self._start()

    def write_for(self, storage: Storage, paths: Mapping[int, Path]) -> None:
        """Segments of which nobody attaches, and where their checkpoints go."""
        with self._lock:
            for rank, path in paths.items():
                segment = self._map(rank, path)
                for slot in segment.slots():
                    segment.unpin(slot.index, Pin.STORAGE)  # of one that was left off
            self._storage = storage
            self._start()

    @property
    def storage(self) -> Storage | None:
        """Where checkpoints go; None for nowhere."""
        return self._storage

    def let_go(self, ranks: Sequence[int]) -> None:
        """These ranks' segments are of another size of the job now."""
        with self._lock:
            for item in list(self._unfinished):
                item.let_go(ranks)
            for rank in ranks:
                self._segments.pop(rank, None)
                self._inodes.pop(rank, None)

    def request(self, reason: str, seconds: float, only_due: bool = False) -> dict[str, Any]:
        """Have the newest version written, and wait for that up to `seconds`.

        `state` of what is returned: 'done' (with lineage, iteration, path), 'failed' (with reason), 'writing' when the
        time is over, 'nothing' when there is no version, 'off' when the job has no folder for checkpoints.
        """
        if self._storage is None:
            return {"state": "off"}
        call = Call(reason, only_due, seconds / 2)  # the other half is for writing
        with self._lock:
            self._calls.append(call)
        self._wake.set()
        call.over.wait(seconds)
        return call.outcome or {"state": "writing"}

    @property
    def busy(self) -> bool:
        """Whether something is being written, completed or was called for."""
        return bool(self._calls or self._writing or self._unfinished)  # in the order in which a call passes through

    def status(self) -> dict[str, Any]:
        """For people: where, the newest complete checkpoint that is known of, what failed since."""
        if self._storage is None:
            return {}
        done = [self._done[0].lineage, self._done[0].iteration] if self._done else None
        writing = self._writing
        return {
            "path": str(Path(self._storage.folder) / self._job),
            "newest": done,
            "writing": [writing.lineage, writing.iteration] if writing else None,
            "failed": self._failed,
        }

    def stop(self) -> None:
        """No more; what is being written is left off at its next piece."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        for item in list(self._unfinished):
            item.let_go()

    def _map(self, rank: int, path: Path) -> Segment:
        inode = path.stat().st_ino
        if self._inodes.get(rank) != inode:  # the old mapping may be in use: it goes with its last user
            self._segments[rank] = Segment(path)
            self._inodes[rank] = inode
        return self._segments[rank]

    def _remember(self, storage: Storage | None) -> None:
        if storage is None:
            self._memory.unlink(missing_ok=True)
            return
        building = self._memory.with_suffix(".new")
        building.write_text(json.dumps(asdict(storage)))
        building.replace(self._memory)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="smp-persist", daemon=True)
            self._thread.start()

    # ---- the thread ----

    def _run(self) -> None:
        while not self._stopping:
            try:
                pause = self._step()
            except _Stopped:
                return
            except Exception as error:  # the boundary: whatever it is, the next turn is tried anew
                reason = _words(error)
                if reason != self._failed:
                    self._events.emit("persist.failed", reason=reason)
                self._failed = reason
                self._answer_all("failed", reason=reason)
                pause = _AFTER_ERROR_SECONDS
            self._wake.wait(pause)
            self._wake.clear()

    def _step(self) -> float:
        """One look; returns the seconds until the next one."""
        storage = self._storage
        segments = counting(dict(self._segments), storage.world_size) if storage else {}
        if storage is None or not segments:
            self._answer_all("nothing")
            return FAR_SECONDS
        base = Path(storage.folder) / self._job
        asked = list(self._calls)  # before the look: what comes later asks for what is not seen by this one
        for item in list(self._unfinished):
            self._complete(storage, base, item)
        if not (self._turns.come(storage, segments, self._last) or asked):
            return self._turns.pause
        seen = view(segments, storage.world_size)
        origin = Origin(self._job, storage.world_size, next(iter(segments.values())).fingerprint)
        self._look(base, origin, seen)
        calls: list[Call] = []
        ending = any(call.only_due for call in asked)
        version = self._turns.due(storage, base, seen, self._last, ending)
        if version is None:
            version, calls = self._called(asked, storage, base, seen)
        if version is not None:
            self._settle(base)
            pinned = _pinned(seen, version)
            if len(pinned) < len(seen.segments) and seen.alone:
                return NEAR_SECONDS  # overwritten since the look, so a newer one is there by now
            self._write(base, origin, seen, version, calls, pinned, watched=bool(storage.audits))
            return 0.0
        return 4 * NEAR_SECONDS if self._calls else self._turns.pause

    def _settle(self, base: Path) -> None:
        """Another version needs the slots kept for storage: what waits for other nodes goes by what is known by now."""
        for item in [each for each in self._unfinished if each.pinned]:
            try:
                item.look()
                if not item.heard.preferred:
                    raise StorageError("another version was begun before it was known whether its replicas agree")
                item.let_go()
            except StorageError as error:
                self._leave_off(base, item, error)

    def _look(self, base: Path, origin: Origin, seen: View) -> None:
        """Once for each job: what is complete in storage already. What lacks only its name gets it."""
        if self._looked == origin:
            return
        self._looked, self._last, self._done = origin, None, None
        with suppress(OSError):  # writing will tell
            own = retention.candidates(checkpoint.listing(base), origin.digest)
            for stored in sorted(own, key=lambda each: each.version):
                if stored.problem or stored.version.lineage > seen.lineage:
                    continue
                path, final = base / stored.name, checkpoint.folder_of(base, stored.version)
                if path != final and 0 in seen.segments:
                    checkpoint.publish(path, final)
                self._last, self._done = stored.version, (stored.version, final)

    def _called(
        self, asked: Sequence[Call], storage: Storage, base: Path, seen: View
    ) -> tuple[Version | None, list[Call]]:
        """The version that was called for and is to be written now, and by whom; answers those who have it already."""
        version: Version | None = None
        takers: list[Call] = []
        pending = {item.version: item for item in self._unfinished}
        for call in asked:
            known = [*pending, *([self._done[0]] if self._done else [])]
            found = self._turns.called(call, storage, base, seen, known)
            if found is None:
                if call.only_due or not seen.held:
                    self._take(call)
                    call.answer("nothing")
            elif found in pending:
                self._take(call)
                pending[found].calls.append(call)
            elif self._done is not None and found == self._done[0]:
                self._take(call)
                call.answer("done", **_facts(found), path=str(self._done[1]))
            elif version in (None, found):
                version = found
                takers.append(call)
        return version, takers

    def _take(self, call: Call) -> None:
        with self._lock:
            self._calls.remove(call)

    def _answer_all(self, state: str, **facts: Any) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call.answer(state, **facts)

    # ---- writing and completing ----

    def _write(
        self,
        base: Path,
        origin: Origin,
        seen: View,
        version: Version,
        calls: list[Call],
        pinned: Sequence[tuple[Segment, int]],
        watched: bool,
    ) -> None:
        """Write this node's ranks of `version`, kept in `pinned` slots until it is complete if they are to be `watched`
        for a verdict; whatever goes wrong is an event."""
        begun = time.monotonic()
        segments, ranks = list(seen.segments.values()), list(seen.segments)
        folder, final = checkpoint.partial_of(base, version), checkpoint.folder_of(base, version)
        self._writing, self._last = version, max(version, self._last or version)
        for call in calls:
            self._take(call)
        reason = calls[0].reason if calls else "interval"
        item: _Unfinished | None = None
        try:
            if checkpoint.is_complete(final, origin):
                self._finished(_Unfinished(version, origin, ranks, begun, begun, 0, calls), final)
                return
            if len(pinned) < len(segments):
                raise SegmentError("it was overwritten on this node before it was kept")
            self._events.emit("persist.begin", **_facts(version), reason=reason, ranks=ranks)
            nbytes = 0
            for segment in segments:
                faults.reach(
                    "persist.rank.before", rank=segment.rank, iteration=version.iteration, adopted=self._adopted
                )
                kept = kept_path(self._memory.parent, segment.rank, segment.shape.layout)
                record = persist.write_rank(
                    folder, segment, version, origin, self._proceed, kept=kept, adopted=self._adopted
                )
                nbytes += record.nbytes
            slots = pinned if watched else ()
            item = _Unfinished(version, origin, ranks, begun, time.monotonic(), nbytes, calls, slots)
            self._unfinished.append(item)
        except _Stopped:
            raise
        except Exception as error:  # of the file system, of a slot that was given up, of our own: this checkpoint's end
            checkpoint.withdraw(folder, ranks)
            self._give_up(base, version, _words(error), calls)
        finally:
            self._writing = None
            for segment, index in pinned if item is None or not watched else ():
                segment.unpin(index, Pin.STORAGE)

    def _proceed(self, nbytes: int) -> None:
        if self._stopping:
            raise _Stopped

    def _complete(self, storage: Storage, base: Path, item: _Unfinished) -> None:
        """Put the manifest under a checkpoint when all files are there; or see that another node has."""
        final, folder = checkpoint.folder_of(base, item.version), checkpoint.partial_of(base, item.version)
        facts = {"adopted": self._adopted}
        late = time.monotonic() - item.written > max(self._patience, 10 * (item.written - item.begun))
        try:
            if 0 in item.ranks:
                absent = checkpoint.missing(folder, item.origin, item.version)
                item.look()
                if not absent:
                    audited = bool(storage.audits)
                    path = checkpoint.commit(
                        base, item.version, item.origin, audited=audited, heard=item.heard, **facts
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

    def _leave_off(self, base: Path, item: _Unfinished, error: Exception) -> None:
        """A checkpoint will not become complete: what this node has of it goes."""
        self._unfinished.remove(item)
        item.let_go()
        checkpoint.withdraw(checkpoint.partial_of(base, item.version), item.ranks)
        self._give_up(base, item.version, _words(error), item.calls)

    def _finished(self, item: _Unfinished, path: Path) -> None:
        """A checkpoint is complete: what was begun before it need not be any more."""
        self._done, self._failed = (item.version, path), ""
        if item in self._unfinished:
            self._unfinished.remove(item)
            item.let_go()
            seconds = time.monotonic() - item.begun
            self._events.emit(
                "persist.done", **_facts(item.version), seconds=seconds, bytes=item.nbytes, path=str(path)
            )
        notices = Notices(path.parent, self._node)
        notices.withdraw()
        notices.have(item.version)
        for call in item.calls:
            call.answer("done", **_facts(item.version), path=str(path))
        for older in [each for each in self._unfinished if each.version < item.version]:
            self._unfinished.remove(older)
            older.let_go()
            self._give_up(path.parent, older.version, "a newer checkpoint was complete first", older.calls)

    def _give_up(self, base: Path, version: Version, reason: str, calls: Sequence[Call]) -> None:
        self._failed = reason
        kept = str(self._done[1]) if self._done else None
        self._events.emit("persist.failed", **_facts(version), reason=reason, newest_complete=kept)
        Notices(base, self._node).withdraw()
        print(f"checkpoint of version {version}: {reason}; newest complete: {kept}", file=sys.stderr, flush=True)
        for call in calls:
            call.answer("failed", **_facts(version), reason=reason)

    def _prune(self, storage: Storage, base: Path, origin: Origin) -> None:
        """Remove what is older than the checkpoints to be kept."""
        removed = []
        try:
            for stored in retention.surplus(checkpoint.listing(base), storage.keep, origin.digest):
                checkpoint.remove(base / stored.name)
                removed.append(stored.name)
        except OSError as error:
            self._events.emit("persist.failed", reason=f"older checkpoints could not be removed: {_words(error)}")
        if removed:
            self._events.emit("persist.pruned", removed=removed)


def _storage(rank: int, fields: Mapping[str, Any] | None) -> Storage | None:
    """What a trainer has told, checked. Raises ProtocolError."""
    if fields is None:
        return None
    message = {"audits": 0, **fields, "do": "attach: storage"}  # older trainers do not say it
    folder = protocol.field(message, "folder", str)
    numbers = [protocol.number(message, name) for name in ("interval", "every", "keep", "world_size", "audits")]
    if not folder.startswith("/") or 0 in numbers[1:4]:
        raise ProtocolError(f"rank {rank}: attach with storage {dict(fields)}")
    return Storage(folder, *numbers)


def _pinned(seen: View, version: Version) -> list[tuple[Segment, int]]:
    """The slots of `version` in every rank, kept from now on; [] where one may be about to be overwritten."""
    found: list[tuple[Segment, int]] = []
    for segment in seen.segments.values():
        index = segment.pin(version, Pin.STORAGE)
        if index is None:
            for earlier, kept in found:
                earlier.unpin(kept, Pin.STORAGE)
            return []
        found.append((segment, index))
    return found


def _facts(version: Version) -> dict[str, int]:
    return {"lineage": version.lineage, "iteration": version.iteration}


def _absent(absent: Sequence[int], item: _Unfinished, folder: Path) -> str:
    """Why a checkpoint never became complete, with the remedy."""
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    if set(absent) | set(item.ranks) == set(range(item.origin.world_size)):
        return (
            f"nothing of ranks {shown} has appeared in {folder}: is it a folder that all nodes share? "
            "--reft-checkpoint-dir has to name one"
        )
    return f"the files of ranks {shown} have not appeared in {folder}; see the events of their nodes"


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, FtError) else f"{type(error).__name__}: {error}"
