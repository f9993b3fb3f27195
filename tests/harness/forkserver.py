"""Start real jobs in half a second: a parent with the framework imported forks an elastic agent, which forks ranks.

Invariant: everything but the imports is as under ft-run: the launcher's own `launch`, agent and watcher, real restarts,
real processes and signals. Jobs end with the server and ranks with their agent (PR_SET_PDEATHSIG).

In: a `JobSpec`. Out: a `RunningJob` with the agent's pid, its log and, when it has ended, its `outcome`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ft_plugins.base import files
from ft_plugins.config import Config, run_directory
from ft_plugins.events import Event, read
from ft_plugins.transport import protocol

_END_SECONDS = 300.0  # for the server to end by itself, which takes long on a busy machine
_FORK_SECONDS = 60.0  # to fork all ranks of one incarnation
_POLL_SECONDS = 0.002
# a server finds this package where the one who starts it has it
_FOUND_AT = str(Path(__file__).parents[1])
_SERVE = f"import sys; sys.path.insert(1, {_FOUND_AT!r})\nfrom {__name__} import main; main(sys.argv[1:])"
_CLONE_NEWNET = 0x40000000
_STACK = signal.SIGUSR1  # makes an agent or a rank write the stack of its main thread to the job's log
_STACK_SECONDS = 0.3  # to write a stack; the process continues
_STACK_PATIENCE = 5.0  # seconds until a busy machine has let it begin
_STACK_LINES = 12  # of a stack


@dataclass(frozen=True)
class JobSpec:
    """A job as given to ft-run. `entry` is 'module:function' or 'file.py:function', called with `argv`."""

    entry: str
    argv: tuple[str, ...]
    name: str
    folder: str  # of logs and outcome
    nproc: int = 1
    flags: tuple[str, ...] = ()  # --ftp-*, --reft*
    node: str = "node0"
    runtime: str = ""  # parent of run directories, default `folder`; socket paths must be short
    nnodes: int = 1
    min_nodes: int = 0  # the job continues with this many; 0: all of them
    endpoint: str = "localhost:0"
    max_restarts: int | None = None  # None: as long as the job makes progress
    environment: dict[str, str] = field(default_factory=dict)
    address: str = "localhost"  # of this node
    rendezvous: str = "ft_plugins"  # back-end; the default is that of ft-run with a system switched on
    rendezvous_conf: dict[str, Any] = field(default_factory=dict)  # --rdzv-conf
    namespace: str = ""  # network namespace; '': the server's

    @property
    def run_dir(self) -> Path:
        """The run directory of this node."""
        return run_directory(self.name, self.node, {**os.environ, "XDG_RUNTIME_DIR": self.runtime or self.folder})


class RunningJob:
    """A started job. `pid` is its agent, the process that stands for ft-run."""

    def __init__(self, spec: JobSpec, pid: int) -> None:
        self.spec = spec
        self.pid = pid
        self.log = _log(spec)
        self._pidfd = os.pidfd_open(pid)

    def wait(self, seconds: float) -> dict[str, Any]:
        """The outcome (status, reason, restarts), or {'status': 'killed'}.

        Raises TimeoutError with the stacks of the job, and leaves it running.
        """
        if not self.ends_within(seconds):
            raise TimeoutError(f"{self.spec.name} had not ended after {seconds:.0f} s:\n{self.stacks()}")
        outcome = _outcome(self.spec)
        return json.loads(outcome.read_text()) if outcome.exists() else {"status": "killed"}

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the agent, unless it has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return

    def stacks(self) -> str:
        """The end of the job's output, and the stack of the main thread of its agent and of each of its ranks."""
        parts = [self.tail()]
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.pid)
            for process in (agent, *agent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it has just ended
                    parts.append(self._stack(process))
        return "\n".join(filter(None, parts))

    def _stack(self, process: psutil.Process) -> str:
        """The innermost calls of a process; '' if it has no handler for `_STACK`, which would end it."""
        if not _catches(process.pid, _STACK):
            return ""
        before = len(self.log.read_bytes())
        process.send_signal(_STACK)
        until = time.monotonic() + _STACK_PATIENCE
        while len(self.log.read_bytes()) == before and time.monotonic() < until:
            time.sleep(_STACK_SECONDS / 10)
        time.sleep(_STACK_SECONDS)  # it is written line by line, without an end
        stack = self.log.read_bytes()[before:].decode(errors="replace").splitlines()
        return "\n".join([f"process {process.pid}:", *stack[:_STACK_LINES]])

    @property
    def ended(self) -> bool:
        """Whether the agent has ended."""
        return self.ends_within(0)

    def ends_within(self, seconds: float) -> bool:
        """Wait; whether the agent has ended."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def events(self, name: str = "") -> list[Event]:
        """The events so far, all or those of one name."""
        return [event for event in read(self.spec.run_dir / "events.jsonl") if not name or event.name == name]

    def tail(self, lines: int = 40) -> str:
        """The end of the job's output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class ForkServer:
    """A separate process that forks jobs. Use as a context manager."""

    def __init__(self, preload: Sequence[str]) -> None:
        """`preload`: modules or files to import before the first fork, in order; a 'module:function' is called."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _SERVE, str(theirs.fileno()), *preload]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection = ours
        self._connection.settimeout(300)
        self._jobs: list[RunningJob] = []
        self._ask({"do": "ready"})

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.wait(_END_SECONDS)

    def start(self, spec: JobSpec) -> RunningJob:
        """Fork a job. Returns while its first ranks are starting."""
        Path(spec.folder).mkdir(parents=True, exist_ok=True)
        _outcome(spec).unlink(missing_ok=True)
        self._jobs.append(RunningJob(spec, int(self._ask({"do": "start", "spec": asdict(spec)})["pid"])))
        return self._jobs[-1]

    def end_jobs(self, seconds: float) -> None:
        """Kill the agents of all running jobs, so that none of them starts another process."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.kill()
        for job in jobs:
            job.wait(seconds)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        protocol.send(self._connection, message)
        reply = protocol.receive(self._connection)
        if reply is None:
            raise RuntimeError("the fork server has ended; its traceback is above")
        return reply


def _log(spec: JobSpec) -> Path:
    return Path(spec.folder) / f"{spec.node}.log"


def _outcome(spec: JobSpec) -> Path:
    return Path(spec.folder) / f"{spec.node}.outcome.json"


def load(entry: str) -> Any:
    """The module or file `entry`, or the function after its colon. A file is imported once, under its stem."""
    source, _, function = entry.partition(":")
    if source.endswith(".py"):
        name = Path(source).stem
        if name not in sys.modules:
            sys.path.insert(0, str(Path(source).resolve().parent))  # as when it runs as a script
            spec = importlib.util.spec_from_file_location(name, source)
            if spec is None or spec.loader is None:
                raise ImportError(f"{source} cannot be imported")
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        module = sys.modules[name]
    else:
        module = importlib.import_module(source)
    return getattr(module, function) if function else module


def _when_all_are_forked(entry: Callable[..., Any], nproc: int) -> Callable[..., Any]:
    """`entry`, delayed in each rank until the last rank of the incarnation has been forked.

    When a rank connects to the agent's store, a thread of the agent looks up a name. A rank forked at that moment
    inherits the locked resolver lock of the C library and hangs in its own first lookup.
    """
    begun = memoryview(mmap.mmap(-1, 4 * nproc)).cast("i")  # by local rank: its incarnation, from 1

    @functools.wraps(entry)
    def run(*args: Any) -> Any:
        gc.freeze()  # no finalizer of the agent's objects runs here: it may wait for a lock that is never released
        incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
        begun[int(os.environ["LOCAL_RANK"])] = incarnation
        deadline = time.monotonic() + _FORK_SECONDS
        while any(other < incarnation for other in begun):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not all ranks were forked within {_FORK_SECONDS:.0f} s; incarnations by rank: {begun.tolist()}"
                )
            time.sleep(_POLL_SECONDS)
        return entry(*args)

    return run


