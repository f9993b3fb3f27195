"""By which name a script knows an object: its globals, and the local variables of the functions that are running.

Invariant: only the main thread's stack is read, by identity; an object is named by the first place where it is found.
One level of attributes and elements is named too: 'trainer.ema', "models['critic']", 'optimizers[1]'.

In: a stack, or namespaces. Out: objects with their names.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

_LIBRARIES = ("ft_plugins", "torch", "deepspeed", "_pytest", "pytest", "pluggy", "runpy", "threading", "importlib")
_OURS = 3  # references to a frame's dictionary: the frame's, a variable, the argument of `getrefcount`
_PARTS = 64  # of a container that are named
_UNNAMED = (ModuleType, type, FunctionType, BuiltinFunctionType, str, bytes, int, float, type(None))


@dataclass(frozen=True)
class Name:
    """`expression` as the script writes it, and where: 'a global of train.py', 'a variable of main()'."""

    expression: str
    place: str


@dataclass(frozen=True)
class Named:
    """An object with its name. `direct`: by a variable, not as a part of another object."""

    name: Name
    value: Any
    direct: bool = True


def is_of_library(module: str) -> bool:
    """Whether a module is never the script's."""
    return module.split(".")[0] in _LIBRARIES


def stack() -> Iterator[tuple[FrameType, Mapping[str, Any]]]:
    """The script's functions that run in the main thread, with their local variables, the innermost first."""
    thread = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(-1 if thread is None else thread)
    while frame is not None:
        if not is_of_library(str(frame.f_globals.get("__name__"))):
            yield frame, variables_of(frame)
        frame = frame.f_back


def namespaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The local variables of the functions that run in the main thread, the innermost first, and the script's
    globals."""
    for frame, variables in stack():
        function = frame.f_code.co_name
        yield "a global" if function == "<module>" else f"a variable of {function}()", variables
    main = sys.modules.get("__main__")
    if main is not None:
        yield "a global", vars(main)


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables. Before Python 3.13 a function's frame keeps the dictionary that it returns, and so
    what is in it, until the function ends: it is emptied, unless the script has it too, by `locals()`."""
    variables = frame.f_locals
    found = dict(variables)
    own = isinstance(variables, dict) and frame.f_code.co_flags & CO_OPTIMIZED
    if own and sys.getrefcount(variables) <= _OURS:
        variables.clear()
    return found


def named(spaces: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[int, Named]:
    """The objects of these namespaces and their parts, by id. A name of its own comes before one as a part."""
    direct: dict[int, Named] = {}
    for place, variables in spaces:
        for variable, value in list(variables.items()):
            if not variable.startswith("__") and _is_scripts(value):
                direct.setdefault(id(value), Named(Name(variable, place), value))
    found = dict(direct)
    for one in direct.values():
        for suffix, part in _parts_of(one.value):
            if _is_scripts(part):
                name = Name(one.name.expression + suffix, one.name.place)
                found.setdefault(id(part), Named(name, part, direct=False))
    return found


def _is_scripts(value: Any) -> bool:
    mine = type(value).__module__.split(".")[0] in ("ft_plugins", "_pytest", "pytest", "pluggy")
    return not mine and not isinstance(value, _UNNAMED)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, torch.nn.Module):
        yield from ((f".{name}", part) for name, part in value.named_children())
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items())[:_PARTS] if isinstance(key, str | int))
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value[:_PARTS]))
    for name, part in list(getattr(value, "__dict__", {}).items())[:_PARTS]:
        if not name.startswith("__"):
            yield f".{name}", part
