"""The `ft_plugins` block of a DeepSpeed configuration: read as DeepSpeed reads the file, but checked.

Invariant: what DeepSpeed would pass over in silence is an error here: a block that is no object, a key that is unknown
or has no effect, a file that names the block twice. DeepSpeed's own keys are DeepSpeed's business.

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
    """The file that a script's arguments name as DeepSpeed's configuration; None for none. The last one counts."""
    found = None
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        if value and name in _FLAGS or name == _SWITCH_OR_FLAG and value.endswith(".json"):
            found = value
    return found


def from_arguments(arguments: Sequence[str], folder: Path) -> Config:
    """What the file says that a script, run in `folder`, is given; nothing where it has none. Raises ConfigError."""
    path = path_in(arguments)
    return Config() if path is None else from_file(folder / path)


def from_file(path: Path) -> Config:
    """What the file says. Raises ConfigError, with the place, for one that cannot be read."""
    try:
        text = read_bytes(path, _LIMIT).decode()
    except (OSError, ValueError) as error:
        usual = error if isinstance(error, Unfit) else "it is no text"
        reason = error.strerror if isinstance(error, OSError) else usual
        raise ConfigError(f"the DeepSpeed configuration {path}: cannot be read ({reason}); name a JSON file") from error
    return _checked(_parse(text, str(path)), str(path))


def from_mapping(config: Mapping[str, Any]) -> Config:
    """What a configuration says that is passed as a dictionary. Raises ConfigError."""
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
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ConfigError(f"{place}: {shown(name)} is given twice, and only one can count; drop one of them")
            found[name] = value
        return found

    try:
        return json_value(text, once)
    except Unfit as error:
        raise ConfigError(f"{place}: {error}") from error
    except json.JSONDecodeError as error:
        found = _as_hjson(text, once)
        if found is None:
            raise ConfigError(
                f"{place}: line {error.lineno}, column {error.colno}: this is no JSON ({error.msg})"
            ) from error
        return found


def _as_hjson(text: str, once: Any) -> Any:
    """With comments and the like, which DeepSpeed takes too; None where that does not help."""
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        return None
    try:
        found = hjson.loads(text, object_pairs_hook=once)
        require_shallow(found)
    except ConfigError:
        raise
    except Exception:  # the parser's own, as for numbers without bound: whatever it trips over, it is no JSON
        return None
    return found if isinstance(found, dict) else None
