"""The configuration keys as tables: for the terminal, and as the page `docs/configuration.md`.

In: the keys of `config`. Out: tables, Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from ..config import Config, keys
from ..config.keys import LARGEST

_PAGE = f"""# Configuration

Give a key as a command line flag, before or after the script, or in one `ft_plugins` block of JSON (DeepSpeed's
configuration). A key that is unknown, misspelt or without effect is an error, and so is a number larger than
{LARGEST:,}. `ft-plugins config -- FLAGS` prints the configuration that the flags yield, with
`--format json|env|flags` in another format.

This page is the output of `ft-plugins config --format markdown`; a test compares them."""


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
