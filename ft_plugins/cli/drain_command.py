"""`ft-plugins drain` and `stop`: have a node leave a running job without loss, or end all of it so.

In: names of a node and a job that runs on this machine. Out: lines. Raises ConfigError, FtError.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..errors import FtError
from ..launcher.rounds.rounds import ALL
from ..smp.serve import client as smp
from ..smp.watch import liveness
from ..smp.watch.job_history import read_note
from .status_command import JobOption, of_one_job
from .status_facts import ASK_SECONDS

_AGAIN_SECONDS = 3.0  # between two requests to stop it


def drain(
    node: Annotated[str, typer.Argument(help="name of the node that is to leave, as `status` shows it")],
    job: Annotated[str, typer.Option("--job", help="name of the job, which runs on this machine too")],
) -> None:
    """Have a node leave a job at its next committed version: a spare takes its place, and no iteration is lost."""
    _ask(job, node)
    print(f"job {job}: node {node} leaves at the next version; `ft-plugins events {job} --follow` shows it")


def stop(job: JobOption = None) -> None:
    """End a whole job, on all nodes, after the iteration that comes next, without loss: what is in memory is written to
    --reft-checkpoint-dir, or kept without one. Waits until the job has ended here."""
    run_dir = _ask(job, ALL)
    print("all nodes end after the next iteration; Ctrl-C ends this wait, and not that", flush=True)
    asked, said = time.monotonic(), False
    while liveness.held(run_dir / "lock"):
        time.sleep(0.2)
        if time.monotonic() - asked > _AGAIN_SECONDS:
            try:
                _ask(run_dir.parent.name, ALL)  # again: a node that leads only since then does not know of it
            except FtError as error:  # also where it is ending
                if not said:
                    print(f"{error}; this command asks again until the job has ended here", flush=True)
                said = True
            asked = time.monotonic()
    note = read_note(run_dir)
    if note is None or note.exit_status:
        raise FtError(f"job {run_dir.parent.name}: {note.reason if note else 'its ft-run has left no word'}")
    print(f"job {run_dir.parent.name}: {note.reason or 'training was at its own end'}")


def _ask(job: str | None, node: str) -> Path:
    """Have `node`, or ALL, leave the job. Returns a run directory. Raises ConfigError, FtError."""
    directories = of_one_job(job, None, "lock", "runs under ft-run")
    from ..launcher.rendezvous import control  # imports torch

    try:
        refused = _unprotected(directories, alone=node == ALL) or control.drain(directories[0], node)
    except ConnectionError as error:
        raise FtError(f"job {directories[0].parent.name}: no ft-run answers: {error}") from error
    if refused:
        raise FtError(f"job {directories[0].parent.name}: {refused}")
    return directories[0]


def _unprotected(directories: list[Path], alone: bool) -> str:
    """Why no node can leave now, as far as is known here; ''. `alone`: no other node has to have its state."""
    for run_dir in () if alone else directories:
        with smp.Client(run_dir, ASK_SECONDS) as client:
            status = client.status()
        if any(segment["attached"] for segment in status["segments"]) and not status["node_tier"]["losses"]:
            return "its nodes do not protect each other now, see `ft-plugins status`: give this again when they do"
    return ""
