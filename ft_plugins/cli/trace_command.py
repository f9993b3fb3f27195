"""`ft-plugins trace`: a job's events as a trace that Perfetto and chrome://tracing show.

In: a job's name, or files of events. Out: a file of JSON. Raises ConfigError.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..report.trace import trace as trace_of
from .job_events import EventsOption, JobArgument, job_events


def trace(
    job: JobArgument = None,
    events: EventsOption = None,
    to: Annotated[Path, typer.Option("--to", help="file to write")] = Path("trace.json"),
) -> None:
    """Write captures, transfers, waits and recoveries of all ranks as a trace, for https://ui.perfetto.dev."""
    made = trace_of(job_events(job, events))
    write_text(to, json.dumps(made, default=str))
    print(f"{to}: {sum(each['ph'] != 'M' for each in made['traceEvents'])} entries; open it in https://ui.perfetto.dev")


def write_text(path: Path, text: str) -> None:
    """Write a file for a person. Raises ConfigError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be written ({error.strerror or error}); give another file") from error
