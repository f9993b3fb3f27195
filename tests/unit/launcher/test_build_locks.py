"""Locks that killed ranks have left in torch's folders of extensions, and those that are let alone."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType

import pytest
from torch.utils.file_baton import FileBaton

from ft_plugins.launcher.agent import build_locks
from ft_plugins.launcher.agent.build_locks import QUIET_SECONDS, builds_of, is_stale, remove_stale
from ft_plugins.smp.watch import liveness

BUILDS = "import time\nprint(flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def lock(tmp_path):
    """A lock as torch makes it, of a process that is gone; nothing changes there any more."""
    path = tmp_path / "py311_cpu" / "ext" / "lock"
    path.parent.mkdir(parents=True)
    baton = FileBaton(str(path))
    assert baton.try_acquire()
    os.close(baton.fd)
    long_ago = time.time() - QUIET_SECONDS - 60
    for each in (path, path.parent):
        os.utime(each, (long_ago, long_ago))
    return path


@pytest.fixture
def remove(tmp_path):
    def remove(builds=MappingProxyType({})):
        return list(remove_stale(tmp_path / "job", builds, {"TORCH_EXTENSIONS_DIR": str(tmp_path)}))

    return remove


@pytest.fixture
def builder(lock):
    """A process that works in the folder of the lock, as a compiler does, of the job of that run directory."""
    started = []

    def start(run_dir):
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


@pytest.mark.parametrize(
    ("users", "ours", "file_system", "quiet", "stale"),
    [
        ([], True, "nfs4", 0.0, True),  # its ranks were seen at it
        ([True], True, "nfs4", 0.0, True),
        ([True, False], True, "ext4", 1e6, False),  # another job's process is
        ([], False, "ext4", QUIET_SECONDS, True),
        ([], False, "ext4", QUIET_SECONDS - 1, False),
        *(([], False, kind, 1e6, False) for kind in ("nfs4", "lustre", "fuse.ceph", "unknown")),
        ([True], False, "ext4", 1e6, False),  # its own, but not seen before its ranks were killed
    ],
)
def test_a_lock_is_stale_only_by_what_was_seen_or_where_nothing_else_can_be_at_it(
    users, ours, file_system, quiet, stale
):
    assert is_stale(users, ours, file_system, quiet) is stale


def test_a_build_of_another_node_or_container_keeps_its_lock(lock, remove):
    (lock.parent / "main.o").touch()
    assert remove() == [] and lock.exists(), "it goes on, though no process is seen here"


def test_a_lock_whose_process_is_dead_is_removed(lock, remove):
    assert remove() == [lock] and not lock.exists()
    assert remove() == []


def test_a_folder_without_accelerator_in_its_name_is_looked_at_too(tmp_path, remove):
    (tmp_path / "ext").mkdir()
    (tmp_path / "ext" / "lock").touch()
    os.utime(tmp_path / "ext" / "lock", (0, 0))
    assert remove() == [tmp_path / "ext" / "lock"]


def test_a_later_lock_of_the_same_path_is_let_alone(lock, tmp_path, remove, builder):
    builder(tmp_path / "job")
    builds = builds_of(tmp_path / "job", (), {"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert set(builds) == {lock}
    lock.unlink()
    lock.touch()
    assert remove(builds) == [] and lock.exists(), "its rank ended the build, and another node began one"


def test_a_lock_that_a_process_holds_open_is_let_alone(lock, remove):
    lock.unlink()
    baton = FileBaton(str(lock))
    assert baton.try_acquire() and remove() == [] and lock.exists()
    baton.release()


def test_a_lock_under_which_another_job_compiles_is_let_alone_and_the_compiler_too(lock, tmp_path, remove, builder):
    pid = builder(tmp_path / "another job")
    assert remove() == [] and lock.exists() and liveness.started(pid)
    builder(tmp_path / "job")
    assert remove() == [] and lock.exists()


def test_what_killed_ranks_of_this_job_have_left_at_work_is_ended_with_their_lock(lock, tmp_path, remove, builder):
    pid = builder(tmp_path / "job")
    (lock.parent / "main.o").touch()
    builds = builds_of(tmp_path / "job", (), {"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert remove(builds) == [lock] and not liveness.started(pid)


def test_a_build_is_that_of_a_rank_itself_also_where_its_environment_is_older(lock, tmp_path, builder):
    pid, folder = builder(tmp_path / "parent of preloaded ranks"), {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert set(builds_of(tmp_path / "job", [pid], folder)) == {lock}
    assert builds_of(tmp_path / "job", [], folder) == {}


def test_by_default_it_is_the_folder_that_torch_uses(tmp_path, monkeypatch):
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Path(get_default_build_root()) / "py311_cpu" / "ext" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (0, 0))
    monkeypatch.setattr(build_locks, "QUIET_SECONDS", 0.0)
    assert list(remove_stale(tmp_path, {}, {})) == [path]
