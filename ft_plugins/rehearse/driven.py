"""One node of a driven job: an ft-run with its own SMP and trainers.

Invariant: nothing of it outlives `release` or `destroy`: ft-run, trainers, SMP, segments and run directory are gone.
Its events and the SMP's log are copied to its folder first. Every wait is bounded.

In: a command for ft-run. Out: its events as they are written, then the copies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import files
from ..config import run_directory
from ..errors import FtError
from ..events import Event, Events, EventType, catalogue, file_sink, read
from ..smp.serve.client import Client
from ..smp.watch import liveness
from ..snapshot.segment import paths

# the first of these shows when a launcher detected a failure
DETECTION_EVENTS = (
    *(catalogue.WORKER_FAILED.name, catalogue.NODE_LOST.name, catalogue.JOB_HUNG.name),
    catalogue.WORKERS_RESTARTED.name,
)
_END_SECONDS = 20.0  # for ft-run to end its workers after SIGTERM
_GONE_SECONDS = 10.0  # for killed processes to disappear
_COPIED = ("events.jsonl", "events.recent.jsonl", "smp.log")


class GrowingLines:
    """Reads each complete line of a growing file once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """The lines added since the last call. A line still being written is left for the next call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._read += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


class DrivenNode:
    """A started node of a job. Owns its processes and its run directory."""

    def __init__(
        self, job: str, name: str, folder: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None,
        protected: bool = True,
    ) -> None:  # fmt: skip
        """Start `ft-run <arguments>`; output goes to `folder`/output.log. An unprotected ft-run gets no --ftp flags."""
        self.job, self.name, self.folder = job, name, folder
        self.log = folder / "output.log"
        self.run_dir = run_directory(job, name)
        self.trainers: dict[int, int] = {}  # pid by rank, of the running incarnation
        self.lost = False
        self._token = 0
        self._events = GrowingLines(self.run_dir / "events.jsonl")
        self._sink = Events(name)
        self._sink.subscribe(file_sink(self.run_dir / "events.jsonl"))
        files.make_private(folder)
        names = ["--ftp-job", job, "--ftp-node-name", name] if protected else []
        command = [str(Path(sys.executable).with_name("ft-run")), *names, *arguments]
        with open(self.log, "wb", opener=files.private) as log:
            # In its own session: Ctrl-C reaches only the driver, which then ends the job in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The pid of its ft-run."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of ft-run; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Wait until ft-run has ended, or for `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def new_events(self) -> list[dict[str, Any]]:
        """The events since the last call. Updates `trainers` to those of the running incarnation."""
        entries = self._events.new()
        for entry in entries:
            match entry["name"]:
                case catalogue.RANK_ATTACHED.name:
                    if entry["token"] != self._token:
                        self._token, self.trainers = entry["token"], {}
                    self.trainers[entry["rank"]] = entry["pid"]
                case name if name in DETECTION_EVENTS:
                    self.trainers = {}
        return entries

    def emit(self, kind: EventType, **fields: Any) -> None:
        """Add an event to the node's own events."""
        self._sink.emit(kind, **fields)

    def events(self) -> tuple[Event, ...]:
        """All events so far, by time."""
        copy = self.folder / "events.jsonl"
        return tuple(read(copy if copy.exists() else self.run_dir / "events.jsonl"))

    def tail(self, lines: int) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def destroy(self) -> None:
        """Lose the node at once: SIGKILL all its processes, then free all its memory."""
        smp = liveness.holder(self.run_dir / "smp.lock")
        trainers = [(pid, liveness.started(pid)) for pid in self.trainers.values()]
        liveness.kill_and_wait([(self.pid, liveness.started(self.pid)), *smp, *trainers], _GONE_SECONDS)
        self._process.wait(_GONE_SECONDS)
        self._remove_files()
        self.lost = True

    def release(self) -> None:
        """End ft-run, trainers and SMP, free the snapshot memory. Idempotent, bounded."""
        self._end_launcher()
        if not self.run_dir.exists():
            return
        self._end_smp()
        self._remove_files()

    def _remove_files(self) -> None:
        paths.remove(self.job, self.name)
        for name in _COPIED:
            if (self.run_dir / name).exists():
                shutil.copy(self.run_dir / name, self.folder / name)
        shutil.rmtree(self.run_dir)
        if not any(self.run_dir.parent.iterdir()):
            self.run_dir.parent.rmdir()

    def _end_launcher(self) -> None:
        trainers = [(pid, liveness.started(pid)) for pid in self.trainers.values()]
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)  # its workers die with it (PR_SET_PDEATHSIG)
                self._process.wait(_GONE_SECONDS)
            liveness.kill_and_wait(trainers, _GONE_SECONDS)

    def _end_smp(self) -> None:
        """Ask the SMP to end; kill it if it does not answer."""
        for pid, started in liveness.holder(self.run_dir / "smp.lock"):
            try:
                with Client(self.run_dir, timeout=_GONE_SECONDS) as client:
                    client.end()
            except FtError as error:
                self.emit(catalogue.SMP_KILLED, killed_pid=pid, reason=str(error))
            liveness.kill_and_wait([(pid, started)], _GONE_SECONDS)
