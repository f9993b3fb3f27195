"""Real segments, SMPs and ranks for unit tests, bounded in time and removed afterwards."""

import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from ft_plugins.base import faults
from ft_plugins.events import read
from ft_plugins.smp.serve.client import Client, ensure
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import header, segment, segment_file, slot_header
from ft_plugins.snapshot.segment.paths import SHM, path_of
from ft_plugins.systems.reft import reft
from harness.gang import gang
from harness.job_control import wait_until_gone

_HEADER_FILES = {module.__file__ for module in (header, segment, segment_file, slot_header)}
_numbers = itertools.count()
_BOUND = 120.0  # seconds for an SMP to answer and to end

settings.register_profile("no deadline", deadline=None)  # durations depend on the load of the machine
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def disarmed():
    """Disarm all faults after a test."""
    yield
    faults.arm("")


@pytest.fixture(autouse=True)
def unproven(monkeypatch):
    """Restores are proven only where a test says so: it computes an iteration once more, and most tests here count
    iterations. Whole jobs prove them."""
    real = reft.unproven
    monkeypatch.setattr(
        reft, "unproven", lambda config: real(config) if ("prove",) in config.given() else "by this test"
    )


@pytest.fixture
def job():
    """A unique job name. Afterwards the job may have nothing in /dev/shm."""
    name = f"t{os.getpid()}-{next(_numbers)}"
    yield name
    left = sorted(SHM.glob(f"ftp-{name}*"))
    for path in left:
        path.unlink()
    assert not left, f"left behind: {left}"


@pytest.fixture
def run_python():
    """Run scripts, each in a session of its own, until they print a line; returns pid and start time."""
    started = []
    python = os.path.realpath("/proc/self/exe")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(script):
        process = subprocess.Popen(
            [python, "-c", script], stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid, liveness.started(process.pid)

    yield run
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def segment_path(job):
    """The path of a segment that the test creates itself; removed afterwards."""
    path = path_of(job, "n", 0)
    yield path
    path.unlink(missing_ok=True)


class Death(BaseException):
    """The death of a process at some line; nothing catches it."""


@pytest.fixture
def dies_at():
    """Run some work, but die before the n-th executed line (from 0) of the files that store to a segment's headers.
    Returns whether there were that many lines."""

    def run(line, work):
        left = line

        def trace(frame, event, arg):
            nonlocal left
            if frame.f_code.co_filename not in _HEADER_FILES:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    raise Death
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            work()
        except Death:
            segment._PINNING = threading.RLock()  # the lock that it may have held has died with it
            return True
        finally:
            sys.settrace(before)
        return False

    return run


@dataclass
class Node:
    """An emulated node of a job: its run directory and SMP."""

    job: str
    name: str
    run_dir: Path
    pids: list[int] = field(default_factory=list)

    def start(self, orphan_seconds=600, armed=""):
        """Start the SMP, or find the running one; returns its pid."""
        self.pids.append(ensure(self.run_dir, self.job, self.name, orphan_seconds, armed))
        return self.pids[-1]

    def client(self, timeout=30):
        return Client(self.run_dir, timeout)

    def fence(self):
        with self.client() as client:
            return client.fence()

    def status(self):
        with self.client() as client:
            return client.status()

    def events(self, name=""):
        return [event for event in read(self.run_dir / "events.jsonl") if not name or event.name == name]

    def segment(self, rank):
        return path_of(self.job, self.name, rank)

    def kill(self):
        """SIGKILL the SMP; it is gone when this returns."""
        kill(self.pids[-1])

    def end(self):
        """End the SMP on request, also if it is stopped."""
        if liveness.held(self.run_dir / "smp.lock"):
            pid = int((self.run_dir / "smp.lock").read_text())
            os.kill(pid, signal.SIGCONT)
            with self.client(_BOUND) as client:
                client.end()
            wait_until_gone(pid, _BOUND)


def kill(pid):
    """SIGKILL a process and wait until it has ended."""
    descriptor = os.pidfd_open(pid)
    os.close(descriptor)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid, 20)


@pytest.fixture
def nodes(job):
    """Nodes by name. Their SMPs are ended afterwards and remove all segments."""
    made = {}
    with tempfile.TemporaryDirectory(prefix="ftu-", dir="/tmp") as folder:

        def node(name="n"):
            if name not in made:
                run_dir = Path(folder) / job / name
                run_dir.mkdir(parents=True, mode=0o700)
                made[name] = Node(job, name, run_dir)
            return made[name]

        yield node
        for each in made.values():
            each.end()


@pytest.fixture
def node(nodes):
    """The only node of a job."""
    return nodes("n")


@pytest.fixture
def ranks():
    """Run `function(rank, world, *args)` on `world` forked gloo ranks; returns the results by rank."""
    torch.set_num_threads(1)
    return functools.partial(gang, plain=True)
