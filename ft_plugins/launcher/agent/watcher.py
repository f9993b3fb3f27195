"""Keep the node's SMP alive while ft-run lives, and send it the agent's requests.

Invariant: an SMP that dies is replaced, with growing pauses in between; the new one adopts the segments, and knows
which ft-run to watch before it serves requests. Nothing of this is in the step path of training.

In: a job on a node, and the death of an SMP (by pidfd). Out: `smp.started`, `smp.lost`, `protection.lost` and
`protection.restored` events; tokens and progress for the agent.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from ...base.intake import Count, Text, read_json, within
from ...config import Config
from ...errors import BusyError, FencedError, FtError, ProtectionError
from ...events import Events, catalogue, say
from ...smp.serve import client as smp
from ...smp.serve.status import common, holds_nothing, leaves_at, marks_in, newest_common, progress_of
from ...smp.watch import liveness
from ...smp.watch.hang_watch import WAITING_FILE
from ...snapshot.checkpoint import checkpoint
from ...snapshot.segment.slots import Mark
from .restarts import HeldVersion

_CALL_SECONDS = 30.0  # for one request including the connection; a fence may wait for the kernel to end a process
_CHECKPOINT_CALL_SECONDS = 5.0  # for the reply, after the time for writing is over
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between two starts of an SMP that dies again
_RETRY_SECONDS = 0.05
_LOOK_SECONDS = 10.0  # for the names of checkpoints, for a message
_STAYED_SECONDS = 30.0  # an SMP that lived this long resets the pause

T = TypeVar("T")


@dataclass(frozen=True)
class _Lost:
    """`lost.json`: nodes and ranks that the SMPs have declared lost in the incarnation with that token."""

    token: Count
    lost: tuple[Text, ...]


@dataclass(frozen=True)
class _Waiting:
    """`WAITING_FILE`: that the job of that token may only be waiting, for people."""

    token: Count
    words: Text


_LOST, _WAITING = TypeAdapter(_Lost), TypeAdapter(_Waiting)


@dataclass(frozen=True)
class Job:
    """A job on this node, as its ft-run knows it. `command` starts another node of it, '' if unknown."""

    config: Config
    name: str
    node: str
    run_dir: Path
    command: str = ""


class Watcher:
    """The SMP of `job` on this node. `start` starts it; then a thread replaces it whenever it dies."""

    def __init__(
        self,
        job: Job,
        events: Events,
        ensure: Callable[..., int] = smp.ensure,
        connect: Callable[..., Any] = smp.Client,
        patience: float = 60.0,
    ) -> None:
        """`patience`: seconds for which a request is repeated while the SMP is being replaced. An SMP that does not
        answer is ended only if it is older than that."""
        self._job = job
        self._events = events
        self._ensure = ensure
        self._connect = connect
        self._patience = patience
        self._pid = self._started = 0
        self._waiting: _Waiting | None = None  # what was printed
        self._starting = threading.Lock()
        self._stop = os.pipe()
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Start the SMP and watch it from now on; returns its pid. Raises ProtectionError if there is none, BusyError
        if the segments of this job belong to another SMP."""
        self._bring_up()
        self._thread = threading.Thread(target=self._watch, name="ft-smp-watcher", daemon=True)
        self._thread.start()
        return self._pid

    def fence(self) -> int:
        """End the rest of the old incarnation; returns the new one's token. Raises FencedError, ProtectionError."""
        return self._request("fence", lambda client: int(client.fence()))

    def status(self) -> dict[str, Any]:
        """What the SMP reports. Raises ProtectionError."""
        return self._request("status", lambda client: dict(client.status()))

    def newest(self) -> int | None:
        """The newest iteration of which all ranks of this node have a snapshot. Raises ProtectionError."""
        status = self.status()
        version = None if status.get("missing") else newest_common(status)
        return version.iteration if version else None

    def begun(self) -> bool:
        """Whether a rank of this node has completed an iteration, or there is a version. Raises ProtectionError."""
        status = self.status()
        return not holds_nothing(status) or any(segment["completed"] for segment in status["segments"])

    def replaceable(self) -> bool:
        """Whether the other nodes can rebuild what this one holds, of a version that they have committed. Raises
        ProtectionError."""
        tier = self.status()["node_tier"]
        return bool(tier["losses"] and tier["committed"])

    def progress(self, token: int) -> tuple[int, int] | None:
        """See `smp.serve.status.progress_of`. Raises ProtectionError."""
        return progress_of(self.status(), token)

    def held(self) -> list[HeldVersion]:
        """The versions that all ranks of this node hold, and complete checkpoints. Raises ProtectionError."""
        status = self.status()
        marks = marks_in(status)
        versions = [] if status.get("missing") else common(status)  # ranks without a segment hold nothing
        found = [HeldVersion(each.iteration, "memory", marks.get(each) is Mark.CERTIFIED) for each in versions]
        if folder := status["storage"].get("path"):
            with suppress(OSError, TimeoutError):
                stored = within(_LOOK_SECONDS, lambda: checkpoint.listing(Path(folder)))
                kept = [each for each in stored if each.complete and not each.problem]
                found += [HeldVersion(each.version.iteration, "storage", bool(each.certified)) for each in kept]
        return found

    def empty(self) -> bool:
        """Whether no segment of this node holds a version, and the job is not known to have continued without this
        node. Raises ProtectionError."""
        return holds_nothing(self.status())

    def hold(self, value: int) -> None:
        """Have the ranks of this node wait, or no longer, at the next version, or all ranks of the job end in order: a
        value of `Header.held`. Raises ProtectionError."""
        self._request("hold", lambda client: client.hold(value))

    def leaves_at(self) -> tuple[int | None, int]:
        """See `smp.serve.status.leaves_at`. Raises ProtectionError, also if nodes do not protect each other."""
        status = self.status()
        if any(segment["attached"] for segment in status["segments"]) and not status["node_tier"]["losses"]:
            raise ProtectionError("nodes do not protect each other now; training goes on with this node")
        return leaves_at(status)

    def lost(self, token: int) -> list[str]:
        """The nodes and ranks that the SMPs have declared lost under `token`. Cheap: reads one file."""
        try:
            content = read_json(self._job.run_dir / "lost.json", _LOST)
        except (OSError, ValueError):
            return []
        return list(content.lost) if content.token == token else []

    def say_waiting(self, token: int) -> None:
        """Print once that ranks under `token` complete nothing but may be at work. Cheap: reads one file."""
        with suppress(OSError, ValueError):
            found = read_json(self._job.run_dir / WAITING_FILE, _WAITING)
            if found.token == token and found != self._waiting:
                self._waiting = found
                say(found.words, alarm=True, who="ft-run: ")

    def checkpoint(self, reason: str, only_due: bool = False, seconds: float | None = None) -> dict[str, Any]:
        """Have the newest version (`only_due`: only a due one) written to storage; wait for it, by default as long as
        configured.

        Returns what `smp.Client.checkpoint` does. Raises ProtectionError if there is no SMP.
        """
        if seconds is None:
            seconds = self._job.config.capture.checkpoint_seconds if self._job.config.capture else 0.0
        try:
            with self._connect(self._job.run_dir, _CHECKPOINT_CALL_SECONDS) as client:
                return dict(client.checkpoint(reason, seconds, only_due))
        except FtError as error:
            raise ProtectionError(f"node {self._job.node}: no checkpoint was written: {error}") from error

    def end(self) -> None:
        """After an orderly end: stop watching, remove the segments, end the SMP. Raises ProtectionError."""
        self.stop()
        if not self._thread:
            return

        self._bring_up()  # if the SMP has just died, another one cleans up
        self._request("end", lambda client: client.end())

    def stop(self) -> None:
        """Stop watching; the SMP stays. Idempotent."""
        if self._stop[1] < 0:
            return
        os.close(self._stop[1])  # makes the other end readable
        if self._thread:
            self._thread.join()
        os.close(self._stop[0])
        self._stop = (-1, -1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Start no SMP meanwhile: this process forks, and no other thread may hold locks then."""
        with self._starting:
            yield

    def close_copies(self) -> None:
        """In a forked child: close the descriptors of the parent's watcher."""
        for descriptor in self._stop:
            if descriptor >= 0:
                os.close(descriptor)
        self._stop = (-1, -1)
        self._thread = None

    def _bring_up(self) -> None:
        """Start or find the SMP, and name this ft-run as the one to watch; end a hung SMP first. Raises
        ProtectionError, BusyError."""
        with self._starting:
            try:
                pid = self._ensure_watching()
            except ProtectionError as error:
                if not self._end_hung("watch", error):
                    raise
                pid = self._ensure_watching()
            if pid != self._pid:
                self._pid, self._started = pid, liveness.started(pid)
                self._events.emit(catalogue.SMP_STARTED, pid=pid)

    def _ensure_watching(self) -> int:
        """The pid of the SMP, which watches this ft-run. Raises ProtectionError, BusyError."""
        job, config = self._job, self._job.config
        try:
            pid = self._ensure(
                job.run_dir, job.name, job.node, config.orphan_seconds, config.faults, _CALL_SECONDS, os.getpid()
            )
            with self._connect(job.run_dir, _CALL_SECONDS) as client:
                unserved = client.watch(
                    os.getpid(), config.detect_seconds, config.orphan_seconds, config.metrics_place
                )
            if unserved:
                say(catalogue.METRICS_FAILED.sentence(f"node {job.node}", unserved), alarm=True, who="ft-run: ")
        except BusyError:
            raise
        except (FtError, OSError, subprocess.SubprocessError) as error:
            raise ProtectionError(f"there is no SMP on node {job.node}: {error}") from error
        return pid

    def _end_hung(self, request: str, error: FtError) -> bool:
        """End the SMP that has not answered `request`, so that another one adopts its segments. False if there is none,
        or if it is young and may still answer."""
        # the lock's holder, not `_pid`: that is an earlier SMP if this one has never answered
        known = liveness.holder(self._job.run_dir / "smp.lock") or [(self._pid, self._started)]
        alive = [(pid, started) for pid, started in known if started and liveness.started(pid) == started]
        hung = [(pid, started) for pid, started in alive if liveness.age(started) > self._patience]
        for pid, _ in hung:
            self._events.emit(catalogue.SMP_HUNG, pid=pid, request=request, reason=str(error))
        liveness.kill_and_wait(hung, _CALL_SECONDS)
        return bool(hung)

    def _request(self, name: str, ask: Callable[[Any], T]) -> T:
        """Repeat a request until it is answered, for `patience` seconds: the SMP may be being replaced."""
        deadline = time.monotonic() + self._patience
        ended = False
        while True:
            try:
                with self._connect(self._job.run_dir, min(_CALL_SECONDS, self._patience)) as client:
                    return ask(client)
            except FencedError:
                raise
            except FtError as error:
                if time.monotonic() >= deadline and not ended:  # it hangs: another one adopts its segments
                    self._end_hung(name, error)
                    ended, deadline = True, time.monotonic() + self._patience
                if time.monotonic() >= deadline:
                    raise ProtectionError(
                        f"node {self._job.node}: the SMP did not answer '{name}' for {self._patience:.0f} s ({error}); "
                        "its snapshots are still in shared memory: give the same command again"
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def _watch(self) -> None:
        """The thread: replace the SMP whenever it dies, until `stop`."""
        pause = _FIRST_PAUSE
        while True:
            began = time.monotonic()
            if not self._wait_for_death(self._pid):
                return
            self._events.emit(catalogue.SMP_LOST, pid=self._pid)
            if time.monotonic() - began > _STAYED_SECONDS:
                pause = _FIRST_PAUSE
            while True:
                try:
                    self._bring_up()
                    reason = f"a new SMP, pid {self._pid}, has adopted the snapshots of the lost one"
                    self._events.emit(catalogue.PROTECTION_RESTORED, reason=reason)
                    break
                except (ProtectionError, BusyError) as error:  # training continues unprotected until the next attempt
                    self._events.emit(catalogue.PROTECTION_LOST, reason=str(error))
                if self._stopped_within(pause):
                    return
                pause = min(2 * pause, _LONGEST_PAUSE)
            if self._stopped_within(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _stopped_within(self, seconds: float) -> bool:
        """Whether `stop` is called within `seconds`."""
        return bool(select.select([self._stop[0]], [], [], seconds)[0])

    def _wait_for_death(self, pid: int) -> bool:
        """Wait; True when `pid` has ended, False when `stop` is called."""
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return not self._stopped_within(0)
        try:
            poller = select.poll()
            poller.register(process, select.POLLIN)
            poller.register(self._stop[0], select.POLLIN | select.POLLHUP)
            ready = {descriptor for descriptor, _ in poller.poll()}
        finally:
            os.close(process)
        return self._stop[0] not in ready
