"""Name, list and remove the files in shared memory: segments of ranks, a node's parity store, its lock.

    ftp-JOB@NODE@UID-rR         the segment of rank R     ftp-JOB@NODE@UID-rRofN      that of a previous size, N ranks
    ftp-JOB@NODE@UID-parity     the parity store          ftp-JOB@NODE@UID.lock       the lock of the node's SMP
    ... .new                    one of these, unfinished

Invariant: a name holds job, node and user, none of which contains an '@', and the rank, so a later process finds what
was left and removes nothing else. A file of another user under such a name is never touched; a job that needs the name
is refused.

A claim of memory that does not fit is rejected before it is made, with the figures, their source and what to do
(`check_room`): in the mount, in the machine, within its control groups. Otherwise the kernel would end the process
later, by SIGBUS or the OOM killer. Page cache is treated as free: the kernel reclaims it under pressure.

In: names of jobs and nodes. Out: paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import BudgetError

_NAME = re.compile(r"ftp-(?P<job>[^@]+)@(?P<node>[^@]+)@(?P<uid>[0-9]+)(?P<rest>[^@]+)")
_SEGMENT, _PREVIOUS = re.compile(r"-r(0|[1-9][0-9]{0,9})"), re.compile(r"-r[0-9]{1,10}of[0-9]{1,10}")
_ANY = re.compile(r"(-r[0-9]{1,10}(of[0-9]{1,10})?|-parity)(\.new)?|\.lock")
STAMP_FILE = "alive.json"  # in a run directory: when its SMP last lived, by a clock that does not jump
REHEARSED_FILE = "rehearsed"  # in the run directory: whether the job's command was
PATIENCE_FILE = "orphan_seconds"  # in a run directory: how long segments outlive the job, in seconds
SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
SPARE = 20  # this part of a node's memory is not claimed while it trains: training itself may need it
_UNLIMITED = 1 << 62  # bytes; cgroup v1 reports no limit as a number just below 1 << 63
_STALE = "remove what ended jobs have left with 'ft-plugins sweep'"


def _of(job: str, node: str) -> str:
    return f"ftp-{job}@{node}@{os.getuid()}"


def path_of(job: str, node: str, rank: int) -> Path:
    """The file of a rank's segment."""
    return SHM / f"{_of(job, node)}-r{rank}"


def previous_path_of(job: str, node: str, rank: int, world_size: int) -> Path:
    """The file of a rank's segment of the job at a previous size of `world_size` ranks."""
    return SHM / f"{_of(job, node)}-r{rank}of{world_size}"


def parity_path_of(job: str, node: str) -> Path:
    """The file in which a node keeps parity of other nodes' slots."""
    return SHM / f"{_of(job, node)}-parity"


def lock_of(job: str, node: str) -> Path:
    """The file that the SMP of a job on a node keeps locked; next to the segments, wherever its run directory is."""
    return SHM / f"{_of(job, node)}.lock"


def segments_of(job: str, node: str) -> list[Path]:
    """The segments of a job on a node, by rank."""
    paths = [path for path, rest in _files(job, node) if _SEGMENT.fullmatch(rest)]
    return sorted(paths, key=lambda path: int(path.name.rpartition("-r")[2]))


def segments_beside(path: Path) -> list[Path]:
    """The segments of the same job on the same node, with the one of `path` itself."""
    prefix = path.name.rpartition("-r")[0]
    names = [name for name in os.listdir(path.parent) if name.startswith(prefix)]
    return [path.parent / name for name in names if _SEGMENT.fullmatch(name.removeprefix(prefix))]


def previous_segments_of(job: str, node: str) -> list[Path]:
    """The segments of previous sizes of a job on a node."""
    return sorted(path for path, rest in _files(job, node) if _PREVIOUS.fullmatch(rest))


def files_of(job: str, node: str) -> list[Path]:
    """All files of this user for a job on a node: segments, unfinished ones, the lock."""
    return sorted(path for path, rest in _files(job, node) if _ANY.fullmatch(rest) and is_own(path))


def jobs() -> list[tuple[str, str]]:
    """The (job, node) of every file of this user in shared memory: segments, unfinished ones, locks."""
    pairs = set()
    for path in SHM.glob("ftp-*@*@*"):
        named = _NAME.fullmatch(path.name)
        if named and named["uid"] == str(os.getuid()) and _ANY.fullmatch(named["rest"]) and is_own(path):
            pairs.add((named["job"], named["node"]))
    return sorted(pairs)


def owner_of(path: Path) -> tuple[str, str]:
    """The (job, node) of one of these files."""
    job, node, _ = path.name.removeprefix("ftp-").split("@", 2)
    return job, node


def is_own(path: Path) -> bool:
    """Whether the file exists and belongs to this user: anyone may create a file under a predictable name."""
    with suppress(FileNotFoundError):
        return path.lstat().st_uid == os.getuid()
    return False


def foreign_files(job: str, node: str) -> str:
    """A message about files of other users under the names of a job on a node; '' if there are none."""
    names = [path for path, rest in _files(job, node) if _ANY.fullmatch(rest) and path.exists() and not is_own(path)]
    if not names:
        return ""
    owned = ", ".join(f"{path} (user {path.lstat().st_uid})" for path in names)
    return f"{owned}: expected a file of user {os.getuid()}; have it removed, or choose another name with --ftp-job"


def remove(job: str, node: str) -> int:
    """Remove the files of a job on a node, unfinished ones included. Returns how many, without the lock file. Files of
    other users stay, and so does what cannot be unlinked, such as a folder."""
    removed = 0
    for path in files_of(job, node):
        with suppress(OSError):
            path.unlink(missing_ok=True)
            removed += path != lock_of(job, node)
    return removed


def _files(job: str, node: str) -> list[tuple[Path, str]]:
    """Every file named for this job, node and user, with the rest of its name."""
    prefix = _of(job, node)
    names = [name for name in os.listdir(SHM) if name.startswith(prefix)]
    return [(SHM / name, name.removeprefix(prefix)) for name in names]


# ---- room ----


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
