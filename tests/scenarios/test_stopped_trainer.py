"""A trainer that is stopped in mid-bucket when a new incarnation starts: it is ended; if it could not be, it is fenced.

The stopped trainer is no child of an agent here, as one would be that escaped its agent's end.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ft_plugins.config import Config, run_directory, worker_environment
from ft_plugins.smp.serve.client import Client, ensure
from ft_plugins.snapshot.segment.paths import path_of
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.slots import SlotState, Version
from harness import fills
from harness.job_control import entries, wait_for, wait_until_stopped

BOUND = 280
STOPPED_AT = "capture.bucket.begin@iteration=4,bucket=2"
BUCKETS = 4  # of 16 MiB

Trainer = Callable[[int, int, str], subprocess.Popen[bytes]]


@dataclasses.dataclass(frozen=True)
class Node:
    """An SMP of this test, and how to start a trainer under one of its tokens."""

    name: str
    run_dir: Path
    journal: Path
    started: list[subprocess.Popen[bytes]]

    def trainer(self, token, iterations, faults=""):
        config = Config.from_flags(
            ["--reft", "--reft-bucket-mib", "16", *(["--ftp-faults", faults] if faults else [])]
        )[0]
        launched = worker_environment(config, self.run_dir, token, os.getpid())
        launched["TORCHELASTIC_RESTART_COUNT"] = str(token - 1)
        words = ["--iterations", str(iterations), "--mib", "64", "--journal", str(self.journal)]
        found = os.pathsep.join([str(Path(fills.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **launched, "OMP_NUM_THREADS": "1", "PYTHONPATH": found}
        process = subprocess.Popen([sys.executable, "-m", "harness.fills", *words], env=environment)
        self.started.append(process)
        return process

    def fence(self):
        with Client(self.run_dir) as client:
            return client.fence()


@pytest.fixture
def make_node(tmp_path, own_environment):
    made = []

    def make(faults):
        name = f"stopped{os.getpid()}"
        run_dir = run_directory(name, "node0", {**os.environ, "XDG_RUNTIME_DIR": str(own_environment)})
        ensure(run_dir, name, "node0", 60, faults)
        made.append(Node(name, run_dir, tmp_path / "journal", []))
        with Client(run_dir) as client:
            client.watch(os.getpid(), 600)
        return made[-1]

    yield make
    for node in made:
        for process in node.started:
            process.kill()
            process.wait(BOUND)
        with Client(node.run_dir) as client:
            client.end()


def test_a_new_start_ends_a_stopped_trainer_and_resumes(make_node):
    node = make_node("")
    stopped = node.trainer(node.fence(), 10, f"{STOPPED_AT}:stop")
    wait_until_stopped(stopped.pid, BOUND)
    token = node.fence()
    assert stopped.wait(BOUND) == -signal.SIGKILL
    fresh = node.trainer(token, 6)
    assert fresh.wait(BOUND) == 0
    restored = [entry for entry in entries(node.journal) if "restored" in entry]
    assert [entry["restored"] for entry in restored] == [0, 3]
    assert all(entry["torn"] == [] for entry in entries(node.journal))


def test_a_stopped_trainer_that_wakes_writes_one_bucket_at_most_and_is_refused_at_the_next_edge(make_node):
    node = make_node("fence.kill:skip")
    stopped = node.trainer(node.fence(), 10, f"{STOPPED_AT}:stop")
    wait_until_stopped(stopped.pid, BOUND)
    segment = Segment(path_of(node.name, "node0", 0))
    (touched,) = [slot.index for slot in segment.slots() if slot.state is SlotState.DIRTY]
    token = node.fence()
    # the new incarnation restores, trains on and reuses the slot; then the old one wakes, and copies its bucket
    fresh = node.trainer(token, 1000, "update.begin@iteration=8:stop")
    wait_until_stopped(fresh.pid, BOUND)
    assert segment.slot(touched).version == Version(2, 7), "the new incarnation had sealed the slot again"
    before = segment.data(touched).copy()
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(BOUND) != 0, "refused: FencedError at the next bucket edge"
    changed = np.flatnonzero(segment.data(touched) != before)
    assert len(changed), "the late write took place, or this test shows nothing"
    starts = np.arange(BUCKETS) * (16 << 20)
    buckets = {int(np.searchsorted(starts, offset, side="right")) - 1 for offset in (changed[0], changed[-1])}
    assert buckets == {2}, "only the bucket it was in was written"
    slot = segment.slot(touched)
    assert slot.state is SlotState.DIRTY, "the seal no longer fits: the late writer's digest is not its"
    assert slot.damaged, "the new incarnation had sealed the slot again: it is not one that a writer had begun"
    os.kill(fresh.pid, signal.SIGKILL)
    fresh.wait(BOUND)
    last = node.trainer(node.fence(), 12)
    assert last.wait(BOUND) == 0
    found = wait_for(node.journal, lambda lines: len(lines) >= 4, BOUND)
    assert all(entry["torn"] == [] for entry in found), "the slot that the late write touched was not restored"
    assert [entry["restored"] for entry in found if "restored" in entry][-1] == 6


def test_a_trainer_that_stays_stopped_is_lost_and_the_job_goes_on(torch_server, jobs, tmp_path):
    """Its peer waits for it in a collective, and would for half an hour: nothing has died, nothing is reported."""
    journal = tmp_path / "journal"
    flags = ("--reft", "--ftp-faults", "update.begin@iteration=5,rank=1,restart=0:stop", "--ftp-detect-seconds", "1")
    argv = ("--iterations", "9", "--mib", "1", "--journal", str(journal), "--replicated")
    job = torch_server.start(jobs(entry="harness.fills:main", argv=argv, flags=flags, nproc=2))
    outcome = job.wait(BOUND)
    words = "the job succeeded: training ended after iteration 9; exit status 0"
    assert outcome == {"status": "succeeded", "reason": words, "restarts": 1}, job.tail()
    (declared,) = job.events("node.lost")
    assert declared.fields["lost"] == ["rank 1"]
    found = entries(journal)
    assert all(entry["torn"] == [] for entry in found)
    assert sorted(entry["restored"] for entry in found if entry.get("restart") == 1) == [3, 3]
    assert [event.fields["iteration"] for event in job.events("resume.proven")] == [4]
    assert [entry["ended"] for entry in found if "ended" in entry] == [9, 9]
