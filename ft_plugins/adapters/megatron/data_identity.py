"""Which data a Megatron-LM job trains on, as plain values for the fingerprint.

Invariant: equal on all ranks and on every restart, different for other data: each file's name, size and a digest of its
first MiB, and the weights of a blend; small however many data sets are blended, since a segment's header holds it. A
file that is missing or empty is one clear line now, not a traceback out of the data loader later. What a user changes
on purpose between two starts (`--iterations-to-skip`, after a loss spike) is no part of it.

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
_DIGEST_LETTERS = 16  # 64 bits: nobody forges a data set here
_VALUE_BYTES = 64  # of JSON; what is longer is told by its beginning and a digest
_DATA_BYTES = 512  # of JSON, for all data sets together
_ARGUMENTS = (
    *("seed", "micro_batch_size", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    *("seq_length", "padded_vocab_size"),
    *("tokenizer_type", "split", "dataloader_type", "data_sharding", "mock_data", "data_parallel_random_init"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "calculate_per_token_loss"),
)


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Seed, batch sizes, how samples are cut and drawn, and the files they come from. Raises ConfigError."""
    values = {name: within(getattr(args, name), _VALUE_BYTES) for name in _ARGUMENTS if hasattr(args, name)}
    named = list(blends(args))
    data = [describe(prefix) for prefixes, _ in named for prefix in prefixes]
    weights = [weights for _, weights in named]
    return {**values, "data": within(data, _DATA_BYTES), "data_weights": within(weights, _VALUE_BYTES)}


def blends(args: argparse.Namespace) -> Iterator[tuple[list[str], list[float] | None]]:
    """Data prefixes and weights, of all splits together or of each, whichever of Megatron's options names them."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    for named in (blend, *(per_split or ())):
        if named:
            prefixes, weights = named
            yield list(prefixes), None if weights is None else list(weights)


def within(value: Any, limit: int) -> Any:
    """`value` as it is where its JSON has at most `limit` bytes, else how it begins and a digest of all of it."""
    text = json.dumps(value, default=str)
    if len(text) <= limit:
        return value
    count = [len(value)] if isinstance(value, list) else []
    return [*count, f"{text[: limit // 2]}...", _digest(text.encode())]


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
        return [path.name, size, _digest(file.read(_HEAD_BYTES))]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_LETTERS]
