"""Add our flags to Megatron-LM's command line, refuse its arguments, and convert them for checkpoints.

Flags: `--help` shows ours. ft-run removes them from the command line before the script sees it, so the namespace
normally holds None for each. If the script gets them in another way, both sources must agree.

Refusal: by the arguments alone, right after Megatron-LM has validated them: before process groups and the model are
built.

Arguments: converted to JSON values and back with their types (`adapters.script.values`). Arguments of types that
Megatron-LM's own load would not accept are left out and listed.

In: `megatron.training.arguments` right after its import; a namespace. Out: the module with an extended parser; a
configuration; JSON values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from ...config import Config, LaunchContext, add_flags, launch_context, merge
from ...errors import UnsupportedError
from ..rules import MEGATRON, findings, line
from ..rules.megatron import OTHERWISE
from ..script import values as coded
from ..script.script_hooks import replace_in_megatron as replace


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
    if systems and (problem := line(findings(MEGATRON, args, systems=systems), OTHERWISE)):
        raise UnsupportedError(problem)


def resolve(args: argparse.Namespace, context: LaunchContext) -> Config:
    """The configuration from ft-run and from the namespace. Raises ConfigError if they differ."""
    return merge(context.config or Config(), Config.from_namespace(args, whole=False), ("ft-run", "the script"))


def arguments_to_plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """`arguments` as 'values' by name, and the names 'left_out'."""
    values, left_out = {}, []
    for name, value in sorted(vars(arguments).items()):
        try:
            values[name] = coded.to_plain(value)
        except coded.Unknown:
            left_out.append(name)
    return {"values": values, "left_out": left_out}


def arguments_from_plain(saved: Mapping[str, Any], now: Mapping[str, Any]) -> argparse.Namespace:
    """The saved arguments, updated with the values that training has changed. Raises StorageError."""
    values = {
        name: coded.from_plain(value, ("megatron", "signal"), "Megatron") for name, value in saved["values"].items()
    }
    return argparse.Namespace(**{**values, **now})
