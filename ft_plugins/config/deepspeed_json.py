"""The `ft_plugins` block of a DeepSpeed configuration: read as DeepSpeed reads the file, but checked.

Invariant: a block that is not an object, or an unknown key in it, is an error here; DeepSpeed ignores them. A key
without effect is left to `schema.merge`, because another source may switch its system on. A key given twice in a file
is an error, as in DeepSpeed. DeepSpeed's own keys are not checked otherwise.

In: a path, a mapping, or a script's arguments. Out: a `Config`, not yet merged with other sources.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.intake import DEPTH, SHOWN, Unfit, json_value, read_bytes, require_shallow, shown
from ..errors import ConfigError
from .neox_yaml import settings_in_arguments
from .schema import Config, keys, protects

BLOCK = "ft_plugins"
_LIMIT = 4 << 20  # bytes; a thousand times a configuration
_FLAGS = ("--deepspeed_config", "--deepspeed-config")
_SWITCH_OR_FLAG = "--deepspeed"  # DeepSpeed's switch; with a file it is the flag of Hugging Face's Trainer


def config_path(arguments: Sequence[str]) -> str | None:
    """The last DeepSpeed configuration file named in a script's arguments; None if there is none. After `--deepspeed`,
    a switch for most scripts, only a word that ends in '.json' is a file."""
    path = None
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        if (name in _FLAGS and value) or (name == _SWITCH_OR_FLAG and value.endswith(".json")):
            path = value
    return path


def from_arguments(arguments: Sequence[str], folder: Path) -> Config:
    """The configuration in the file named in the arguments of a script that runs in `folder`, or in the yml files of a
    gpt-neox job; an empty one if none is named. Raises ConfigError."""
    path = config_path(arguments)
    if path is not None:
        return from_file(folder / path)
    block = settings_in_arguments(arguments, folder).get(BLOCK)
    return Config() if block is None else _config_in({BLOCK: block}, "the yml files")


def from_file(path: Path) -> Config:
    """The configuration in a file. Raises what `settings_in` raises, and ConfigError."""
    return _config_in(settings_in(path), str(path))


def settings_in(path: Path) -> Any:
    """What a file holds. Raises ConfigError, naming the file, and line and column of a syntax error."""
    try:
        text = read_bytes(path, _LIMIT).decode()
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    except Unfit as error:
        raise _unreadable(path, str(error)) from error
    except ValueError as error:
        raise _unreadable(path, "it is not text") from error
    return _parse(text, str(path))


def from_mapping(config: Mapping[str, Any]) -> Config:
    """The configuration in a dictionary. Raises ConfigError."""
    return _config_in(config, "the DeepSpeed configuration")


def _unreadable(path: Path, reason: str | None) -> ConfigError:
    return ConfigError(f"the DeepSpeed configuration {path}: cannot be read ({reason}); name a JSON file")


def _config_in(config: Any, place: str) -> Config:
    if not isinstance(config, Mapping):
        raise ConfigError(f"{place}: expected an object, found {type(config).__name__}")
    if BLOCK not in config:
        _refuse_misspelt(config, place)
        return Config()
    try:
        return Config.from_json(config[BLOCK], whole=False)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _refuse_misspelt(config: Mapping[str, Any], place: str) -> None:
    """Raises ConfigError for a key that was meant for our block, or for a system of it that protects state."""
    inside = {key.path[0] for key in keys() if protects(key)}
    for name in map(str, config):
        if difflib.get_close_matches(name[:SHOWN].lower(), [BLOCK], 1, 0.85):
            raise ConfigError(f"{place}: {shown(name)[1:-1]}: unknown key; did you mean {BLOCK}?")
        if name in inside:
            raise ConfigError(f"{place}: {name}: unknown key; did you mean {BLOCK}.{name}?")


def _parse(text: str, place: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise ConfigError(f"{place}: {shown(name)} is given twice; drop one of them")
            values[name] = value
        return values

    try:
        try:
            return json_value(text, unique)
        except json.JSONDecodeError as error:
            value = _as_hjson(text, unique)
            if value is None:
                where = f"line {error.lineno}, column {error.colno}"
                raise ConfigError(f"{place}: {where}: not JSON ({error.msg}); remove the error there") from error
            require_shallow(value)
            return value
    except Unfit as error:
        raise ConfigError(f"{place}: {error}") from error


def _as_hjson(text: str, unique: Any) -> Any:
    """Parse Hjson (JSON with comments, optional commas and quotes), which DeepSpeed accepts. None if the text is not an
    object in Hjson, or if hjson is not installed."""
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        return None
    try:
        value = hjson.loads(text, object_pairs_hook=unique)
    except ConfigError:
        raise
    except RecursionError as error:
        raise Unfit(f"it is nested more than {DEPTH} deep") from error
    except Exception:  # any error of the parser: the text is not Hjson
        return None
    return value if isinstance(value, dict) else None
