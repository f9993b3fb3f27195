"""Megatron-LM's arguments: add our flags to its command line, refuse what is not followed, and read those of a job
before it starts.

Flags: `--help` shows ours. ft-run removes them from the command line before the script sees it, so the namespace
normally holds None for each. If the script gets them in another way, both sources must agree.

Refusal: by the arguments alone, right after Megatron-LM has validated them: before process groups and the model are
built.

Reading: without a device and without starting the job. The version's own parser and validation say what an argument is;
named here are only arguments that change how others are read: parallel sizes, FSDP, vocabulary, a YAML file. Process
groups, files of data and models are not touched. A process reads one version. What the validation refuses is named with
the arguments that its failed statement reads.

In: `megatron.training.arguments` right after its import; a script and its arguments. Out: the module with an extended
parser; a configuration; `ReadArguments`, for the rules. Raises FtError.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...config import Config, LaunchContext, add_flags, launch_context, merge
from ...errors import FtError
from ..job_check import last_line, quiet
from ..rules import MEGATRON, refuse
from ..rules.megatron import OTHERWISE
from ..script.script_hooks import replace_in_megatron as replace
from . import prepare

_BYTES = 18  # that Megatron-LM's own estimate takes for each parameter, if nothing is distributed
_LINES = 3  # of its own refusal that are shown


def extend(module: ModuleType) -> None:
    """Add our flags to every parser that Megatron-LM builds in this process."""
    replace(module, "add_megatron_arguments", _with_flags)


def _with_flags(original: Callable[..., Any], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    extended: argparse.ArgumentParser = original(parser)
    add_flags(extended)
    return extended


def check_validated(module: ModuleType) -> None:
    """Refuse what is not followed whenever Megatron-LM has validated arguments in this process."""
    replace(module, "validate_args", _validated)


def _validated(original: Callable[..., Any], args: argparse.Namespace, *more: Any, **named: Any) -> Any:
    outcome = original(args, *more, **named)
    require_followed(args, resolve(args, launch_context()).systems)
    return outcome


def require_followed(args: argparse.Namespace, systems: Collection[str]) -> None:
    """Raises UnsupportedError, naming each option in use that is not followed by these systems; none: unprotected."""
    if systems:
        refuse(MEGATRON, OTHERWISE, args, systems=systems)


def resolve(args: argparse.Namespace, context: LaunchContext) -> Config:
    """The configuration from ft-run and from the namespace. Raises ConfigError if they differ."""
    return merge(context.config or Config(), Config.from_namespace(args, whole=False), ("ft-run", "the script"))


# ---- before a job ----


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
    FtError for words that Megatron-LM's parser refuses, for a YAML file of arguments, and without Megatron-LM."""
    module = import_arguments(folder)
    with _as_first_rank(words, ranks):
        with quiet() as said:
            try:
                values = module.parse_args(ignore_unknown_args=True)
            except (Exception, SystemExit) as stop:  # also what it reads a file of arguments with
                told = last_line(str(stop) if isinstance(stop, Exception) else said.getvalue())
                raise FtError(f"Megatron-LM's own parser refuses these arguments: {told}") from stop
        if getattr(values, "yaml_cfg", None) is not None:
            raise FtError(f"{values.yaml_cfg}: a YAML file of arguments is read when the job starts; give flags")
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
        with quiet():
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


def _validate(module: ModuleType, values: argparse.Namespace) -> str:
    """Validate in place; returns what is refused. What a version asserts of the machine is refused here too."""
    try:
        with quiet():
            module.validate_args(values, {})
    except (Exception, SystemExit) as error:  # whatever a version raises, the rules still read what was parsed
        lines = [line for line in str(error).splitlines() if line.strip()][:_LINES]
        return f"{type(error).__name__}: {' '.join(lines) or 'no message'}{_raised_at(error)}"
    return ""


def _raised_at(error: BaseException) -> str:
    """The line of Megatron-LM in which `error` was raised, which names the arguments."""
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return f" ({line})" if line else ""


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
        with quiet():
            held = estimate.compute_weight_and_optimizer_memory(whole) / _BYTES
    except Exception:  # a model of another kind, or values that were not validated
        return None
    return float(held * values.tensor_model_parallel_size * values.pipeline_model_parallel_size)
