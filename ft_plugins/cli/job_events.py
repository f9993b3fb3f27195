"""The events of a job, for the commands that look back: of all its nodes on this machine, or of files.

In: a job's name, or files. Out: events. Raises ConfigError.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..events import Damage, Event, catalogue, read
from .status_facts import run_directories

JobArgument = Annotated[str | None, typer.Argument(help="name of the job, from `status`; of several")]
EventsOption = Annotated[
    list[Path] | None, typer.Option("--events", help="an events.jsonl instead of a job here; once for each node")
]


def job_events(job: str | None, files: list[Path] | None) -> list[Event]:
    """The events of the last run of a job, of its nodes on this machine, or of `files`; how many were damaged is said.
    Raises ConfigError."""
    damage = Damage()
    found = [list(read(path, damage)) for path in histories(job, files)]
    if damage.lines:
        print(damage, file=sys.stderr)
    return of_last_run(found)


def of_last_run(histories: Iterable[Sequence[Event]]) -> list[Event]:
    """The events of the run that was started or restored last, of the histories of several nodes. Starts of which the
    run is not known, because they failed before, are of it if they are not older."""
    starts: list[list[Event]] = []
    for history in histories:
        starts.append([])
        for event in history:
            if event.type is catalogue.JOB_STARTED:
                starts.append([])
            starts[-1].append(event)
    runs = [{event.fields["run"]: event.time for event in start if "run" in event.fields} for start in starts]
    last = max(((at, run) for each in runs for run, at in each.items()), default=(0.0, ""))[1]
    several = len(set[str]().union(*runs)) > 1
    since = min((one[0].time for one, own in zip(starts, runs, strict=True) if several and last in own), default=0.0)
    ours = [one for one, own in zip(starts, runs, strict=True) if last in own or one and not own]
    return [event for one in ours if one[0].time >= since for event in one]


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
