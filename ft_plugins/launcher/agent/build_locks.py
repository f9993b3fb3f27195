"""Remove locks that killed ranks have left in the folders in which torch builds extensions (torch.utils.cpp_extension).

While the file `lock` is in such a folder every other process waits for it, without end. Which process made it stands
nowhere, but that process holds it open, and its compilers work in the folder. Invariant: a lock is removed only if no
process of this node holds it open or works in its folder, and if it was made between `since` and `until`: not by ranks
of another node that have started again already. What killed ranks of this job have left at work there is ended first.

In: the job's run directory, the time in which its ended ranks ran. Out: the paths that were removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torch import _appdirs

from ...smp.watch import liveness


def remove_stale(
    run_dir: Path, since: float, until: float, environment: Mapping[str, str] = os.environ
) -> Iterator[Path]:
    """Remove those of the folder that this environment, or torch's default, names. Times: seconds since the epoch."""
    root = environment.get("TORCH_EXTENSIONS_DIR") or _appdirs.user_cache_dir(appname="torch_extensions")
    for path in (*(found := Path(root).resolve()).glob("*/lock"), *found.glob("*/*/lock")):
        with suppress(OSError):
            users, status = _users(path, run_dir), path.lstat()
            stale = all(users.values()) and status.st_uid == os.getuid() and since <= status.st_mtime <= until
            if stale and not liveness.kill_and_wait([(pid, liveness.started(pid)) for pid in users], 5.0):
                path.unlink()
                yield path


def _users(lock: Path, run_dir: Path) -> dict[int, bool]:
    """The processes of this node that hold `lock` open, or work in its folder, and whether a rank of the job that has
    this run directory has started them."""
    users = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            links = {os.path.realpath(link) for link in (entry / "cwd", *(entry / "fd").iterdir())}
            if links & {str(lock), str(lock.parent)}:
                users[int(entry.name)] = b"FTP_RUN_DIR=%b\0" % bytes(run_dir) in (entry / "environ").read_bytes()
    return users
