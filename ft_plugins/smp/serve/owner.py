"""The snapshot management process: owns the segments of its node and carries out requests, one at a time.

Invariant: its death loses nothing. Segments are files in /dev/shm, the token is a file in the run directory, owners are
in the segments' headers: a new SMP adopts them all. Which segments belong to this job is decided in `leftovers`. It
imports no torch, holds no device, and takes no part in the step path.

In: messages of `protocol`, read by `requests`. Out: segments created, lineages opened, superseded trainers killed;
events.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...base import faults, files
from ...base.intake import Count, read_json, shown
from ...errors import FencedError, FtError, ProtocolError, SegmentError
from ...events import Events, catalogue
from ...snapshot.segment import paths
from ...snapshot.segment import segment as segments
from ...snapshot.segment.header import OWNER
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import voided_slots
from ...transport import protocol
from ..resize.context import PreviousStorage, ResizeContext
from ..resize.spares import SpareClient, SpareServer
from ..resize.transition import ResizeTransition
from ..storage.checkpoint_schedule import REQUEST
from ..storage.folder_lease import FolderLease
from ..storage.persister import Persister
from ..tree.node import NodeTier
from ..tree.other_nodes import reported
from ..tree.protection import Protection
from ..watch import liveness, stacks
from ..watch.hang_watch import HangWatch
from ..watch.job_history import NODE, STORAGE, JobHistory
from . import job_file, leftovers, requests
from .metrics_endpoint import MetricsEndpoint
from .node_context import NodeContext
from .node_facts import facts_of
from .status import described, signal_of

_TOKEN = TypeAdapter(Count)
_PATHS = TypeAdapter(list[Path])
_REMOVED = "removed.json"  # in the run directory: files that were removed while their memory is used
KILL_SECONDS = 20.0  # for killed trainers to be gone; a process in uninterruptible sleep may take longer
_TOUCH_SECONDS = 30.0
_FILES_SECONDS = 1.0  # between two looks whether files in shared memory are still there
_SCRAPE_SECONDS = 1.0  # for which a scrape waits for a request to be over
_PAUSE_SECONDS = 2.0  # between two looks at trainers, ten times as long as usual
# requests that are carried out under the lock; the others take it for a part of their work
_UNDER_LOCK = frozenset({"status", "watch", "fence", "hold", "restore", "shutdown", "end"})


class SnapshotProcess:
    """The SMP of one node: its segments, the token of the running incarnation, the processes it watches."""

    def __init__(self, run_dir: Path, job: str, node: str, events: Events) -> None:
        self._run_dir = run_dir
        self._job = job
        self._node = node
        self._events = events
        self._lock = threading.Lock()
        self._token_path = run_dir / "token"
        self.token = self._last_token()
        self.watched: tuple[int, int] = (0, 0)
        self.ended = threading.Event()
        self.orphan_seconds: float | None = None  # as the watched ft-run requested
        self.kept_until: float | None = None  # monotonic; None while the watched process lives
        self._detect_seconds = float("inf")  # after which a stopped trainer is lost
        self._stopped: dict[int, float] = {}  # by rank of a stopped trainer: since when (monotonic)
        self._checked = time.monotonic()  # when it was last looked for them
        self._declared = -1  # the token under which trainers were declared lost
        self._touched, self._files_checked = float("-inf"), time.monotonic()
        self._orphaned = self._removed_before()  # removed files whose memory a previous SMP held, which has died
        # files that were removed while their memory is used, as was said last; None: what a previous SMP said stands
        self._removed: list[str] | None = None if self._orphaned else []
        self._allocating: dict[int, threading.Lock] = {}  # by rank: one attach at a time, even of two incarnations
        self._segments, self._refused = leftovers.adopt(job, node, events)
        self.token = max([self.token, *(segment.header.token for segment in self._segments.values())])
        self.adopted = len(self._segments)
        self._adopted_token = self.token  # of the incarnation whose memory it is
        self._history = JobHistory(run_dir, continues=self.adopted > 0)
        context = NodeContext.of(run_dir, job, node, events, self._segments)
        self._previous, self._alarms = context.previous, context.alarms
        self._alarms.forget()  # those of a previous SMP
        self._tier = NodeTier(context)
        self.persister = Persister(context, lease=FolderLease(context, lambda: self.watched))
        self._previous_storage = PreviousStorage(context, self.persister)
        self._hangs = HangWatch(context, self._tier)
        self._metrics = MetricsEndpoint(run_dir, self._status_in_time, events)
        resize = ResizeContext(
            **vars(context), incarnation=self, previous_storage=self._previous_storage, persister=self.persister,
            tier=self._tier, lock=self._lock,
        )  # fmt: skip
        self._spare_client = SpareClient(context, self._tier)
        self._spare_server = SpareServer(resize)
        self._transition = ResizeTransition(resize)
        self._tier.serve_as_spare(self._spare_server.answer)
        self._tier.serve_status(self._status_for_others)
        self.persister.adopt({rank: segment.path for rank, segment in self._segments.items()})
        if self.adopted:
            events.emit(catalogue.SEGMENTS_ADOPTED, segments=self.adopted, token=self.token)

    def _last_token(self) -> int:
        """The last token of a previous SMP; 0 if there was none. If a crash of the machine damaged its file: the
        seconds since the epoch, which no incarnation can have reached."""
        try:
            return read_json(self._token_path, _TOKEN)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            self._events.emit(catalogue.FILE_REJECTED, path=str(self._token_path), reason=str(error))
            return int(time.time())

    def _removed_before(self) -> list[Path]:
        try:
            return read_json(self._run_dir / _REMOVED, _PATHS)
        except (OSError, ValueError):
            return []

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request. Errors of this package and of the operating system become refusals."""
        name = message.get("do")
        if not isinstance(name, str) or name not in requests.LOCAL:
            unknown = f"unknown request: {shown(name)}; known are {sorted(requests.LOCAL)}"
            return protocol.refusal(ProtocolError(unknown))
        faults.reach(f"smp.{name}.before", adopted=self.adopted)
        try:
            request = requests.local(message)
            with self._lock if name in _UNDER_LOCK else nullcontext():
                reply = {"ok": True, **getattr(self, f"_{name}")(request)}
        except (FtError, OSError) as error:
            refused = _as_refusal(name, message, error) if isinstance(error, OSError) else error
            self._events.emit(catalogue.REQUEST_REJECTED, request=name, reason=str(refused))
            reply = protocol.refusal(refused)
        faults.reach(f"smp.{name}.after", adopted=self.adopted)
        return reply

    def _status_in_time(self) -> dict[str, Any] | None:
        """For a scrape; None if a request takes too long now, or the SMP has ended."""
        if not self._lock.acquire(timeout=_SCRAPE_SECONDS):
            return None
        try:
            return None if self.ended.is_set() else self._status(requests.WithoutFields())
        finally:
            self._lock.release()

    def _status(self, request: requests.WithoutFields) -> dict[str, Any]:
        tier = self._tier.status()
        self._look(always=True)
        return {
            "pid": os.getpid(),
            "job": self._job,
            "node": self._node,
            "token": self.token,
            "watched_pid": self.watched[0],
            "watched_lives": (lives := bool(self.watched[1]) and liveness.started(self.watched[0]) == self.watched[1]),
            "ranks": len(self._segments) if lives else 0,
            "kept_seconds": None if self.kept_until is None else max(0.0, self.kept_until - time.monotonic()),
            "stopped": sorted(self._stopped),
            "signal": signal_of(self._segments.values(), tier, trainers_work=not self._stopped).value,
            "missing": [str(path) for path in self._orphaned if not path.exists()],
            "refused": [path for path in self._refused if Path(path).exists()],
            "previous_sizes": {str(size): sorted(ranks) for size, ranks in self._previous.by_size().items() if ranks},
            "node_tier": tier,
            "progress": self._hangs.status(),
            "storage": self.persister.status(),
            "metrics_error": self._metrics.failure,
            "world_size": max([self._tier.ranks, *(each.world_size for each in self._segments.values())]),
            "history": self._history.report(),
            "safe_lineage": self._transition.safe_lineage,
            "segments": [described(rank, segment) for rank, segment in sorted(self._segments.items())],
        }

    def _status_for_others(self) -> dict[str, Any]:
        """For people on other nodes. Raises ProtocolError if that takes too long now."""
        if (status := self._status_in_time()) is None:
            raise ProtocolError(f"node {self._node}: its SMP carries out a request that takes long")
        return reported(facts_of(self._run_dir, status))

    def _nodes(self, request: requests.OtherNodes) -> dict[str, Any]:
        nodes, following = self._tier.other_nodes(request.first, request.each, request.every)
        return {"nodes": nodes, "next": following}

    def _watch(self, request: requests.WatchProcess) -> dict[str, Any]:
        self.watched, self._detect_seconds = (request.pid, liveness.started(request.pid)), request.detect_seconds
        if request.orphan_seconds is not None:
            self.orphan_seconds = request.orphan_seconds
            files.write_json(self._run_dir / paths.PATIENCE_FILE, self.orphan_seconds)  # for a sweep after our death
        self._metrics.become(request.metrics)
        return {"metrics_error": self._metrics.failure}

    def _fence(self, request: requests.WithoutFields) -> dict[str, Any]:
        """Supersede the running incarnation: void its token, kill its trainers and wait until they are gone."""
        self._tier.suspend()
        self._history.fenced(any(segment.header.attached for segment in self._segments.values()))
        self.token += 1
        files.write_json(self._token_path, self.token)
        for rank, segment in self._segments.items():
            if OWNER in segment.damaged:
                reason = f"rank {rank}: the owner of its segment cannot be read; only its token keeps it from writing"
                self._events.emit(catalogue.SEGMENT_CORRUPTED, about=rank, reason=reason)
            segment.header.token = self.token
            segment.header.held = False
            segment.header.held_at = 0
        if faults.reach("fence.kill", token=self.token) != "skip":
            owners = [segment.header.owner for segment in self._segments.values()]
            alive = liveness.kill_and_wait(owners, KILL_SECONDS)
            if alive:
                raise FencedError(
                    f"node {self._node}: trainers {alive} of the superseded incarnation are still running "
                    f"{KILL_SECONDS:.0f} s after SIGKILL (a hung device?); no rank may capture before they are gone"
                )
        for segment in self._segments.values():
            segment.header.owner = (0, 0)
            segment.header.attached = False
        self._events.emit(catalogue.INCARNATION_FENCED, token=self.token)
        return {"token": self.token}

    def _hold(self, request: requests.Hold) -> dict[str, Any]:
        for segment in self._segments.values():
            segment.header.held = request.value
        return {}

    def _require_current(self, request: requests.OfRank) -> None:
        """Raises FencedError if the request is of a superseded incarnation."""
        if request.token != self.token:
            raise FencedError(
                f"rank {request.rank}: token {request.token} was superseded by {self.token}; this incarnation has ended"
            )

    def _attach(self, request: requests.Attach) -> dict[str, Any]:
        self._require_current(request)
        rank = request.rank
        path = paths.path_of(self._job, self._node, rank)
        with self._allocating.setdefault(rank, threading.Lock()):
            with self._lock:
                segment, lost = self._existing(rank, path, request)
            old = None
            if segment is None:  # without the lock: allocating takes seconds, and a node's ranks do it concurrently
                path.unlink(missing_ok=True)
                segments.create(path, request.shape, rank, request.fingerprint, request.world_size, lost=lost)
                segment = Segment(path)
            elif not segment.linked:  # no trainer writes to it: they are fenced
                old, segment = segment, segments.write_again(segment)
            with self._lock:
                if self.ended.is_set():
                    path.unlink(missing_ok=True)
                    raise FencedError(f"rank {rank}: the SMP of node {self._node} has ended meanwhile")
                self._segments[rank] = segment  # before the token is checked: the next incarnation finds it
                if old is not None:
                    old.close()
                self._require_current(request)  # a fence may have passed meanwhile
                segment.header.token = self.token
                segment.header.owner = (request.pid, liveness.started(request.pid))
                segment.header.attached = True
        self.persister.attached(rank, path, request.storage)
        return {"path": str(path), "resident_bytes": segment.resident_bytes}

    def _existing(self, rank: int, path: Path, request: requests.Attach) -> tuple[Segment | None, bool]:
        """The segment with which this rank continues, None if one is to be created; and whether state was lost by
        damage. Raises ResumeError, SegmentError."""
        segment = self._segments.get(rank)
        damage = leftovers.damage_of(segment, path)
        if damage is not None:
            self._events.emit(catalogue.SEGMENT_CORRUPTED, about=rank, path=str(path), reason=str(damage))
        elif leftovers.is_reusable(segment, path, request):
            return segment, False
        if segment is not None:
            self.persister.release([rank])  # otherwise its mapping keeps the memory, and there has to be twice as much
            self._segments.pop(rank).close()
        return None, damage is not None

    def _restore(self, request: requests.Restore) -> dict[str, Any]:
        """Open a lineage for one rank's segment; versions newer than its base become void."""
        self._require_current(request)
        segment = self._segments.get(request.rank)
        if segment is None:
            raise ProtocolError(f"rank {request.rank}: restore before attach")
        self._history.opened(request.loaded if request.base is None else request.base.iteration)
        segment.open_lineage(request.lineage, request.base, voided_slots(segment.slots(), request.base), request.run)
        return {}

    def _shutdown(self, request: requests.Shutdown) -> dict[str, Any]:
        self._require_current(request)
        self._tier.suspend()  # training has ended: silent nodes are not lost
        if request.rank in self._segments:
            self._segments[request.rank].header.owner = (0, 0)
        return {}

    # ---- other nodes ----

    def _endpoint(self, request: requests.Listen) -> dict[str, Any]:
        host, port = self._tier.endpoint(request.address, request.secret_file, request.encrypt)
        return {"host": host, "port": port}

    def _inventory(self, request: requests.WithoutFields) -> dict[str, Any]:
        return self._tier.inventory()

    def _rebuild(self, request: requests.RebuildSlot) -> dict[str, Any]:
        self._require_current(request)
        protection = job_file.read(self._run_dir, request.protection)
        shapes, into = protection.shapes, None
        if request.previous:
            if request.rank >= len(shapes):
                raise ProtocolError(f"rank {request.rank} was not in the previous job of {len(shapes)} ranks")
            into = self._previous.create(len(shapes), request.rank, shapes[request.rank], request.fingerprint)
        self._tier.rebuild(request, protection, into)
        return {}

    def _claim(self, request: requests.Protect) -> dict[str, Any]:
        self._tier.claim(self._described(request), self.token)
        return {}

    def _protect(self, request: requests.Protect) -> dict[str, Any]:
        return self._tier.protect(self._described(request), self.token)

    def _described(self, request: requests.Protect) -> Protection:
        """What to protect, once ranks that have left this node have been dropped."""
        self._require_current(request)
        protection = job_file.read(self._run_dir, request.protection)
        with self._lock:
            here = {rank for rank, node in enumerate(protection.nodes) if node == self._node}
            moved = set(self._segments) - here
            for rank in moved:
                self._segments.pop(rank).close()  # it is on another node now, where it was restored
                paths.path_of(self._job, self._node, rank).unlink(missing_ok=True)
            self.persister.release(sorted(moved))  # otherwise its mapping keeps the memory
        return protection

    # ---- resizes ----

    def _resize(self, request: requests.Resize) -> dict[str, Any]:
        self._require_current(request)
        return {"previous": self._transition.resize(request.world_size)}

    def _previous_sizes(self, request: requests.WithoutFields) -> dict[str, Any]:
        return self._transition.report()

    def _spare(self, request: requests.AskSpare) -> dict[str, Any]:
        self._require_current(request)
        return {"report": self._spare_client.ask(request.node, request.where, request.world_size, request.seconds)}

    def _settle(self, request: requests.Settle) -> dict[str, Any]:
        self._require_current(request)
        self._transition.keep_only((request.world_size, request.version) if request.version is not None else None)
        return {}

    # ---- storage ----

    def _checkpoint(self, request: requests.WriteCheckpoint) -> dict[str, Any]:
        return self.to_storage(request.reason, request.seconds, request.only_due, request.keep)

    def to_storage(
        self, reason: str, seconds: float = 0.0, only_due: bool = False, keep: bool = False
    ) -> dict[str, Any]:
        """`Persister.request`. At the end of protection also for state of previous sizes that was not restored."""
        if only_due or reason == REQUEST:
            return self.persister.request(reason, seconds, only_due, keep)
        deadline = time.monotonic() + seconds
        outcome = self.persister.request(reason, seconds)
        only_previous = outcome["state"] == "nothing"  # this size has no version: that of a previous one is the newest
        left = max(0.0, deadline - time.monotonic()) if only_previous else 0.0
        previous = self._previous_storage.request(reason, left)
        return previous if only_previous else outcome

    @property
    def storing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.persister.busy or self._previous_storage.busy

    def _end(self, request: requests.WithoutFields) -> dict[str, Any]:
        self.finish("in order", in_order=True)
        return {}

    def check_trainers(self) -> None:
        """Declare trainers lost that have been stopped for too long: their peers wait for them in a collective."""
        self._transition.drop_if_safe()
        if not (self.in_use or self.persister.needs_segments or self._previous_storage.busy):
            self._spare_server.drop_if_safe()
        now = time.monotonic()
        if now - self._checked > _PAUSE_SECONDS:
            self._stopped = {}  # this process was stopped, too: the whole node may be suspended
        self._checked = now
        self._stopped = {
            rank: self._stopped.get(rank, now)
            for rank, (pid, began) in self._owners().items()
            if began and liveness.is_stopped(pid, began)
        }
        lost = [rank for rank, since in self._stopped.items() if now - since > self._detect_seconds]
        if lost and self._declared != self.token:
            with suppress(OSError):  # a full disk: at the next look again
                self._tier.declare_lost(self.token, [f"rank {rank}" for rank in sorted(lost)])
                self._declared = self.token
        if self._declared != self.token:
            self._hangs.look(self.token, self._stopped)

    def _owners(self) -> dict[int, tuple[int, int]]:
        owners = {}
        for rank, segment in list(self._segments.items()):
            with suppress(AttributeError):  # closed meanwhile: the rank is on another node now
                owners[rank] = segment.header.owner
        return owners

    @property
    def in_use(self) -> bool:
        """Whether a trainer of this node is alive."""
        return any(began and liveness.started(pid) == began for pid, began in self._owners().values())

    def check_files(self) -> None:
        """Report files in shared memory that were removed while their memory is used. The lock is taken again."""
        if time.monotonic() - self._files_checked < _FILES_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._files_checked = time.monotonic()
            removed = [segment.path for segment in self._segments.values() if not segment.linked]
            removed += self._tier.removed_files()
            attached = [segment for segment in self._segments.values() if segment.header.attached]
            if attached and all(segment.header.opened.token > self._adopted_token for segment in attached):
                self._orphaned = []  # the ranks have started again, from what there is
            orphaned = [path for path in self._orphaned if not path.exists()]
            if self._segments and not paths.lock_of(self._job, self._node).exists():
                with suppress(FtError, OSError):  # another user's; there is another look
                    liveness.acquire(paths.lock_of(self._job, self._node))
            held = "the SMP holds their memory"
            died = (
                "the SMP that held their memory died: what they held is lost at the next restart; if you can, have the "
                "framework save a checkpoint before it"
            )
            words = " ".join(_removal(each, fate) for each, fate in ((removed, held), (orphaned, died)) if each)
            removed += orphaned
            names = [path.name for path in sorted(removed)]
            if names != self._removed:
                kind = catalogue.SEGMENTS_REMOVED if names else catalogue.SEGMENTS_RECOVERED
                reason = words or "every segment has its file again, or the ranks have started without it"
                with suppress(OSError):  # first, for an SMP that takes the place of one that dies here
                    files.write_json(self._run_dir / _REMOVED, [str(path) for path in removed])
                self._events.emit(kind, paths=[str(path) for path in removed], reason=reason)
                self._alarms.say("files", kind, reason)
                self._removed = names
        finally:
            self._lock.release()

    def look(self) -> None:
        """Record for operators how far the ranks are, unless a request is being carried out: there is another look."""
        if self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()

    def _look(self, always: bool = False) -> None:
        """Record for operators what the ranks have completed, and the newest versions. Call with the lock held."""
        tiers = {NODE: self._tier.committed, STORAGE: self.persister.newest}
        self._history.look(self._segments.values(), self.token, tiers, always)

    def touch(self) -> None:
        """Update the lock file's time and a stamp now and then, so that a sweep knows when this SMP last lived; try to
        serve the metrics again if that failed."""
        if time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touched = time.monotonic()
            with suppress(OSError):
                os.utime(paths.lock_of(self._job, self._node))
            with suppress(OSError):
                leftovers.stamp(self._run_dir)
            if self._lock.acquire(blocking=False):
                try:
                    self._metrics.again()
                finally:
                    self._lock.release()

    def finish_alone(self, reason: str, keep: bool = False) -> None:
        """`finish`, but not while a request is being carried out."""
        with self._lock:
            self.finish(reason, keep)

    def finish(self, reason: str, keep: bool = False, in_order: bool = False) -> None:
        """Remove the segments, unless another SMP shall adopt them (`keep`), and let the daemon end, even if that
        fails."""
        try:
            with suppress(AttributeError, OSError):  # a segment that is closed already
                self._look(always=True)
            self._metrics.become(None)
            self._tier.close()
            self._previous_storage.stop()
            self.persister.stop(in_order)
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            stacks.forget(self._run_dir)
            with suppress(OSError):
                (self._run_dir / _REMOVED).unlink(missing_ok=True)
            removed = 0 if keep else paths.remove(self._job, self._node)
            self._history.close()
            self._events.emit(catalogue.SMP_ENDED, reason=reason, segments=removed)
        finally:
            self.ended.set()


def _removal(removed: list[Path], fate: str) -> str:
    names = ", ".join(path.name for path in sorted(removed))
    return f"{len(removed)} files were removed ({names}), and {fate}."


def _as_refusal(name: str, message: dict[str, Any], error: OSError) -> FtError:
    """An operating system error as a refusal; a SegmentError if it is about a segment's file: a retry cannot help."""
    reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if name == "attach":
        return SegmentError(f"rank {message.get('rank')}: cannot create its segment ({reason}); remove what blocks it")
    return ProtocolError(f"the SMP could not carry out '{name}' ({reason})")
