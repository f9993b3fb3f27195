"""Keeps the node's SMP alive for as long as ft-run lives, and speaks to it for the agent.

Invariant: an SMP that dies is replaced, at most once per growing pause; the new one adopts the segments and is told
whom to watch before anyone is served. Training is not disturbed: nothing of this is in the step path.

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from ..config import Config
from ..errors import BusyError, FencedError, FtError, ProtectionError
from ..events import Events, catalogue
from ..intake import Count, Text, read_json
from ..smp import client as smp
from ..smp import liveness
from ..smp.status import newest_common

_CALL_SECONDS = 30.0  # for one request, connecting included; a fence may wait for the kernel to end a process
_CHECKPOINT_CALL_SECONDS = 5.0  # for the answer to come after the time for writing is over
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between two starts of an SMP that does not stay
_RETRY_SECONDS = 0.05
_STAYED_SECONDS = 30.0  # an SMP that lived so long starts the pauses anew

T = TypeVar("T")


@dataclass(frozen=True)
class _Lost:
    """What `lost.json` says: those that the SMPs have declared lost, in the incarnation with that token."""

    token: Count
    lost: tuple[Text, ...]


_LOST = TypeAdapter(_Lost)


@dataclass(frozen=True)
class Job:
    """A job on this node, as its ft-run knows it."""

    config: Config
    name: str
    node: str
    run_dir: Path


class Watcher:
    """The SMP of `job` as its launcher sees it. `start` brings it up; then a thread replaces it whenever it dies."""

    def __init__(
        self,
        job: Job,
        events: Events,
        ensure: Callable[..., int] = smp.ensure,
        connect: Callable[..., Any] = smp.Client,
        patience: float = 60.0,
    ) -> None:
        """`patience`: seconds for which a request is tried again while the SMP is being replaced, and for which one has
        to have lived, not to be taken for one that is still about to answer."""
        self._job = job
        self._events = events
        self._ensure = ensure
        self._connect = connect
        self._patience = patience
        self._pid = self._began = 0
        self._busy = threading.Lock()
        self._stop = os.pipe()
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Bring the SMP up and watch it from now on; returns its pid. Raises ProtectionError when it cannot be had,
        BusyError when the memory of this job is another's."""
        self._bring_up()
        self._thread = threading.Thread(target=self._watch, name="ft-smp-watcher", daemon=True)
        self._thread.start()
        return self._pid

    def fence(self) -> int:
        """End what is left of the old incarnation; returns the new one's token. Raises FencedError, ProtectionError."""
        return self._request("fence", lambda client: int(client.fence()))

    def newest(self) -> int | None:
        """The newest iteration that all ranks of this node hold complete. Raises ProtectionError."""
        found = self._request("status", lambda client: newest_common(client.status()))
        return found.iteration if found else None

    def begun(self) -> bool:
        """Whether a rank of this node has completed an iteration, or there is a version. Raises ProtectionError."""
        found = self._request("status", lambda client: client.status())
        return not _empty(found) or any(segment["completed"] for segment in found["segments"])

    def empty(self) -> bool:
        """Whether no segment of this node holds a version, nor is it known that the job went on without this node.
        Raises ProtectionError."""
        return _empty(self._request("status", lambda client: client.status()))

    def opened_since(self, token: int) -> bool:
        """Whether a rank of this node has opened a lineage under `token` or a later one. Raises ProtectionError."""
        return self._request(
            "status",
            lambda client: any(segment["lineage_token"] >= token for segment in client.status()["segments"]),
        )

    def lost(self, token: int) -> list[str]:
        """The nodes and ranks that the SMPs have declared lost under `token`; a look at a file, to be asked often."""
        try:
            found = read_json(self._job.run_dir / "lost.json", _LOST)
        except (OSError, ValueError):
            return []
        return list(found.lost) if found.token == token else []

    def checkpoint(self, reason: str, only_due: bool = False) -> dict[str, Any]:
        """Have the newest version (or what was due anyway) written to storage, and wait for it as long as configured.

        Returns what `smp.Client.checkpoint` does. Raises ProtectionError when there is no SMP to do it.
        """
        seconds = self._job.config.capture.checkpoint_seconds if self._job.config.capture else 0.0
        try:
            with self._connect(self._job.run_dir, _CHECKPOINT_CALL_SECONDS) as client:
                found: dict[str, Any] = client.checkpoint(reason, seconds, only_due)
                return found
        except FtError as error:
            raise ProtectionError(f"node {self._job.node}: no checkpoint was written: {error}") from error

    def end(self) -> None:
        """The job ended in order: no more watching, the segments removed, the SMP gone. Raises ProtectionError."""
        self.stop()
        if not self._thread:
            return

        def end(client: Any) -> None:
            client.end()

        self._bring_up()  # an SMP that died just now has to come back to clean up
        self._request("end", end)

    def stop(self) -> None:
        """Stop watching; the SMP stays. May be called twice."""
        if self._stop[1] < 0:
            return
        os.close(self._stop[1])  # the reader's end becomes readable
        if self._thread:
            self._thread.join()
        os.close(self._stop[0])
        self._stop = (-1, -1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No SMP is started meanwhile: for forking, which must not happen while another thread holds locks."""
        with self._busy:
            yield

    def close_copies(self) -> None:
        """In a forked child: close what belongs to the parent's watcher."""
        for descriptor in self._stop:
            if descriptor >= 0:
                os.close(descriptor)
        self._stop = (-1, -1)
        self._thread = None

    def _bring_up(self) -> None:
        """Start or find the SMP, and tell it whom to watch; one that hangs, maybe for days, is ended before. Raises
        ProtectionError, BusyError."""
        with self._busy:
            try:
                pid = self._watched()
            except ProtectionError as error:
                if not self._end_hung("watch", error):
                    raise
                pid = self._watched()
            if pid != self._pid:
                self._pid, self._began = pid, liveness.started(pid)
                self._events.emit(catalogue.SMP_STARTED, pid=pid)

    def _watched(self) -> int:
        """The pid of the SMP that has been told whom to watch. Raises ProtectionError, BusyError."""
        job, config = self._job, self._job.config
        try:
            pid = self._ensure(
                job.run_dir, job.name, job.node, config.orphan_seconds, config.faults, _CALL_SECONDS, os.getpid()
            )
            with self._connect(job.run_dir, _CALL_SECONDS) as client:
                client.watch(os.getpid(), config.detect_seconds, config.orphan_seconds)
        except BusyError:
            raise
        except (FtError, OSError, subprocess.SubprocessError) as error:
            raise ProtectionError(f"there is no SMP on node {job.node}: {error}") from error
        return pid

    def _end_hung(self, request: str, error: FtError) -> bool:
        """End the SMP that has not answered `request`, so that another one adopts what it owns; False where there is
        none, or a young one, which may still be about to answer."""
        # the one that lives may never have answered: then `_pid` is of the one before
        known = liveness.holder(self._job.run_dir / "smp.lock") or [(self._pid, self._began)]
        lives = [(pid, began) for pid, began in known if began and liveness.started(pid) == began]
        hung = [(pid, began) for pid, began in lives if liveness.age(began) > self._patience]
        for pid, _ in hung:
            self._events.emit(catalogue.SMP_HUNG, pid=pid, request=request, reason=str(error))
        liveness.kill_and_wait(hung, _CALL_SECONDS)
        return bool(hung)

    def _request(self, name: str, ask: Callable[[Any], T]) -> T:
        """Ask until there is an answer, for `patience` seconds: an SMP that died meanwhile is being replaced."""
        deadline = time.monotonic() + self._patience
        ended = False
        while True:
            try:
                with self._connect(self._job.run_dir, min(_CALL_SECONDS, self._patience)) as client:
                    return ask(client)
            except FencedError:
                raise
            except FtError as error:
                if time.monotonic() >= deadline and not ended:  # it hangs: what it owns, another one adopts
                    self._end_hung(name, error)
                    ended, deadline = True, time.monotonic() + self._patience
                if time.monotonic() >= deadline:
                    raise ProtectionError(
                        f"node {self._job.node}: the SMP did not answer '{name}' for {self._patience:.0f} s ({error}); "
                        "what it kept is still in shared memory: give the same command again"
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def _watch(self) -> None:
        """The thread: wait for the SMP's death, replace it, until `stop`."""
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
                    reason = f"a new SMP, pid {self._pid}, has taken over what the lost one kept"
                    self._events.emit(catalogue.PROTECTION_RESTORED, reason=reason)
                    break
                except (ProtectionError, BusyError) as error:  # training goes on unprotected: an alarm, and another try
                    self._events.emit(catalogue.PROTECTION_LOST, reason=str(error))
                if self._stopped_within(pause):
                    return
                pause = min(2 * pause, _LONGEST_PAUSE)
            if self._stopped_within(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _stopped_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for `stop`."""
        return bool(select.select([self._stop[0]], [], [], seconds)[0])

    def _wait_for_death(self, pid: int) -> bool:
        """True when `pid` is gone, False when `stop` was called."""
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


def _empty(status: dict[str, Any]) -> bool:
    """Whether the SMP with this `status` has nothing that a job could be resumed from."""
    held = any(slot["state"] == "CLEAN" for segment in status["segments"] for slot in segment["slots"])
    # what cannot be read may be of use to another version of ft_plugins, a previous size to a job of that size
    kept = status["refused"] or status["previous_sizes"] or status["node_tier"].get("released")
    return not held and not kept
