"""Read the arguments of a Megatron-LM job as it would itself, without a device and without starting it.

Invariant: the version's own parser and validation say what an argument is; no name of an argument is listed here, but
those of parallel sizes. Process groups, files of data and models are not touched. A process reads one version.

In: the script and its arguments. Out: `ReadArguments`, for the rules. Raises FtError.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import ConfigError, FtError
from . import prepare

_BYTES = 18  # that Megatron-LM's own estimate takes for each parameter, if nothing is distributed
_LINES = 3  # of its own refusal that are shown


@dataclass(frozen=True)
class ReadArguments:
    """`values` after validation, or as far as it came: `problem` is what it refused. `unknown`: words that the
    version's parser does not know. `parameters`: those of the model, None if the version cannot estimate them."""

    version: str
    values: argparse.Namespace
    unknown: tuple[str, ...]
    problem: str
    ranks: int
    parameters: float | None


def read_arguments(folder: Path, words: Sequence[str], ranks: int = 1) -> ReadArguments:
    """Read `words`, the arguments of a script in `folder`, for so many ranks, or the fewest that the sizes need. Raises
    ConfigError for words that Megatron-LM's parser refuses, FtError if there is no Megatron-LM."""
    module = import_arguments(folder)
    with _as_first_rank(words, ranks):
        with _quiet() as said:
            try:
                values = module.parse_args(ignore_unknown_args=True)
            except (Exception, SystemExit) as stop:  # also what it reads a file of arguments with
                told = str(stop) if isinstance(stop, Exception) else said.getvalue()
                last = (told.strip().splitlines() or ["no message"])[-1]
                raise ConfigError(f"Megatron-LM's own parser refuses these arguments: {last}") from stop
        known = module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        unknown = tuple(word for word in known.parse_known_args(list(words))[1] if word.startswith("--"))
        values.world_size = max(ranks, _fewest(values))
        if any(getattr(values, name, False) for name in ("use_torch_fsdp2", "use_megatron_fsdp")):
            os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS")  # which other jobs need to be 1
        problem = _validate(module, values)
    version = str(importlib.import_module("megatron.core").__version__)
    return ReadArguments(version, values, unknown, problem, values.world_size, _parameters(values))


def import_arguments(folder: Path) -> ModuleType:
    """Megatron-LM's module of arguments, as a script in `folder` imports it. Raises FtError."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # as when Python runs a script there
    prepare()
    try:
        with _quiet():
            return importlib.import_module("megatron.training.arguments")
    except ImportError as error:
        raise FtError(
            f"Megatron-LM cannot be imported from {folder} or the Python path ({error}): run this where the job runs, "
            "with its PYTHONPATH; what of a loop of your own is followed, `ft-plugins rehearse` shows"
        ) from error


@contextlib.contextmanager
def _as_first_rank(words: Sequence[str], ranks: int) -> Iterator[None]:
    """What Megatron-LM's parser reads of a process."""
    before, environment = sys.argv, dict(os.environ)
    sys.argv = ["check", *words]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), CUDA_DEVICE_MAX_CONNECTIONS="1")
    try:
        yield
    finally:
        sys.argv = before
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """Without what Megatron-LM prints, which is yielded."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said


def _validate(module: ModuleType, values: argparse.Namespace) -> str:
    """Validate in place; returns what is refused. What a version asserts of the machine is refused here too."""
    if getattr(values, "yaml_cfg", None) is not None:
        return "arguments in a YAML file are validated when the job starts"
    try:
        with _quiet():
            module.validate_args(values, {})
    except (Exception, SystemExit) as error:  # whatever a version raises, the rules still read what was parsed
        lines = [line for line in str(error).splitlines() if line.strip()][:_LINES]
        return f"{type(error).__name__}: {' '.join(lines)}"
    return ""


def _fewest(values: Any) -> int:
    """The fewest ranks of a job with these parallel sizes."""

    def size(name: str) -> int:
        return int(getattr(values, f"{name}_parallel_size", None) or 1)

    stages = size("pipeline_model")
    experts = (getattr(values, "expert_tensor_parallel_size", None) or size("tensor_model")) * size("expert_model")
    return math.lcm(size("tensor_model") * size("context") * stages, experts * stages)


def _parameters(values: argparse.Namespace) -> float | None:
    """The parameters of the model, from Megatron-LM's own estimate for the rank that holds most. It divides experts
    over ranks in newer versions only; the vocabulary of most tokenizers is known when the job starts."""
    if (getattr(values, "expert_model_parallel_size", None) or 1) > 1:
        return None
    words = getattr(values, "padded_vocab_size", None) or getattr(values, "vocab_size", None)
    changed = {"use_distributed_optimizer": False, "padded_vocab_size": words}
    whole = argparse.Namespace(**{**vars(values), **changed})
    try:
        estimate: Any = importlib.import_module("megatron.training.theoretical_memory_usage")
        with _quiet():
            held = estimate.compute_weight_and_optimizer_memory(whole) / _BYTES
    except Exception:  # a model of another kind, or values that were not validated
        return None
    return float(held * values.tensor_model_parallel_size * values.pipeline_model_parallel_size)
