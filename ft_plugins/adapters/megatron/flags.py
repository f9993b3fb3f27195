"""Our flags in Megatron-LM's own command line: shown by `--help`, and resolved where Megatron resolves its own.

Invariant: ft-run takes our flags out of the command line before the script sees it, so a namespace normally holds None
for each of them; where the script was given them in another way, both sources must agree.

In: `megatron.training.arguments` right after it was imported. Out: the same module with a wider parser; `resolve`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...config import Config, LaunchContext, add_flags, merge
from .wrapping import replace

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
