"""What decides how far a loop of a script goes: the expressions of its code that count it or end it. Pure.

    for epoch in range(start, epochs):      counts by `epoch`; bounded by `start`, `epochs`
        for inputs in loader: ...           counts by `inputs`, a tensor; bounded by `loader`
    while self.step < total:                ends by `self.step`, `total`
        if best.age > patience: break       ends by `best.age`, `patience`

        if number % 100 == 0: evaluate()    decides by `number`, which does not end it
        best = min(best, loss)              carries `best` on
        losses.append(loss)                 carries `losses` on
        meter.update(loss)                  calls `meter.update(loss)`, which may carry something on (`loop_calls`)

Invariant: a target of a `for` whose next element is only being fetched has a value of the element before, so it does
not count, and neither does what is assigned from a clock. An `if` ends a loop if it leaves it in order, skips the rest
of its body, or sets a flag by which one ends.

In: a module's syntax tree, the line at which a function of it is. Out: `LoopCode`, `FunctionCode`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .loop_statements import (
    OVER_ALL,
    SCOPES,
    calls_in,
    changed_by,
    clocked_in,
    iterated_by,
    root_of,
    same_scope,
    values_in,
)

_LEAVING = (ast.Break, ast.Continue, ast.Return)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
Loop = ast.For | ast.AsyncFor | ast.While
_Chain = tuple[tuple[ast.expr, bool], ...]  # tests, and what each must be


@dataclass(frozen=True)
class Cut:
    """What ends a pass: its expressions, and the tests around the statement that leaves it, each with what it must be:
    one of `if args.debug: break` does not end it where `args.debug` is false. `unsteady`: what the pass itself changes,
    by which no test is decided before. `counter` counts the elements of `over`, so that it stays below their number."""

    expressions: tuple[str, ...]
    guards: tuple[tuple[str, bool], ...] = ()
    unsteady: frozenset[str] = frozenset()
    counter: str = ""
    over: str = ""


@dataclass(frozen=True)
class LoopCode:
    """Expressions of all loops around a line, as the script writes them. `bounds`: of what is iterated, literal numbers
    included. `deciding`: of other `if`s, and what is `carried` on: what the loops change. `indices`: what `enumerate`
    counts from zero, as it is fetching, and an `if` tests. `cut`: literal numbers included, what ends the pass of a
    loop that is fetching, if that is counted from where it begins: `for ... in islice(loader, n)` in another loop,
    `for i, ... in enumerate(loader): if i == n: break`. `calls`: what loops call; `ending`: by what they end. `cuts`:
    what `cut` is made of. `iterated`: from what a `for` takes its elements."""

    counters: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    deciding: tuple[str, ...] = ()
    indices: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    carried: tuple[str, ...] = field(default=(), compare=False)
    calls: tuple[str, ...] = field(default=(), compare=False)
    ending: tuple[str, ...] = field(default=(), compare=False)
    cuts: tuple[Cut, ...] = field(default=(), compare=False, kw_only=True)
    iterated: tuple[str, ...] = field(default=(), compare=False, kw_only=True)


@dataclass(frozen=True)
class FunctionCode:
    """Of a function: its parameters, and expressions of what outlives its call: what it changes, what it tests or
    returns. What it calls."""

    parameters: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    deciding: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


def loops_around(tree: ast.Module, line: int) -> LoopCode:
    """The loops that a function is in, when it executes `line`."""
    loops = _path(tree, line)
    inside = [loop for loop in loops if isinstance(loop, ast.While) or line >= loop.body[0].lineno]
    targets = [name for loop in inside for name in _targets(loop)]
    stale = {name for loop in loops for one in ast.walk(loop) for name in _targets(one)} - {*targets}
    stale |= clocked_in([one for loop in loops for one in same_scope(loop.body)])
    ends = [test for loop in loops for test in _ending(loop)]
    counters = targets + [text for test in ends for text in values_in(test) if text not in stale]
    bounds = [text for loop in loops if isinstance(loop, ast.For | ast.AsyncFor) for text in _bounds(loop.iter)]
    tested = [text for loop in loops for test, ends in _tests(loop) if not ends for text in values_in(test)]
    carried = [text for loop in loops for one in same_scope(loop.body) for text in changed_by(one) if text not in stale]
    iterated = [text for loop in loops if isinstance(loop, ast.For) for text in iterated_by(loop.iter)]
    calls = [*calls_in(ends), *calls_in([one for loop in loops for one in loop.body])]
    deciding = [text for text in tested + carried if text not in stale and text not in counters]
    fetching = {name for loop in loops if loop not in inside and _counts(loop) for name in _targets(loop)}
    indices = [text for loop in loops for test, _ in _tests(loop) for text in values_in(test) if text in fetching]
    cuts = [one for loop in loops if loop not in inside for one in _cuts(loop, loop is not loops[0])]
    cuts += [Cut(tuple(_sliced(one))) for one in _yielding(tree, line) if inside]
    cut = [text for one in cuts for text in one.expressions]
    found = counters, bounds, deciding, indices, cut, carried, calls, calls_in(ends)
    each_once = [tuple(dict.fromkeys(each)) for each in (*found, iterated)]
    return LoopCode(*each_once[:-1], cuts=tuple(cuts), iterated=each_once[-1])


def function_at(tree: ast.Module, line: int, name: str) -> FunctionCode:
    """The function of that name whose first line, decorators included, is `line`."""
    named = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == name)
    found = (one for one in named if line == min([one.lineno, *(each.lineno for each in one.decorator_list)]))
    return next(map(_function, found), FunctionCode())


def _function(node: ast.FunctionDef) -> FunctionCode:
    parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    inside = [*same_scope(node.body)]
    outer = {name for one in inside if isinstance(one, ast.Nonlocal | ast.Global) for name in one.names}
    changed = [text for one in inside for text in changed_by(one)]
    read = [one.test for one in inside if isinstance(one, ast.If | ast.While | ast.IfExp)]
    read += [one.value for one in inside if isinstance(one, ast.Return) and one.value is not None]
    local = {text for text in changed if text.isidentifier()} - outer
    clocked = clocked_in(inside)
    found = changed, [text for one in read for text in values_in(one)]
    carried, deciding = (
        [one for one in texts if one not in parameters and root_of(one) not in local and one not in clocked]
        for texts in found
    )
    calls = calls_in(node.body)
    return FunctionCode(tuple(parameters), *(tuple(dict.fromkeys(each)) for each in (carried, deciding, calls)))


def _path(tree: ast.Module, line: int) -> list[Loop]:
    """The loops around a line within one function, outermost first."""
    loops: list[Loop] = []
    node: ast.AST | None = tree
    while node is not None:
        if isinstance(node, SCOPES):
            loops = []
        elif isinstance(node, _LOOPS) and line <= (node.body[-1].end_lineno or line):  # else in its `else`
            loops.append(node)
        node = next((one for one in _statements(node) if one.lineno <= line <= (one.end_lineno or line)), None)
    return loops


def _statements(node: ast.AST) -> Iterator[ast.stmt | ast.excepthandler]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler):
            yield child
        elif isinstance(child, ast.match_case):
            yield from child.body


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.For | ast.AsyncFor):
        for one in ast.walk(node.target):
            if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Store):
                yield ast.unparse(one)


def _ending(loop: Loop) -> Iterator[ast.expr]:
    if isinstance(loop, ast.While):
        yield loop.test
    yield from (test for test, ends in _tests(loop) if ends)


def _tests(loop: Loop) -> Iterator[tuple[ast.expr, bool]]:
    """What each `if` in a loop tests, and whether that ends the loop."""
    ending = {id(test) for chain in _exits(loop) for test, _ in chain}
    for node in same_scope(loop.body):
        if isinstance(node, ast.If):
            yield node.test, id(node.test) in ending


def _exits(loop: Loop) -> Iterator[_Chain]:
    """The tests around each statement that leaves the loop, skips the rest of its body, or sets a flag by which it
    ends."""
    leaving = list(_chains(loop.body, frozenset()))
    deciding = [test for chain in leaving for test, _ in chain] + ([loop.test] if isinstance(loop, ast.While) else [])
    yield from _chains(loop.body, frozenset(text for test in deciding for text in values_in(test)))


def _chains(
    statements: Sequence[ast.AST], flags: frozenset[str], around: _Chain = (), within: bool = False
) -> Iterator[_Chain]:
    """`flags`: what ends the loop if it is set. `within`: in a loop in it, whose `break` leaves only that one."""
    for one in statements:
        leaves = isinstance(one, ast.Return) or (not within and isinstance(one, _LEAVING))
        if leaves or not flags.isdisjoint(_set_flags(one)):
            yield around
        if isinstance(one, ast.If):
            yield from _chains(one.body, flags, (*around, (one.test, True)), within)
            yield from _chains(one.orelse, flags, (*around, (one.test, False)), within)
        elif isinstance(one, _LOOPS):
            yield from _chains(one.body, flags, around, True)
            yield from _chains(one.orelse, flags, around, within)
        elif not isinstance(one, SCOPES):
            yield from _chains(list(_statements(one)), flags, around, within)


def _counts(loop: Loop) -> bool:
    """Whether it is `for ... in enumerate(...)` from zero."""
    call = None if isinstance(loop, ast.While) else loop.iter
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "enumerate":
        return False
    return len(call.args) + len(call.keywords) == 1


def _cuts(loop: Loop, is_inner: bool) -> Iterator[Cut]:
    if isinstance(loop, ast.While):
        return
    targets = {*_targets(loop)}
    inside = [*same_scope(loop.body)]
    changed = {text for one in inside for text in (*changed_by(one), *_targets(one))}
    for chain in _exits(loop) if _counts(loop) else ():
        counted = [test for test, _ in chain if targets & {*values_in(test)}]
        texts = [text for test in counted for text in (*values_in(test), *_literals(test)) if text not in targets]
        if counted:
            guards = tuple((ast.unparse(test), wanted) for test, wanted in chain)
            yield Cut(tuple(texts), guards, frozenset(targets | changed), *_counter(loop))
    if is_inner and (sliced := tuple(_sliced(loop.iter))):
        yield Cut(sliced)


def _counter(loop: ast.For | ast.AsyncFor) -> tuple[str, str]:
    """What `enumerate` counts by, and over; '' for a counter that the loop sets, too, or that has no name."""
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else None
    name = first.id if isinstance(first, ast.Name) else ""
    is_set = any(name in changed_by(one) for one in same_scope(loop.body))
    over = loop.iter.args if isinstance(loop.iter, ast.Call) else []  # none of `enumerate(iterable=loader)`
    if is_set or not name or not over or isinstance(over[0], ast.Starred):
        return "", ""
    return name, ast.unparse(over[0])


def _sliced(node: ast.AST) -> Iterator[str]:
    """What ends the calls of `islice` and `zip` in an expression or a statement."""
    for call in (one for one in same_scope([node]) if isinstance(one, ast.Call)):
        if ast.unparse(call.func).split(".")[-1] in ("islice", "zip"):
            yield from (*values_in(call), *_literals(call))


def _yielding(tree: ast.Module, line: int) -> list[ast.YieldFrom]:
    """The `yield from` that is executed at a line."""
    return [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.YieldFrom) and one.lineno <= line <= (one.end_lineno or line)
    ]


def _set_flags(node: ast.AST) -> Iterator[str]:
    """What an assignment of True or False sets."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
        yield from map(ast.unparse, node.targets)


def _bounds(iterable: ast.expr) -> Iterator[str]:
    yield from values_in(iterable)
    if isinstance(iterable, ast.Call) and ast.unparse(iterable.func).split(".")[-1] not in OVER_ALL:
        yield from _literals(iterable)


def _literals(expression: ast.AST) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield ast.unparse(node)