def _host_of_store(spec: JobSpec) -> dict[str, str]:
    """For c10d: whether this node serves the store. c10d decides by host name, which a namespace cannot resolve."""
    if spec.rendezvous != "c10d" or not spec.namespace:
        return {}
    return {"is_host": str(int(spec.endpoint.rpartition(":")[0] == spec.address))}


def _run(spec: JobSpec) -> dict[str, Any]:
    """Do for a spec what ft-run does for a command line."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from ft_plugins.launcher.agent.watcher import Job
    from ft_plugins.launcher.node_launch import launch

    config, rest = Config.from_flags(spec.flags)
    if rest:
        raise ValueError(f"{spec.name}: {rest} are not flags of ft_plugins")
    launch_config = LaunchConfig(
        min_nodes=spec.min_nodes or spec.nnodes,
        max_nodes=spec.nnodes,
        nproc_per_node=spec.nproc,
        run_id=spec.name,
        rdzv_backend=spec.rendezvous,
        rdzv_configs=_host_of_store(spec) | spec.rendezvous_conf,
        rdzv_endpoint=spec.endpoint,
        max_restarts=spec.max_restarts or 0,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
        local_addr=spec.address,
    )
    entry = _when_all_are_forked(load(spec.entry), spec.nproc)
    job = Job(config, spec.name, spec.node, spec.run_dir) if config.systems else None
    outcome = launch(launch_config, entry, (list(spec.argv),), job=job, bounded=spec.max_restarts is not None)
    return {"status": outcome.status, "reason": outcome.reason, "restarts": outcome.restarts}


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. Raises OSError if the process has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def enter(namespace: str) -> None:
    """Join a network namespace, as `ip netns exec` would."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _job(spec: JobSpec) -> None:
    """Run a job in the forked process that stands for ft-run."""
    from ft_plugins.launcher.preload.new_process import bind_to_agent

    bind_to_agent(os.getppid())
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(_log(spec), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    faulthandler.register(_STACK, all_threads=False)  # inherited by the ranks, which are forked from here
    os.environ.update(spec.environment)
    if spec.namespace:
        enter(spec.namespace)
    try:
        outcome = _run(spec)
    except BaseException as error:
        traceback.print_exc()
        outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}", "restarts": 0}
    files.write_json(_outcome(spec), outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome["status"] == "succeeded" else 1)


def main(argv: Sequence[str]) -> None:
    """Serve the connection whose descriptor is the first argument, until it is closed."""
    connection = socket.socket(fileno=int(argv[0]))
    for entry in argv[1:]:
        loaded = load(entry)
        if ":" in entry:
            loaded()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps jobs; a pidfd shows their end
    while (request := protocol.receive(connection)) is not None:
        if request["do"] == "ready":
            protocol.send(connection, {"ok": True})
            continue
        fields = request["spec"]
        spec = JobSpec(**{**fields, "argv": tuple(fields["argv"]), "flags": tuple(fields["flags"])})
        pid = os.fork()
        if pid == 0:
            connection.close()
            _job(spec)
        protocol.send(connection, {"ok": True, "pid": pid})
