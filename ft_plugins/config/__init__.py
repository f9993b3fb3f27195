"""One schema for all keys, and the only package that reads environment variables.

Invariant: a key is described once, in its field in `schema`; flags, the `ft_plugins` block of a DeepSpeed JSON file,
the environment of workers, `--help`, docs/configuration.md and the printed configuration derive from it. A key that is
unknown, misspelt, out of range, contradicted or without effect is a `ConfigError` of one line. No key holds a secret:
secrets are in a file that only its owner can read.

    schema           the keys: `Config` and one block per system
    sync_block       the keys of local SGD
    keys             a field of the schema: its flag, its JSON path, the text for what it expects
    sources          a command line or a JSON block -> values by key; unknown keys are errors; misspelt names
    deepspeed_json   the block of a DeepSpeed configuration
    checks           contradictions between keys, keys without effect
    launch_context   the environment of a worker
"""

from ..base.run_directories import run_directory, run_root
from . import deepspeed_json, sources
from .blocks import BaftConfig, PaftConfig, ReftConfig, SystemConfig
from .keys import Key
from .launch_context import LaunchContext, launch_context, worker_environment
from .schema import Config, add_flags, keys, merge, protects
from .sync_block import SyncConfig

__all__ = [
    "BaftConfig",
    "Config",
    "Key",
    "LaunchContext",
    "PaftConfig",
    "ReftConfig",
    "SyncConfig",
    "SystemConfig",
    "add_flags",
    "deepspeed_json",
    "keys",
    "launch_context",
    "merge",
    "protects",
    "run_directory",
    "run_root",
    "sources",
    "worker_environment",
]
