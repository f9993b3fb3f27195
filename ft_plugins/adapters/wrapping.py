"""Replacing a function of a framework by a wrapped one, or saying by name that it is not there.

Invariant: only the module or object that *uses* a name is touched, before anybody binds names from it; once, whoever
asks how often. In: owner, name, `original -> replacement`. Out: the owner with that one name replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError

REPLACED = "__ft_replaced__"


def replace(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, framework: str, tested: str
) -> None:
    """Set `owner.name` to `wrap(owner.name)`. Raises UnsupportedError when this version has no such function."""
    original = getattr(owner, name, None)
    if getattr(original, REPLACED, False):
        return
    if not callable(original):
        of = getattr(owner, "__name__", type(owner).__name__)
        raise UnsupportedError(
            f"{of} ({getattr(owner, '__file__', None)}) has no function '{name}': this version of {framework} cannot "
            f"be followed; use {tested}"
        )
    replacement = wrap(original)
    setattr(replacement, REPLACED, True)
    setattr(owner, name, replacement)
