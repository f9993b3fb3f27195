"""Remove the shared memory of jobs that no live process owns: `ft-plugins sweep`, and the start of each job.

Invariant: files of a job are removed only if neither its SMP, its ft-run nor a trainer lives, and none of them has been
there for a given time. The system's clock may jump, so an age by it is bounded by one since boot, and nothing that is
of the future is removed, unless any age will do.

In: the folder of run directories. Out: the removed files.
"""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import Seconds, read_json
from ...errors import SegmentError
from ...snapshot.segment import paths
from ...snapshot.segment import segment as segments
from ..watch import liveness

_SECONDS = TypeAdapter(Seconds)
_STAMP: TypeAdapter[tuple[str, float]] = TypeAdapter(tuple[str, float])


def stamp(run_dir: Path) -> None:
    """Record that the SMP of a run directory lives now. Raises OSError."""
    files.write_json(run_dir / paths.STAMP_FILE, [_boot(), liveness.age(0)])


def _since_stamp(run_dir: Path) -> float:
    """Seconds since `stamp`; infinite if there was none since the machine was started."""
    try:
        boot, seconds = read_json(run_dir / paths.STAMP_FILE, _STAMP)
        return liveness.age(0) - seconds if boot == _boot() else float("inf")
    except (OSError, ValueError):
        return float("inf")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _age(last: float, bound: float = float("inf")) -> float:
    """Seconds since `last` (since the epoch), at most `bound`; 0 if that is not known: it is of the future."""
    return max(0.0, min(time.time() - last, bound))


def _patience(run_dir: Path) -> float:
    """Seconds for which the job of a run directory wants its segments to outlive it; 0 if it did not say."""
    try:
        return read_json(run_dir / paths.PATIENCE_FILE, _SECONDS)
    except (OSError, ValueError):
        return 0.0


def sweep(
    base: Path,
    older_than_seconds: float,
    keep: tuple[str, str] | None = None,
    patient: bool = False,
    job: str | None = None,
) -> list[Path]:
    """Remove segments that no live job owns; returns the removed files.

    These are the segments of every run directory `base`/job/node whose SMP and ft-run have both been gone for longer
    than `older_than_seconds`; and segments whose run directory is gone or belongs to another login, if neither SMP nor
    trainer has been there for that long. `job`: only of this one. `keep`: nothing of this (job, node). `patient`:
    nothing that its own job wants to outlive it for longer.
    """
    removed: list[Path] = []
    run_dirs = {(path.parent.name, path.name): path for path in base.glob("*/*") if path.is_dir()}
    for name in sorted((run_dirs.keys() | set(paths.jobs())) - {keep}):
        if job in (None, name[0]) and _is_left(name, run_dirs.get(name), older_than_seconds, patient):
            removed += paths.segments_of(*name)
            paths.remove(*name)
    return sorted(removed)


def _is_left(name: tuple[str, str], run_dir: Path | None, seconds: float, patient: bool) -> bool:
    """Whether no process of a job on a node has been there for that long."""
    if run_dir is None:
        return _abandoned(*name, seconds)
    if any(liveness.held(lock) for lock in (run_dir / "smp.lock", run_dir / "lock", paths.lock_of(*name))):
        return False
    last = max(_touched(path) for path in [run_dir, *run_dir.iterdir()])
    return _age(last, _since_stamp(run_dir)) >= max(seconds, _patience(run_dir) if patient else 0.0)


def _abandoned(job: str, node: str, seconds: float) -> bool:
    """Whether neither an SMP nor a trainer has used a job's segments for that long, nor is one being made. An SMP
    touches its lock file."""
    youngest = max((_touched(path) for path in paths.files_of(job, node)), default=0.0)
    if liveness.held(paths.lock_of(job, node)) or _age(youngest) < seconds:
        return False
    for path in paths.segments_of(job, node):
        try:
            segment = segments.Segment(path)
        except SegmentError:
            continue  # damaged, or of another version: no process uses it
        pid, began = segment.header.owner
        segment.close()
        if began and (liveness.started(pid) == began or _age(youngest, liveness.age(began)) < seconds):
            return False  # it lives, or was started so lately that the system's clock is wrong
    return True


def _touched(path: Path) -> float:
    """When a file was last modified (seconds since the epoch); 0 if it does not exist."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
