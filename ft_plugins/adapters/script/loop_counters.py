"""Whether the counters of a script's own loops are where the restored state is.

A loop may read where an engine is only to print it, and begin at its own start all the same. Its counters show that: at
the restored loop's first iteration they must be what they were when the version was captured, at the same place of the
same code.

    first     at the job's first iteration
    version   when the version was captured: right before the next iteration
    now       right before the first iteration after the restore

Invariant: nothing of the script is called or changed; what cannot be read is not compared: expressions that are not
integers, code without source, counters in calls. A counter that has not moved since the job's first iteration (a total,
which a restart may change) is not compared.

In: the stack. Out: `LoopCounters`, plain values, and what is wrong, or None.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .loop_code import LoopCode, loops_around
from .script_names import stack


@dataclass(frozen=True)
class LoopCounters:
    """The integers that count or end the loops that run, and those that bound a `for`, by `name in function()`."""

    counters: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counters or self.bounds)


def not_continued(
    first: LoopCounters, version: LoopCounters, now: LoopCounters, ended: bool = False, ignored: Collection[str] = ()
) -> str | None:
    """What shows that the loop did not continue; None for nothing.

    `ended`: the version was captured after the loop, and has the counters of the version before. `ignored`: names.
    """
    both = [name for name in now.counters if name in version.counters]
    wrong = []
    for name in both:
        began, was, is_now = first.counters.get(name), version.counters[name], now.counters[name]
        if was not in (began, is_now) and name.split(" in ")[0] not in ignored and (not ended or is_now == began):
            wrong.append(f"`{name}` is {is_now}, and was {was} when that version was captured")
    if wrong:
        return "; ".join(wrong)
    bounds = now.bounds
    if bounds and not both and bounds == version.bounds == first.bounds:
        return f"it runs as often as at the job's start (`{'`, `'.join(bounds)}`), and has no counter"
    return None


def loop_counters() -> LoopCounters:
    """The counters of the script's loops that run in the main thread."""
    counters: dict[str, int] = {}
    bounds: dict[str, int] = {}
    for frame, variables in stack():
        code = _loops_at(frame.f_code.co_filename, frame.f_lineno)
        function = frame.f_code.co_name
        place = "" if function == "<module>" else f" in {function}()"
        for values, expressions in ((counters, code.counters), (bounds, code.bounds)):
            for expression in expressions:
                value = _value(_parsed(expression), (variables, frame.f_globals))
                if type(value) is int:
                    values.setdefault(expression + place, value)
    return LoopCounters(counters, bounds)


@cache
def _loops_at(file: str, line: int) -> LoopCode:
    tree = _tree(file)
    return LoopCode() if tree is None else loops_around(tree, line)


@cache
def _tree(file: str) -> ast.Module | None:
    """The code of a file; None if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _value(node: ast.expr, spaces: tuple[Mapping[str, Any], ...]) -> Any:
    """The value of a name, an attribute or an element, without a call of anything; None if there is none."""
    match node:
        case ast.Constant(value=number):
            return number
        case ast.Name(id=name):
            return next((space[name] for space in spaces if name in space), None)
        case ast.Attribute(value=owner, attr=name):
            return getattr(_value(owner, spaces), "__dict__", {}).get(name)
        case ast.Subscript(slice=ast.Constant(value=key)):
            container = _value(node.value, spaces)
            return container.get(key) if type(container) is dict else None
    return None
