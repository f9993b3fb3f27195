"""The values of modules that can be set again, read again only where something may have changed.

    plain values             in attributes, also in lists, tuples and dicts
    generators               of random numbers, also in these: their states, encoded
    small objects            that the codec knows, encoded

Invariant: a module is not read again if its attributes are the very objects that they were, and what can change in
itself has the same contents. Tensors are left out. Nothing of the script is called.

In: a module. Out: the values of each of its modules, by path and attribute.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from ..snapshot.capture import codec
from .data.data_parts import is_generator
from .data.loader_values import encoding
from .data.loaders import state_of
from .script.script_names import is_of_library
from .value_text import FUNCTIONS, is_a

PLAIN = (int, float, bool, str, type(None))
ENCODED, GENERATOR = "__ft_encoded__", "__ft_generator__"  # first of a tuple whose second is encoded
CONTAINERS = (list, tuple, dict)
MOST = 256  # values of a list, tuple or dict that are read
_LIMIT = 4 << 10  # bytes of an object that is
_SCALARS = (np.number, np.bool_)  # as `np.maximum` of two numbers
# of every module: parameters, hooks, `training`; and what Megatron-DeepSpeed sets when it saves
_LEFT_OUT = frozenset((*vars(torch.nn.Module()), "state_dict", "load_state_dict"))
_COUNTING = ("deepspeed.", "torch.nn.parallel.")  # packages whose modules count for themselves
_DEPTH = 4
_STEADY = (*PLAIN, *_SCALARS, *FUNCTIONS, Enum, bytes, complex, torch.dtype, torch.device)
_NONE: Any = object()  # no value that can be set again
Values = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class _Seen:
    """`mark`: ids of what `values` were read from, which `kept` keeps from becoming those of others. `changing`: the
    attributes that can change in themselves."""

    values: Values
    mark: list[int]
    kept: list[Any]
    changing: list[str]


class ModuleParts:
    """The parts of one model."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.modules: list[tuple[str, torch.nn.Module]] = []  # by path, as they were read last
        self._names: list[str] = []
        self._seen: list[_Seen] = []
        self._present: Mapping[str, Values] = {}
        self._encoded: dict[int, Any] = {}  # of the objects that the present reading has met, which many modules share

    def read(self) -> Mapping[str, Values]:
        """All parts, in the order of `named_modules`; the very mapping of the last time if nothing has changed."""
        self._encoded = {}
        self.modules = parts_of(self.module)
        same = [name for name, _ in self.modules] == self._names
        before: Sequence[_Seen | None] = self._seen if same else len(self.modules) * [None]
        self._seen = [self._read(part, seen) for (_, part), seen in zip(self.modules, before, strict=True)]
        if self._seen != before:
            self._names = [name for name, _ in self.modules]
            self._present = {name: one.values for name, one in zip(self._names, self._seen, strict=True)}
        return self._present

    def _read(self, module: torch.nn.Module, seen: _Seen | None) -> _Seen:
        own = vars(module)
        mark = [*map(id, own.values())]
        if seen is not None and seen.mark == mark:
            if all(self._value_of(own.get(key)) == seen.values.get(key, _NONE) for key in seen.changing):
                return seen
        elif f"{type(module).__module__}.".startswith(_COUNTING):
            return _Seen({}, mark, [], [])
        read = {key: self._value_of(one) for key, one in own.items() if key not in _LEFT_OUT}
        values = {key: value for key, value in read.items() if value is not _NONE}
        changing = [key for key in read if not _is_steady(own[key])]
        kept = [one for key, one in own.items() if key in read and is_a(one, *_STEADY, tuple)]
        return _Seen(values, mark, kept, changing)

    def _value_of(self, value: Any) -> Any:
        """What can be set again of a value; `_NONE` for nothing."""
        if is_a(value, torch.Tensor, torch.nn.Module, *FUNCTIONS):
            return _NONE
        if is_plain(value):
            return copy.deepcopy(value)
        if drawing := generators_in(value):
            return GENERATOR, codec.encode([*map(state_of, drawing)])
        if id(value) not in self._encoded:
            self._encoded[id(value)] = value, _encoded(value)
        return self._encoded[id(value)][1]


def _is_steady(value: Any) -> bool:
    """Whether a value, as long as it is the same one, has the same contents as far as they are read."""
    if type(value) is tuple:
        return not any(isinstance(one, CONTAINERS) for one in value)
    return is_a(value, *_STEADY, torch.Tensor, torch.nn.Module)


def _encoded(value: Any) -> Any:
    kind = type(value)
    with suppress(Exception):  # its class may compute what is asked for, and fail
        left_out = kind in CONTAINERS or kind in weakref.ProxyTypes or is_of_library(kind.__module__)
        if not left_out and (encoded := encoding(value, _LIMIT)):
            return ENCODED, encoded
    return _NONE


def generators_in(value: Any, depth: int = _DEPTH) -> list[Any]:
    """`value`, if it is a generator; those in a list, tuple or dict that is not large."""
    if is_generator(value):
        return [value]
    if type(value) not in CONTAINERS or len(value) > MOST or not depth:
        return []
    inside = [*value.values()] if type(value) is dict else [*value]
    return [one for part in inside for one in generators_in(part, depth - 1)]


def is_plain(value: Any) -> bool:
    return (
        is_a(value, *_SCALARS)
        or type(value) in PLAIN
        or (type(value) in CONTAINERS and _plain_values(value, _DEPTH) <= MOST)
    )


def _plain_values(value: Any, depth: int) -> int:
    """How many plain values `value` has; more than `MOST` if there are others, or if it is nested too deep."""
    if type(value) in PLAIN or is_a(value, *_SCALARS):
        return 1
    if type(value) not in CONTAINERS or len(value) > MOST or not depth:
        return MOST + 1
    count = 1
    for part in [*value, *value.values()] if type(value) is dict else value:
        count += _plain_values(part, depth - 1)
        if count > MOST:
            break
    return count


def parts_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """What `named_modules` yields, in a fraction of its time; it has a generator for each depth of nesting."""
    found: list[tuple[str, torch.nn.Module]] = []
    pending, seen = [("", module)], set[torch.nn.Module]()
    while pending:
        name, part = pending.pop()
        if part not in seen:
            seen.add(part)
            found.append((name, part))
            before = f"{name}." if name else ""
            inside = [(before + key, one) for key, one in part._modules.items() if one is not None]
            pending += reversed(inside)
    return found
