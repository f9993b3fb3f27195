"""Name, list and remove the files in shared memory: segments of ranks, a node's parity store, its lock.

    ftp-JOB@NODE@UID-rR         the segment of rank R     ftp-JOB@NODE@UID-rRofN      that of a previous size, N ranks
    ftp-JOB@NODE@UID-parity     the parity store          ftp-JOB@NODE@UID.lock       the lock of the node's SMP
    ... .new                    one of these, unfinished

Invariant: a name holds job, node and user, none of which contains an '@', and the rank, so a later process finds what
was left and removes nothing else. A file of another user under such a name is never touched; a job that needs the name
is refused.

In: names of jobs and nodes. Out: paths.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from .room import SHM

_NAME = re.compile(r"ftp-(?P<job>[^@]+)@(?P<node>[^@]+)@(?P<uid>[0-9]+)(?P<rest>[^@]+)")
_SEGMENT, _PREVIOUS = re.compile(r"-r(0|[1-9][0-9]{0,9})"), re.compile(r"-r[0-9]{1,10}of[0-9]{1,10}")
_ANY = re.compile(r"(-r[0-9]{1,10}(of[0-9]{1,10})?|-parity)(\.new)?|\.lock")
STAMP_FILE = "alive.json"  # in a run directory: when its SMP last lived, by a clock that does not jump
PATIENCE_FILE = "orphan_seconds"  # in a run directory: how long segments outlive the job, in seconds


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
