"""Values of a framework's checkpoints as plain ones, and back: for what stands in them beside tensors.

Invariant: what comes back has the type that it had. No pickle: an enum is its class's place and its member's name, and
only places of the packages that the reader names are looked up, whatever a file says.

In: nested values. Out: JSON values, with a tag where JSON lacks the type; Unknown for a type that is not known here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import PosixPath, PurePath
from typing import Any

import torch

from ..errors import StorageError

TAG = "ftp"


class Unknown(Exception):
    """A value of a type that has no plain form."""


def _unknown(value: Any) -> Any:
    raise Unknown(type(value).__qualname__)


def to_plain(value: Any, other: Callable[[Any], Any] = _unknown) -> Any:
    """`value` as JSON has it; `other` is asked for types that are not known here. Raises Unknown."""
    match value:
        case Enum():
            return {TAG: "enum", **_place(type(value)), "name": value.name}
        case torch.dtype():
            return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
        case PurePath():
            return {TAG: "path", "name": str(value)}
        case tuple() if type(value) is tuple:
            return {TAG: "tuple", "parts": [to_plain(part, other) for part in value]}
        case list():
            return [to_plain(part, other) for part in value]
        case dict() if type(value) is dict and all(isinstance(key, str) for key in value):
            return {TAG: "dict", "parts": {key: to_plain(part, other) for key, part in value.items()}}
        case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
            return value
    return other(value)


def from_plain(
    value: Any, packages: Sequence[str], framework: str, other: Callable[[Mapping[str, Any]], Any] | None = None
) -> Any:
    """What `plain` was given; `other` is asked for tags that are not known here. Raises StorageError."""
    if isinstance(value, list):
        return [from_plain(part, packages, framework, other) for part in value]
    if not isinstance(value, dict):
        return value
    match value[TAG]:
        case "dtype":
            return getattr(torch, value["name"])
        case "path":
            return PosixPath(value["name"])
        case "tuple":
            return tuple(from_plain(part, packages, framework, other) for part in value["parts"])
        case "dict":
            return {key: from_plain(part, packages, framework, other) for key, part in value["parts"].items()}
        case "enum":
            kind = find_class(value, packages)
            if kind is None or not issubclass(kind, Enum) or value["name"] not in kind.__members__:
                where = f"{value['module']}.{value['class']}.{value['name']}"
                raise StorageError(f"{where} is not known to the {framework} installed here")
            return kind[value["name"]]
    if other is None:
        raise StorageError(f"a value of unknown kind {value[TAG]!r} was saved")
    return other(value)


def _place(kind: type[Any]) -> dict[str, str]:
    return {"module": kind.__module__, "class": kind.__qualname__}


def find_class(told: Mapping[str, Any], packages: Sequence[str]) -> Any:
    """The class that is named, None where there is none in one of `packages`."""
    found: Any = None
    if told["module"].split(".")[0] in packages:
        found = importlib.import_module(told["module"])
        for part in told["class"].split("."):
            found = getattr(found, part, None)
    return found if isinstance(found, type) else None
