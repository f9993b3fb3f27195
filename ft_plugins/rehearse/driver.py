"""Drive one job under `ft-run` from outside: start it, follow it through its files, kill parts of it, clean up.

    one node     ft-run as on a workstation
    several      one ft-run per node, each with its own name and loopback address; they authenticate each other by a
                 secret in a file of mode 0600. A killed node loses its memory, and a fresh node replaces it

Invariant: nothing of a driven job outlives `release`, however the job ended: ft-run, trainers, SMP, segments and run
directory are gone. Every wait is bounded. The driver only reads the job's files, sends signals and records each signal
in the job's events.

No port of an emulated node comes from the kernel's ephemeral range. A port from there may be given to any connection on
this machine between two nodes that listen on it in turn, and the second one could then not listen.

In: a command for ft-run. Out: `Progress` while it runs; events and losses.
"""

from __future__ import annotations

import random
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from ..base.files import make_private, private
from ..errors import FtError
from ..events import Event, catalogue
from .driven import DETECTION_EVENTS, DrivenNode, GrowingLines

NODE = "node0"
_NETWORK = "127.77.1"  # of the loopback device: every machine has it, and no privilege is needed
_HOSTS = 8  # maximum number of nodes of a job, substitutes included
_DEVICE = "lo"
_FIRST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 100


class DriveError(FtError):
    """The driven job failed or makes no progress."""


class DrivePhase(str, Enum):
    """What a job is doing, as seen from outside."""

    STARTING = "start-up"
    TRAINING = "training"
    RESTARTING = "restart"
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Progress:
    """The state of a job at one moment. `attached`: ranks of this incarnation that hold their snapshot memory."""

    phase: DrivePhase
    iteration: int
    loss: float | None
    attached: int
    seconds: float  # since the start


@dataclass(frozen=True)
class Loss:
    """One line of a loss log. `time` is seconds since the epoch, after the iteration."""

    iteration: int
    loss: float
    time: float


