"""What a job asks for, as `deepspeed.initialize` receives it.

In: the arguments of `deepspeed.initialize`. Out: the merged configuration; errors for jobs that cannot
be protected as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import Config, LaunchContext, deepspeed_json, merge
from .shard_groups import ReplicaBuild, require_divisible


def replica_build(config: Config, model: Any) -> ReplicaBuild | None:
    """How DeepSpeed builds the engine of a job with local SGD; None for other jobs. Raises UnsupportedError."""
    if config.sync is None:
        return None
    require_divisible(model)
    return ReplicaBuild(config.sync.shard_ranks or 1)


def configuration_argument(arguments: Mapping[str, Any]) -> Any:
    """The configuration that `deepspeed.initialize` received: a path, a mapping or None."""
    for name in ("config", "config_params"):
        if arguments.get(name) is not None:
            return arguments[name]
    return getattr(arguments.get("args"), "deepspeed_config", None)


def _file(configuration: Any) -> Path | None:
    """The file that a configuration names, if it does."""
    if isinstance(configuration, str) and (Path(configuration).exists() or configuration.endswith(".json")):
        return Path(configuration)
    return None


def settings_of(configuration: Any) -> Mapping[str, Any]:
    """The settings in a configuration; {} for an encoded one: the engine's own is read later. Raises ConfigError."""
    if file := _file(configuration):
        configuration = deepspeed_json.settings_in(file)
    return configuration if isinstance(configuration, Mapping) else {}


def resolve(configuration: Any, context: LaunchContext) -> Config:
    """Merge the configurations of ft-run and of the block. Raises ConfigError if they differ."""
    file = _file(configuration)
    block = deepspeed_json.from_file(file) if file else deepspeed_json.from_mapping(settings_of(configuration))
    return merge(context.config or Config(), block, ("ft-run", "the DeepSpeed configuration"))
