"""`ft-plugins report`: where the time of a job went.

In: a job's name, or files of events. Out: tables, JSON, or a page. Raises ConfigError.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..report.goodput import goodput
from ..report.html_page import html_page
from ..report.recovery_phases import phase_lines, proof_lines, recovery_phases
from .job_events import EventsOption, JobArgument, job_events
from .trace_command import write_text


def report(
    job: JobArgument = None,
    files: EventsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="an object for each restart, then one of goodput")] = False,
    page: Annotated[Path | None, typer.Option("--html", help="write one page with pictures to this file")] = None,
) -> None:
    """Show where the time of each restart went, and all other time of the job."""
    known = job_events(job, files)
    if page:
        write_text(page, html_page(job or "ft_plugins: a job", known))
        print(page)
        return
    found, time = recovery_phases(known), goodput(known)
    if as_json:
        for one in found:
            print(json.dumps(one.block()))
        if time:
            print(json.dumps({"goodput": time.block()}))
        return
    print("\n".join(phase_lines(found)) if found else "no restart has completed an iteration yet")
    if proofs := proof_lines(known):
        print("\n".join(["", *proofs]))
    if time:
        print("\n".join(["", *time.lines()]))
