"""Identify the data that a Megatron-LM job trains on, as plain values for the fingerprint.

Invariant: equal on all ranks and on every restart, different for other data: each file's name, size and a digest of its
first MiB, and the weights of a blend. Its size is bounded for any number of data sets, because a segment's header holds
it. A missing or empty file raises ConfigError here, before the data loader fails on it. Options that a user may change
between two starts (`--iterations-to-skip`, after a loss spike) are not part of it.

In: Megatron-LM's resolved arguments. Out: a dictionary for `MegatronCoreHost(identity=...)`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError

_HEAD_BYTES = 1 << 20
_DIGEST_LETTERS = 16  # 64 bits: enough without an adversary
_VALUE_BYTES = 64  # of JSON; longer values are replaced by their beginning and a digest
_DATA_BYTES = 512  # of JSON, for all data sets together
_ARGUMENTS = (
    *("seed", "micro_batch_size", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    *("seq_length", "padded_vocab_size"),
    *("tokenizer_type", "split", "dataloader_type", "data_sharding", "mock_data", "data_parallel_random_init"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "calculate_per_token_loss"),
)


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Seed, batch sizes, how samples are cut and drawn, and the files they come from. Raises ConfigError."""
    values = {name: bounded(getattr(args, name), _VALUE_BYTES) for name in _ARGUMENTS if hasattr(args, name)}
    named = list(blends(args))
    data = [describe(prefix) for prefixes, _ in named for prefix in prefixes]
    weights = [weights for _, weights in named]
    return {**values, "data": bounded(data, _DATA_BYTES), "data_weights": bounded(weights, _VALUE_BYTES)}


def blends(args: argparse.Namespace) -> Iterator[tuple[list[str], list[float] | None]]:
    """Data prefixes and weights, of all splits together or of each split, depending on Megatron's options."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    for named in (blend, *(per_split or ())):
        if named:
            prefixes, weights = named
            yield list(prefixes), None if weights is None else list(weights)


def bounded(value: Any, limit: int) -> Any:
    """`value` if its JSON has at most `limit` characters, else the beginning of the JSON and a digest of all of it."""
    text = json.dumps(value, default=str)
    if len(text) <= limit:
        return value
    count = [len(value)] if isinstance(value, list) else []
    return [*count, f"{text[: limit // 2]}...", _digest(text.encode())]


def describe(prefix: str) -> list[Any]:
    """`prefix` with name, size and digest of its `.bin` and `.idx`, or of the file `prefix`. Raises ConfigError."""
    if "://" in prefix:  # an object store, which is not read
        return [prefix]
    paths = [Path(prefix)] if Path(prefix).is_file() else [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    return [prefix, *(_file(path) for path in paths)]


def _file(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"data file {path} is missing; check --data-path (a prefix, without '.bin' or '.idx')")
    size = path.stat().st_size
    if size == 0:
        raise ConfigError(f"data file {path} is empty; create it again with tools/preprocess_data.py")
    with path.open("rb") as file:
        return [path.name, size, _digest(file.read(_HEAD_BYTES))]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_LETTERS]
