"""Replacing a function of a module of Megatron-LM by a wrapped one, or saying by name that it is not there.

Invariant: only the module that *uses* a name is touched, right after its import, before anybody binds names from it.
In: module, name, `original -> replacement`. Out: the module with that one name replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...errors import UnsupportedError

_REPLACED = "__ft_replaced__"


def replace(module: ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Set `module.name` to `wrap(module.name)`; once, whoever asks how often.

    Raises UnsupportedError when this version has no such function.
    """
    original = getattr(module, name, None)
    if getattr(original, _REPLACED, False):
        return
    if not callable(original):
        raise UnsupportedError(
            f"{module.__name__} ({getattr(module, '__file__', None)}) has no function '{name}': this version of "
            "Megatron-LM cannot be followed; use core_v0.16.1"
        )
    replacement = wrap(original)
    setattr(replacement, _REPLACED, True)
    setattr(module, name, replacement)
