"""One job under `ft-run`, driven from outside: started, followed through what it writes, struck, ended, cleaned up.

Invariant: nothing of a driven job outlives its `release`: ft-run, trainers, SMP, segments and run directory are gone,
however the job ended; every wait is bounded. The driver takes no part in the job: it reads its files, sends signals and
notes in the events of the job when it did.

In: a command for ft-run. Out: `Progress` while it runs; events and losses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ..config import run_directory
from ..errors import FtError
from ..events import Event, Events, file_sink, read
from ..smp import liveness
from ..smp.client import Client
from ..snapshot import segment as segments
from .report import KILL, Loss, read_losses

NODE = "node0"
_END_SECONDS = 20.0  # for ft-run to end its workers after SIGTERM
_GONE_SECONDS = 10.0  # for what was killed to be gone


class DriveError(FtError):
    """The driven job ended otherwise than it should have, or stands still."""


class Phase(str, Enum):
    """What a job is doing, as seen from outside."""

    STARTING = "start-up"
    TRAINING = "training"
    RESTARTING = "restart"
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Progress:
    """A job at a moment. `attached` counts the ranks of the running incarnation that hold their snapshot memory."""

    phase: Phase
    iteration: int
    loss: float | None
    attached: int
    seconds: float  # since the start


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


class Drive:
    """A job that is run in `folder`. Use as a context manager: leaving it releases everything."""

    def __init__(self, job: str, arguments: Sequence[str], folder: Path, loss_log: Path, iterations: int) -> None:
        """Start `ft-run <arguments>`; its output goes to `folder`/output.log. `loss_log` must not exist yet."""
        self.job, self.folder, self.loss_log, self.iterations = job, folder, loss_log, iterations
        self.log = folder / "output.log"
        self.run_dir = run_directory(job, NODE)
        self.began = time.time()
        self.ended = self.began
        self._events = GrowingLines(self.run_dir / "events.jsonl")
        self._losses = GrowingLines(loss_log)
        self._note = Events(NODE)
        self._note.subscribe(file_sink(self.run_dir / "events.jsonl"))
        self._trainers: dict[int, int] = {}  # pid by rank, of the running incarnation
        self._token = 0
        self._progress = Progress(Phase.STARTING, 0, None, 0, 0.0)
        self._moved = time.monotonic()
        command = [str(Path(sys.executable).with_name("ft-run")), "--ftp-job", job, "--ftp-node-name", NODE, *arguments]
        with open(self.log, "wb") as log:
            # A session of its own: Ctrl-C reaches the driver only, which then ends the job in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Drive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def follow(self, seconds: float, patience: float) -> Progress:
        """Look at the job once more, after `seconds` or as soon as it has ended.

        Raises DriveError when it ended with an error, or wrote nothing new for `patience` seconds.
        """
        try:
            status: int | None = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        before = self._progress
        phase, iteration, loss = before.phase, before.iteration, before.loss
        events = self._events.new()
        for entry in events:
            match entry["name"]:
                case "rank.attach":
                    if entry["token"] != self._token:
                        self._token, self._trainers = entry["token"], {}
                    self._trainers[entry["rank"]] = entry["pid"]
                case "worker.failed":
                    phase, self._trainers = Phase.RESTARTING, {}
        losses = self._losses.new()
        for entry in losses:
            iteration, loss = entry["iteration"], entry["loss"]
        if losses and self._trainers:
            phase = Phase.ENDING if iteration >= self.iterations else Phase.TRAINING
        if events or losses:
            self._moved = time.monotonic()
        if status is not None:
            self.ended = time.time()
            phase = Phase.DONE if status == 0 else Phase.FAILED
        elapsed = (self.ended if status is not None else time.time()) - self.began
        self._progress = Progress(phase, iteration, loss, len(self._trainers), elapsed)
        if status:
            raise DriveError(
                f"ft-run ended with status {status} in iteration {iteration + 1}, expected 0; see {self.log}"
            )
        if status is None and time.monotonic() - self._moved > patience:
            raise DriveError(f"the job stands still in {phase.value} for {patience:.0f} s; see {self.log}")
        return self._progress

    def kill(self, rank: int) -> int:
        """SIGKILL the process of `rank`, and note so in the job's events right before. Returns its pid.

        Raises DriveError when that rank is not running.
        """
        pid = self._trainers.get(rank, 0)
        try:
            trainer = psutil.Process(pid)
            if self._process.pid not in {parent.pid for parent in trainer.parents()}:
                raise DriveError(f"rank {rank} should be process {pid}, but that is none of this job's")
            self._note.emit(KILL, rank=rank, signal="SIGKILL", iteration=self._progress.iteration, killed_pid=pid)
            trainer.kill()  # checks that the number was not given to another process meanwhile
        except psutil.NoSuchProcess as error:
            raise DriveError(f"rank {rank} cannot be killed: it is not running (pid {pid})") from error
        return pid

    def events(self) -> tuple[Event, ...]:
        """All events of the job so far, in the order in which they were written."""
        kept = self.folder / "events.jsonl"
        return tuple(read(kept if kept.exists() else self.run_dir / "events.jsonl"))

    def losses(self) -> tuple[Loss, ...]:
        """The loss log so far."""
        return read_losses(self.loss_log)

    def tail(self, lines: int = 25) -> str:
        """The last lines of the job's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def release(self) -> None:
        """End ft-run, trainers and SMP, free the snapshot memory, keep the events in `folder`. Idempotent, bounded."""
        self._end_launcher()
        if not self.run_dir.exists():
            return
        self._end_smp()
        for name in ("events.jsonl", "smp.log"):
            if (self.run_dir / name).exists():
                shutil.copyfile(self.run_dir / name, self.folder / name)
        shutil.rmtree(self.run_dir)
        if not any(self.run_dir.parent.iterdir()):
            self.run_dir.parent.rmdir()

    def _end_launcher(self) -> None:
        trainers = [(pid, liveness.started(pid)) for pid in self._trainers.values()]
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)  # its workers have asked the kernel to follow it
                self._process.wait(_GONE_SECONDS)
            liveness.kill_and_wait(trainers, _GONE_SECONDS)

    def _end_smp(self) -> None:
        """By request; an SMP that does not answer is killed. Its segments are removed either way."""
        lock = self.run_dir / "smp.lock"
        if liveness.held(lock):
            pid = int(lock.read_text() or 0)
            process = (pid, liveness.started(pid))
            try:
                with Client(self.run_dir, timeout=_GONE_SECONDS) as client:
                    client.end()
            except FtError as error:
                self._note.emit("smp.killed", killed_pid=pid, reason=str(error))
            liveness.kill_and_wait([process], _GONE_SECONDS)
        segments.remove(self.job, NODE)
