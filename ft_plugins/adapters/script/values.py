"""Convert the non-tensor values of a framework's checkpoints to JSON values and back.

Invariant: a value comes back with the type that it had. No pickle: an enum is stored as class path and member name,
and only classes of the packages that the reader allows are imported, whatever a file says.

In: nested values. Out: JSON values, tagged where JSON lacks the type. Raises Unknown for a type without plain form.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import PosixPath, PurePath
from typing import Any

import torch

from ...errors import StorageError

TAG = "ftp"


class Unknown(Exception):
    """A value of a type that has no plain form."""


def _unknown(value: Any) -> Any:
    raise Unknown(type(value).__qualname__)


def to_plain(value: Any, other: Callable[[Any], Any] = _unknown) -> Any:
    """`value` as JSON values; `other` converts the types that this function does not know. Raises Unknown."""
    match value:
        case Enum():
            kind = type(value)
            return {TAG: "enum", "module": kind.__module__, "class": kind.__qualname__, "name": value.name}
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
    """The inverse of `to_plain`; `other` converts the tags that this function does not know. Raises StorageError."""
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
                raise StorageError(f"{where} does not exist in the installed version of {framework}")
            return kind[value["name"]]
    if other is None:
        raise StorageError(f"the checkpoint holds a value of the unknown kind {value[TAG]!r}")
    return other(value)


def find_class(named: Mapping[str, Any], packages: Sequence[str]) -> Any:
    """The class that `named` gives by 'module' and 'class'; None if no package of `packages` has it."""
    place: Any = None
    if named["module"].split(".")[0] in packages:
        place = importlib.import_module(named["module"])
        for part in named["class"].split("."):
            place = getattr(place, part, None)
    return place if isinstance(place, type) else None
