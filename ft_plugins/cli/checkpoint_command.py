"""`ft-plugins checkpoint now` and `export`: checkpoints of a running job, and in the framework's own format.

In: names; a folder. Out: paths. Raises ConfigError, FtError.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from ..errors import FtError
from ..smp.serve import client as smp
from ..smp.watch.job_history import FtRunPhase, read_note
from .status_command import JobOption, NodeOption, of_one_job


def now(
    job: JobOption = None,
    node: NodeOption = None,
    seconds: Annotated[float, typer.Option(min=0, help="how long to wait for the checkpoint")] = 600.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="exempt from --reft-checkpoint-keep: it stays until its folder is removed")
    ] = False,
) -> None:
    """Write the newest snapshot of a running job to its --reft-checkpoint-dir, and print its path."""
    held = of_one_job(job, node, "smp.lock", "has an SMP")
    notes = {run_dir: read_note(run_dir) for run_dir in held}
    idle = {at for at, note in notes.items() if note and (note.phase is FtRunPhase.SPARE or note.status == "drained")}
    if not (served := [run_dir for run_dir in held if run_dir not in idle]):
        raise FtError(
            f"job {held[0].parent.name} on node {held[0].name}: it takes no part in training; give this on a node that "
            "trains"
        )
    with ThreadPoolExecutor(len(served)) as pool:  # SMPs of nodes on one machine write one checkpoint together
        folders = list(pool.map(lambda run_dir: _checkpoint(run_dir, seconds, keep), served))
    for path in sorted(set(folders)):
        print(path)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a checkpoint, as `checkpoint now` prints it")],
    to: Annotated[Path, typer.Option("--to", help="new or empty folder, for the framework's own --load")],
) -> None:
    """Convert a checkpoint to the framework's own format, which loads without ft_plugins. Needs no GPU and no job."""
    from ..adapters.export_command import export as write  # slow: imports torch and the framework

    summary = write(checkpoint, to)
    print(f"{to}: {summary['framework']}, iteration {summary['iteration']}, {summary['tensors']} tensors")
    if summary["left_out"]:
        print(f"left out the arguments {', '.join(summary['left_out'])}: their types cannot be saved")
    if summary["note"]:
        print(summary["note"])


def _checkpoint(run_dir: Path, seconds: float, keep: bool) -> str:
    """Have the SMP of a run directory write the newest version; returns the checkpoint's folder. Raises FtError."""
    where = f"job {run_dir.parent.name} on node {run_dir.name}"
    with smp.Client(run_dir) as client:
        outcome = client.checkpoint(smp.REQUEST, seconds, keep=keep)
    match outcome["state"]:
        case "done":
            return str(outcome["path"])
        case "off":
            raise FtError(f"{where}: it has no folder for checkpoints; start the job with --reft-checkpoint-dir")
        case "nothing":
            raise FtError(f"{where}: no version is in memory yet on all ranks")
        case "writing":
            raise FtError(f"{where}: the checkpoint is not complete after {seconds:.0f} s; see `ft-plugins status`")
    raise FtError(f"{where}: {outcome['reason']}")
