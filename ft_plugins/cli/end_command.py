"""`ft-plugins end` and `sweep`: drop what jobs left in the memory of this node.

Invariant: no running job is disturbed: `end` refuses one that runs under ft-run.

In: names. Out: lines. Raises ConfigError, FtError.
"""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ..config import Config, run_root
from ..errors import ConfigError, FtError
from ..smp.serve import client as smp
from ..smp.serve import leftovers
from ..smp.serve.status import newest_common
from ..smp.watch import liveness
from .status_command import JobOption, NodeOption, known_jobs
from .status_facts import OTHER_SECONDS, OTHERS_SECONDS, run_directories


def end(
    job: Annotated[str, typer.Argument(help="name of the job, from `status`")],
    node: NodeOption = None,
    force: Annotated[bool, typer.Option("--force", help="also what other nodes of the job wait for")] = False,
) -> None:
    """End a job's SMP and drop its snapshots. The training processes must have ended before."""
    directories = run_directories(job, node)
    if not directories:
        raise ConfigError(f"no job '{job}' is known here; expected one of: {known_jobs()}")
    if running := [run_dir.name for run_dir in directories if liveness.held(run_dir / "lock")]:
        where = f"job {job} on node {', '.join(running)}"
        alone = "; --node NAME ends what it has left on another node alone" * (len(running) < len(directories))
        raise FtError(f"{where} is running under ft-run; stop that first: `end` would drop its snapshots{alone}")
    for run_dir in directories:
        where = f"job {job} on node {run_dir.name}"
        if liveness.held(run_dir / "smp.lock"):
            with smp.Client(run_dir) as client:
                others = client.other_nodes(OTHER_SECONDS, OTHERS_SECONDS)
                waiting = ", ".join(each["node"] for each in others if each["state"] == "WAITING")
                if waiting and not force:
                    raise FtError(
                        f"{where} holds version {newest_common(client.status())} in memory, and the job on "
                        f"{waiting} waits for nodes: it would lose that; start ft-run here again, or end it there "
                        "first; --force drops it nevertheless"
                    )
                client.end()
            print(f"{where}: ended")
        else:
            sweeping = f"ft-plugins sweep --job {shlex.quote(job)} --older-than 0"  # the segments of this job alone
            print(f"{where}: no SMP is running; `{sweeping}` removes segments that it may have left")


def sweep(
    older_than: Annotated[
        float,
        typer.Option(min=0, help="seconds since the job was last active; it can still resume from younger segments"),
    ] = Config().orphan_seconds,
    job: JobOption = None,
) -> None:
    """Remove segments of jobs whose SMP and ft-run are both gone, even if their run directory is gone too."""
    try:
        removed = leftovers.sweep(run_root(), older_than, job=job)
    except OSError as error:
        raise FtError(f"some segments could not be removed: {error.filename}: {error.strerror}") from error
    for path in removed:
        print(f"removed {path}")
    print(f"{len(removed)} segments removed")
