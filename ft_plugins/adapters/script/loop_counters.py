"""Whether the counters of a script's own loops are where the restored state is.

A loop may read where an engine is only to print it, and begin at its own start all the same. Its counters show that: at
the restored loop's first iteration they must be what they were when the version was captured, at the same place of the
same code.

    first     at the job's first iteration
    version   when the version was captured: right before the next iteration
    now       right before the first iteration after the restore

Invariant: nothing of the script is changed, and nothing called but the length of a loader. What cannot be read
(`loop_values`), and code without source, is not compared; tensors and arrays of it that the loop carries on are named.
Only an integer that differs ends a job; other values that differ are named in a remark. A counter that has not moved
since the job's first iteration (a total, which a restart may change) is not compared.

In: the stack. Out: `LoopCounters`, plain values, and what is wrong, or None.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from ...base.installed import is_installed
from ..data.loaders import is_sampled
from .loop_calls import carried_by
from .loop_code import Cut, FunctionCode, LoopCode, function_at, loops_around
from .loop_statements import root_of
from .loop_values import (
    NOTHING,
    Spaces,
    attribute,
    comparable,
    is_unsteady,
    length_of,
    parsed,
    truth_of,
    unread,
    value_of,
)
from .script_names import is_of_library, stack

_SHOWN, _MOST = 8, 64  # counters in a message, of each kind
LEAVING = (
    "end a pass behind the training on its last batch, as a restart can: `if engine.global_steps % n == 0: break` "
    "after engine.step(); and look at samples of the data set, not at a batch of the loader"
)


@dataclass(frozen=True)
class LoopCounters:
    """The values in the expressions of `LoopCode`, of the loops that run, by "`name` in function()". Fields are as
    there; `unread`: the kinds of tensors and arrays that are carried on and cannot be compared."""

    counters: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)
    deciding: Mapping[str, int | str] = field(default_factory=dict)
    indices: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(vars(self).values())


def not_continued(
    first: LoopCounters, version: LoopCounters, now: LoopCounters, ended: bool = False, ignored: Collection[str] = (),
    within: bool = False,
) -> str | None:  # fmt: skip
    """What shows that the loop did not continue; None for nothing.

    `ended`: the version was captured after the loop, and has the counters of the version before. `ignored`: names.
    `within`: it was captured in the middle of a pass over the data, whose rest comes next.
    """
    if within and version.cut and now.cut == version.cut == first.cut:
        return rest_ends_as_a_whole(version.cut, LEAVING)
    changed = _changed(first.counters, version.counters, now.counters, ended, ignored)
    if changed:
        return changed
    bounds = now.bounds
    if bounds and not now.counters.keys() & version.counters.keys() and bounds == version.bounds == first.bounds:
        return f"it runs as often as at the job's start ({', '.join(bounds)}), and has no counter"
    return None


def rest_ends_as_a_whole(cut: Collection[str], remedy: str) -> str:
    """What is wrong with a pass that is ended by a count from its beginning, if only its rest comes."""
    rest = "its pass over the data, of which only the rest comes now, ends as a whole one does"
    return f"{rest}, by {', '.join(cut)}: {remedy}"


def decided_otherwise(
    first: LoopCounters, version: LoopCounters, now: LoopCounters, within: bool, ignored: Collection[str] = (),
    set_back: Collection[str] = (),
) -> str | None:  # fmt: skip
    """What of a loop that continues is not what it was, and decides something in it; None for nothing. `within`: the
    version was captured in the middle of a pass over the data, whose rest `enumerate` counts from zero. `set_back`:
    variables of which the script restores what cannot be compared."""
    changed = [_changed(first.deciding, version.deciding, now.deciding, False, ignored)]
    for name, was in version.indices.items() if within else ():
        if not _is_in(name, ignored):
            changed.append(f"{name} begins at 0, and was {was} when that version was captured")
    unread = [f"{name} ({kind})" for name, kind in version.unread.items() if now.unread.get(name) == kind]
    unread = [one for one in unread if not _is_in(one, ignored) and root_of(one.split("`")[1]) not in set_back]
    if unread:
        changed.append(f"what cannot be compared is what the script has set: {', '.join(unread)}")
    return "; ".join(filter(None, changed)) or None


def _changed(
    first: Mapping[str, Any], version: Mapping[str, Any], now: Mapping[str, Any], ended: bool, ignored: Collection[str]
) -> str:
    """The counters that have moved since the job began, and are not what they were; '' for none."""
    moved = [
        f"{name} is {now[name]}, and was {was} when that version was captured"
        for name, was in version.items()
        if name in now and was not in (first.get(name), now[name]) and not _is_in(name, ignored)
        and (not ended or now[name] == first.get(name))
    ]  # fmt: skip
    more = [f"so are {len(moved) - _SHOWN} more"] if len(moved) > _SHOWN else []
    return "; ".join([*moved[:_SHOWN], *more])


def _is_in(name: str, ignored: Collection[str]) -> bool:
    return name.split("`")[1] in ignored


def loop_counters() -> LoopCounters:
    """The counters of the loops that run in the main thread. Of loops in installed packages (a progress bar) only those
    that end them."""
    found: dict[str, dict[str, Any]] = {one.name: {} for one in fields(LoopCounters)}
    seen: set[Any] = set()  # functions that loops call
    inside = False  # a function of the script
    for frame, variables in stack():
        installed = is_installed(frame.f_code.co_filename)
        if inside and installed:
            continue  # it only calls the script, as a test runner or a command line library does
        inside = inside or not installed
        function = frame.f_code.co_name
        place = "" if function == "<module>" else f" in {function}()"
        code, spaces = loops_at(frame.f_code.co_filename, frame.f_lineno), (variables, frame.f_globals)
        cut = dict.fromkeys(text for one in code.cuts if _is_in_force(one, spaces) for text in one.expressions)
        for kind in ("counters", *(() if installed else ("bounds", "deciding", "indices", "cut"))):
            for expression in cut if kind == "cut" else getattr(code, kind):
                value = value_of(parsed(expression), spaces)
                _note(found, kind, f"`{expression}`{place}", value, expression in code.carried)
        for text in () if installed else code.iterated:
            if _is_own_iterable(value := value_of(parsed(text), spaces)):
                _note(found, "deciding", f"`{text}`{place}", value, True)
        tested = {text: value_of(parsed(text), spaces) for text in code.counters}
        flags = [text for text, value in tested.items() if isinstance(value, bool)]
        for call in () if installed else code.calls:
            carries = list(carried_by(call, spaces, _function_code, seen))
            changed = {text for text, _, carried in carries if carried}
            owners = {_owner_of(flag) for flag in flags if flag in changed} - {""}  # this call sets such a flag
            for text, value, carried in carries:
                ends = call in code.ending or _owner_of(text) in owners
                _note(found, "counters" if ends else "deciding", f"`{text}`{place}", value, carried)
    return LoopCounters(**found)


def _is_in_force(cut: Cut, spaces: Spaces) -> bool:
    """Whether a pass may end by it, as far as its guards can be read."""
    over = value_of(parsed(cut.over), spaces) if cut.counter else None
    length = _length(over)
    return all(
        truth_of(parsed(test), spaces, cut.unsteady) in (wanted, None)
        and not (wanted and length is not None and _is_beyond(parsed(test), cut, length, spaces))
        for test, wanted in cut.guards
    )


def _is_beyond(test: ast.expr, cut: Cut, length: int, spaces: Spaces) -> bool:
    """Whether a test wants a counter to reach a number that it never does: `if i >= 10**9` of a shorter pass."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and ast.unparse(test.left) == cut.counter):
        return False
    limit = test.comparators[0]
    number = NOTHING if is_unsteady(limit, cut.unsteady) else value_of(limit, spaces)
    least = {ast.GtE: 0, ast.Eq: 0, ast.Gt: 1}.get(type(test.ops[0]))
    return type(number) is int and least is not None and number + least >= length


