"""What the files in shared memory are called, and which there are: segments of ranks, a node's vault, its lock.

    ftp-JOB@NODE-rR         the segment of rank R         ftp-JOB@NODE-rRofN      one of a job of N ranks, set aside
    ftp-JOB@NODE-parity     the vault                     ftp-JOB@NODE.lock       the lock of the node's SMP
    ... .new                half-made ones of these

Invariant: a name says job, node and rank, so whoever comes later finds what was left, and sweeps nothing else.

In: names of jobs and nodes. Out: paths; what there is of them; their removal.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .room import SHM

_NAME = re.compile(r"ftp-(?P<job>[^@]+)@(?P<node>[^@]+?)((-r\d+(of\d+)?|-parity)(\.new)?|\.lock)")
PATIENCE_FILE = "orphan_seconds"  # in a run directory: how long its segments are to outlive a job


def path_of(job: str, node: str, rank: int) -> Path:
    """The file of a rank's segment."""
    return SHM / f"ftp-{job}@{node}-r{rank}"  # no name holds an '@', so two jobs never share a file


def set_aside(job: str, node: str, rank: int, world_size: int) -> Path:
    """The file of a segment of the job as it was with another number of ranks, kept until its state is taken over."""
    return SHM / f"ftp-{job}@{node}-r{rank}of{world_size}"


def vault_of(job: str, node: str) -> Path:
    """The file in which a node keeps parity of other nodes' slots."""
    return SHM / f"ftp-{job}@{node}-parity"


def lock_of(job: str, node: str) -> Path:
    """The file that the SMP of a job on a node keeps locked: beside the segments, wherever its run directory is."""
    return SHM / f"ftp-{job}@{node}.lock"


def segments_of(job: str, node: str) -> list[Path]:
    """The segments of a job on a node, by rank."""
    prefix = path_of(job, node, 0).name[:-1]
    ranks = {path.name.removeprefix(prefix): path for path in SHM.glob(f"{prefix}*")}
    return [ranks[rank] for rank in sorted(filter(str.isdecimal, ranks), key=int)]


def former_segments_of(job: str, node: str) -> list[Path]:
    """The segments that are set aside on a node."""
    prefix = path_of(job, node, 0).name[:-1]
    return sorted(p for p in SHM.glob(f"{prefix}*of*") if re.fullmatch(r"\d+of\d+", p.name.removeprefix(prefix)))


def jobs() -> list[tuple[str, str]]:
    """The (job, node) of everything of this user in shared memory: segments, half-made ones, locks."""
    found = set()
    for path in SHM.glob("ftp-*@*"):
        named = _NAME.fullmatch(path.name)
        if named and path.lstat().st_uid == os.getuid():
            found.add((named["job"], named["node"]))
    return sorted(found)


def remove(job: str, node: str) -> int:
    """Remove the segments of a job on a node, half-made ones too, and their lock file. Returns how many segments."""
    prefix = path_of(job, node, 0).name[:-1]
    half_made = [p for p in SHM.glob(f"{prefix}*.new") if re.fullmatch(r"\d+(of\d+)?", p.stem.removeprefix(prefix))]
    vault = vault_of(job, node)
    vaults = filter(Path.exists, [vault, vault.with_name(vault.name + ".new")])
    paths = [*segments_of(job, node), *former_segments_of(job, node), *half_made, *vaults]
    for path in [*paths, lock_of(job, node)]:
        path.unlink(missing_ok=True)
    return len(paths)
