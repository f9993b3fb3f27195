"""Megatron-LM's arguments as plain values, and back: they are part of its checkpoints.

Invariant: what comes back has the type that it had; a value of a type that Megatron-LM's own load would not accept is
left out, and named. No pickle: an enum is its class's place and its member's name.

In: the namespace. Out: JSON values, with a tag where JSON lacks the type.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

from ...errors import StorageError

_TAG = "ftp"


class _LeftOut(Exception):
    pass


def plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """`values` by name, and the names `left_out`."""
    values, left_out = {}, []
    for name, value in sorted(vars(arguments).items()):
        try:
            values[name] = _plain(value)
        except _LeftOut:
            left_out.append(name)
    return {"values": values, "left_out": left_out}


def namespace(told: Mapping[str, Any], now: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments, with the values that training has changed as they are `now`. Raises StorageError."""
    values = {name: _back(value) for name, value in told["values"].items()}
    return argparse.Namespace(**{**values, **now})


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            kind = type(value)
            return {_TAG: "enum", "module": kind.__module__, "class": kind.__qualname__, "name": value.name}
        case torch.dtype():
            return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
        case PurePath():
            return {_TAG: "path", "name": str(value)}
        case tuple() if type(value) is tuple:
            return {_TAG: "tuple", "parts": [_plain(part) for part in value]}
        case list():
            return [_plain(part) for part in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {_TAG: "dict", "parts": {key: _plain(part) for key, part in value.items()}}
        case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
            return value
    raise _LeftOut


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return [_back(part) for part in value]
    if not isinstance(value, dict):
        return value
    match value[_TAG]:
        case "dtype":
            return getattr(torch, value["name"])
        case "path":
            from pathlib import PosixPath

            return PosixPath(value["name"])
        case "tuple":
            return tuple(_back(part) for part in value["parts"])
        case "dict":
            return {key: _back(part) for key, part in value["parts"].items()}
        case "enum":
            return _enum(value)
    raise StorageError(f"an argument of unknown kind {value[_TAG]!r} was saved")


def _enum(value: Mapping[str, str]) -> Enum:
    """The member that is named; only an enum of Megatron's or Python's, whatever a file says."""
    module, kind = value["module"], None
    if module.split(".")[0] in ("megatron", "signal"):
        found: Any = importlib.import_module(module)
        for part in value["class"].split("."):
            found = getattr(found, part, None)
        kind = found
    if not (isinstance(kind, type) and issubclass(kind, Enum) and value["name"] in kind.__members__):
        raise StorageError(f"{module}.{value['class']}.{value['name']} is not known to the Megatron installed here")
    return kind[value["name"]]
