"""`ft-plugins config`: explain the keys, or show a configuration in another format.

In: flags. Out: tables for people, JSON and shell words for programs. Raises ConfigError.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..config import Config, keys
from ..config.keys import LARGEST
from ..errors import ConfigError

_PAGE = f"""# Configuration

Give a key as a command line flag, before or after the script, or in one `ft_plugins` block of JSON (DeepSpeed's
configuration). A key that is unknown, misspelt or without effect is an error, and so is a number larger than
{LARGEST:,}. `ft-plugins config -- FLAGS` prints the configuration that the flags yield, with
`--format json|env|flags` in another format.

This page is the output of `ft-plugins config --format markdown`; a test compares them."""


class Format(str, Enum):
    """How `config` prints the keys."""

    table = "table"
    markdown = "markdown"
    json = "json"
    env = "env"
    flags = "flags"
    schema = "schema"


def config(
    context: typer.Context,
    form: Annotated[Format, typer.Option("--format", help="how to print")] = Format.table,
) -> None:
    """Explain every key, or print the configuration that the flags after `--` yield, in any format."""
    chosen, rest = Config.from_flags(context.args)
    if rest:
        raise ConfigError(f"{rest[0]}: unknown; expected flags such as --reft, after `--`")
    shown = chosen if context.args else all_defaults()
    match form:
        case Format.table if context.args:
            print(chosen.table())
        case Format.table:
            Console(width=None if sys.stdout.isatty() else 200).print(explained())  # lines of a file are not cut
        case Format.markdown:
            print(markdown())
        case Format.json:
            print(json.dumps({"ft_plugins": shown.block()}, indent=2))
        case Format.env:
            print(f"FTP_CONFIG={shlex.quote(json.dumps(shown.block()))}")
        case Format.flags:
            print(shlex.join(shown.flags()))
        case Format.schema:
            print(json.dumps(Config.model_json_schema(), indent=2))


def all_defaults() -> Config:
    """A configuration with every key at its default; unset keys without a default stay unset. Without local SGD, which
    cannot be on together with PAFT."""
    block: dict[str, Any] = {}
    for key in keys():
        if key.path[0] == "sync":
            continue
        if key.system:
            block[key.path[0]] = {}
        elif key.default is not None:
            (block if len(key.path) == 1 else block[key.path[0]])[key.path[-1]] = key.default
    return Config.from_json(block)


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for key in keys():
        meaning = key.meaning if key.switch else f"{key.meaning} ({key.expected})"
        yield key.flag, key.name, key.shown(key.default), key.unit, meaning


def explained() -> Table:
    """The keys as a table for the terminal."""
    table = Table("flag", "in JSON", "default", "unit", "meaning")
    for flag, name, default, unit, meaning in _rows():
        table.add_row(flag, name, default, unit, meaning)
    return table


def markdown() -> str:
    """The page `docs/configuration.md`: general keys, then the keys of each system."""
    head = ["", "| flag | in JSON | default | unit | meaning |", "|---|---|---|---|---|"]
    lines = [_PAGE, "", "## General", *head]
    for key, (flag, name, *rest) in zip(keys(), _rows(), strict=True):
        if key.system:
            lines += ["", f"## {name.upper()}", *head]
        lines.append(f"| `{flag}` | `{name}` | " + " | ".join(rest) + " |")
    return "\n".join(lines)
