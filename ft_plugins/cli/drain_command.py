"""`ft-plugins drain`: have a node leave a running job without loss.

In: names of a node and a job that runs on this machine. Out: one line. Raises ConfigError, FtError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, FtError
from ..smp.serve import client as smp
from ..smp.watch import liveness
from .status_command import known_jobs
from .status_facts import ASK_SECONDS, facts_of, run_directories


def drain(
    node: Annotated[str, typer.Argument(help="name of the node that is to leave, as `status` shows it")],
    job: Annotated[str, typer.Option("--job", help="name of the job, which runs on this machine too")],
) -> None:
    """Have a node leave a job at its next committed version: a spare takes its place, and no iteration is lost."""
    directories = [each for each in run_directories(job, None) if liveness.held(each / "lock")]
    if not directories:
        ended = [
            f"job '{job}' does not run here: {each['state']}, {each['headline']}"
            for each in facts_of(run_directories(job, None))
        ]
        raise ConfigError(ended[0] if ended else f"no job '{job}' is known here; expected one of: {known_jobs()}")
    from ..launcher.rendezvous import control  # imports torch

    try:
        refused = _unprotected(directories) or control.drain(directories[0], node)
    except ConnectionError as error:
        raise FtError(f"job {job}: no ft-run answers: {error}") from error
    if refused:
        raise FtError(f"job {job}: {refused}")
    print(f"job {job}: node {node} leaves at the next version; `ft-plugins events {job} --follow` shows it")


def _unprotected(directories: list[Path]) -> str:
    """Why no node can leave now, as far as the SMPs here know; ''."""
    for run_dir in directories:
        with smp.Client(run_dir, ASK_SECONDS) as client:
            status = client.status()
        if any(segment["attached"] for segment in status["segments"]) and not status["node_tier"]["losses"]:
            return "its nodes do not protect each other now, see `ft-plugins status`: give this again when they do"
    return ""
