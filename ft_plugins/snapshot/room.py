"""Check that memory is available before it is claimed: in the mount, and within the limits of the control groups.

A claim that does not fit is rejected here, with the figure and its source; otherwise the kernel would end the process
later, by SIGBUS or the OOM killer. Page cache is treated as free: the kernel reclaims it under pressure.

In: bytes, files of the kernel. Out: nothing, or a BudgetError.
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
_UNLIMITED = 1 << 62  # bytes; cgroup v1 reports no limit as a number just below 1 << 63


def check_room(nbytes: int, claim: str, mount: Path = SHM) -> None:
    """Raises BudgetError if `mount` or a control group of this process has fewer than `nbytes` free for `claim`, which
    the message names."""
    stat = os.statvfs(mount)
    available = stat.f_bavail * stat.f_frsize
    if available < nbytes:
        raise BudgetError(
            f"{claim} needs {nbytes} bytes in {mount}, but only {available} are free; enlarge that mount "
            f"(docker: --shm-size, Kubernetes: an emptyDir with medium Memory and a sizeLimit) "
            f"or remove stale segments with 'ft-plugins sweep'"
        )
    for file, limit, used in _limits():
        if limit - used < nbytes:
            raise BudgetError(
                f"{claim} needs {nbytes} bytes, but {file} allows {limit}, of which {used} are in use: only "
                f"{max(0, limit - used)} are free; raise that limit (docker: --memory, Kubernetes: "
                "resources.limits.memory, Slurm: --mem) or remove stale segments with 'ft-plugins sweep'"
            )


def memory_bytes() -> int:
    """Bytes of this node's memory; less if a control group allows less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for _, limit, _ in _limits())])


def _limits() -> Iterator[tuple[Path, int, int]]:
    """Each memory limit of this process: its file, its bytes, and the bytes in use that cannot be reclaimed."""
    with suppress(OSError):  # no control groups
        for line in OWN_CGROUPS.read_text().splitlines():
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0":  # cgroup v2
                yield from _upwards(CGROUPS, path, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                mount = CGROUPS / "memory"
                yield from _upwards(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _upwards(mount: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[tuple[Path, int, int]]:
    """The limits of a group and its parents. In a container the path may be that outside the container; missing files
    are skipped."""
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # missing, or 'max'
            bytes_allowed = int((folder / limit).read_text())
            if bytes_allowed < _UNLIMITED:
                lines = (folder / "memory.stat").read_text().splitlines()
                stat = dict(line.split() for line in lines)
                files = sum(int(stat[f"{prefix}{age}_file"]) for age in ("active", "inactive"))
                yield folder / limit, bytes_allowed, max(0, int((folder / usage).read_text()) - files)
        if folder == mount:
            return
