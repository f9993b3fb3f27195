"""Jobs of the rig brought to a known place: ended, standing still at an iteration, checkpointed there, without memory.

Invariant: nothing depends on speed; what is waited for is an event or a process's end, and bounded.

In: a fork server, specs. Out: jobs; an AssertionError where something else happened.
"""

from __future__ import annotations

import os
import select
import signal
from dataclasses import replace

from ..events import catalogue
from ..smp.client import Client
from ..snapshot import paths
from .forkserver import ForkServer, JobSpec, RunningJob
from .journal import Entry, wait_for

BOUND = 90  # seconds


def ended(server: ForkServer, spec: JobSpec, restarts: int = 0, seconds: float = 240) -> RunningJob:
    """The job, ended in order after that many restarts."""
    job = server.start(spec)
    outcome = job.wait(seconds)
    assert (outcome["status"], outcome["restarts"]) == ("succeeded", restarts), (outcome, job.tail())
    return job


def sealed(found: list[Entry], iteration: int, ranks: int) -> bool:
    """Whether the events say that so many ranks hold the version of `iteration`."""
    return (
        len([e for e in found if e["name"] == catalogue.SNAPSHOT_SEALED.name and e["iteration"] == iteration]) >= ranks
    )


def standing_after(server: ForkServer, spec: JobSpec, iteration: int, seconds: float = BOUND) -> RunningJob:
    """The job, its ranks stopped in the update after `iteration`, whose version every rank has sealed."""
    faults = f"update.begin@iteration={iteration + 1}:stop"
    job = server.start(replace(spec, flags=(*spec.flags, "--ftp-faults", faults)))
    wait_for(spec.run_dir / "events.jsonl", lambda found: sealed(found, iteration, spec.nproc), seconds)
    return job


def checkpointed(server: ForkServer, spec: JobSpec, *iterations: int, seconds: float = BOUND) -> None:
    """The job run up to each of `iterations` in turn, a checkpoint written there, its ft-run killed; memory stays."""
    for iteration in iterations:
        job = standing_after(server, spec, iteration, seconds)
        with Client(spec.run_dir) as client:
            found = client.checkpoint("request", seconds)
        assert (found["state"], found["iteration"]) == ("done", iteration), found
        job.kill()
        assert job.wait(seconds) == {"status": "killed"}


def lose_memory(spec: JobSpec, seconds: float = BOUND) -> None:
    """As if the machine had been switched off: no SMP, no segments."""
    with Client(spec.run_dir) as client:
        pid = client.status()["pid"]
    descriptor = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    assert poller.poll(1000 * seconds)
    os.close(descriptor)
    parity = paths.vault_of(spec.name, spec.node).exists()
    assert paths.remove(spec.name, spec.node) == spec.nproc + parity
