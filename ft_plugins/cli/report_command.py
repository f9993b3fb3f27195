"""`ft-plugins report`: where the time of a job's restarts went, from the events of its nodes.

In: a job's name, or files of events. Out: a table for people, JSON for programs. Raises FtError.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..events import Event, read
from ..report.phase_table import phase_lines
from ..report.recovery_phases import recovery_phases
from .status_facts import run_directories


def report(
    job: Annotated[str | None, typer.Argument(help="name of the job, from `status`; of several")] = None,
    events: Annotated[
        list[Path] | None, typer.Option("--events", help="an events.jsonl instead of a job here; once for each node")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object for each restart, for programs")] = False,
) -> None:
    """Show where the time of each restart went, from the failure to the next completed iteration."""
    found = recovery_phases(_events(job, events or []))
    if as_json:
        for one in found:
            print(json.dumps(one.block()))
        return
    print("\n".join(phase_lines(found)) if found else "no restart has completed an iteration yet")


def _events(job: str | None, files: list[Path]) -> list[Event]:
    """The events of a job's nodes on this machine, or of `files`. Raises ConfigError."""
    if files:
        missing = [str(path) for path in files if not path.is_file()]
        if missing:
            raise ConfigError(f"--events {missing[0]}: no such file; give the events.jsonl of a run directory")
        return [event for path in files for event in read(path)]
    folders = run_directories(job, None)
    names = sorted({folder.parent.name for folder in folders})
    if len(names) != 1:
        known = ", ".join(sorted({folder.parent.name for folder in run_directories(None, None)})) or "none"
        raise ConfigError(f"{f'no job {job!r} is known here' if job else 'name the job'}; known here: {known}")
    return [event for folder in folders for event in read(folder / "events.jsonl")]
