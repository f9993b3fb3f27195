"""What the statements of a script change, call and read, as the script writes it. Pure.

    best = min(best, loss)              changes `best`
    last[step % 4] = loss               changes `last`
    sample = buffer.popleft()           changes `buffer`
    random.shuffle(order)               changes `order`
    meters[name].update(loss)           calls `meters[<each>].update(loss)`

Nothing is what is only assigned from a clock: no restart begins where that was.

In: nodes of a syntax tree. Out: expressions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_TAKING = ("pop", "popitem", "popleft", "setdefault")  # what they return may be used
_CHANGING = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "remove", "reverse"),
    *("rotate", "sort", "subtract", "update"),
    *("difference_update", "intersection_update", "symmetric_difference_update"),
)
_IN_PLACE = (
    *("shuffle", "next", "heappush", "heappop", "heapreplace", "heappushpop"),
    *("insort", "insort_left", "insort_right"),
)
EACH = "[<each>]"  # in an expression: any element; no code is written like that, as `x[...]` is
_CLOCKS = (
    *("time", "monotonic", "perf_counter", "process_time", "now", "utcnow"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns"),
)
_ARITHMETIC = ("int", "float", "round", "max", "min", "total_seconds")
_DERIVED = 3  # assignments from one clock to what is tested
_SAME_ELEMENTS = ("list", "reversed", "sorted", "tuple")
_SLICING = ("islice",)
OVER_ALL = ("enumerate", "iter", "tqdm", "zip")  # functions whose loop ends with the data that they receive


def root_of(text: str) -> str:
    """The variable that an expression begins with."""
    return text.partition(".")[0].partition("[")[0]


def changed_by(node: ast.AST) -> Iterator[str]:
    """What a statement assigns, or changes by a method of a container."""
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
        targets = [node.target]
    for target in targets:
        yield from map(ast.unparse, _assigned(target))
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return
    name = ast.unparse(call.func).split(".")[-1]
    if isinstance(call.func, ast.Attribute) and name in (_TAKING if call is node else (*_CHANGING, *_TAKING)):
        yield from map(ast.unparse, _assigned(call.func.value))
    elif call.args and name in _IN_PLACE:
        yield from map(ast.unparse, _assigned(call.args[0]))


def _assigned(target: ast.expr) -> Iterator[ast.expr]:
    """The variables, attributes and elements of a target; of an element by a computed index what it is in."""
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _assigned(one.value if isinstance(one, ast.Starred) else one)
        return
    whole: ast.expr = target
    while isinstance(whole, ast.Attribute | ast.Subscript):
        if isinstance(whole, ast.Subscript) and not isinstance(whole.slice, ast.Constant):
            target = whole.value  # any of its elements
        whole = whole.value
    if isinstance(whole, ast.Name):
        yield target


def clocked_in(nodes: Sequence[ast.AST]) -> set[str]:
    """What is assigned from the time of day by arithmetic, or from what is: no restart begins where that was."""
    found: set[str] = set()
    assigned = [one for one in nodes if isinstance(one, ast.Assign | ast.AnnAssign)]
    for _ in range(_DERIVED):
        for one in assigned:
            value = one.value or one
            texts, values = {*changed_by(one)}, {*values_in(value)}
            called = [ast.unparse(each.func).split(".")[-1] for each in ast.walk(value) if isinstance(each, ast.Call)]
            timed = values & found or any(name in _CLOCKS for name in called)
            if timed and not texts & values and {*called} <= {*_CLOCKS, *_ARITHMETIC}:
                found |= texts
    return found


def calls_in(nodes: Sequence[ast.AST]) -> list[str]:
    """The calls in nodes; what is called of each element of a container, by a `for` or by an index that is computed, as
    `container[<each>]`."""
    calls = [one for one in same_scope(nodes) if isinstance(one, ast.Call)]
    found = [ast.unparse(one) for one in calls]
    for one in calls:
        function = one.func.value if isinstance(one.func, ast.Attribute) else one.func
        if isinstance(function, ast.Subscript) and not isinstance(function.slice, ast.Constant):
            text = ast.unparse(one)
            found.append(ast.unparse(function.value) + EACH + text[len(ast.unparse(function)) :])
    for loop in [one for one in same_scope(nodes) if isinstance(one, ast.For)]:
        for target, over in _elements(loop.target, loop.iter):
            inside = [text for text in calls_in(loop.body) if root_of(text.partition("(")[0]) == target]
            found += [f"{over}{EACH}{text[len(target) :]}" for text in inside]
    return found


def _elements(target: ast.expr, over: ast.expr) -> Iterator[tuple[str, str]]:
    """The targets of a `for` that are elements of containers, with these."""
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    name = ast.unparse(over.func).split(".")[-1] if isinstance(over, ast.Call) else ""
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and name in ("values", "items"):
        pairs = [(targets[-1], over.func.value)]
    elif isinstance(over, ast.Call) and over.args and name in OVER_ALL + _SAME_ELEMENTS:
        pairs = list(zip(targets, over.args, strict=False)) if name == "zip" else [(targets[-1], over.args[0])]
    else:
        pairs = [(target, over)]
    for one, container in pairs:
        if isinstance(one, ast.Name) and isinstance(container, ast.Name | ast.Attribute | ast.Subscript):
            yield one.id, ast.unparse(container)


def iterated_by(over: ast.expr) -> Iterator[str]:
    """What a `for` takes its elements from, also through functions that only pass them on."""
    if isinstance(over, ast.Name | ast.Attribute | ast.Subscript):
        yield ast.unparse(over)
    elif isinstance(over, ast.Call) and ast.unparse(over.func).split(".")[-1] in OVER_ALL + _SLICING:
        for one in over.args:
            yield from iterated_by(one)


def same_scope(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of these statements but those of functions that are defined in them."""
    for statement in statements:
        if not isinstance(statement, SCOPES):
            yield statement
            yield from same_scope(list(ast.iter_child_nodes(statement)))


def values_in(expression: ast.AST) -> Iterator[str]:
    """The variables, attributes and elements in an expression."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            yield ast.unparse(node)
