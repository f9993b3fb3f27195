"""Locks that killed ranks have left in torch's folders of extensions, and those that are let alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from ft_plugins.launcher.agent.build_locks import remove_stale
from ft_plugins.smp.watch import liveness

BUILDS = "import time\nprint(flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock as torch makes it, of a process that is gone."""
    path = tmp_path / "py311_cpu" / "ext" / "lock"
    path.parent.mkdir(parents=True)
    baton = FileBaton(str(path))
    assert baton.try_acquire()
    os.close(baton.fd)
    return path


@pytest.fixture
def remove(tmp_path: Path) -> Callable[..., list[Path]]:
    def remove(since: float = 0.0, until: float = float("inf")) -> list[Path]:
        return list(remove_stale(tmp_path / "job", since, until, {"TORCH_EXTENSIONS_DIR": str(tmp_path)}))

    return remove


@pytest.fixture
def builder(lock: Path) -> Iterator[Callable[[Path], int]]:
    """A process that works in the folder of the lock, as a compiler does, of the job of that run directory."""
    started = []

    def start(run_dir: Path) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", BUILDS], cwd=lock.parent, env=os.environ | {"FTP_RUN_DIR": str(run_dir)},
            stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_lock_whose_process_is_dead_is_removed(lock: Path, remove: Callable[..., list[Path]]) -> None:
    assert remove() == [lock] and not lock.exists()
    assert remove() == []


def test_a_folder_without_accelerator_in_its_name_is_looked_at_too(
    tmp_path: Path, remove: Callable[..., list[Path]]
) -> None:
    (tmp_path / "ext").mkdir()
    (tmp_path / "ext" / "lock").touch()
    assert remove() == [tmp_path / "ext" / "lock"]


def test_a_lock_that_was_made_before_or_after_the_ended_ranks_ran_is_let_alone(
    lock: Path, remove: Callable[..., list[Path]]
) -> None:
    made = lock.stat().st_mtime
    assert remove(since=made + 1) == remove(until=made - 1) == [] and lock.exists()


def test_a_lock_that_a_process_holds_open_is_let_alone(lock: Path, remove: Callable[..., list[Path]]) -> None:
    lock.unlink()
    baton = FileBaton(str(lock))
    assert baton.try_acquire() and remove() == [] and lock.exists()
    baton.release()


def test_a_lock_under_which_another_job_compiles_is_let_alone_and_the_compiler_too(
    lock: Path, tmp_path: Path, remove: Callable[..., list[Path]], builder: Callable[[Path], int]
) -> None:
    pid = builder(tmp_path / "another job")
    assert remove() == [] and lock.exists() and liveness.started(pid)
    builder(tmp_path / "job")
    assert remove() == [] and lock.exists()


def test_what_killed_ranks_of_this_job_have_left_at_work_is_ended_with_their_lock(
    lock: Path, tmp_path: Path, remove: Callable[..., list[Path]], builder: Callable[[Path], int]
) -> None:
    pid = builder(tmp_path / "job")
    assert remove() == [lock] and not liveness.started(pid)


def test_by_default_it_is_the_folder_that_torch_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Path(get_default_build_root()) / "py311_cpu" / "ext" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    assert list(remove_stale(tmp_path, 0.0, time.time() + 60, {})) == [path]
