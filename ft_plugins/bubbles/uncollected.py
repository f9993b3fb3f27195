"""Planning without Python's cyclic collector, which takes two fifths of its time: it walks a million small values again
and again, none of which is ever part of a cycle.

Invariant: the collector is on again afterwards if it was on before, also after an error.
In: a function. Out: the same, faster.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def uncollected(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, during which nothing is looked for in cycles."""

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        was = gc.isenabled()
        gc.disable()
        try:
            return function(*arguments, **named)
        finally:
            if was:
                gc.enable()

    return run
