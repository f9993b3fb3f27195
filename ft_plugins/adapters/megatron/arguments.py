"""Megatron-LM's command line and arguments: our flags in it, and its values as part of checkpoints.

Flags: `--help` shows ours, and they are resolved where Megatron-LM resolves its own. ft-run takes them out of the
command line before the script sees it, so the namespace normally holds None for each; where the script was given them
in another way, both sources must agree.

Values: as plain JSON values and back, each with the type that it had (`adapters.values`). A value of a type that
Megatron-LM's own load would not accept is left out, and named.

In: `megatron.training.arguments` right after it was imported; a namespace. Out: the same module with a wider parser;
a configuration; JSON values.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...config import Config, LaunchContext, add_flags, merge
from .. import values as coded
from ..script_hooks import replace_in_megatron as replace

MODULE = "megatron.training.arguments"


def extend(module: ModuleType) -> None:
    """Every parser that Megatron-LM builds in this process gets our flags as a group of its own."""
    replace(module, "add_megatron_arguments", _with_flags)


def _with_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        extended: argparse.ArgumentParser = original(parser)
        add_flags(extended)
        return extended

    return add_megatron_arguments


def resolve(args: argparse.Namespace, context: LaunchContext) -> Config:
    """What ft-run passed and what the namespace says, together. Raises ConfigError where they differ."""
    return merge(context.config or Config(), Config.from_namespace(args, whole=False), ("ft-run", "the script"))


def arguments_to_plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """`values` by name, and the names `left_out`."""
    values, left_out = {}, []
    for name, value in sorted(vars(arguments).items()):
        try:
            values[name] = coded.to_plain(value)
        except coded.Unknown:
            left_out.append(name)
    return {"values": values, "left_out": left_out}


def arguments_from_plain(told: Mapping[str, Any], now: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments, with the values that training has changed as they are `now`. Raises StorageError."""
    values = {
        name: coded.from_plain(value, ("megatron", "signal"), "Megatron") for name, value in told["values"].items()
    }
    return argparse.Namespace(**{**values, **now})
