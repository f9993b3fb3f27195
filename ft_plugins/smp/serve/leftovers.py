"""Shared memory that is there before an SMP or a rank starts: which segments may be used, and what is removed.

Invariant: state of another job, or with another layout, is never used for this job. It is refused, and dropped only if
the user starts fresh. A file of another format is left alone; only a fresh start replaces it.

Files of a job are removed (`ft-plugins sweep`, and the start of each job) only if neither its SMP, its ft-run nor a
trainer lives, and none of them has been there for a given time. The system's clock may jump, so an age by it is bounded
by one since boot, and nothing that is of the future is removed, unless any age will do.

In: segments in /dev/shm, requests to attach; the folder of run directories. Out: segments to use; errors that name the
remedy; events; the removed files.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import Seconds, changes, read_json
from ...errors import CorruptHeaderError, ResumeError, SegmentError
from ...events import Events, catalogue
from ...snapshot.segment import paths
from ...snapshot.segment import segment as segments
from ...snapshot.segment.segment import Segment
from ..watch import liveness
from .requests import Attach

_SECONDS = TypeAdapter(Seconds)
_STAMP: TypeAdapter[tuple[str, float]] = TypeAdapter(tuple[str, float])


def stamp(run_dir: Path) -> None:
    """Record that the SMP of a run directory lives now. Raises OSError."""
    files.write_json(run_dir / paths.STAMP_FILE, [liveness.boot(), liveness.age(0)])


def _since_stamp(run_dir: Path) -> float:
    """Seconds since `stamp`; infinite if there was none since the machine was started."""
    try:
        boot, seconds = read_json(run_dir / paths.STAMP_FILE, _STAMP)
        return liveness.age(0) - seconds if boot == liveness.boot() else float("inf")
    except (OSError, ValueError):
        return float("inf")


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


# ---- which segments may be used ----


def adopt(job: str, node: str, events: Events) -> tuple[dict[int, Segment], list[str]]:
    """The node's segments by rank, and the paths that hold no usable segment.

    A foreign file is refused at attach, a damaged segment replaced.
    """
    adopted: dict[int, Segment] = {}
    refused: list[str] = []
    for path in paths.segments_of(job, node):
        try:
            segment = Segment(path)
            if path != paths.path_of(job, node, segment.rank):
                raise SegmentError(f"segment {path} is that of rank {segment.rank}; 'ft-plugins sweep' removes it")
        except SegmentError as error:
            kind = catalogue.SEGMENT_CORRUPTED if isinstance(error, CorruptHeaderError) else catalogue.FILE_REJECTED
            events.emit(kind, path=str(path), reason=str(error))
            refused.append(str(path))
            continue
        adopted[segment.rank] = segment
    return adopted, refused


def damage_of(segment: Segment | None, path: Path) -> SegmentError | None:
    """Why the segment of a rank is damaged, so that its state is lost; None if it is not damaged.

    `segment` is the adopted one, if there is one; else `path` is examined.
    """
    try:
        if segment is not None:
            segment.check()
        elif path.exists():
            Segment(path)
    except SegmentError as error:
        is_foreign = segment is None and not isinstance(error, CorruptHeaderError)
        return None if is_foreign else error.with_traceback(None)  # whose frames would keep the segment mapped
    return None


def is_reusable(segment: Segment | None, path: Path, request: Attach) -> bool:
    """Whether a rank can continue with its segment; if not, one has to be created at `path`.

    Raises ResumeError, SegmentError if that would drop state, unless the request is to start fresh.
    """
    if segment is None:
        if path.exists() and not request.fresh:
            raise SegmentError(
                f"rank {request.rank}: {path} cannot be used as its segment ({_reason(path)}); 'ft-plugins end' or "
                "--ftp-resume fresh removes it"
            )
        return False
    try:
        _require_same_job(segment, request)
    except (ResumeError, SegmentError):
        if not request.fresh:
            raise
        return False
    return True


def _reason(path: Path) -> str:
    try:
        return f"it is that of rank {Segment(path).rank}"
    except SegmentError as error:
        return str(error)


def _require_same_job(segment: Segment, request: Attach) -> None:
    """Raises ResumeError if a segment holds the state of another job, or of this job with another layout."""
    rank = request.rank
    drop = (
        "drop it: 'ft-plugins end JOB' on each node, after which the job resumes from its newest checkpoint, or "
        "--ftp-resume fresh, from the beginning"
    )
    if segment.fingerprint != request.fingerprint:
        changed = changes(segment.fingerprint, request.fingerprint)
        raise ResumeError(
            f"rank {rank}: the snapshot in memory was taken with other settings (stored -> now: {changed}): put those "
            f"settings back to resume from it, {drop}, or keep it and give another --ftp-job"
        )
    stored, now = asdict(segment.shape), asdict(request.shape)
    room, wanted = stored.pop("small_nbytes"), now.pop("small_nbytes")
    del stored["first"], now["first"]  # how many slots had memory at first is of no importance to what they hold
    if request.shape.free <= segment.shape.free and request.shape.pinned <= segment.shape.pinned:
        for shape in (stored, now):  # it has the slots that are needed, as after a longer --reft-interval
            del shape["slots"], shape["free"]
    if changed := changes(stored, now):
        raise ResumeError(
            f"rank {rank}: the snapshot in memory has another layout (stored -> now: {changed}): give the previous "
            f"command (nodes, bucket size, model; of slots: --reft-interval, --reft-slots) to resume from it, or {drop}"
        )
    if 2 * room < wanted:  # trainers request twice what they need
        raise ResumeError(
            f"rank {rank}: the snapshot in memory has room for {room} bytes of small state, but at least "
            f"{wanted // 2} are needed now: give the previous command to resume from it, or {drop}"
        )
