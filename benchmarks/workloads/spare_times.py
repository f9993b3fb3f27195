"""Lose a node of a real job while a warm spare waits: Megatron's example under `ft-run` on two nodes of this machine.

    loss -> the next iteration that is completed, whichever it is

Each node is an `ft-run` of its own with a loopback address, as from three command lines, and one rank. The spare's
preloader has imported before the node is lost, which is waited for: a spare that was just started takes longer by its
imports. A lost node leaves no process and no memory. The others wait for it for --ftp-detect-seconds (10, the default)
unless the connections of its processes end, as here.

In: how often. Out: a `Kill` of each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from ft_plugins.config import run_directory
from ft_plugins.events import catalogue, read
from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import paths
from harness.jobs import write_secret
from workloads.restart_times import BOUND, ENDLESS, Kill, kill_of, read_lines
from workloads.running import PROGRESS, Figures, say

_POLL_SECONDS = 0.02
_EXAMPLE = Path(__file__).resolve().parents[2] / "launch" / "examples" / "megatron_gpt.py"
_PRELOADER = "ft-preload"  # the name of its process
_IDLE_SECONDS, _IMPORTING = 2.0, 1.0  # without computing; seconds of a processor that imports take at least
_TRAINED = 20  # iterations before a loss


@dataclass
class _Node:
    """One `ft-run`."""

    job: str
    name: str
    process: subprocess.Popen[bytes]

    @property
    def run_dir(self) -> Path:
        return run_directory(self.job, self.name)

    def is_warm(self) -> bool:
        """Whether its preloader computes no longer: it has imported. Its agent reports that once it starts ranks."""
        children = [each for each in psutil.Process(self.process.pid).children() if each.name() == _PRELOADER]
        before = [sum(each.cpu_times()[:2]) for each in children]
        time.sleep(_IDLE_SECONDS)
        after = [sum(each.cpu_times()[:2]) for each in children]
        return bool(children) and min(after) > _IMPORTING and before == after

    def was_warm(self) -> bool:
        """Whether its ranks were forked by a preloader that was ready."""
        used = [each for each in read(self.run_dir / "events.jsonl") if each.type is catalogue.PRELOAD_USED]
        return bool(used) and not used[0].fields["cold"]

    def lose(self) -> None:
        """End all of its processes at once, and what it holds."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        smps = liveness.holder(self.run_dir / "smp.lock")
        for pid in (self.process.pid, *(pid for pid, _ in smps), *(each.pid for each in family)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(BOUND)
        liveness.kill_and_wait(smps, BOUND)
        paths.remove(self.job, self.name)
        shutil.rmtree(self.run_dir)


def measure(losses: int) -> Figures:
    """The median over so many losses. Prints each."""
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder:
        kills = with_a_warm_spare(Path(folder) / "spare", losses)
    return {
        "spare_seconds": median(kill.restart for kill in kills),
        "spare_lost_iterations": max(kill.lost for kill in kills),
    }


def with_a_warm_spare(folder: Path, losses: int) -> list[Kill]:
    """Lose a node so many times; each time a spare waits. Raises TimeoutError."""
    folder.mkdir(parents=True)
    job, log, secret = f"spare-{os.getpid()}", folder / "loss.jsonl", write_secret(folder)
    places = ",".join(f"127.0.0.{host}:{port}" for host, port in ((1, free_port()),))
    nodes: list[_Node] = []
    found: list[Kill] = []

    def start(number: int) -> _Node:
        command = [
            str(Path(sys.executable).parent / "ft-run"), "--nnodes", "2", "--nproc-per-node", "1",
            "--rdzv-endpoint", places, "--local-addr", f"127.0.0.{number}", "--ftp-secret-file", str(secret),
            "--reft", "--ftp-cpu", "--ftp-job", job, "--ftp-node-name", f"n{number}", str(_EXAMPLE),
            "--distributed-optimizer", "--iterations", str(ENDLESS), "--loss-log", str(log),
        ]  # fmt: skip
        with open(folder / f"n{number}.log", "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        nodes.append(_Node(job, f"n{number}", process))
        return nodes[-1]

    try:
        start(1)
        lost = start(2)
        _until(lambda: bool(read_lines(log)), "training")  # else the spare may be one of the two
        for number in range(losses):
            PROGRESS.step(f"a node is lost while a warm spare waits, {number + 1} of {losses}")
            spare = start(3 + number)
            note = spare.run_dir / "ft-run.json"
            _until(lambda note=note: note.exists() and "is a spare" in note.read_text(), "a spare")  # type: ignore[misc]
            _until(spare.is_warm, "preloader that has imported")
            since = [line.iteration for line in read_lines(log) if line.restart == number]
            goal = max(since, default=0) + _TRAINED
            _until(lambda goal=goal: max((each.iteration for each in read_lines(log)), default=0) > goal, "training")  # type: ignore[misc]
            killed = time.time()
            lost.lose()
            nodes.remove(lost)
            _until(lambda: kill_of(killed, number, read_lines(log)) is not None, "a restart")  # noqa: B023
            cost = kill_of(killed, number, read_lines(log))
            assert cost is not None
            assert spare.was_warm(), "the ranks of the spare imported by themselves"
            found.append(cost)
            say(f"a node lost, a warm spare: {cost.restart:.2f} s to the next iteration, {cost.lost} computed again")
            lost = spare
        return found
    finally:
        for node in nodes:
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                node.lose()


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {BOUND:.0f} s")
        time.sleep(_POLL_SECONDS)
