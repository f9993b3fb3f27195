"""`ft-plugins why`: why a job failed last, from its events.

In: a job's name, or files of events. Out: a paragraph for people, or one line of JSON. Raises ConfigError.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ..launcher.agent.why import why as account_of
from .job_events import EventsOption, JobArgument, job_events


def why(
    job: JobArgument = None,
    events: EventsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object in one line, for programs")] = False,
) -> None:
    """Say why the job failed last: which rank, its last words, what it means, and what to do."""
    account = account_of(job_events(job, events))
    if as_json:
        print(json.dumps(None if account is None else asdict(account)))
    elif account is None:
        print("no failure is in the events of this job")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        print("\n".join(account.lines(width)))
