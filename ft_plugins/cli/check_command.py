"""`ft-plugins check`: what of a job would be followed, refused or without effect, and the memory that it takes.

Invariant: no part of the job is started, and no device is needed. In: the command of a job, as ft-run receives it, or a
DeepSpeed configuration. Out: text or JSON. The exit status is that of such a job: 78 if it would be refused, 1 if the
framework itself refuses its arguments, and if nothing can be said of it. Raises FtError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..adapters.job_check import JobCheck, ModelSize, check_deepspeed, check_megatron, check_trainer
from ..adapters.rules.megatron_forks import NEOX
from ..config import Config, deepspeed_json, merge
from ..config.neox_yaml import settings_in_arguments
from ..errors import EXIT_REFUSED, ConfigError, FtError
from ..systems.reft.dry_claim import DryJob
from .job_script import ScriptKind, kind_of
from .memory_plan_command import MemoryPlan, averages, plan_memory

LAUNCHERS = ("ft-run", "torchrun")
_OF_NEOX = (  # a yml file with one of them configures a job of gpt-neox; others may be those of a data set
    *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "pipe_parallel_size"),
    deepspeed_json.BLOCK,
)
_ON_A_NODE = 8  # ranks, where no launcher's arguments say


def check(
    context: typer.Context,
    deepspeed_config: Annotated[
        Path | None, typer.Option("--deepspeed_config", "--deepspeed-config", help="a DeepSpeed configuration alone")
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(help="parameters of the model, where its arguments do not say")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="ranks of the job; unset: by the command")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="ranks on a node; unset: by the command")] = None,
    node_memory_gib: Annotated[
        float | None, typer.Option(help="GiB of a node; unset: what this machine has free now")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, for programs")] = False,
) -> None:
    """Say what of a job is followed, refused or without effect, and the memory it takes, without starting it: give its
    command after '--', or --deepspeed_config, and the job's flags."""
    try:
        checked, config, on_node = _checked(context.args, deepspeed_config, ranks)
    except ConfigError as error:  # as ft-run would end
        _say(as_json, {"refusal": str(error)}, [f"refused: {error}"])
        raise typer.Exit(EXIT_REFUSED) from error
    except FtError as error:  # nothing could be checked
        if not as_json:
            raise
        _say(as_json, {"error": str(error)}, ())
        raise typer.Exit(1) from error
    plan, why_not = _memory(checked.size, config, parameters, ranks_per_node or on_node, node_memory_gib)
    memory = {"memory": plan.block()} if plan is not None else {"memory": None, "memory_unknown": why_not}
    lines = list(plan.lines(checked.size.each[0])) if plan and checked.size.each else [f"host memory: {why_not}"]
    end = f"refused: {checked.refusal}" if checked.refusal else f"would be protected by {', '.join(config.systems)}"
    end = checked.rejected or end
    _say(as_json, {"systems": config.systems, **checked.block(), **memory}, [*checked.lines(), *lines, end])
    if checked.rejected or checked.refusal:
        raise typer.Exit(1 if checked.rejected else EXIT_REFUSED)


def _say(as_json: bool, block: dict[str, Any], lines: Sequence[str]) -> None:
    print(json.dumps(block) if as_json else "\n".join(lines))


def _checked(words: Sequence[str], file: Path | None, ranks: int | None) -> tuple[JobCheck, Config, int | None]:
    """The check, its configuration, and the ranks of a node if the command says. Raises FtError."""
    if file is not None:
        flags, rest = Config.from_flags(words, whole=False)
        if rest:
            raise FtError(f"{rest[0]}: unknown; give --deepspeed_config with flags of the job, or a command after '--'")
        config = with_reft(merge(flags, deepspeed_json.from_file(file), ("the command line", str(file))))
        return check_deepspeed(_mapping(file), config.systems, ranks or 1), config, None
    if not words:
        raise FtError("expected the command of a job after '--', or --deepspeed_config FILE")
    from ..launcher import command  # slow: imports torch

    given = list(words[1:] if Path(words[0]).name in LAUNCHERS else words)
    plan = command.plan(given, os.getuid(), os.getcwd(), "here")
    config, options = with_reft(plan.config), plan.torch
    on_node = int(options.nproc_per_node) if str(options.nproc_per_node).isdigit() else 1
    world = ranks or command.parse_min_max_nnodes(options.nnodes)[1] * on_node
    arguments, named = options.training_script_args, on_node if on_node > 1 else None
    path = deepspeed_json.config_path(arguments)
    settings = settings_in_arguments(arguments, Path()) if path is None else _mapping(Path(path))
    script = Path(f"{options.training_script.replace('.', '/')}.py" if options.module else options.training_script)
    kind, unknown = kind_of(script)
    checked: JobCheck | None = None
    if path is not None or any(name in settings for name in _OF_NEOX):
        client = NEOX if path is None and kind is ScriptKind.MEGATRON else kind.value
        checked = check_deepspeed(settings, config.systems, world, client)
    if kind is ScriptKind.TRAINER:
        checked = check_trainer(arguments, config.systems, world, checked)
    if checked is None and unknown:
        raise FtError(f"{script}: {unknown}")
    return checked or check_megatron(script.resolve().parent, arguments, config.systems, world), config, named


def with_reft(config: Config) -> Config:
    """REFT if no system is on, so that a job can be asked about before its flags are chosen."""
    return config if config.systems else merge(config, Config.from_json({"reft": True}), ("the job", "check"))


def _mapping(file: Path) -> dict[str, Any]:
    settings = deepspeed_json.settings_in(file)
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: expected an object, found {type(settings).__name__}")
    return settings


def _memory(
    size: ModelSize, config: Config, parameters: float | None, on_node: int | None, node_memory_gib: float | None
) -> tuple[MemoryPlan | None, str]:
    """The plan of memory, or why there is none."""
    count = parameters or size.parameters
    if count is None:
        return None, "the number of parameters is not known before the job; give --parameters"
    if size.each is None:
        return None, "the optimizer's state is not known before the job; see ft-plugins plan memory"
    job = DryJob(
        count, size.each[1], size.tp, size.pp, max(1, size.ranks // (size.tp * size.pp)),
        on_node or min(_ON_A_NODE, size.ranks), sharded=size.sharded, whole=averages(config),
    )  # fmt: skip
    try:
        return plan_memory(job, config, node_memory_gib), ""
    except FtError as error:  # no memory is claimed by this system, or what is given cannot be planned
        return None, str(error)
