"""Check that memory is available before it is claimed: in the mount, in the machine, within its control groups.

A claim that does not fit is rejected here, with the figures, their source and what to do; otherwise the kernel would
end the process later, by SIGBUS or the OOM killer. Page cache is treated as free: the kernel reclaims it under
pressure.

In: bytes, files of the kernel. Out: nothing, or a BudgetError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import BudgetError

SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
SPARE = 20  # this part of a node's memory is not claimed while it trains: training itself may need it
_UNLIMITED = 1 << 62  # bytes; cgroup v1 reports no limit as a number just below 1 << 63
_STALE = "remove what ended jobs have left with 'ft-plugins sweep'"


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of this process: `nbytes`, of which `free` can still be claimed. `remedy`: how to raise
    it."""

    where: str
    nbytes: int
    free: int
    remedy: str


def check_room(nbytes: int, claim: str, mount: Path = SHM, smaller: str = "", spare: int = 0) -> None:
    """Raises BudgetError if `mount`, this machine or a control group of this process has fewer than `nbytes` free for
    `claim`, which the message names. `smaller`: how the job could claim less, for the message. `spare`: bytes that must
    be left for other processes, so not of `mount`."""
    for number, limit in enumerate(memory_limits(mount)):
        least = nbytes + (spare if number else 0)
        if limit.free < least:
            needed, free, total = sizes_text(least, limit.free, limit.nbytes)
            raise BudgetError(
                f"{claim} needs {needed} of host memory, but {limit.where} has only {free} free, of {total}: "
                f"{limit.remedy}; {_removed(mount)}or {_STALE}" + (f"; or claim less: {smaller}" if smaller else "")
            )


def _removed(mount: Path) -> str:
    """Who holds memory of files of jobs that were removed from `mount`, and what frees it, for people; ''."""
    name, found = re.compile(rf"{re.escape(str(mount))}/ftp-([^@\n]+)@.* \(deleted\)$", re.MULTILINE), set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            found |= {(int(maps.parent.name), job) for job in name.findall(maps.read_text(errors="replace"))}
    return "".join(
        f"or 'ft-plugins end {job}', which drops its snapshots: files of job {job} were removed, and their memory is "
        f"held by the process with pid {pid}; "
        for pid, job in sorted(found)
    )


def memory_limits(mount: Path = SHM) -> Iterator[MemoryLimit]:
    """The limits on what this process can claim in `mount`."""
    stat = os.statvfs(mount)
    yield MemoryLimit(
        str(mount), stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize,
        "enlarge that mount (mount -o remount,size=..., docker: --shm-size, Kubernetes: an emptyDir with medium Memory "
        "and a sizeLimit)",
    )  # fmt: skip
    machine = _machine()
    if machine is not None:
        yield MemoryLimit("this machine", *machine, "end other processes, or use more nodes or larger ones")
    for file, limit, used in _limits():
        yield MemoryLimit(
            f"the control group of {file}", limit, max(0, limit - used),
            "raise that limit (docker: --memory, Kubernetes: resources.limits.memory, Slurm: --mem)",
        )  # fmt: skip


def sizes_text(*sizes: int) -> tuple[str, ...]:
    """Sizes in the unit of the first, with enough decimals for the first two to differ."""
    unit, name = (1 << 30, "GiB") if sizes[0] >= 1 << 30 else (1 << 20, "MiB")
    texts: tuple[str, ...] = ()
    for decimals in (1, 3, 6):
        texts = tuple(f"{size / unit:.{decimals}f} {name}" for size in sizes)
        if len(set(texts[:2])) == len(set(sizes[:2])):
            break
    return texts


def _machine() -> tuple[int, int] | None:
    """The memory of this machine and what of it can be claimed without swapping; None if the kernel does not say."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return total, free


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
