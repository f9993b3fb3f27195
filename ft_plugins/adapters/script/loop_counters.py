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
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .loop_code import LoopCode, loops_around
from .script_names import stack

LEAVING = (
    "end a pass behind the training on its last batch, as a restart can: `if engine.global_steps % n == 0: break` "
    "after engine.step(); and look at samples of the data set, not at a batch of the loader"
)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class LoopCounters:
    """The integers in the expressions of `LoopCode`, of the loops that run, by "`name` in function()"."""

    counters: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)
    deciding: Mapping[str, int] = field(default_factory=dict)
    indices: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)

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
        names = ", ".join(version.cut)
        rest = "its pass over the data, of which only the rest comes now, ends as a whole one does"
        return f"{rest}, by {names}: {LEAVING}"
    changed = _changed(first.counters, version.counters, now.counters, ended, ignored)
    if changed:
        return changed
    bounds = now.bounds
    if bounds and not now.counters.keys() & version.counters.keys() and bounds == version.bounds == first.bounds:
        return f"it runs as often as at the job's start ({', '.join(bounds)}), and has no counter"
    return None


def decided_otherwise(
    first: LoopCounters, version: LoopCounters, now: LoopCounters, within: bool, ignored: Collection[str] = ()
) -> str | None:
    """What of a loop that continues is not what it was, and decides something in it; None for nothing. `within`: the
    version was captured in the middle of an epoch, whose rest `enumerate` counts from zero."""
    changed = [_changed(first.deciding, version.deciding, now.deciding, False, ignored)]
    for name, was in version.indices.items() if within else ():
        if not _is_in(name, ignored):
            changed.append(f"{name} begins at 0, and was {was} when that version was captured")
    return "; ".join(filter(None, changed)) or None


def _changed(
    first: Mapping[str, int], version: Mapping[str, int], now: Mapping[str, int], ended: bool, ignored: Collection[str]
) -> str:
    """The counters that have moved since the job began, and are not what they were; '' for none."""
    return "; ".join(
        f"{name} is {now[name]}, and was {was} when that version was captured"
        for name, was in version.items()
        if name in now and was not in (first.get(name), now[name]) and not _is_in(name, ignored)
        and (not ended or now[name] == first.get(name))
    )  # fmt: skip


def _is_in(name: str, ignored: Collection[str]) -> bool:
    return name.split("`")[1] in ignored


def loop_counters() -> LoopCounters:
    """The counters of the loops that run in the main thread. Of loops in installed packages (a progress bar) only those
    that end them."""
    found: dict[str, dict[str, int]] = {name: {} for name in vars(LoopCode())}
    inside = False  # a function of the script
    for frame, variables in stack():
        if inside and _is_installed(frame.f_code.co_filename):
            continue  # it only calls the script, as a test runner or a command line library does
        inside = inside or not _is_installed(frame.f_code.co_filename)
        function = frame.f_code.co_name
        place = "" if function == "<module>" else f" in {function}()"
        installed = frame.f_code.co_filename.startswith(_INSTALLED)
        for kind, expressions in vars(_loops_at(frame.f_code.co_filename, frame.f_lineno)).items():
            for expression in () if installed and kind != "counters" else expressions:
                value = _value(_parsed(expression), (variables, frame.f_globals))
                if type(value) is int:
                    found[kind].setdefault(f"`{expression}`{place}", value)
    return LoopCounters(**found)


@cache
def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python or an installed package."""
    paths = sysconfig.get_paths()
    return file.startswith("<frozen") or any(file.startswith(paths[name]) for name in ("stdlib", "purelib", "platlib"))


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
