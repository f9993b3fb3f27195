"""Which data a Megatron-LM job trains on, as plain values for the fingerprint.

Invariant: equal on all ranks and on every restart, different for other data: each file's name, size and a digest of its
first MiB. A file that is missing or empty is one clear line now, not a traceback out of the data loader later.

In: Megatron-LM's resolved arguments. Out: a dictionary for `MegatronCoreHost(identity=...)`.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError

_HEAD_BYTES = 1 << 20
_ARGUMENTS = (
    *("seed", "micro_batch_size", "global_batch_size", "rampup_batch_size", "seq_length", "padded_vocab_size"),
    *("tokenizer_type", "split", "dataloader_type", "data_sharding", "mock_data", "data_parallel_random_init"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "calculate_per_token_loss", "iterations_to_skip"),
)


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Seed, batch sizes, how samples are cut and drawn, and the files they come from. Raises ConfigError."""
    values = {name: getattr(args, name) for name in _ARGUMENTS if hasattr(args, name)}
    return {**values, "data": [describe(prefix) for prefix in prefixes(args)]}


def prefixes(args: argparse.Namespace) -> Iterator[str]:
    """Every data prefix that the arguments name, whichever of Megatron's options names it."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    for named in (blend, *(per_split or ())):
        yield from named[0] if named else ()


def describe(prefix: str) -> list[Any]:
    """`prefix` with size and head of its `.bin` and `.idx`, or of the file of that very name. Raises ConfigError."""
    if "://" in prefix:  # an object store: its name is what can be known without reading it
        return [prefix]
    paths = [Path(prefix)] if Path(prefix).is_file() else [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    return [prefix, *(_file(path) for path in paths)]


def _file(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"data file {path} is missing; check --data-path (a prefix, without '.bin' or '.idx')")
    size = path.stat().st_size
    if size == 0:
        raise ConfigError(f"data file {path} is empty; make it again with tools/preprocess_data.py")
    with path.open("rb") as file:
        return [path.name, size, hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()]
