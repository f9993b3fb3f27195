"""What the processes of a job share without a command line: the environment of a worker.

Invariant: this and `run_directories` are the only modules of the package that read environment variables, when called,
from a mapping. A launcher's variables are set all together or not at all; a part of them is an error.

In: an environment. Out: `LaunchContext`, the variables for workers.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.intake import json_value, shown
from ..errors import ConfigError
from .schema import Config

_OURS = ("FTP_CONFIG", "FTP_RUN_DIR", "FTP_TOKEN", "FTP_AGENT_PID")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # every launcher sets these
_LOCAL = "localhost"


@dataclass(frozen=True)
class LaunchContext:
    """What a worker received from its launcher. Without ft-run, config, run_dir and agent_pid are None."""

    config: Config | None
    run_dir: Path | None
    token: int  # fencing token of this incarnation; 0 without ft-run
    agent_pid: int | None
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int  # torchrun's number of the node
    restart: int  # incarnations before this one
    master_addr: str = _LOCAL  # a host of the job


def worker_environment(config: Config, run_dir: Path, token: int, agent_pid: int) -> dict[str, str]:
    """The variables by which a worker receives what ft-run decided."""
    return dict(zip(_OURS, (json.dumps(config.block()), str(run_dir), str(token), str(agent_pid)), strict=True))


def launch_context(environ: Mapping[str, str] = os.environ) -> LaunchContext:
    """Read the environment of a worker. A process that no launcher started is rank 0 of 1.

    Raises ConfigError for a variable that is not a number, is misspelt (FTP_CONFG), or is missing while others are set.
    """
    for name in environ:
        near = difflib.get_close_matches(name, _OURS, 1, 0.85) if name.startswith("FTP_") else []
        if near and name not in _OURS:
            raise ConfigError(f"environment variable {shown(name)[1:-1]}: unknown; did you mean {near[0]}?")
    if "LOCAL_SIZE" in environ and "LOCAL_WORLD_SIZE" not in environ:  # the name that DeepSpeed's launcher uses
        environ = {**environ, "LOCAL_WORLD_SIZE": environ["LOCAL_SIZE"]}
    launched = any(name in environ for name in _RANKS)
    rank, local_rank, world_size, local_world_size = (
        _number(environ, name, None if launched else alone) for name, alone in zip(_RANKS, (0, 0, 1, 1), strict=True)
    )
    by_ft_run = "FTP_RUN_DIR" in environ
    return LaunchContext(
        config=_config(environ),
        run_dir=Path(environ["FTP_RUN_DIR"]) if by_ft_run else None,
        token=_number(environ, "FTP_TOKEN", None if by_ft_run else 0),
        agent_pid=_number(environ, "FTP_AGENT_PID", None) if by_ft_run else None,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        group_rank=_number(environ, "GROUP_RANK", rank // max(local_world_size, 1)),
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        master_addr=environ.get("MASTER_ADDR") or _LOCAL,
    )


def _config(environ: Mapping[str, str]) -> Config | None:
    text = environ.get("FTP_CONFIG")
    if text is None:
        return None
    try:
        block: Any = json_value(text)
    except ValueError as error:
        raise ConfigError(f"environment variable FTP_CONFIG: expected JSON, found {shown(text)} ({error})") from error
    return Config.from_json(block, whole=False)


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"-?[0-9]{1,18}", text):
        found = "nothing" if text is None else shown(text)
        raise ConfigError(
            f"environment variable {name}: expected an integer, found {found}; start the job with ft-run or torchrun"
        )
    return int(text)
