"""What the functions that a loop calls carry on: counters in methods, closures and globals.

    def step(self, loss):               a loop's `stopper.step(loss)` carries `stopper.bad` on
        self.bad += 1

    for callback in callbacks:          `callbacks[<each>](loss)`, for each of them
        callback(loss)

Invariant: nothing is called. Only functions of the script are followed, to a depth, and as many as one reads quickly.

In: a call as the script writes it, the namespaces that it is in. Out: what it carries on, by the caller's names.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

import torch

from ..data.data_parts import is_generator
from .loop_code import FunctionCode
from .loop_statements import EACH, root_of
from .loop_values import NOTHING, Spaces, attribute, is_a, length_of, parsed, unparsed, value_of

_DEPTH, _MOST, _EACH = 3, 48, 16  # of calls in calls; functions of a loop; elements of a list that are called


@dataclass(frozen=True)
class Called:
    """A function that is called, and the objects that the call gives it, by parameter, with the caller's names."""

    function: FunctionType
    given: Mapping[str, tuple[str, Any]]
    module: torch.nn.Module | None = None  # whose forward it is: those of its parts are not followed

    def in_caller(self, expression: str) -> str:
        """An expression of the function as the caller would write it."""
        root = root_of(expression)
        return self.given[root][0] + expression[len(root) :] if root in self.given else expression


CodeOf = Callable[[FunctionType], FunctionCode | None]  # None for a function that is not the script's


def carried_by(
    call: str, spaces: Spaces, code_of: CodeOf, seen: set[Any], depth: int = _DEPTH
) -> Iterator[tuple[str, Any, bool]]:
    """What a call changes, or decides by: names, objects, and whether it changes them. `seen`: what was followed."""
    if EACH in call:
        container = value_of(parsed(call.partition(EACH)[0]), spaces)
        for key in islice(_keys(container), _EACH):
            yield from carried_by(call.replace(EACH, f"[{key!r}]", 1), spaces, code_of, seen, depth)
        return
    node = parsed(call)
    yield from ((text, one, True) for text, one in _generators(node, spaces))
    called = _resolved(node, spaces, code_of) if isinstance(node, ast.Call) and depth else None
    code = None if called is None or len(seen) >= _MOST else code_of(called.function)
    if called is None or code is None:
        return
    identity = (called.function.__code__, *(id(one) for _, one in called.given.values()))
    if identity in seen:
        return
    seen.add(identity)
    depth = min(depth, 1) if isinstance(called.module, torch.nn.Module) else depth
    inner = {name: one for name, (_, one) in called.given.items()}, _cells(called.function), called.function.__globals__
    for expressions, changes in ((code.carried, True), (code.deciding, False)):
        for expression in expressions:
            if root_of(expression) in called.given or root_of(expression) not in code.parameters:
                yield called.in_caller(expression), value_of(parsed(expression), inner), changes
    for each in code.calls:
        for text, value, changes in carried_by(each, inner, code_of, seen, depth - 1):
            yield called.in_caller(text), value, changes


def _keys(container: Any) -> Iterable[Any]:
    """The indices of a list, the plain keys of a dictionary."""
    if is_a(container, dict):
        return [key for key in dict.keys(container) if type(key) in (str, int)]
    return range(length_of(container) or 0)


def _generators(node: ast.expr, spaces: Spaces) -> Iterator[tuple[str, Any]]:
    """The random number generators that a call draws from: its receiver, its arguments."""
    if isinstance(node, ast.Call):
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        for part in (*receiver, *node.args, *(one.value for one in node.keywords)):
            value = value_of(part, spaces)
            if is_generator(value):
                yield unparsed(part), value


def _resolved(node: ast.Call, spaces: Spaces, code_of: CodeOf) -> Called | None:
    function = value_of(node.func, spaces)
    text, owner = "", None
    if isinstance(function, MethodType):  # in a variable
        text, owner, function = unparsed(node.func), function.__self__, function.__func__
    elif isinstance(function, FunctionType) and isinstance(node.func, ast.Attribute):
        owner, text = value_of(node.func.value, spaces), unparsed(node.func.value)
        if attribute(type(owner), node.func.attr) is not function:  # of a module, or in an attribute
            owner = None
    elif not isinstance(function, FunctionType | type):
        name = "forward" if isinstance(function, torch.nn.Module) else "__call__"
        text, owner, function = unparsed(node.func), function, attribute(type(function), name)
    if not isinstance(function, FunctionType):
        return None
    code = code_of(function)
    if code is None:
        return None
    bound: list[tuple[str, Any]] = [] if owner is None else [(text, owner)]
    bound += [(unparsed(one), value_of(one, spaces)) for one in node.args if not isinstance(one, ast.Starred)]
    given = dict(zip(code.parameters, bound, strict=False))
    for one in node.keywords:
        if one.arg in code.parameters:
            given[one.arg] = unparsed(one.value), value_of(one.value, spaces)
    module = owner if isinstance(owner, torch.nn.Module) else None
    return Called(function, {name: pair for name, pair in given.items() if pair[1] is not NOTHING}, module)


def _cells(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # empty
            continue
    return found
