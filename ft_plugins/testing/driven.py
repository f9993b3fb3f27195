"""One node of a driven job: an ft-run with an SMP and trainers of its own, started, read, lost or released.

Invariant: nothing of it outlives `release` or `destroy`: ft-run, trainers, SMP, segments and run directory are gone,
every wait is bounded, and what it has written about itself is kept in its folder.

In: a command for ft-run. Out: its events, as they come; the kept copies.
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

from ..config import run_directory
from ..errors import FtError
from ..events import Event, Events, EventType, catalogue, file_sink, read
from ..smp import liveness
from ..smp.client import Client
from ..snapshot import paths

_END_SECONDS = 20.0  # for ft-run to end its workers after SIGTERM
_GONE_SECONDS = 10.0  # for what was killed to be gone
_KEPT = ("events.jsonl", "events.recent.jsonl", "smp.log")


class GrowingLines:
    """The complete lines of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """What was added since the last call; a line still being written is left for the next one."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class DrivenNode:
    """A node of a job, from its start on. Guards its processes and its run directory."""

    def __init__(
        self, job: str, name: str, folder: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None,
        protected: bool = True,
    ) -> None:  # fmt: skip
        """Start `ft-run <arguments>`; its output goes to `folder`/output.log. An unprotected ft-run takes no names."""
        self.job, self.name, self.folder = job, name, folder
        self.log = folder / "output.log"
        self.run_dir = run_directory(job, name)
        self.trainers: dict[int, int] = {}  # pid by rank, of the running incarnation
        self.lost = False
        self._token = 0
        self._events = GrowingLines(self.run_dir / "events.jsonl")
        self._note = Events(name)
        self._note.subscribe(file_sink(self.run_dir / "events.jsonl"))
        folder.mkdir(parents=True, exist_ok=True)
        names = ["--ftp-job", job, "--ftp-node-name", name] if protected else []
        command = [str(Path(sys.executable).with_name("ft-run")), *names, *arguments]
        with open(self.log, "wb") as log:
            # A session of its own: Ctrl-C reaches the driver only, which then ends the job in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of its ft-run."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """How ft-run has ended; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Until ft-run has ended, for so many seconds at most."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def look(self) -> list[dict[str, Any]]:
        """What it has reported since the last look; `trainers` are then those of the incarnation that runs."""
        found = self._events.new()
        for entry in found:
            match entry["name"]:
                case catalogue.RANK_ATTACHED.name:
                    if entry["token"] != self._token:
                        self._token, self.trainers = entry["token"], {}
                    self.trainers[entry["rank"]] = entry["pid"]
                case catalogue.WORKER_FAILED.name | catalogue.NODE_LOST.name | catalogue.WORKERS_RESTARTED.name:
                    self.trainers = {}
        return found

    def note(self, kind: EventType, **fields: Any) -> None:
        """Report something among its own events."""
        self._note.emit(kind, **fields)

    def events(self) -> tuple[Event, ...]:
        """All of them so far, by time."""
        kept = self.folder / "events.jsonl"
        return tuple(read(kept if kept.exists() else self.run_dir / "events.jsonl"))

    def tail(self, lines: int) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def destroy(self) -> None:
        """Lose it at once: all of its processes by SIGKILL, then all of its memory."""
        smp = liveness.holder(self.run_dir / "smp.lock")
        trainers = [(pid, liveness.started(pid)) for pid in self.trainers.values()]
        liveness.kill_and_wait([(self.pid, liveness.started(self.pid)), *smp, *trainers], _GONE_SECONDS)
        self._process.wait(_GONE_SECONDS)
        self._forget()
        self.lost = True

    def release(self) -> None:
        """End ft-run, trainers and SMP, free the snapshot memory. Idempotent, bounded."""
        self._end_launcher()
        if not self.run_dir.exists():
            return
        self._end_smp()
        self._forget()

    def _forget(self) -> None:
        paths.remove(self.job, self.name)
        for name in _KEPT:
            if (self.run_dir / name).exists():
                shutil.copyfile(self.run_dir / name, self.folder / name)
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
                os.killpg(self._process.pid, signal.SIGKILL)  # its workers have asked the kernel to follow it
                self._process.wait(_GONE_SECONDS)
            liveness.kill_and_wait(trainers, _GONE_SECONDS)

    def _end_smp(self) -> None:
        """By request; an SMP that does not answer is killed."""
        for pid, started in liveness.holder(self.run_dir / "smp.lock"):
            try:
                with Client(self.run_dir, timeout=_GONE_SECONDS) as client:
                    client.end()
            except FtError as error:
                self.note(catalogue.SMP_KILLED, killed_pid=pid, reason=str(error))
            liveness.kill_and_wait([(pid, started)], _GONE_SECONDS)
