"""What the batches of a loader come from: its samplers, its data set, and what those refer to; the generators in it.

    parts        the loader and its samplers, which decide the order
    data_parts   data sets, transforms, the collate function: objects of the script under any name, also in small
                 containers, in closures, defaults and partials; objects of packages by the names that they are known by
    generators   of all of these; those that packages keep under other names, and that methods of the script refer to
                 in their classes and modules, too

Invariant: nothing is called, and nothing is changed. Modules of torch are left out, unless they are transforms by name:
a data set may hold the model. The walk is bounded, the nearest first.

In: a loader. Out: objects by attribute path.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from ...base.installed import is_installed
from ..script.script_names import is_of_library

GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_PARTS = ("loader", "batch_sampler", "sampler", "data_sampler")
_DRAWING = ("dataset", "datasets", "collate_fn", "data_collator", "transform", "transforms", "target_transform")
_DEPTH, _NESTED = 6, 2  # of attributes, of containers in one
_MANY, _MOST = 64, 512  # elements of a container that are looked at; parts of a loader
_SIMPLE = (int, float, bool, str, bytes, type(None), type, ModuleType, torch.Tensor, np.ndarray)


def parts(source: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`source` and its samplers, recursively, each with its attribute path."""
    if source is None:
        return
    yield path, source
    for name in _PARTS:
        part = getattr(source, "__dict__", {}).get(name)
        if part is not None:
            yield from parts(part, f"{path}{name}.")


def data_parts(source: Any) -> Iterator[tuple[str, Any]]:
    """What makes samples and batches, each with its attribute path."""
    return ((path, one) for path, one in _walk(source, packages=False) if not is_generator(one))


def is_generator(value: Any) -> bool:
    """Whether it is one of `GENERATORS`, and has a state: the system's has none."""
    return issubclass(type(value), GENERATORS) and not issubclass(type(value), random.SystemRandom)


def generators_of(source: Any, data: bool = True) -> dict[str, Any]:
    """The generators of `source` by attribute path; without `data`, only those that decide the order of samples. Not
    those of the process."""
    own = ((f"{path}{name}", one) for path, part in parts(source) for name, one in _attributes(part).items())
    seen = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for path, one in (*own, *((path[:-1], one) for path, one in (_walk(source, packages=True) if data else ()))):
        if is_generator(one) and id(one) not in seen:
            seen.add(id(one))
            found[path] = one
    return found


def _walk(source: Any, packages: bool) -> Iterator[tuple[str, Any]]:
    """`packages`: also what objects of installed packages hold under any name."""
    own = _attributes(source)
    seen = {id(source)}
    pending = deque((path, one, _DEPTH) for name in _DRAWING if name in own for path, one in _elements(name, own[name]))
    while pending and len(seen) < _MOST:
        path, part, depth = pending.popleft()
        if id(part) in seen or isinstance(part, _SIMPLE):
            continue
        seen.add(id(part))
        yield f"{path}.", part
        for name, value in _inside(part, packages) if depth else ():
            for inner, one in _elements(name, value):
                known = not isinstance(one, torch.nn.Module) or name in _DRAWING
                if known and not isinstance(one, _SIMPLE):
                    pending.append((f"{path}.{inner}", one, depth - 1))


def _elements(name: str, value: Any, depth: int = _NESTED) -> Iterator[tuple[str, Any]]:
    """A value, or those in a small container, with its name."""
    if not isinstance(value, list | tuple | deque | dict):
        yield name, value
    elif depth and len(value) <= _MANY:
        for key, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from _elements(f"{name}{key}", one, depth - 1)


def _inside(part: Any, packages: bool) -> Iterator[tuple[str, Any]]:
    kind: Any = type(part)
    match part:
        case FunctionType():
            yield from cells(part)
            yield from (("default", one) for one in (part.__defaults__, part.__kwdefaults__) if one)
            yield from _global_generators(part)
        case MethodType():
            yield from (("__self__", part.__self__), ("__func__", part.__func__))
        case BuiltinMethodType():
            yield "__self__", part.__self__
        case functools.partial():
            yield from (("func", part.func), ("args", part.args), ("keywords", part.keywords))
        case _ if _is_scripts(kind):
            yield from _attributes(part).items()
            yield from _of_class(kind)
        case _:
            any_name = packages and not _is_closed(kind)
            yield from ((name, one) for name, one in _attributes(part).items() if any_name or name in _DRAWING)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Generators that a class keeps, or that its methods refer to."""
    for base in kind.__mro__:
        for name, one in list(vars(base).items()) if _is_scripts(base) else ():
            if is_generator(one):
                yield name, one
            elif isinstance(one, FunctionType):
                yield from _global_generators(one)


def _global_generators(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in global_names(function.__code__):
        if is_generator(one := function.__globals__.get(name)):
            yield name, one


@cache
def global_names(code: CodeType) -> tuple[str, ...]:
    """The globals and attributes that a function's code names, with that of functions inside of it."""
    inner = (name for one in code.co_consts if isinstance(one, CodeType) for name in global_names(one))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _attributes(part: Any) -> Mapping[str, Any]:
    return dict(getattr(part, "__dict__", None) or {})


def cells(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The variables of the functions around it that a function refers to."""
    code = getattr(function, "__code__", None)
    for name, cell in zip(getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False):
        with suppress(ValueError):  # empty
            yield name, cell.cell_contents


@cache
def _is_scripts(kind: type) -> bool:
    """Whether a class is the script's, not Python's or an installed package's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    known = kind.__module__ == "__main__" or (file is not None and not is_installed(file))
    return known and not is_of_library(kind.__module__)


@cache
def _is_closed(kind: type) -> bool:
    """Whether a class is Python's or torch's, whose attributes hold all kinds of things."""
    root = kind.__module__.partition(".")[0]
    return root in sys.stdlib_module_names or is_of_library(kind.__module__)