def _length(over: Any) -> int | None:
    """How many elements a pass has; None if that is unknown."""
    try:
        return len(over) if (known := length_of(over)) is None and is_sampled(over) else known
    except Exception:  # a sampler without length, or one of the script whose length fails
        return None


def _is_own_iterable(value: Any) -> bool:
    """Whether a class of the script says how it is iterated, and what it holds shows where it is."""
    ways = [type(attribute(type(value), name)) is FunctionType for name in ("__next__", "__iter__")]
    return any(ways) and not is_of_library(type(value).__module__) and (ways[0] or comparable(value) is not None)


def _owner_of(expression: str) -> str:
    """Of `stopper.stop`, a flag by which a loop ends: what sets it."""
    return expression.rpartition(".")[0]


def _note(found: dict[str, dict[str, Any]], kind: str, name: str, value: Any, carried: bool) -> None:
    """Integers count wherever they are; what else is carried on decides something."""
    if type(value) is int:
        if kind == "deciding" and name in found["counters"]:
            return
        noted: Any = value
    elif carried and kind in ("counters", "deciding"):
        noted, kind = comparable(value), "deciding"
        if (lacks := unread(value)) is not None and len(found["unread"]) < _MOST:
            found["unread"].setdefault(name, lacks)
    else:
        return
    if noted is not None and len(found[kind]) < _MOST:
        found[kind].setdefault(name, noted)


@cache
def loops_at(file: str, line: int) -> LoopCode:
    """The loops that a function is in at a line of a file."""
    tree = _tree(file)
    return LoopCode() if tree is None else loops_around(tree, line)


@cache
def _tree(file: str) -> ast.Module | None:
    """The code of a file; None if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _function_code(function: FunctionType) -> FunctionCode | None:
    """None for a function of an installed package, or without source."""
    return _code_at(function.__code__, str(function.__globals__.get("__name__")))


@cache
def _code_at(code: CodeType, module: str) -> FunctionCode | None:
    """By the code, not by the function: a closure that a loop makes in each step would stay, with what it refers to."""
    tree = None if is_of_library(module) or is_installed(code.co_filename) else _tree(code.co_filename)
    return None if tree is None else function_at(tree, code.co_firstlineno, code.co_name)
