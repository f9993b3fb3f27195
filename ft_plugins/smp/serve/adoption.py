"""Decide which segments in memory may be used: by an SMP that replaces another one, and by a rank that attaches.

Invariant: state of another job, or with another layout, is never used for this job. It is refused, and dropped only if
the user starts fresh. A file of another format is left alone; only a fresh start replaces it.

In: segments in /dev/shm, requests to attach. Out: segments to use; errors that name the remedy; events.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ...base.intake import changes
from ...errors import CorruptHeaderError, ResumeError, SegmentError
from ...events import Events, catalogue
from ...snapshot.segment import paths
from ...snapshot.segment.segment import Segment
from .requests import Attach


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
        return None if is_foreign else error
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
    rank, drop = request.rank, "drop it with --ftp-resume fresh"
    if segment.fingerprint != request.fingerprint:
        changed = changes(segment.fingerprint, request.fingerprint)
        raise ResumeError(
            f"rank {rank}: the snapshot in memory was taken with other settings (stored -> now: {changed}): put those "
            f"settings back to resume from it, {drop}, or keep it and give another --ftp-job"
        )
    stored, now = asdict(segment.shape), asdict(request.shape)
    room, wanted = stored.pop("small_nbytes"), now.pop("small_nbytes")
    del stored["first"], now["first"]  # how many slots had memory at first is of no importance to what they hold
    if changed := changes(stored, now):
        raise ResumeError(
            f"rank {rank}: the snapshot in memory has another layout (stored -> now: {changed}): give the previous "
            f"command (nodes, bucket size, model) to resume from it, or {drop}"
        )
    if 2 * room < wanted:  # trainers request twice what they need
        raise ResumeError(
            f"rank {rank}: the snapshot in memory has room for {room} bytes of small state, but at least "
            f"{wanted // 2} are needed now: give the previous command to resume from it, or {drop}"
        )