class DrivenJob:
    """A job that runs in `folder`. Use as a context manager: leaving it releases everything."""

    def __init__(
        self, job: str, arguments: Sequence[str], folder: Path, loss_log: Path, iterations: int, nodes: int = 1
    ) -> None:
        """Start `ft-run <arguments>` on each of `nodes`. `loss_log` must not exist yet.

        Output goes to `folder`/output.log, or with several nodes to `folder`/<node>/output.log.
        """
        self.job, self.folder, self.loss_log, self.iterations = job, folder, loss_log, iterations
        self.began = time.time()
        self.ended = self.began
        self._arguments = tuple(arguments)
        self._losses = GrowingLines(loss_log)
        self._progress = Progress(DrivePhase.STARTING, 0, None, 0, 0.0)
        self._moved = time.monotonic()
        self._nodes: list[DrivenNode] = []  # lost ones included
        self._count = nodes
        self._endpoint = ""
        self._secret = folder / "secret"
        try:
            if nodes == 1:
                self._nodes.append(DrivenNode(job, NODE, folder, self._arguments))
            else:
                self._endpoint = _endpoint()
                _write_secret(self._secret)
                for _ in range(nodes):
                    self._start_node()
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> DrivenJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def log(self) -> Path:
        """The output of the failed node, else of the first one."""
        failed = [node for node in self._alive if node.status]
        return (failed or self._alive)[0].log

    @property
    def run_dir(self) -> Path:
        """The run directory of the first node."""
        return self._nodes[0].run_dir

    def follow(self, seconds: float, patience: float) -> Progress:
        """Read the job's files again after `seconds`, or as soon as the job has ended.

        Raises DriveError if the job failed or wrote nothing new for `patience` seconds.
        """
        next((node for node in self._alive if node.status is None), self._alive[0]).wait(seconds)
        statuses = [node.status for node in self._alive]
        before = self._progress
        phase, iteration, loss = before.phase, before.iteration, before.loss
        events = [entry for node in self._alive for entry in node.new_events()]
        if any(entry["name"] in DETECTION_EVENTS for entry in events):
            phase = DrivePhase.RESTARTING
        losses = self._losses.new()
        for entry in losses:
            iteration, loss = entry["iteration"], entry["loss"]
        attached = sum(len(node.trainers) for node in self._alive)
        if losses and attached:
            phase = DrivePhase.ENDING if iteration >= self.iterations else DrivePhase.TRAINING
        if events or losses:
            self._moved = time.monotonic()
        ended = all(status == 0 for status in statuses)
        failed = [(node, status) for node, status in zip(self._alive, statuses, strict=True) if status]
        if ended or failed:
            self.ended = time.time()
            phase = DrivePhase.FAILED if failed else DrivePhase.DONE
        elapsed = (self.ended if ended or failed else time.time()) - self.began
        self._progress = Progress(phase, iteration, loss, attached, elapsed)
        for node, status in failed:
            raise DriveError(
                f"ft-run ended with status {status} in iteration {iteration + 1}, expected 0; see {node.log}"
            )
        if not ended and time.monotonic() - self._moved > patience:
            raise DriveError(f"no progress in {phase.value} for {patience:.0f} s; see {self.log}")
        return self._progress

    def kill(self, rank: int) -> int:
        """Record the signal in the job's events, then SIGKILL the process of `rank`. Returns its pid.

        Raises DriveError if that rank is not running.
        """
        node = next((node for node in self._alive if rank in node.trainers), self._alive[0])
        pid = node.trainers.get(rank, 0)
        try:
            trainer = psutil.Process(pid)
            if node.pid not in {parent.pid for parent in trainer.parents()}:
                raise DriveError(f"rank {rank} should be process {pid}, but that process is not part of this job")
            node.emit(
                catalogue.SIGNAL_SENT, rank=rank, signal="SIGKILL", iteration=self._progress.iteration, killed_pid=pid
            )
            trainer.kill()  # checks that the pid was not reused
        except psutil.NoSuchProcess as error:
            raise DriveError(f"cannot kill rank {rank}: it is not running (pid {pid})") from error
        return pid

    def kill_node(self) -> tuple[str, str]:
        """Destroy the last node with all its processes and memory, and start a fresh one. Returns the names of both.

        The signal is recorded in the events of the first node.
        """
        lost = self._alive[-1]
        ranks = sorted(lost.trainers)
        self._alive[0].emit(
            catalogue.SIGNAL_SENT, lost=lost.name, ranks=ranks, signal="SIGKILL", iteration=self._progress.iteration,
            killed_pid=lost.pid,
        )  # fmt: skip
        lost.destroy()
        return lost.name, self._start_node().name

    def events(self) -> tuple[Event, ...]:
        """All events of all nodes so far, in the order in which they were written."""
        return tuple(sorted((e for node in self._nodes for e in node.events()), key=lambda event: event.time))

    def losses(self) -> tuple[Loss, ...]:
        """The complete lines of the loss log so far."""
        lines = GrowingLines(self.loss_log).new()
        return tuple(Loss(line["iteration"], line["loss"], line["time"]) for line in lines)

    def tail(self, lines: int = 25) -> str:
        """The last lines of the job's output."""
        return (next((node for node in self._alive if node.status), self._alive[0])).tail(lines)

    def release(self) -> None:
        """End ft-run, trainers and SMP, free the snapshot memory, keep the events in `folder`. Idempotent, bounded."""
        self._secret.unlink(missing_ok=True)
        with ExitStack() as releases:  # releases every node even if one fails
            for node in self._alive:
                releases.callback(node.release)

    @property
    def _alive(self) -> list[DrivenNode]:
        return [node for node in self._nodes if not node.lost]

    def _start_node(self) -> DrivenNode:
        """Start one more node, or a substitute, of a job on several nodes. It gets the next address."""
        number = len(self._nodes)
        if number >= _HOSTS:
            raise DriveError(f"a driven job has at most {_HOSTS} nodes, substitutes included")
        address = f"{_NETWORK}.{number + 1}"
        words = [
            *("--nnodes", str(self._count), "--rdzv-endpoint", self._endpoint, "--local-addr", address),
            *("--ftp-secret-file", str(self._secret), *self._arguments),
        ]
        name = f"node{number}"
        node = DrivenNode(self.job, name, self.folder / name, words, {"GLOO_SOCKET_IFNAME": _DEVICE})
        self._nodes.append(node)
        return node


def _endpoint() -> str:
    """The rendezvous endpoint: all addresses, so that any live node will do."""
    port = free_port()
    return ",".join(f"{_NETWORK}.{host + 1}:{port}" for host in range(_HOSTS))


def _write_secret(path: Path) -> None:
    """Write the secret by which the nodes authenticate each other, readable by this user only."""
    make_private(path.parent)
    path.unlink(missing_ok=True)
    with open(path, "x", opener=private) as file:
        file.write(secrets.token_hex(32))


# ---- ports, signals ----


def free_port() -> int:
    """A port that is free on all addresses of this machine. Raises OSError if none is found."""
    end = int(_EPHEMERAL.read_text().split()[0])
    chosen = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = chosen.randrange(_FIRST, max(end, _FIRST + 1))
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise OSError(f"no free port found from {_FIRST} to {end} in {_ATTEMPTS} attempts")


@contextmanager
def raising_signals() -> Iterator[None]:
    """Turn SIGTERM, and SIGHUP unless it is ignored (nohup), into SystemExit, so that the body cleans up. The ones that
    follow are ignored: they would interrupt that."""

    def raised(number: int, frame: FrameType | None) -> None:
        for each in usual:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    known = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    usual = {number: handler for number, handler in known.items() if handler is not signal.SIG_IGN}
    for number in usual:
        signal.signal(number, raised)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
