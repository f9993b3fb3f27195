"""The beginning of a script, which a standby worker executes ahead of time: its imports.

Invariant: what is executed is what the script itself executes first, in its order; it ends before the first statement
that may do more than import modules, set names and say where and how to import. So when the script runs later, from its
first statement, modules are as they would be without a standby. Statements of that beginning are executed twice, and
the second time must do the same: a choice between imports and settings (`try: import a; except ImportError:
sys.path.insert(..)`) ends it, because once it is made, another one would be made the second time.

In: the text of a script. Out: statements of its top level.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from .standby_plan import ABSENT

_SETTINGS = {  # calls that say where and how to import; executing them twice changes nothing
    "os.environ.setdefault",
    "sys.path.append",
    "sys.path.insert",
    "warnings.filterwarnings",
    "warnings.simplefilter",
}
_PURE = {  # and os.path
    "Path", "pathlib.Path", "logging.getLogger", "str", "int", "float", "bool", "len",
    "time.time", "time.monotonic", "time.perf_counter",
}  # fmt: skip
_READERS = {"os.environ.get", "os.getenv"}
_EVER_NEW = ABSENT | {"TORCHELASTIC_RESTART_COUNT"}  # variables that no standby can know
_PURE_METHODS = {"resolve", "absolute", "as_posix"}  # of a path


def beginning(source: str, name: str) -> list[ast.stmt]:
    """The statements to execute. Raises SyntaxError for invalid text; `name` is its name."""
    return list(_beginning(ast.parse(source, name).body))


def _beginning(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if _is_guard(statement):
            assert isinstance(statement, ast.If)
            yield from _beginning(statement.body)
            return
        if not _harmless(statement):
            return
        yield statement


def _is_guard(statement: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":`."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


def _harmless(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.FunctionDef(args=given, decorator_list=[]) | ast.AsyncFunctionDef(args=given, decorator_list=[]):
            return all(default is None or _pure(default) for default in [*given.defaults, *given.kw_defaults])
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call() as call):
            return _dotted(call.func) in _SETTINGS and _pure_arguments(call)
        case ast.Assign(targets=targets, value=value):
            return all(map(_settable, targets)) and _pure(value)
        case ast.AnnAssign(target=target, value=value):
            return _settable(target) and (value is None or _pure(value))
        case ast.If(test=test, body=body, orelse=other):
            return _pure(test) and all(map(_harmless, [*body, *other])) and not _mixed(statement)
        case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=last):
            inner = [each for handler in handlers for each in handler.body]
            return all(map(_harmless, [*body, *inner, *other, *last])) and not _mixed(statement)
    return False


def _mixed(statement: ast.stmt) -> bool:
    """Whether it holds both imports and settings."""
    parts = list(ast.walk(statement))
    imports = any(isinstance(part, ast.Import | ast.ImportFrom) for part in parts)
    settings = any(
        isinstance(part, ast.Call)
        and _dotted(part.func) in _SETTINGS
        or isinstance(part, ast.Subscript)
        and isinstance(part.ctx, ast.Store)
        for part in parts
    )
    return imports and settings


def _settable(target: ast.expr) -> bool:
    """A name, or a variable of the environment."""
    if isinstance(target, ast.Subscript):
        return _dotted(target.value) == "os.environ" and _pure(target.slice)
    return isinstance(target, ast.Name)


def _pure(value: ast.expr) -> bool:
    """Whether computing it changes nothing."""
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.Attribute(attr="modules", value=ast.Name(id="sys")):
            return False  # holds more the second time
        case ast.Attribute(value=inner) | ast.UnaryOp(operand=inner) | ast.FormattedValue(value=inner):
            return _pure(inner)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.JoinedStr(values=parts):
            return all(map(_pure, parts))
        case ast.BoolOp(values=parts):
            return all(map(_pure, parts))
        case ast.Dict(keys=keys, values=parts):
            return all(key is not None and _pure(key) for key in keys) and all(map(_pure, parts))
        case ast.BinOp(left=left, right=right):
            return _pure(left) and _pure(right)
        case ast.Compare(left=left, comparators=others):
            searched = any(_dotted(each) == "os.environ" for each in others)
            return all(map(_pure, [left, *others])) and (not searched or _known(left))
        case ast.Subscript(value=whole, slice=index):
            return _pure(whole) and _pure(index) and (_dotted(whole) != "os.environ" or _known(index))
        case ast.Call(func=function):
            name = _dotted(function)
            if name in _READERS:
                return bool(value.args) and _known(value.args[0]) and _pure_arguments(value)
            path = isinstance(function, ast.Attribute) and function.attr in _PURE_METHODS and _pure(function.value)
            return (name in _PURE or name.startswith("os.path.") or path) and _pure_arguments(value)
    return False


def _known(name: ast.expr) -> bool:
    """Whether a standby may know the variable of the environment with that name."""
    return isinstance(name, ast.Constant) and name.value not in _EVER_NEW


def _pure_arguments(call: ast.Call) -> bool:
    return all(map(_pure, [*call.args, *(keyword.value for keyword in call.keywords)]))


def _dotted(function: ast.expr) -> str:
    """`a.b.c` for such an expression; '' for any other."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute) and (owner := _dotted(function.value)):
        return f"{owner}.{function.attr}"
    return ""
