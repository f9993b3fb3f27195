"""What ft-run does on this node, or how it ended there: a file of the run directory, for `ft-plugins status`.

Invariant: only the ft-run that holds the job's lock writes it. One that is killed leaves what it did last, so without a
live ft-run `ENDED` alone says how it ended. Nothing is decided by it. Imports nothing that is slow: the command line
reads the file.

In: a run directory. Out: a `FtRunNote`.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from ...base import files
from ...base.outside_values import json_value, read_bytes

NOTE_FILE = "ft-run.json"
_REASON = 2000  # characters


class FtRunPhase(str, Enum):
    """What ft-run does."""

    STARTING = "starting"  # its ranks start, or train
    WAITING = "waiting"  # for other nodes
    SPARE = "spare"  # for a place in the job
    LEAVING = "leaving"  # for ranks of other nodes to end, as its own have
    ENDED = "ended"


@dataclass(frozen=True)
class FtRunNote:
    """`time`: since when, in seconds since the epoch. `reason`: what it waits for, or why it ended. `status` and
    `exit_status`: how it ended."""

    phase: FtRunPhase
    reason: str = ""
    status: str = ""
    exit_status: int = 0
    time: float = field(default_factory=time.time)


def write_note(run_dir: Path, note: FtRunNote) -> None:
    """Replace the note of a run directory. A full disk loses it; nothing is raised."""
    with suppress(OSError):
        files.write_json(run_dir / NOTE_FILE, asdict(note) | {"reason": note.reason[:_REASON]})


def read_note(run_dir: Path) -> FtRunNote | None:
    """The note of a run directory; None if there is none, or its file is damaged."""
    try:
        value = json_value(read_bytes(run_dir / NOTE_FILE))
        note = FtRunNote(
            FtRunPhase(value["phase"]), value["reason"], value["status"], value["exit_status"], float(value["time"])
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    fits = type(note.reason) is type(note.status) is str and type(note.exit_status) is int
    return note if fits and math.isfinite(note.time) else None
