"""The jobs of one test: specs under names of its own, starts on the fork servers of all frameworks, and a clean end.

In: the fork server of a framework, the folder of a test. Out: specs and running jobs. `end` leaves no process of them,
and asserts that no segment was left.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_plugins.errors import FtError
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.watch import liveness

from .forkserver import ForkServer, JobSpec, RunningJob
from .job_control import run_to_end
from .runs import ExampleRun, Run

DETECT, HANG = "--ftp-detect-seconds", "--ftp-hang-seconds"
_GONE_SECONDS = 10.0  # for an SMP to end on request or after a signal
_numbers = itertools.count()


def has_flag(flags: tuple[str, ...], name: str) -> bool:
    """Whether the flag `name` is given, as a word or before a '='."""
    return any(word.split("=")[0] == name for word in flags)


def write_secret(folder: Path) -> Path:
    """The file by which the nodes of a job know each other."""
    secret = folder / "secret"
    secret.write_text("what the nodes of this job know")
    secret.chmod(0o600)
    return secret


class Jobs:
    """Makes, starts and ends the jobs of a test. `servers`: the fork server of a framework, by name."""

    def __init__(self, folder: Path, runtime: Path, servers: Callable[[str], ForkServer]) -> None:
        self.folder = folder
        self._name, self._runtime, self._servers = _new_name(), runtime, servers
        self._specs: list[JobSpec] = []

    def __call__(self, **fields: object) -> JobSpec:
        """A spec; without a name, of the test's own job, of which there may be several nodes and starts."""
        own = {"name": self._name, "folder": str(self.folder), **fields, "runtime": str(self._runtime)}
        spec = JobSpec(**own)  # type: ignore[arg-type]
        if any(":stop" in word for word in spec.flags) and not has_flag(spec.flags, DETECT):
            # A test inspects a stopped process for as long as it needs.
            more = (DETECT, "600") if has_flag(spec.flags, HANG) else (DETECT, "600", HANG, "0")
            spec = replace(spec, flags=(*spec.flags, *more))
        self._specs.append(spec)
        return spec

    def of(self, run: ExampleRun, **fields: object) -> JobSpec:
        """The spec of a run, under a name that no other job has."""
        return self(**{**vars(run.spec(**fields)), "name": _new_name()})

    def server(self, framework: str) -> ForkServer:
        """The fork server of a framework."""
        return self._servers(framework)

    def start(self, run: ExampleRun, **fields: object) -> RunningJob:
        """Start a run as a job of its own."""
        return self.server(run.framework).start(self.of(run, **fields))

    def finish(self, run: ExampleRun, restarts: int | None = 0, **fields: object) -> RunningJob:
        """Start a run as a job of its own, and wait until it has succeeded, after so many restarts; None: however many.
        """
        return run_to_end(self.server(run.framework), self.of(run, **fields), restarts)

    def end(self, servers: Iterable[ForkServer]) -> None:
        """End all jobs of `servers` and the SMPs. Raises AssertionError if a segment was left; it is removed."""
        for server in servers:  # first the agents, which would replace ended SMPs
            server.end_jobs(_GONE_SECONDS)
        for spec in self._specs:
            if liveness.held(spec.run_dir / "smp.lock"):
                with suppress(FtError), Client(spec.run_dir, timeout=5) as client:
                    client.end()
        deadline = time.monotonic() + _GONE_SECONDS
        while any(liveness.held(spec.run_dir / "smp.lock") for spec in self._specs) and time.monotonic() < deadline:
            time.sleep(0.01)  # SMPs remove their segments
        names = {spec.name for spec in self._specs}
        while (others := _smps_of(names)) and time.monotonic() < deadline + _GONE_SECONDS:
            liveness.kill_and_wait(others, _GONE_SECONDS)  # stopped, or starting for an agent that has ended
        left = [path for name in names for path in Path("/dev/shm").glob(f"ftp-{name}@*")]
        for path in left:
            path.unlink(missing_ok=True)
        assert not left, f"segments were left behind: {left}"


class Goldens:
    """Makes unfailed runs, each once for all tests, as jobs of the test that needs it first."""

    def __init__(self, jobs: Jobs, made: dict[str, tuple[Any, RunningJob]], folder: Callable[[str], Path]) -> None:
        """`made`: those of earlier tests; `folder` makes one."""
        self._jobs, self._made, self._folder = jobs, made, folder

    def __call__(self, run: Run) -> Run:
        """The run as it is to be, in whatever folder; returns it where it was made."""
        found: Run = self._of(run)[0]
        return found

    def job(self, run: ExampleRun) -> RunningJob:
        """The job of such a run, which has ended."""
        return self._of(run)[1]

    def _of(self, run: ExampleRun) -> tuple[Any, RunningJob]:
        key = repr(replace(run, name="", folder=Path()))
        if key not in self._made:
            one = replace(run, name="golden", folder=self._folder("golden"))
            self._made[key] = one, self._jobs.finish(one)
        return self._made[key]


def _new_name() -> str:
    return f"t{os.getpid()}-{next(_numbers)}"


def _smps_of(jobs: set[str]) -> list[tuple[int, int]]:
    """Pids and start times of the SMPs of these jobs, starting ones included."""
    smps = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = entry.read_text(errors="replace").split("\0")
            if "--job" in words and words[words.index("--job") + 1] in jobs:
                smps.append((int(entry.parent.name), liveness.started(int(entry.parent.name))))
    return [(pid, began) for pid, began in smps if began]
