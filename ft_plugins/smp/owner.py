"""What the snapshot management process owns and does: the segments of its node, requests about them, one at a time.

Invariant: nothing that it knows is lost with it. Segments are files in /dev/shm, the token is a file in the run
directory, owners stand in the segments' headers: a new SMP adopts them all. It imports no torch and holds no device,
and takes no part in the step path.

In: requests of `protocol`. Out: segments created, lineages opened, superseded trainers killed; events.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from .. import faults, files
from ..errors import CorruptHeaderError, FencedError, FtError, ProtocolError, ResumeError, SegmentError
from ..events import Events, catalogue
from ..intake import Count, read_json, shown
from ..snapshot import paths
from ..snapshot import segment as segments
from ..snapshot.paths import path_of
from ..snapshot.segment import OWNER, Segment
from ..snapshot.shape import Shape
from ..snapshot.slots import SlotState, void
from . import liveness, protocol, requests
from .alarms import Alarms
from .attaching import plain, require_same_job, shape_of
from .node import NodeTier
from .peers import read_maybe, read_version
from .persister import Persister
from .protection import Protection
from .resize.context import ResizeContext
from .resize.previous_segments import PreviousSegments
from .resize.previous_storage import PreviousStorage
from .resize.spares import SpareClient, SpareServer
from .resize.transition import ResizeTransition
from .signals import Signal, signal
from .turns import REQUEST

_TOKEN = TypeAdapter(Count)
KILL_SECONDS = 20.0  # for superseded trainers to be gone; a process in uninterruptible sleep may take longer
_TOUCH_SECONDS = 30.0
_RANKS = 1 << 32  # a number beyond is no rank


class SnapshotProcess:
    """The state of the daemon: which segments there are, the token, whom it watches."""

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
        self.orphan_seconds: float | None = None  # as the ft-run that watches wants it
        self._silence = float("inf")  # seconds after which a stopped trainer is lost
        self._stopped: dict[int, float] = {}  # by rank, since when
        self._declared = -1  # the token under which trainers were declared lost
        self._touched = time.monotonic()
        self._segments: dict[int, Segment] = {}
        self._refused: list[str] = []  # files that are in the place of segments, and are not touched
        self._allocating: dict[int, threading.Lock] = {}  # one attach of a rank at a time, also of two incarnations
        for path in paths.segments_of(job, node):
            try:
                adopted = Segment(path)
                if path != path_of(job, node, adopted.rank):
                    raise SegmentError(f"segment {path} is that of rank {adopted.rank}; 'ft-plugins sweep' removes it")
            except SegmentError as error:  # a foreign file is refused at attach, a damaged one replaced
                damaged = isinstance(error, CorruptHeaderError)
                events.emit(
                    catalogue.SEGMENT_CORRUPTED if damaged else catalogue.FILE_REJECTED,
                    path=str(path),
                    reason=str(error),
                )
                self._refused.append(str(path))
                continue
            self._segments[adopted.rank] = adopted
            self.token = max(self.token, adopted.token)
        self.adopted = len(self._segments)
        self._previous = PreviousSegments(job, node)
        self._alarms = Alarms(run_dir)
        self._alarms.forget()  # what an SMP before this one wanted to say
        self._tier = NodeTier(run_dir, job, node, self._segments, self._previous, events, self._alarms)
        self.persister = Persister(run_dir, job, node, events, alarms=self._alarms)
        self._previous_storage = PreviousStorage(
            run_dir, job, node, self._previous, self.persister, events, self._alarms
        )
        context = ResizeContext(
            self, self._segments, self._previous, self._previous_storage, self.persister, self._tier, self._lock, events
        )
        self._spare_client = SpareClient(run_dir, self._tier, events)
        self._spare_server = SpareServer(run_dir, node, context)
        self._transition = ResizeTransition(context, self._spare_client)
        self._tier.serve_outside(self._spare_server.answer)
        self.persister.adopt({rank: segment.path for rank, segment in self._segments.items()})
        if self._segments:
            events.emit(catalogue.SEGMENTS_ADOPTED, segments=len(self._segments), token=self.token)

    def _last_token(self) -> int:
        """The token that an SMP before this one gave out last; 0 for none. Where its file is damaged (by a crash of the
        machine) one that none can have reached: the seconds since the epoch."""
        try:
            return read_json(self._token_path, _TOKEN)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            self._events.emit(catalogue.FILE_REJECTED, path=str(self._token_path), reason=str(error))
            return int(time.time())

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request. Errors of this package and of the system become refusals."""
        name = request.get("do")
        known = protocol.REQUESTS | protocol.NODE_REQUESTS | protocol.SIZE_REQUESTS | protocol.STORAGE_REQUESTS
        if not isinstance(name, str) or name not in known:
            return protocol.refusal(ProtocolError(f"unknown request: {shown(name)}; known are {sorted(known)}"))
        faults.reach(f"smp.{name}.before", adopted=self.adopted)
        try:
            alone = name in protocol.REQUESTS and name != "attach"  # the others take locks where they need them
            with self._lock if alone else nullcontext():
                reply = {"ok": True, **getattr(self, f"_{name}")(request)}
        except (FtError, OSError) as error:
            refused = _in_words(name, request, error) if isinstance(error, OSError) else error
            self._events.emit(catalogue.REQUEST_REJECTED, request=name, reason=str(refused))
            reply = protocol.refusal(refused)
        faults.reach(f"smp.{name}.after", adopted=self.adopted)
        return reply

    def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "job": self._job,
            "node": self._node,
            "token": self.token,
            "watched_pid": self.watched[0],
            "signal": self._signal().value,
            "refused": [path for path in self._refused if Path(path).exists()],
            "previous_sizes": {str(size): sorted(ranks) for size, ranks in self._previous.by_size().items() if ranks},
            "node_tier": self._tier.status(),
            "storage": self.persister.status(),
            "segments": [
                {
                    "rank": rank,
                    "path": str(segment.path),
                    "bytes": segment.shape.total,
                    "resident_bytes": segment.resident_bytes,
                    "owner_pid": segment.owner[0],
                    "attached": segment.attached,
                    "completed": segment.completed,
                    "lineage": segment.lineage,
                    "lineage_token": segment.lineage_token,
                    "slots": [
                        {
                            "state": slot.state.name,
                            "lineage": slot.version.lineage if slot.version else None,
                            "iteration": slot.version.iteration if slot.version else None,
                            **({"mark": slot.mark.word} if slot.mark else {}),
                        }
                        for slot in segment.slots()
                    ],
                }
                for rank, segment in sorted(self._segments.items())
            ],
        }

    def _signal(self) -> Signal:
        """How this node stands."""
        owners = [found.owner for found in self._segments.values() if found.attached and found.owner[1]]
        slots = [slot for found in self._segments.values() for slot in found.slots()]
        tier = self._tier.status()
        clean = any(slot.state is SlotState.CLEAN for slot in slots)
        return signal(
            answers=True,
            trainers_work=not self._stopped and all(liveness.started(pid) == began for pid, began in owners),
            on_its_way=bool(tier["exchange"]) or any(s.state is SlotState.DIRTY and s.version for s in slots),
            complete=bool(tier["counts"]) if tier["nodes"] else clean,
        )

    def _watch(self, request: dict[str, Any]) -> dict[str, Any]:
        pid = protocol.number(request, "pid")
        silence = requests.seconds(request, "detect_seconds")
        self.watched, self._silence = (pid, liveness.started(pid)), silence
        if "orphan_seconds" in request:  # a new ft-run may have another mind
            self.orphan_seconds = requests.seconds(request, "orphan_seconds")
            # for a sweep after this process's death
            files.write_json(self._run_dir / paths.PATIENCE_FILE, self.orphan_seconds)
        return {}

    def _fence(self, request: dict[str, Any]) -> dict[str, Any]:
        """Supersede the running incarnation: its token is void at once, its trainers are gone before this returns."""
        self._tier.suspend()
        self.token += 1
        files.write_json(self._token_path, self.token)
        for rank, segment in self._segments.items():
            if OWNER in segment.damaged:
                reason = f"rank {rank}: who writes its segment cannot be read; a trainer that lives on is fenced alone"
                self._events.emit(catalogue.SEGMENT_CORRUPTED, about=rank, reason=reason)
            segment.token = self.token
        if faults.reach("fence.kill", token=self.token) != "skip":
            owners = [segment.owner for segment in self._segments.values()]
            alive = liveness.kill_and_wait(owners, KILL_SECONDS)
            if alive:
                raise FencedError(
                    f"node {self._node}: trainers {alive} of the superseded incarnation were not gone "
                    f"{KILL_SECONDS:.0f} s after SIGKILL (a hung device?); nobody may capture before they are"
                )
        for segment in self._segments.values():
            segment.owner = (0, 0)
            segment.attached = False
        self._events.emit(catalogue.INCARNATION_FENCED, token=self.token)
        return {"token": self.token}

    def _check_token(self, request: dict[str, Any]) -> int:
        rank, token = protocol.number(request, "rank", _RANKS), protocol.field(request, "token", int)
        if token != self.token:
            raise FencedError(
                f"rank {rank}: token {token} was superseded by {self.token}; this incarnation may not go on"
            )
        return rank

    def _attach(self, request: dict[str, Any]) -> dict[str, Any]:
        rank = self._check_token(request)
        shape = shape_of(rank, protocol.field(request, "shape", dict))
        fingerprint = plain(rank, protocol.field(request, "fingerprint", dict))
        pid = protocol.number(request, "pid")
        world_size = protocol.number(request, "world_size", _RANKS) if "world_size" in request else 0
        fresh = protocol.field(request, "fresh", bool)
        path = path_of(self._job, self._node, rank)
        with self._allocating.setdefault(rank, threading.Lock()):
            with self._lock:
                lost = self._damaged(rank, path)
                found = None if lost else self._reusable(rank, path, shape, fingerprint, fresh)
            if found is None:  # without the lock: allocating takes seconds, and a node's ranks do it side by side
                path.unlink(missing_ok=True)
                segments.create(path, shape, rank, fingerprint, world_size, lost=lost)
                found = Segment(path)
            with self._lock:
                if self.ended.is_set():
                    path.unlink(missing_ok=True)
                    raise FencedError(f"rank {rank}: the job's SMP on node {self._node} has ended meanwhile")
                self._segments[rank] = found  # before the token is checked: the next incarnation finds it
                self._check_token(request)  # once more: a fence may have passed meanwhile
                found.token = self.token
                found.owner = (pid, liveness.started(pid))
                found.attached = True
        self.persister.told(rank, path, protocol.field(request, "storage", dict) if request.get("storage") else None)
        return {"path": str(path), "resident_bytes": found.resident_bytes}

    def _damaged(self, rank: int, path: Path) -> bool:
        """Whether the segment that this rank has is damaged: then it is lost, and another one takes its place."""
        found = self._segments.get(rank)
        try:
            if found is not None:
                found.check()
            elif path.exists():
                Segment(path)
        except SegmentError as error:
            if found is None and not isinstance(error, CorruptHeaderError):
                return False  # a foreign file: refused
            self._events.emit(catalogue.SEGMENT_CORRUPTED, about=rank, path=str(path), reason=str(error))
            if found is not None:
                self._segments.pop(rank).close()
            return True
        return False

    def _reusable(
        self, rank: int, path: Path, shape: Shape, fingerprint: dict[str, Any], fresh: bool
    ) -> Segment | None:
        """The segment that this rank has already, None when one is to be made. Raises ResumeError, SegmentError."""
        found = self._segments.get(rank)
        if found is None and path.exists() and not fresh:
            raise SegmentError(
                f"rank {rank}: {path} is there but is no segment of this version; "
                "'ft-plugins end' or --ftp-resume fresh removes it"
            )
        if found is None:
            return None
        try:
            require_same_job(rank, found, shape, fingerprint)
        except (ResumeError, SegmentError):
            if not fresh:
                raise
            self._segments.pop(rank).close()
            return None
        return found

    def _restore(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open a lineage for one rank's segment: what is newer than its base is void."""
        rank = self._check_token(request)
        lineage = protocol.number(request, "lineage")
        base = read_maybe(request.get("base"))
        found = self._segments.get(rank)
        if found is None:
            raise ProtocolError(f"rank {rank}: restore before attach")
        found.open_lineage(lineage, base, void(found.slots(), base))
        return {}

    def _shutdown(self, request: dict[str, Any]) -> dict[str, Any]:
        """This rank has ended in order."""
        rank = self._check_token(request)
        self._tier.suspend()  # training is over: nobody is missed any more
        if rank in self._segments:
            self._segments[rank].owner = (0, 0)
        return {}

    # ---- other nodes ----

    def _endpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        host, port = self._tier.endpoint(
            requests.field(requests.ADDRESS, request, "address"), protocol.field(request, "secret_file", str),
            protocol.field(request, "encrypt", bool),
        )  # fmt: skip
        return {"host": host, "port": port}

    def _inventory(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._tier.inventory()

    def _rebuild(self, request: dict[str, Any]) -> dict[str, Any]:
        rank = self._check_token(request)
        told = Protection.read(protocol.field(request, "protection", dict))
        into = None
        if protocol.field(request, "former", bool):
            if rank >= len(told.shapes):
                raise ProtocolError(f"rank {rank} was not in the former job of {len(told.shapes)} ranks")
            fingerprint = plain(rank, protocol.field(request, "fingerprint", dict))
            into = self._previous.create(len(told.shapes), rank, told.shapes[rank], fingerprint)
        self._tier.rebuild(rank, self.token, told, request, into)
        return {}

    # ---- the job at another size ----

    def _resize(self, request: dict[str, Any]) -> dict[str, Any]:
        """The job has so many ranks now: segments of other sizes are moved out of the way."""
        self._check_token(request)
        return {"former": self._transition.resize(protocol.number(request, "world_size", _RANKS))}

    def _former(self, request: dict[str, Any]) -> dict[str, Any]:
        """The state of previous sizes on this node, and the parity that belongs to it."""
        return self._transition.report()

    def _spare(self, request: dict[str, Any]) -> dict[str, Any]:
        """What another node has of other sizes, which has no part in the job."""
        self._check_token(request)
        seconds, where = requests.seconds(request, "seconds"), requests.field(requests.ENDPOINT, request, "where")
        world_size, node = protocol.number(request, "world_size", _RANKS), protocol.field(request, "node", str)
        return {"told": self._spare_client.ask(node, where, world_size, seconds)}

    def _settle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Keep only that version of that previous size; nothing, if none is named."""
        self._check_token(request)
        spares = requests.field(requests.ENDPOINTS, request, "spares")
        taken = None
        if request.get("version") is not None:
            taken = protocol.number(request, "world_size", _RANKS), read_version(request["version"])
        self._spare_client.release_later(spares)
        self._transition.keep_only(taken)
        return {}

    def _protect(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_token(request)
        told = Protection.read(protocol.field(request, "protection", dict))
        with self._lock:
            moved = set(self._segments) - {r for r, node in enumerate(told.nodes) if node == self._node}
            for rank in moved:
                self._segments.pop(rank).close()  # it is on another node now, and was restored there
                path_of(self._job, self._node, rank).unlink(missing_ok=True)
            self.persister.let_go(sorted(moved))  # else its mapping keeps the memory
        return self._tier.protect(told, self.token)

    def _checkpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        reason, seconds = protocol.field(request, "reason", str), requests.seconds(request, "seconds")
        keep = protocol.field(request, "keep", bool) if "keep" in request else False
        return self.to_storage(reason, seconds, protocol.field(request, "only_due", bool), keep)

    def to_storage(
        self, reason: str, seconds: float = 0.0, only_due: bool = False, keep: bool = False
    ) -> dict[str, Any]:
        """`Persister.request`; at the end of protection also for state of previous sizes that was not restored."""
        if only_due or reason == REQUEST:
            return self.persister.request(reason, seconds, only_due, keep)
        deadline = time.monotonic() + seconds
        found = self.persister.request(reason, seconds)
        nothing = found["state"] == "nothing"  # of this size: the state of a previous one is the newest
        previous = self._previous_storage.request(reason, max(0.0, deadline - time.monotonic()) if nothing else 0.0)
        return previous if nothing else found

    @property
    def storing(self) -> bool:
        """Whether something is on its way to storage."""
        return self.persister.busy or self._previous_storage.busy

    def _end(self, request: dict[str, Any]) -> dict[str, Any]:
        self.finish("in order")
        return {}

    def look_at_trainers(self) -> None:
        """A trainer that has been stopped for too long is lost: its peers wait for it in a collective."""
        self._transition.drop_if_safe()
        now = time.monotonic()
        stopped = {}
        for rank, segment in list(self._segments.items()):
            pid, began = segment.owner
            if began and liveness.is_stopped(pid, began):
                stopped[rank] = self._stopped.get(rank, now)
        self._stopped = stopped
        lost = [rank for rank, since in stopped.items() if now - since > self._silence]
        if lost and self._declared != self.token:
            self._declared = self.token
            self._tier.declare(self.token, [f"rank {rank}" for rank in sorted(lost)])

    def touch(self) -> None:
        """Now and then, leave the time at the lock file: a sweep asks how long nobody has been here."""
        if time.monotonic() - self._touched < _TOUCH_SECONDS:
            return
        self._touched = time.monotonic()
        lock = paths.lock_of(self._job, self._node)
        if lock.exists():
            os.utime(lock)

    def finish_alone(self, reason: str) -> None:
        """`finish`, when no request is being carried out."""
        with self._lock:
            self.finish(reason)

    def finish(self, reason: str) -> None:
        """Remove the segments; the daemon ends, whatever is in the way."""
        try:
            self._tier.close()
            self._spare_client.forget()
            self._spare_server.forget()
            self._previous_storage.stop()
            self.persister.stop()
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            removed = paths.remove(self._job, self._node)
            self._events.emit(catalogue.SMP_ENDED, reason=reason, segments=removed)
        finally:
            self.ended.set()


def _in_words(name: str, request: dict[str, Any], error: OSError) -> FtError:
    """What the system would not let us do: for good where a segment's file is in question, else perhaps not again."""
    reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if name == "attach":
        return SegmentError(f"rank {request.get('rank')}: no segment can be made ({reason}); remove what is in its way")
    return ProtocolError(f"the SMP could not carry out '{name}' ({reason})")
