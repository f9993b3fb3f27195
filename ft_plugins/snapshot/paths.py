"""What the files in shared memory are called, and which there are: segments of ranks, a node's vault, its lock.

    ftp-JOB@NODE@UID-rR         the segment of rank R     ftp-JOB@NODE@UID-rRofN      that of a previous size, N ranks
    ftp-JOB@NODE@UID-parity     the vault                 ftp-JOB@NODE@UID.lock       the lock of the node's SMP
    ... .new                    half-made ones of these

Invariant: a name says job, node and user, none of which holds an '@', and rank; so whoever comes later finds what was
left, and sweeps nothing else. What is another user's under such a name is left alone, and refused where it is in the
way.

In: names of jobs and nodes. Out: paths; what there is of them; their removal.
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
PATIENCE_FILE = "orphan_seconds"  # in a run directory: how long its segments are to outlive a job


def _of(job: str, node: str) -> str:
    return f"ftp-{job}@{node}@{os.getuid()}"


def path_of(job: str, node: str, rank: int) -> Path:
    """The file of a rank's segment."""
    return SHM / f"{_of(job, node)}-r{rank}"


def previous_path_of(job: str, node: str, rank: int, world_size: int) -> Path:
    """The file of a rank's segment of the job at a previous size, of `world_size` ranks."""
    return SHM / f"{_of(job, node)}-r{rank}of{world_size}"


def parity_path_of(job: str, node: str) -> Path:
    """The file in which a node keeps parity of other nodes' slots."""
    return SHM / f"{_of(job, node)}-parity"


def lock_of(job: str, node: str) -> Path:
    """The file that the SMP of a job on a node keeps locked: beside the segments, wherever its run directory is."""
    return SHM / f"{_of(job, node)}.lock"


def segments_of(job: str, node: str) -> list[Path]:
    """The segments of a job on a node, by rank."""
    found = [path for path, rest in _files(job, node) if _SEGMENT.fullmatch(rest)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-r")[2]))


def previous_segments_of(job: str, node: str) -> list[Path]:
    """The segments of previous sizes of a job on a node."""
    return sorted(path for path, rest in _files(job, node) if _PREVIOUS.fullmatch(rest))


def jobs() -> list[tuple[str, str]]:
    """The (job, node) of everything of this user in shared memory: segments, half-made ones, locks."""
    found = set()
    for path in SHM.glob("ftp-*@*@*"):
        named = _NAME.fullmatch(path.name)
        if named and named["uid"] == str(os.getuid()) and _ANY.fullmatch(named["rest"]) and is_own(path):
            found.add((named["job"], named["node"]))
    return sorted(found)


def is_own(path: Path) -> bool:
    """Whether that file is there and this user's: anyone may put files under a name that can be guessed."""
    with suppress(FileNotFoundError):
        return path.lstat().st_uid == os.getuid()
    return False


def foreign(job: str, node: str) -> str:
    """The files of other users that are in the way of a job on a node, with the remedy; '' where there is none."""
    names = [path for path, rest in _files(job, node) if _ANY.fullmatch(rest) and path.exists() and not is_own(path)]
    if not names:
        return ""
    whose = ", ".join(f"{path} (user {path.lstat().st_uid})" for path in names)
    return f"{whose}: expected a file of user {os.getuid()}; have it removed, or name this job otherwise with --ftp-job"


def remove(job: str, node: str) -> int:
    """Remove the segments of a job on a node, half-made ones too, and their lock file. Returns how many segments. What
    is another user's stays, and what cannot be removed, as a folder of such a name."""
    own = [path for path, rest in _files(job, node) if _ANY.fullmatch(rest) and is_own(path)]
    removed = 0
    for path in own:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            removed += path != lock_of(job, node)
    return removed


def _files(job: str, node: str) -> list[tuple[Path, str]]:
    """Every file whose name says this job, node and user, with the rest of the name."""
    prefix = _of(job, node)
    names = [name for name in os.listdir(SHM) if name.startswith(prefix)]
    return [(SHM / name, name.removeprefix(prefix)) for name in names]
