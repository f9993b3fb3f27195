"""`ft-plugins doctor`: what of this node would stop or harm a job, before it starts.

Invariant: nothing is started or changed. In: the command of a job, as ft-run receives it, or its flags alone. Out: text
or JSON; exit status 0 if the node is fine, 1 with warnings, 2 if the job will not work.
"""

from __future__ import annotations

import json
import os
import socket
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import Config
from ..errors import FtError
from ..systems.reft.dry_claim import DryJob
from .check_command import LAUNCHERS, with_reft
from .memory_plan_command import AsJson, Precision, averages, plan_memory, replicas

if TYPE_CHECKING:
    from ..doctor.findings import NodeFinding
    from ..doctor.host_facts import DoctorJob

_COLUMNS = 80
_ON_A_NODE = 8  # ranks, where the command does not say


def doctor(
    context: typer.Context,
    parameters: Annotated[
        float | None, typer.Option(help="parameters of the model, such as 7e9: compares memory too")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="tensor parallel size")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="pipeline parallel size")] = 1,
    as_json: AsJson = False,
) -> None:
    """Examine this node before a job: give the job's command, or its flags, after '--'. Exit status 0: fine; 1:
    warnings; 2: the job will not work."""
    from ..doctor.findings import Grade, NodeFinding, exit_status, findings  # slow: they import torch
    from ..doctor.host_facts import gather

    try:
        job = _job(context.args, parameters, tp, pp)
        found = findings(job, gather(job))
    except FtError as error:  # as ft-run would end
        found = (NodeFinding(Grade.FAILURE, str(error), "the job would be refused", "correct its command"),)
    host, status = socket.gethostname(), exit_status(found)
    if as_json:
        each = [{**asdict(one), "grade": one.grade.name.lower()} for one in found]
        print(json.dumps({"node": host, "exit_status": status, "findings": each}))
    else:
        print("\n".join(_lines(host, status, found)))
    raise typer.Exit(status)


def _job(words: Sequence[str], parameters: float | None, tp: int, pp: int) -> DoctorJob:
    """What the words of a command say. Raises FtError."""
    from ..doctor.host_facts import DoctorJob
    from ..launcher import command
    from ..launcher.rendezvous.endpoint import Endpoint

    given = list(words[1:] if words and Path(words[0]).name in LAUNCHERS else words)
    _, rest = Config.from_flags(given, whole=False)
    alone = command.parser().parse_args([*rest, os.devnull]).training_script == os.devnull  # flags, without a script
    words = [*given, os.devnull] if alone else given
    planned = command.plan(words, os.getuid(), os.getcwd(), "here", os.environ)  # under srun as ft-run would have it
    config, options = planned.config, planned.torch
    nodes = command.parse_min_max_nnodes(options.nnodes)[1]
    need = None
    if parameters is not None:
        on_node = int(options.nproc_per_node) if str(options.nproc_per_node).isdigit() else _ON_A_NODE
        on = with_reft(config)
        size = DryJob(
            parameters, Precision.bf16.captured[0], tp, pp, replicas(tp * pp, None, on_node, nodes), on_node,
            sharded=True, whole=averages(on),
        )  # fmt: skip
        need = plan_memory(size, on, None).claim.kinds[0].total
    texts = [] if options.standalone else [part for part in (options.rdzv_endpoint or "").split(",") if part.strip()]
    folder = config.capture.checkpoint_dir if config.capture else None
    checkpoints = Path(folder).absolute() / planned.job if folder else None
    return DoctorJob(
        nodes, tuple(map(Endpoint.read, texts)), config.secret_file, config.interface, need, options.local_addr,
        checkpoints,
    )  # fmt: skip


def _lines(host: str, status: int, found: Sequence[NodeFinding]) -> Iterator[str]:
    yield f"{host}: {('fine', 'works, with warnings', 'will not work')[status]}"
    for one in found:
        head = f"  {one.grade.name.lower():9}"
        for first, text in ((head, one.what), (" " * 11, one.why), (" " * 11, f"to do: {one.do}")):
            yield from textwrap.wrap(
                text, _COLUMNS, initial_indent=first, subsequent_indent=" " * 11, break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip
