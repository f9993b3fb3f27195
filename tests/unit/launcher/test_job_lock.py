"""One ft-run per job and node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ft_plugins.errors import BusyError
from ft_plugins.launcher.job_identity import JobLock

fork = get_context("fork")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "job" / "node"
    folder.mkdir(parents=True)
    return folder


def own(run_dir: Path, ready: Connection, forks: bool) -> None:
    """An owner that lives until it is killed; with `forks`, a child of it has a copy of the lock and lets go of it."""
    ownership = JobLock(run_dir)
    if forks and os.fork() == 0:
        ownership.close()
        os.setpgid(0, 0)
        ready.send(os.getpid())
        signal.pause()
    if not forks:
        ready.send(os.getpid())
    signal.pause()


@pytest.fixture
def owner(run_dir: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    ours, theirs = fork.Pipe()
    process = fork.Process(target=own, args=(run_dir, theirs, getattr(request, "param", False)))
    process.start()
    assert ours.poll(20)
    ready = ours.recv()
    yield process.pid or 0
    process.kill()
    if ready != process.pid:
        os.kill(ready, signal.SIGKILL)
    process.join(20)


def test_a_second_one_is_refused_and_told_who_owns_the_job_and_what_to_do(run_dir: Path, owner: int) -> None:
    with pytest.raises(BusyError, match=rf"job job .*node node .*pid {owner}.*--ftp-job"):
        JobLock(run_dir)


@pytest.mark.parametrize("owner", [False, True], indirect=True, ids=["alone", "with a forked worker that lives on"])
def test_the_lock_of_a_killed_owner_is_free(run_dir: Path, owner: int) -> None:
    os.kill(owner, signal.SIGKILL)
    with JobLock(run_dir):
        assert (run_dir / "lock").read_text() == str(os.getpid())


def test_it_is_given_up_at_the_end_of_the_block(run_dir: Path) -> None:
    with JobLock(run_dir) as first:
        first.close()
        first.close()
        with JobLock(run_dir):
            pass
