"""The `ft_plugins` block of a DeepSpeed configuration: read as DeepSpeed reads the file, but checked.

Invariant: what DeepSpeed would ignore silently is an error here: a block that is not an object, a key that is unknown
or has no effect, a file that has the block twice. DeepSpeed's own keys are not checked.

In: a path, a mapping, or a script's arguments. Out: a `Config`, not yet merged with other sources.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..intake import Unfit, json_value, read_bytes, require_shallow, shown
from .schema import Config

BLOCK = "ft_plugins"
_LIMIT = 4 << 20  # bytes; a thousand times a configuration
_FLAGS = ("--deepspeed_config", "--deepspeed-config")
_SWITCH_OR_FLAG = "--deepspeed"  # DeepSpeed's switch; with a file it is the flag of Hugging Face's Trainer


def path_in(arguments: Sequence[str]) -> str | None:
    """The DeepSpeed configuration file that a script's arguments name, the last one; None for none."""
    path = None
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        if value and name in _FLAGS or name == _SWITCH_OR_FLAG and value.endswith(".json"):
            path = value
    return path


def from_arguments(arguments: Sequence[str], folder: Path) -> Config:
    """The configuration in the file that a script, run in `folder`, gets; an empty one without. Raises ConfigError."""
    path = path_in(arguments)
    return Config() if path is None else from_file(folder / path)


def from_file(path: Path) -> Config:
    """The configuration in a file. Raises ConfigError, with the place, if it cannot be read."""
    try:
        text = read_bytes(path, _LIMIT).decode()
    except (OSError, ValueError) as error:
        unfit = error if isinstance(error, Unfit) else "it is not text"
        reason = error.strerror if isinstance(error, OSError) else unfit
        raise ConfigError(f"the DeepSpeed configuration {path}: cannot be read ({reason}); name a JSON file") from error
    return _checked(_parse(text, str(path)), str(path))


def from_mapping(config: Mapping[str, Any]) -> Config:
    """The configuration in a dictionary. Raises ConfigError."""
    return _checked(config, "the DeepSpeed configuration")


def _checked(config: Any, place: str) -> Config:
    if not isinstance(config, Mapping):
        raise ConfigError(f"{place}: expected an object, found {type(config).__name__}")
    if BLOCK not in config:
        return Config()
    try:
        return Config.from_json(config[BLOCK], whole=False)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _parse(text: str, place: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise ConfigError(f"{place}: {shown(name)} is given twice; drop one of them")
            values[name] = value
        return values

    try:
        return json_value(text, unique)
    except Unfit as error:
        raise ConfigError(f"{place}: {error}") from error
    except json.JSONDecodeError as error:
        value = _as_hjson(text, unique)
        if value is None:
            raise ConfigError(f"{place}: line {error.lineno}, column {error.colno}: not JSON ({error.msg})") from error
        return value


def _as_hjson(text: str, unique: Any) -> Any:
    """Parse JSON with comments and the like, which DeepSpeed accepts; None if it is not that either."""
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        return None
    try:
        value = hjson.loads(text, object_pairs_hook=unique)
        require_shallow(value)
    except ConfigError:
        raise
    except Exception:  # any error of the parser: the text is not JSON
        return None
    return value if isinstance(value, dict) else None
