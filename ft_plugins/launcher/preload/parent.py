"""The preloader of a node as its agent keeps it: ranks are forked from it at the first start and at every restart.

Invariant: torch's agent finds the processes that it would have started: children of this process, with their exit
status, in sessions of their own. The kernel gives a process whose parent ends to the nearest ancestor that is a
*subreaper*, which this process is while it starts ranks; so a rank is forked from a process that ends at once. Whatever
goes wrong here, a rank is started as without a preloader, and an event says why. No error of this ends the agent.

In: commands of workers, what they have imported, turns of the agent's loop. Out: for torch, the processes behind its
handlers; `preload.prepared`, `preload.used`, `preload.reduced`, `preload.refused` events; a record for later jobs.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as torch_processes

from ...base import files
from ...config import worker_environment
from ...events import Events, catalogue, say
from ...model import imported
from ...smp.watch import liveness
from ..agent.watcher import Job
from ..agent.worker_failures import WorkerExits
from . import packets, preloader, what_to_import

_WORKER = ("-u", "-m", "ft_plugins.launcher.worker")  # then [-m] script args...
_RECORD, _RECORDS = "imported-{}.json", 32  # of scripts, in the folder of run directories; the newest ones are kept
_READY_SECONDS = 300.0  # for all imports; without a preloader each rank does them
_TURN_SECONDS, _LONG_SECONDS = 1.0, 20.0  # of a wait for imports: between signs of life; before it is said
_FORK_SECONDS = 10.0  # for a fork, which takes milliseconds; it may be stopped
_LOOK_SECONDS = 600.0  # between two looks at a rank
_END_SECONDS = 10.0  # for the kernel to end a process
_GET_SUBREAPER, _SET_SUBREAPER = 37, 36  # of prctl

Command = tuple[str, ...]
Cold = Callable[[Any, Any], Any]


class ForkedRank:
    """What torch needs of `subprocess.Popen`, for a child that something else has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # as Popen
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), deadline)
            exits = WorkerExits([self.pid])
            exits.wait(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
            exits.close()
        return status


class PreloadedParent:
    """That of `count` local ranks with the command `command`. `alive` is called about once a second while ranks wait
    for imports, so that the other nodes do not take this one for lost; it never raises. Not thread-safe: every call
    comes from the thread that starts workers."""

    def __init__(
        self, job: Job, command: Command, count: int, events: Events, alive: Callable[[], object] = lambda: None
    ) -> None:
        self._job, self._command, self._count, self._events, self._alive = job, command, count, events, alive
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._ready = False
        self._left: dict[str, str] = {}
        self._record = record_of(job.run_dir.parent.parent, command)
        self._token, self._recorded = 0, True
        self._forked, self._over = 0, False  # over: no preloader of this script could be used

    def begin(self) -> None:
        """Start the preloader; never raises."""
        self._left = {}
        self._begin({}, 0)

    def _begin(self, left: dict[str, str], starts: int) -> None:
        with self._guarded():
            ours, theirs = packets.pair()
            environment = {name: value for name, value in os.environ.items() if not what_to_import.withheld(name)}
            config = worker_environment(self._job.config, self._job.run_dir, 0, 0)["FTP_CONFIG"]
            order = preloader.Order(theirs.fileno(), os.getpid(), self._count, str(self._record), config, left, starts)
            environment |= {preloader.NVML: "1", preloader.VARIABLE: json.dumps(vars(order))}
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            outputs = [
                files.private(str(self._job.run_dir / name), flags) for name in ("preload-out.log", "preload-err.log")
            ]
            try:
                with liveness.notices_blocked():
                    self._process = subprocess.Popen(
                        self._command, env=environment, stdout=outputs[0], stderr=outputs[1],
                        pass_fds=[theirs.fileno()], start_new_session=True,
                    )  # fmt: skip
                self._end = ours
            finally:
                theirs.close()
                for output in outputs:
                    os.close(output)

    def wait(self) -> None:
        """Wait until ranks can be forked, or never can."""
        began = time.monotonic()
        deadline, tell_at = began + _READY_SECONDS, began + _LONG_SECONDS
        while self._end is not None and not self._ready:
            now = time.monotonic()
            if now < deadline and not packets.pending(self._end, min(_TURN_SECONDS, deadline - now)):
                self._alive()
                if now >= tell_at:
                    tell_at = math.inf
                    say(f"{_LONG_SECONDS:g} s: the preloader imports; ranks start when it is ready", who="ft-run: ")
                continue
            with self._guarded():
                self._hear(0.0)
        self._over |= time.monotonic() >= deadline  # no later start waits for another one

    @contextmanager
    def starting(self, token: int) -> Iterator[None]:
        """While torch starts the workers of an incarnation: they are forked."""
        for rank in range(self._count):  # of the last incarnation
            with suppress(OSError):  # its token is looked at, too
                imported.path_of(self._job.run_dir, rank).unlink(missing_ok=True)
        self._forked, self._token, self._recorded = 0, token, False
        with _subreaper(), _popen_of(self._start):
            yield
        self._events.emit(catalogue.PRELOAD_USED, count=self._forked, cold=self._count - self._forked)
        if self._end is None and not self._over:  # for the next start
            self.begin()

    def turn(self) -> None:
        """One turn of the agent's loop while all workers are healthy. Never waits, and never raises."""
        with self._guarded():
            while self._end is not None and packets.pending(self._end):
                self._hear(0.0)
            if not self._recorded and self._end is not None and self._ready:
                self._write_record()

    def end(self) -> None:
        """Kill the preloader, and wait until it is gone. Idempotent."""
        process, self._process = self._process, None
        self._ready = False
        if self._end is not None:
            self._end.close()
            self._end = None
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                process.wait(_END_SECONDS)

    def _write_record(self) -> None:
        """Once the ranks have completed their first iterations: record what they have imported, and import it."""
        paths = [imported.path_of(self._job.run_dir, rank) for rank in range(self._count)]
        if self._end is None or not all(path.exists() for path in paths):
            return
        ranks = [imported.read(self._job.run_dir, rank) for rank in range(self._count)]
        self._recorded = True
        if any(each.token != self._token for each in ranks):
            return
        before = imported.read_record(self._record)
        names = dict.fromkeys(name for each in (before, *ranks) for name in each.names)
        variables = {name for each in (*ranks, before) for name in each.variables}
        with suppress(OSError):
            imported.write_to(self._record, imported.Imported(0, tuple(names), tuple(sorted(variables))))
            records = sorted(self._record.parent.glob(_RECORD.format("*")), key=lambda path: path.stat().st_mtime)
            for old in records[:-_RECORDS]:
                old.unlink()
        if set(names) - set(before.names) or variables - set(before.variables):
            self._ready = False
            packets.send(self._end, {"again": True})

    def _hear(self, seconds: float) -> dict[str, Any]:
        """The next message of the preloader, noted. Raises what `packets.receive` does."""
        assert self._end is not None
        message, _ = packets.receive(self._end, seconds)
        if "ready" in message:
            self._ready = True
            self._events.emit(
                catalogue.PRELOAD_PREPARED, seconds=message["ready"], modules=message["modules"], bytes=message["bytes"]
            )
        for package, reason in message.get("left", {}).items():
            if package not in self._left:
                self._left[package] = reason
                self._events.emit(catalogue.PRELOAD_REDUCED, module=package, reason=reason)
        if "restart" in message:
            self.end()
            self._begin(message["restart"], message["starts"])
        if "refused" in message:
            self._ready, self._over = False, bool(message.get("for_good"))
            self._refuse(message["refused"], again=bool(message.get("again")))
        return message

    def _start(
        self, rank: int, command: Command, environment: Mapping[str, str], outputs: Sequence[int], cold: Cold
    ) -> Any:
        """The process of a worker: forked, or a new one."""
        if command == self._command:
            for _ in range(2):  # a preloader whose modules have changed imports them again
                self.wait()
                with self._guarded():
                    if (pid := self._fork(environment, outputs)) is not None:
                        self._forked += 1
                        return ForkedRank(pid)
            self.end()  # its modules' files change all the time: the other ranks need not wait for it
        with liveness.notices_blocked():
            return cold(command, environment)

    def _fork(self, environment: Mapping[str, str], outputs: Sequence[int]) -> int | None:
        if self._end is None:
            return None
        may_run, let_run = os.pipe()
        try:
            request = {"environment": dict(environment), "folder": os.getcwd()}
            packets.send(self._end, {"fork": request}, [*outputs, may_run])
            deadline = time.monotonic() + _FORK_SECONDS
            while not packets.pending(self._end, min(_TURN_SECONDS, _FORK_SECONDS)) and time.monotonic() < deadline:
                self._alive()
            pid = self._hear(0.0).get("pid")
            if not isinstance(pid, int):
                return None
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it is not a child of this one
            os.write(let_run, b"1")
            return pid
        finally:
            os.close(may_run)
            os.close(let_run)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error of the body ends the preloader only."""
        try:
            yield
        except SignalException:
            raise
        except (EOFError, ConnectionError):
            self._refuse(f"it has ended; see {self._job.run_dir / 'preload-err.log'}")
        except (TimeoutError, BlockingIOError):
            self._refuse(f"it did not answer within {_FORK_SECONDS if self._ready else _READY_SECONDS:g} s")
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")

    def _refuse(self, reason: str, again: bool = False) -> None:
        """Report why ranks are not forked. `again`: the preloader starts itself again."""
        if not again:
            self.end()
        self._events.emit(catalogue.PRELOAD_REFUSED, reason=reason)
        next_step = "it imports again" if again else "ranks import by themselves"
        say(f"the preloader cannot be used: {reason}; {next_step}", alarm=True, who="ft-run: ")


def record_of(folder: Path, command: Command) -> Path:
    """Where what the ranks of a script have imported is kept for its next job: by script and packages."""
    words = command[1 + len(_WORKER) :]
    module = words[0] == "-m"
    script = words[1] if module else os.path.realpath(words[0])
    content = b""
    with suppress(OSError):
        content = b"" if module else Path(script).read_bytes()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "ft_plugins")]
    named = os.fsencode("\0".join([script, sys.version, sys.prefix, *versions])) + content
    return folder / _RECORD.format(hashlib.blake2b(named, digest_size=12).hexdigest())


@contextmanager
def _subreaper() -> Iterator[None]:
    """Meanwhile, become the parent of processes whose parents end."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


@contextmanager
def _popen_of(start: Callable[..., Any]) -> Iterator[None]:
    """torch's handlers of workers get their processes from `start`, within this context. A version of torch that has no
    such handlers starts workers as usual."""
    handler: Any = getattr(torch_processes, "SubprocessHandler", None)
    original: Any = getattr(torch_processes, "get_subprocess_handler", None)
    if original is None or not hasattr(handler, "_popen"):
        yield
        return

    class Handler(handler):  # type: ignore[misc]
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            outputs = [_descriptor(self._stdout, 1), _descriptor(self._stderr, 2)]
            return start(self.local_rank_id, tuple(args), env, outputs, super()._popen)

    torch_processes.get_subprocess_handler = Handler
    try:
        yield
    finally:
        torch_processes.get_subprocess_handler = original


def _descriptor(file: IO[str] | None, inherited: int) -> int:
    return inherited if file is None else file.fileno()


def parent_of(job: Job | None, spec: WorkerSpec, events: Events, alive: Callable[[], object]) -> PreloadedParent | None:
    """The preloader of a node, started; None if it has none."""
    if job is None or job.config.preload == "off" or not isinstance(spec.entrypoint, str):
        return None
    command = (spec.entrypoint, *map(str, spec.args))
    if command[1:4] != _WORKER:
        return None
    try:
        found = PreloadedParent(job, command, spec.local_world_size, events, alive)
    except Exception as error:  # such as a torch without metadata
        events.emit(catalogue.PRELOAD_REFUSED, reason=f"{type(error).__name__}: {error}")
        return None
    found.begin()
    return found
