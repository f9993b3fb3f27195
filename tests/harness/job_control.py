"""Read the files of jobs, wait for entries, and bring jobs to a known state.

Invariant: nothing depends on speed. Every wait is for an event or for the end of a process and has a time limit.

In: files of JSON lines that other processes append to; a fork server and specs. Out: entries and jobs; a TimeoutError
that shows the last state, an AssertionError if a job did something else.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_plugins.events import catalogue, recent_of
from ft_plugins.smp.serve.client import Client
from ft_plugins.snapshot.segment import paths

from .forkserver import ForkServer, JobSpec, RunningJob

BOUND = 300  # seconds; on two idle cores a wait takes some seconds
_LEAST = 120.0  # seconds that any wait may take
_POLL_SECONDS = 0.005
_LOOK_SECONDS = 0.2

Entry = dict[str, Any]


def wait_for_success(jobs: Mapping[str, RunningJob], seconds: float) -> None:
    """Wait until every node has succeeded. Raises AssertionError with the reason and output of the first one that has
    not, however many still run; TimeoutError with the stacks of those that do."""
    deadline, running = time.monotonic() + seconds, dict(jobs)
    while running:
        ended = {name: job for name, job in running.items() if job.ended}
        for name, job in ended.items():
            outcome = running.pop(name).wait(0)
            reason = outcome.get("reason", "")
            assert outcome["status"] == "succeeded", f"node {name}: {outcome['status']}: {reason}\n{job.tail()}"
        if running and not ended:
            if time.monotonic() > deadline:
                stacks = [f"node {name}:\n{job.stacks()}" for name, job in running.items()]
                raise TimeoutError("\n\n".join([f"not ended after {seconds:.0f} s", *stacks]))
            next(iter(running.values())).ends_within(_LOOK_SECONDS)


def entries(path: Path) -> list[Entry]:
    """The complete lines of `path`, none if the file does not exist. Recent routine events are merged in by time."""
    lines, recent = _lines(path), _lines(recent_of(path))
    return sorted([*recent, *lines], key=lambda entry: float(entry["time"])) if recent else lines


def _lines(path: Path) -> list[Entry]:
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(path: Path, condition: Callable[[list[Entry]], bool], seconds: float) -> list[Entry]:
    """Wait until `condition` holds for the entries, and return them. Raises TimeoutError after `seconds`."""
    current: list[Entry] = []

    def holds() -> bool:
        current[:] = entries(path)
        return condition(current)

    wait_until(holds, seconds, lambda: f"{path.name}: last entries: {current[-5:]}")
    return current


def wait_until_stopped(pid: int, seconds: float) -> None:
    """Wait until process `pid` is stopped by a signal. Raises TimeoutError after `seconds`."""
    wait_until(lambda: is_stopped(pid), seconds, lambda: f"process {pid} is not stopped")


def wait_until_gone(pid: int, seconds: float) -> None:
    """Wait until all threads of process `pid` have ended: then its locks are free. Raises AssertionError."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    ended = poller.poll(1000 * seconds)
    os.close(descriptor)
    assert ended, f"process {pid} was still there after {seconds} s"


def is_stopped(pid: int) -> bool:
    """Whether process `pid` is stopped by a signal; one that has ended is not."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def wait_until(holds: Callable[[], bool], seconds: float, state: Callable[[], str]) -> None:
    """Wait until `holds()`. Raises TimeoutError with the present `state()` after `seconds`, but not before `_LEAST`: a
    busy machine fails no test."""
    deadline = time.monotonic() + max(seconds, _LEAST)
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {max(seconds, _LEAST):.0f} s; {state()}")
        time.sleep(_POLL_SECONDS)


def run_to_end(server: ForkServer, spec: JobSpec, restarts: int | None = 0, seconds: float = 280) -> RunningJob:
    """Run a job until it succeeds, after exactly `restarts` restarts; None: however many."""
    job = server.start(spec)
    outcome = job.wait(seconds)
    assert outcome["status"] == "succeeded", f"{outcome}\n{job.tail(60)}"
    assert restarts in (None, outcome["restarts"]), f"{outcome}\n{job.tail(60)}"
    return job


def captured(events: list[Entry], iteration: int, ranks: int) -> bool:
    """Whether at least `ranks` ranks have captured `iteration`, by their events."""
    sealed = [e for e in events if e["name"] == catalogue.SNAPSHOT_SEALED.name and e["iteration"] == iteration]
    return len(sealed) >= ranks


def stop_after(server: ForkServer, spec: JobSpec, iteration: int, seconds: float = BOUND) -> RunningJob:
    """Start a job and stop its ranks in the update after `iteration`, once every rank has captured that version."""
    faults = f"update.begin@iteration={iteration + 1}:stop"
    job = server.start(replace(spec, flags=(*spec.flags, "--ftp-faults", faults)))
    wait_for(spec.run_dir / "events.jsonl", lambda events: captured(events, iteration, spec.nproc), seconds)
    return job


def write_checkpoints(server: ForkServer, spec: JobSpec, *iterations: int, seconds: float = BOUND) -> None:
    """For each of `iterations`: run the job up to it, write a checkpoint and kill its ft-run. The memory stays."""
    for iteration in iterations:
        job = stop_after(server, spec, iteration, seconds)
        with Client(spec.run_dir) as client:
            reply = client.checkpoint("request", seconds)
        assert (reply["state"], reply["iteration"]) == ("done", iteration), reply
        job.kill()
        assert job.wait(seconds) == {"status": "killed"}


def lose_memory(spec: JobSpec, seconds: float = BOUND) -> None:
    """Kill the SMP and remove its segments, as if the machine had lost power."""
    with Client(spec.run_dir) as client:
        pid = client.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid, seconds)
    parity = paths.parity_path_of(spec.name, spec.node).exists()
    assert paths.remove(spec.name, spec.node) == spec.nproc + parity
