"""The events of a job, for the commands that look back: of all its nodes on this machine, or of files.

In: a job's name, or files. Out: events. Raises ConfigError.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..events import Damage, Event, read
from .status_facts import run_directories

JobArgument = Annotated[str | None, typer.Argument(help="name of the job, from `status`; of several")]
EventsOption = Annotated[
    list[Path] | None, typer.Option("--events", help="an events.jsonl instead of a job here; once for each node")
]


def job_events(job: str | None, files: list[Path] | None) -> list[Event]:
    """The events of a job's nodes on this machine, or of `files`; how many were damaged is said. Raises ConfigError."""
    damage = Damage()
    found = [event for path in histories(job, files) for event in read(path, damage)]
    if damage.lines:
        print(damage, file=sys.stderr)
    return found


def histories(job: str | None, files: list[Path] | None) -> list[Path]:
    """The files of a job's nodes on this machine, or `files`, which must exist. Raises ConfigError."""
    if files:
        missing = [str(path) for path in files if not path.is_file()]
        if missing:
            raise ConfigError(f"--events {missing[0]}: no such file; give the events.jsonl of a run directory")
        return files
    folders = run_directories(job, None)
    names = sorted({folder.parent.name for folder in folders})
    if len(names) != 1:
        known = ", ".join(sorted({folder.parent.name for folder in run_directories(None, None)})) or "none"
        raise ConfigError(f"{f'no job {job!r} is known here' if job else 'name the job'}; known here: {known}")
    return [folder / "events.jsonl" for folder in folders]
