"""The standby workers of a node, as its agent keeps them: one for each local rank, for the next restart.

Invariant: they never delay training's start. They are started one after another, only once the running incarnation has
settled, and import while cores are idle, otherwise in a share of the turns. They are processes of their own, started by
the thread that starts workers, in sessions of their own, and end with the agent. A rank for which none fits starts in a
new process, as without standbys, and an event says why. No error of theirs ends the agent.

In: the commands of the running workers, what those have imported, the turns of the agent's loop. Out: for torch, the
processes behind its handlers; `standbys.prepared`, `standbys.used`, `standby.refused`, `standbys.omitted` events.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as torch_processes

from ...config import Config
from ...events import Events, catalogue, say
from ...model import imported
from ...snapshot.segment import room
from ..agent.watcher import Job
from . import standby_plan
from .processor_idle import IdleProcessors, used_seconds
from .standby_channel import StandbyChannel
from .standby_process import Command, StandbyProcess, own_bytes

_WORKER, _STANDBY = "ft_plugins.launcher.worker", "ft_plugins.launcher.preload.standby"
_CHECK_SECONDS = 10.0  # for all standbys together to say that no file has changed
_TAKE_SECONDS = 5.0  # for one to confirm that it takes over
_IMPORT_SECONDS = 900.0  # for the imports of one, which may be stopped for most of that time

Cold = Callable[[Any, Any], "subprocess.Popen[bytes]"]


class StandbyPool:
    """Those of `count` local ranks. Not thread-safe: every call comes from the thread that starts workers."""

    def __init__(self, config: Config, run_dir: Path, count: int, events: Events) -> None:
        self._config, self._run_dir, self._count, self._events = config, run_dir, count, events
        self._commands: dict[int, tuple[Command, dict[str, str]]] = {}  # of the running workers, by local rank
        self._standbys: dict[int, StandbyProcess] = {}
        self._idle = IdleProcessors()
        self._token = 0
        self._settled_at: float | None = None  # monotonic; since when what the workers have imported is known
        self._over = False  # none is started in this incarnation any more
        self._turn = 0
        self._began = 0.0
        self._taken = 0

    @contextmanager
    def starting(self, token: int) -> Iterator[None]:
        """While torch starts the workers of an incarnation: standbys that fit become its workers."""
        had = bool(self._standbys)
        try:
            self._check()
        except SignalException:
            raise
        except Exception as error:  # a new process is always possible
            self._fail(error)
        self._taken = 0
        for rank in range(self._count):  # of the last incarnation
            with contextlib.suppress(OSError):  # its token is looked at, too
                imported.path_of(self._run_dir, rank).unlink(missing_ok=True)
        try:
            with _popen_of(self._start):
                yield
        finally:
            self.end()
            self._token, self._settled_at, self._over = token, None, False
        if had:
            self._events.emit(catalogue.STANDBYS_USED, count=self._taken, cold=self._count - self._taken)

    def turn(self) -> None:
        """One turn of the agent's loop while all workers are healthy. Never waits, and never raises."""
        if self._over:
            return
        try:
            self._go_on()
        except SignalException:  # the agent's own, for its caller
            raise
        except Exception as error:  # training is worth more than a standby
            self._fail(error)

    def _go_on(self) -> None:
        importing = [rank for rank, standby in self._standbys.items() if not standby.ready]
        self._turn += 1
        if importing:
            self._follow(importing[0], self._standbys[importing[0]])
        elif len(self._standbys) < self._count:
            if self._settled():
                self._start_next()
        else:
            self._prepared()

    def end(self) -> None:
        """Kill them all, and wait until they are gone. Idempotent."""
        standbys, self._standbys = self._standbys, {}
        for standby in standbys.values():
            standby.end()

    # ---- prepare ----

    def _settled(self) -> bool:
        """Whether all workers have completed their first iterations, some time ago."""
        if len(self._commands) < self._count:
            return False
        if self._settled_at is None:
            if not all(imported.path_of(self._run_dir, rank).exists() for rank in range(self._count)):
                return False
            try:
                tokens = {imported.read(self._run_dir, rank).token for rank in range(self._count)}
            except (OSError, ValueError):
                return False
            if tokens == {self._token}:
                self._settled_at = time.monotonic()
            return False
        return time.monotonic() - self._settled_at >= standby_plan.SETTLED_SECONDS

    def _start_next(self) -> None:
        rank = next(rank for rank in range(self._count) if rank not in self._standbys)
        if refusal := self._memory_refusal():
            self._omit(refusal)
            return
        if not self._standbys:
            self._began = time.monotonic()
        command, environment = self._commands[rank]
        where = _position(command)
        if where is None:
            self._over = True
            return
        ours, theirs = socket.socketpair()
        own = [_STANDBY, str(theirs.fileno()), str(self._run_dir), str(rank), str(os.getpid())]
        words = [*command[:where], *own, *command[where + 1 :]]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(self._run_dir / f"standby-{rank}.log", flags, 0o600)
        try:
            process = subprocess.Popen(
                words,
                env={name: value for name, value in environment.items() if name not in standby_plan.ABSENT},
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._refuse(rank, str(error))
            return
        finally:
            os.close(log)
            theirs.close()
        self._standbys[rank] = StandbyProcess(process, StandbyChannel(ours), command, time.monotonic())
        self._idle.begin()

    def _memory_refusal(self) -> str:
        """Why there is too little memory for those that are still to be started."""
        if self._config.warm_workers == "on":
            return ""
        known = [own_bytes(standby.process.pid) for standby in self._standbys.values()]
        each, left = (max(known), self._count - len(known)) if known else (standby_plan.GUESSED_BYTES, 1)
        try:
            available = room.headroom()
        except (OSError, ValueError, KeyError) as error:
            return f"the memory that is available is not known ({error})"
        return standby_plan.memory_refusal(each, left, available)

    def _omit(self, reason: str) -> None:
        self.end()
        self._over = True
        self._events.emit(catalogue.STANDBYS_OMITTED, reason=reason)
        say(
            f"no standby workers are kept: {reason}; give --ftp-warm-workers on to keep them all the same",
            alarm=True,
            who="ft-run: ",
        )

    def _follow(self, rank: int, standby: StandbyProcess) -> None:
        """Hear whether it is ready; if it is not, let it import in this turn or stop it."""
        if standby.channel.pending():
            standby.let_run(True)  # it may have to send the rest
            try:
                message, _ = standby.channel.receive(_TAKE_SECONDS)
            except (EOFError, OSError, ValueError) as error:
                self._refuse(rank, f"it has ended while it imported ({error}); see standby-{rank}.log")
                return
            standby.bound |= "bound" in message
            standby.ready = "ready" in message
            if "refusal" in message:
                self._refuse(rank, str(message["refusal"]))
            return
        if time.monotonic() - standby.began > _IMPORT_SECONDS:
            self._refuse(rank, f"its imports were not done after {_IMPORT_SECONDS:.0f} s")
            return
        used = used_seconds(standby.process.pid)
        idle = self._idle.cores(used - standby.used)
        standby.used = used
        standby.let_run(standby_plan.may_import(idle, self._turn))

    def _refuse(self, rank: int, reason: str) -> None:
        """Give up the standbys that are not ready: the others would fail as well."""
        if standby := self._standbys.pop(rank, None):
            standby.end()
        self._over = True
        self._events.emit(catalogue.STANDBY_REFUSED, local_rank=rank, reason=reason)

    def _fail(self, error: Exception) -> None:
        """Keep none in this incarnation, because of an unexpected error."""
        self.end()
        self._over = True
        self._events.emit(catalogue.STANDBY_REFUSED, local_rank=0, reason=f"{type(error).__name__}: {error}")

    def _prepared(self) -> None:
        """All wait: say so, once."""
        self._over = True
        seconds = round(time.monotonic() - self._began, 1)
        own = sum(own_bytes(standby.process.pid) for standby in self._standbys.values())
        self._events.emit(catalogue.STANDBYS_PREPARED, count=self._count, seconds=seconds, bytes=own)
        say(
            f"{self._count} standby workers have imported what the ranks of this node have, and wait for a restart; "
            f"they take {own / 2**30:.2f} GiB (--ftp-warm-workers off: none)",
            alarm=True,
            who="ft-run: ",
        )

    # ---- hand over ----

    def _check(self) -> None:
        """Ask all that are ready, at the same time, whether they can still be used; end the others."""
        for rank in [rank for rank, standby in self._standbys.items() if not standby.ready]:
            self._standbys.pop(rank).end()
        asked = {}
        for rank, standby in list(self._standbys.items()):
            with self._usable(rank):
                standby.channel.send({"check": True})
                asked[rank] = standby
        deadline = time.monotonic() + _CHECK_SECONDS
        for rank, standby in asked.items():
            with self._usable(rank):
                _require_none(standby.channel.receive(max(0.0, deadline - time.monotonic()))[0])

    def _start(
        self, rank: int, command: Command, environment: Mapping[str, str], outputs: list[int], cold: Cold
    ) -> subprocess.Popen[bytes]:
        """The process of a worker: a standby that takes its place, or a new one."""
        self._commands[rank] = (command, dict(environment))
        standby = self._standbys.get(rank)
        if standby is not None:
            with self._usable(rank):
                if standby.command != command:
                    raise _Refused("the command differs")
                standby.channel.send({"environment": dict(environment)}, outputs)
                _require_none(standby.channel.receive(_TAKE_SECONDS)[0])
                del self._standbys[rank]
                standby.channel.close()
                self._taken += 1
                return standby.process
        return cold(command, environment)

    @contextmanager
    def _usable(self, rank: int) -> Iterator[None]:
        """If the body fails, the standby of `rank` is ended, and the reason reported."""
        try:
            yield
        except (_Refused, EOFError, OSError, ValueError) as error:
            dead = isinstance(error, EOFError | ConnectionError)
            self._standbys.pop(rank).end()
            reason = "it has ended" if dead else str(error)
            self._events.emit(catalogue.STANDBY_REFUSED, local_rank=rank, reason=reason)


class _Refused(Exception):
    """A standby says that it cannot be used, or is not the right one."""


def _require_none(message: Mapping[str, Any]) -> None:
    """Raises _Refused with the refusal in a standby's answer."""
    if message.get("refusal") != "":
        raise _Refused(str(message.get("refusal")))


def _position(command: Command) -> int | None:
    """Where the worker's module is in a command."""
    for place, word in enumerate(command):
        if word == _WORKER and command[place - 1] == "-m":
            return place
    return None


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


def pool_of(job: Job | None, spec: WorkerSpec, events: Events) -> StandbyPool | None:
    """The standbys of a node; None if it keeps none."""
    if job is None or job.config.warm_workers == "off" or not isinstance(spec.entrypoint, str):
        return None
    return StandbyPool(job.config, job.run_dir, spec.local_world_size, events)
