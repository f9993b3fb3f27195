"""What generators of a script carry on between two of their values, from version to version.

    def batches():                      the loop reads `next(it)`, with `it = batches()`
        n = 0
        while True:
            for x, y in loader:
                n += 1                  `n` begins at 0 again after a restart, as `it` does
                yield x * n, y

A generator begins again after a restore, and its variables exist when it has yielded. So each is compared at the first
version point at which it is there again: it began again if it is what it was at the job's first one, or, as a number,
has turned back towards it. What it takes from outside (an argument, a variable of the function around it) is compared
before.
Passes over loaders that are not followed, in variables or in such generators, are compared by the batches read.

Invariant: nothing is called, and no generator is advanced.

In: the stack. Out: plain values for the next version; a remark, or ''.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from types import FrameType, GeneratorType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...base.installed import is_installed
from .loop_counters import loops_at
from .loop_values import comparable, parsed, value_of
from .script_names import stack, variables_of

_PYTHONS = ("builtins", "itertools")
_MOST, _DEPTH = 32, 3  # values of a version; generators in generators
ROOM = 8 << 10  # bytes of them, twice
_EACH = 16  # bytes of one, but for its name and value
_OF_NO_VARIABLE = "for ... in "
Values = dict[str, int | str]
_Suspended = tuple[str, FrameType, Mapping[str, Any]]  # the place in messages, its variables


class SuspendedValues:
    """Of one job. `remark` after `begin` and `captured`: what has begun again."""

    def __init__(self) -> None:
        self._first: Values = {}
        self._expected: Values = {}  # of the restored version, not seen again so far
        self._ignored: Collection[str] = ()
        self.remark = ""

    def captured(self, first: bool) -> dict[str, Any]:
        """At the version point: what a version has of them. `first`: only the size is asked for."""
        if first:
            return {"first": {}, "last": {}, "reserve": bytes(2 * ROOM)}
        now = suspended_values()
        more = {name: value for name, value in now.items() if name not in self._first}
        self._first = that_fit({**self._first, **more})
        known = {name: self._expected.pop(name) for name in list(self._expected) if name in now}
        self.remark = begun_again(self._first, known, now, self._ignored)
        return {"first": self._first, "last": now}

    def begin(self, saved: Mapping[str, Any] | None, ignored: Collection[str]) -> None:
        """Before the first iteration after a restore. `saved`: None if the version has none."""
        saved = saved or {"first": {}, "last": {}}
        self._first, version, self._ignored = dict(saved["first"]), dict(saved["last"]), ignored
        present = values_from_outside(version)
        self._expected = {name: was for name, was in version.items() if name not in present}
        changed = {name: (version[name], now) for name, now in present.items() if now != version[name]}
        self.remark = _said({name: pair for name, pair in changed.items() if _of(name) not in ignored})


def begun_again(first: Values, version: Values, now: Values, ignored: Collection[str] = ()) -> str:
    """What has begun again, in words; '' for nothing."""
    again = {}
    for name, was in version.items():
        at, begun = now[name], first.get(name)
        numbers = type(was) is int and type(at) is int and type(begun) is int
        if was != begun and (at == begun or (numbers and (at - was) * (was - begun) < 0)):  # type: ignore[operator]
            again[name] = was, at
    return _said({name: pair for name, pair in again.items() if _of(name) not in ignored})


def _said(changed: Mapping[str, tuple[Any, Any]]) -> str:
    said = (f"{name} is {now}, and was {was} when that version was captured" for name, (was, now) in changed.items())
    return f"after the restore {'; '.join(said)}" if changed else ""


def _of(name: str) -> str:
    return name.split("`")[1]


def suspended_values() -> Values:
    """The present values."""
    found: Values = {}
    for place, frame, variables in _suspended():
        code = loops_at(frame.f_code.co_filename, frame.f_lineno)
        for text in (*code.carried, *code.deciding, *code.iterated):
            value = comparable(value_of(parsed(text), (variables, frame.f_globals)))
            if value is not None and len(found) < _MOST:
                found.setdefault(f"`{text}` in {place}", value)
        found.update(_passes(variables, place))
    for frame, variables in stack():
        found.update(_passes(variables, f"{frame.f_code.co_name}()"))
    return that_fit(found)


def that_fit(found: Values, most: int = _MOST) -> Values:
    """The first of them, no more than a version has room for."""
    kept: Values = {}
    left = ROOM
    for name, value in islice(found.items(), most):
        left -= len(name.encode()) + len(str(value).encode()) + _EACH
        if left >= 0:
            kept[name] = value
    return kept


def values_from_outside(names: Collection[str]) -> Values:
    """Those of `names` that generators which have not begun already have."""
    found: Values = {}
    for place, frame, variables in _suspended():
        for name in names:
            if name == f"`{_of(name)}` in {place}" and not _of(name).startswith(_OF_NO_VARIABLE):
                value = comparable(value_of(parsed(_of(name)), (variables, frame.f_globals)))
                if value is not None:
                    found[name] = value
    return found


def _passes(variables: Mapping[str, Any], place: str) -> Iterator[tuple[str, int]]:
    """The batches read of passes that are not followed."""
    for name, value in variables.items():
        if isinstance(value, _BaseDataLoaderIter):
            yield f"`{name}` in {place}", value._num_yielded


def _suspended() -> Iterator[_Suspended]:
    """The script's generators that variables of its running functions hold, and what they hold and delegate to."""
    seen: set[int] = set()
    for _, variables in stack():
        yield from _held(variables, seen)


def _held(variables: Mapping[str, Any], seen: set[int], depth: int = _DEPTH) -> Iterator[_Suspended]:
    held = dict(variables)
    for name, value in variables.items():
        own = getattr(value, "__dict__", None)
        if type(own) is dict and len(own) <= _MOST:
            held |= {f"{name}.{key}": one for key, one in own.items()}
    for name, value in held.items():
        if not isinstance(value, GeneratorType) or id(value) in seen or (frame := value.gi_frame) is None:
            continue
        seen.add(id(value))
        if value.gi_running or is_installed(frame.f_code.co_filename):
            continue
        inner = {**variables_of(frame), **dict(_iterated(value))}
        yield f"{frame.f_code.co_name}(), of '{name}'", frame, inner
        if depth:
            yield from _held(inner, seen, depth - 1)


def _iterated(iterator: Any, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """What the loops of a suspended generator go over, which no variable has: through zip, enumerate and others."""
    for one in gc.get_referents(iterator) if depth else ():
        if isinstance(one, GeneratorType | _BaseDataLoaderIter):
            yield f"{_OF_NO_VARIABLE}{type(one).__name__}", one
        elif type(one) in (tuple, FrameType) or (type(one).__module__ in _PYTHONS and hasattr(type(one), "__next__")):
            yield from _iterated(one, depth - 1)
