"""Remove locks that killed ranks have left in the folders in which torch builds extensions (torch.utils.cpp_extension).

While the file `lock` is in such a folder every other process waits for it, without end. Which process made it stands
nowhere, but that process holds it open, and its compilers work in the folder. The folder may be in a home that other
nodes and containers use too, whose processes are not seen here. Invariant: a lock is removed only if no process of
another job is seen that has to do with it, and either processes of this job were seen at that build before they were
killed, or the folder is on a file system of this machine and nothing in it has changed for QUIET_SECONDS. What killed
ranks of this job have left at work there is ended first.

In: the job's run directory, the builds that were its own. Out: those that are; the paths that were removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torch import _appdirs

from ...smp.watch import liveness

QUIET_SECONDS = 600.0


def is_stale(users: Collection[bool], ours: bool, file_system: str, quiet: float) -> bool:
    """Whether a lock is left by dead ranks of this job. `users`: of each process that is seen at its build, whether it
    is of this job; `ours`: such a one was seen there; `file_system`: the type of that of its folder; `quiet`: for so
    many seconds nothing there has changed."""
    return all(users) and (
        ours or not users and quiet >= QUIET_SECONDS
        and file_system in ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
    )  # fmt: skip


def builds_of(
    run_dir: Path, ranks: Collection[int], environment: Mapping[str, str] = os.environ
) -> dict[Path, tuple[int, int]]:
    """The locks of builds at which only processes of the job that has this run directory are seen, each with what no
    later one of its path has. `ranks`: pids of its ranks. For the moment before they are killed, compilers too."""
    return {lock: which for lock, which, users in _builds(environment, run_dir, ranks) if users and all(users.values())}


def remove_stale(
    run_dir: Path, builds: Mapping[Path, tuple[int, int]], environment: Mapping[str, str] = os.environ
) -> Iterator[Path]:
    """Remove those of the folder that this environment, or torch's default, names. `builds`: see `builds_of`."""
    for lock, which, users in _builds(environment, run_dir):
        with suppress(OSError):
            stale = is_stale(
                users.values(), builds.get(lock) == which, liveness.file_system(lock),
                time.time() - max(path.lstat().st_mtime for path in lock.parent.rglob("*")),
            )  # fmt: skip
            if stale and not liveness.kill_and_wait([(pid, liveness.started(pid)) for pid in users], 5.0):
                lock.unlink()
                yield lock


def _builds(
    environment: Mapping[str, str], run_dir: Path, ranks: Collection[int] = ()
) -> Iterator[tuple[Path, tuple[int, int], dict[int, bool]]]:
    """The locks of this user, each with what no later one of its path has, and its users."""
    with suppress(OSError):
        root = environment.get("TORCH_EXTENSIONS_DIR") or _appdirs.user_cache_dir(appname="torch_extensions")
        for path in (*(found := Path(root).resolve()).glob("*/lock"), *found.glob("*/*/lock")):
            if (status := path.lstat()).st_uid == os.getuid():
                yield path, (status.st_ino, status.st_mtime_ns), _users(path, run_dir, ranks)


def _users(lock: Path, run_dir: Path, ranks: Collection[int]) -> dict[int, bool]:
    """The processes of this node that hold `lock` open, or work in its folder, and whether each is one of `ranks`, or a
    rank of the job that has this run directory has started it."""
    users = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            links = (os.path.realpath(link) for link in (entry / "cwd", *(entry / "fd").iterdir()))
            if not {str(lock), str(lock.parent)}.isdisjoint(links):
                users[int(entry.name)] = int(entry.name) in ranks or (
                    b"FTP_RUN_DIR=%b\0" % bytes(run_dir) in (entry / "environ").read_bytes()
                )
    return users
