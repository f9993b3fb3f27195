"""Whether memory is there before it is claimed: in the mount, and within what this process's control groups may take.

Invariant: refused here, with the figure and its source, or the kernel would do it later, by SIGBUS or the OOM killer.
What the kernel gives back by itself when memory gets short (pages of files) does not count as taken.

In: bytes, the files of the kernel. Out: nothing, or a BudgetError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import BudgetError

SHM = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 62  # bytes; version 1 has no word for it


def check_room(nbytes: int, who: str, mount: Path = SHM) -> None:
    """Raises BudgetError when `mount`, or a control group of this process, has not `nbytes` free for `who`."""
    found = os.statvfs(mount)
    available = found.f_bavail * found.f_frsize
    if available < nbytes:
        raise BudgetError(
            f"{who} needs {nbytes} bytes in {mount}, but only {available} are free there; enlarge that mount "
            f"(docker: --shm-size, Kubernetes: an emptyDir with medium Memory and a sizeLimit) "
            f"or remove stale segments with 'ft-plugins sweep'"
        )
    for file, limit, used in _limits():
        if limit - used < nbytes:
            raise BudgetError(
                f"{who} needs {nbytes} bytes, but {file} allows {limit}, of which {used} are taken: only "
                f"{max(0, limit - used)} are free; raise that limit (docker: --memory, Kubernetes: "
                "resources.limits.memory, Slurm: --mem) or remove stale segments with 'ft-plugins sweep'"
            )


def _limits() -> Iterator[tuple[Path, int, int]]:
    """The file of each memory limit that this process is under, its bytes, and how many of those are taken for good."""
    with suppress(OSError):  # no control groups here
        for line in OWN_CGROUPS.read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if number == "0":
                yield from _upwards(CGROUPS, path, "memory.max", "memory.current", "")
            elif "memory" in kinds.split(","):
                mount = CGROUPS / "memory"
                yield from _upwards(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _upwards(mount: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[tuple[Path, int, int]]:
    """A group's limit and those of the groups around it. In a container its path may be that of the host: what is not
    there is passed over."""
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # not there, or 'max'
            bytes_allowed = int((folder / limit).read_text())
            if bytes_allowed < _UNLIMITED:
                lines = (folder / "memory.stat").read_text().splitlines()
                stat = dict(line.split() for line in lines)
                files = sum(int(stat[f"{prefix}{age}_file"]) for age in ("active", "inactive"))
                yield folder / limit, bytes_allowed, max(0, int((folder / usage).read_text()) - files)
        if folder == mount:
            return
