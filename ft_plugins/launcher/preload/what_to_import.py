"""What a preloader imports: modules of installed packages that the script names, or that its ranks had imported. Pure.

Invariant: the script is read, not executed. A variable that differs between ranks, between starts, or that the script
itself sets is *withheld*: a module that reads it while it is imported is left to the rank. A script that sets one which
libraries in C read when they are loaded has no preloader, and so has one that changes the path in a way that reading
does not show.

In: texts, names. Out: imports in order, names, a refusal.
"""

from __future__ import annotations

import ast
import copy
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

# what every rank needs, first torch: it is the one import that cannot be left out
BASE = ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing.errors", "ft_plugins.session")
_OF_A_RANK = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE",
        "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "SEED",
    }
)  # fmt: skip
_OF_A_RANK_PREFIXES = ("MASTER_", "TORCHELASTIC_", "FTP_")
_READ_WHEN_LOADED = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "MALLOC_", "LD_", "TORCH_", "PYTORCH_")
_OURS = "ft_plugins"
_NOT_AHEAD = ("ft_plugins.deepspeed", "ft_plugins.launcher")  # act when they are imported
_FRAMEWORKS = ("deepspeed", "megatron")  # modules of the adapter with that name import it
_UNIT_PARTS = 3  # of this package, such as ft_plugins.adapters.megatron


@dataclass(frozen=True)
class ImportStatement:
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The top-level one."""
        return self.module.partition(".")[0]

    @property
    def unit(self) -> str:
        """What is left to the ranks if it cannot be imported ahead: the whole package; of this one, the part, because
        its other modules import the same, and each attempt finds one of them only."""
        return ".".join(self.module.split(".")[:_UNIT_PARTS]) if self.package == _OURS else self.package


def withheld(variable: str) -> bool:
    """Whether a variable is one of a rank, which no preloader knows."""
    return variable in _OF_A_RANK or variable.startswith(_OF_A_RANK_PREFIXES) or variable.endswith("_SEED")


def read_when_loaded(variables: Iterable[str]) -> list[str]:
    """Those that libraries in C may read when they are loaded."""
    return sorted(name for name in variables if name.startswith(_READ_WHEN_LOADED))


def statements(source: str, adjacent: Callable[[str], str | None]) -> list[ImportStatement]:
    """The imports at the top level of a script, in order, and those of the modules next to it, whose text
    `adjacent` gives: None for any other. Raises SyntaxError."""
    return _followed(source, adjacent)[0]


def texts(source: str, adjacent: Callable[[str], str | None]) -> list[str]:
    """A script and the modules next to it that it imports at its top level, or they do. Raises SyntaxError."""
    return _followed(source, adjacent)[1]


def _followed(source: str, adjacent: Callable[[str], str | None]) -> tuple[list[ImportStatement], list[str]]:
    found: list[ImportStatement] = []
    followed: list[str] = []
    read: set[str] = set()

    def follow(text: str) -> None:
        followed.append(text)
        for statement in _imports(ast.parse(text).body):
            if statement.package not in read and (inner := adjacent(statement.package)) is not None:
                read.add(statement.package)
                follow(inner)
            found.append(statement)

    follow(source)
    return found, followed


def _imports(body: Iterable[ast.AST]) -> Iterator[ImportStatement]:
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from (ImportStatement(each.name) for each in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield ImportStatement(module, tuple(each.name for each in names if each.name != "*"))
            case ast.If(test=test) if ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                continue  # may never run
            case _:
                yield from _imports(ast.iter_child_nodes(node))


def variables_set(source: str) -> set[str]:
    """The variables of the environment that the text of a script sets by name, wherever in it. Raises SyntaxError."""
    found: set[object] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(value=owner, slice=ast.Constant(value=name), ctx=ast.Store() | ast.Del()):
                found |= {name} if _is_environment(owner) else set()
            case ast.Call(
                func=ast.Attribute(attr="setdefault" | "pop", value=owner), args=[ast.Constant(value=name), *_]
            ):
                found |= {name} if _is_environment(owner) else set()
            case ast.Call(func=ast.Attribute(attr="update", value=owner), args=given, keywords=keywords):
                if _is_environment(owner):
                    keys = [key for each in given if isinstance(each, ast.Dict) for key in each.keys]
                    found |= {key.value for key in keys if isinstance(key, ast.Constant)}
                    found |= {each.arg for each in keywords}
            case ast.AugAssign(target=owner, value=ast.Dict(keys=keys)) if _is_environment(owner):
                found |= {key.value for key in keys if isinstance(key, ast.Constant)}
            case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv"), args=[ast.Constant(value=name), *_]):
                found.add(name)
    return {name for name in found if isinstance(name, str)}


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def first_on_path(source: str, file: str) -> list[str]:
    """The folders that the text of a script, or of a module next to it, puts on the path before others; `file`: of the
    script. Raises SyntaxError, and ValueError if reading does not show them."""
    tree = ast.parse(source)
    assigned: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                assigned[name] = None if name in assigned else value  # None: one of several
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="insert", value=owner), args=[_, place]) if _is_path(owner):
                found.append(_folder(place, assigned, file))
            case ast.Assign(targets=[ast.Subscript(value=owner, slice=ast.Constant(value=0))], value=place) if _is_path(
                owner
            ):
                found.append(_folder(place, assigned, file))
            case ast.Call(func=ast.Attribute(attr=attr, value=owner)) if _is_path(owner):
                if attr not in ("append", "extend", "index", "count", "copy"):  # those come last
                    raise ValueError(ast.unparse(node))
            case ast.Attribute(ctx=ast.Store() | ast.Del()) if _is_path(node) and not _is_added(node, tree):
                raise ValueError(f"it sets {ast.unparse(node)}")
            case ast.Subscript(value=owner, ctx=ast.Store() | ast.Del()) if _is_path(owner):
                if ast.unparse(node.slice) != "0" or isinstance(node.ctx, ast.Del):
                    raise ValueError(f"it sets {ast.unparse(node)}")
    return found


def _is_path(node: ast.expr) -> bool:
    return ast.unparse(node) == "sys.path"


def _is_added(node: ast.expr, tree: ast.AST) -> bool:
    return any(isinstance(each, ast.AugAssign) and each.target is node for each in ast.walk(tree))


_OF_A_PLACE = frozenset(
    {
        "path", "join", "dirname", "abspath", "realpath", "normpath", "expanduser", "getcwd", "pardir", "fspath",
        "Path", "parent", "parents", "resolve", "absolute", "cwd", "as_posix", "joinpath",
    }
)  # fmt: skip
_NAMES = {"os": os, "pathlib": pathlib, "Path": pathlib.Path, "str": str}
_NODES = (
    ast.Expression, ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.BinOp, ast.Div, ast.Add,
    ast.Load,
)  # fmt: skip
_DEPTH = 8  # of names that are assigned from names


def _folder(place: ast.expr, assigned: Mapping[str, ast.expr | None], file: str) -> str:
    """The value of an expression that consists of functions on paths alone. Raises ValueError."""

    class Inline(ast.NodeTransformer):
        depth = 0

        def visit_Name(self, node: ast.Name) -> ast.AST:
            value = assigned.get(node.id)
            if value is None or self.depth == _DEPTH:
                return node
            self.depth += 1
            inner: ast.AST = self.visit(copy.deepcopy(value))
            self.depth -= 1
            return inner

    names = {**_NAMES, "__file__": file}
    whole = ast.fix_missing_locations(ast.Expression(Inline().visit(copy.deepcopy(place))))
    for node in ast.walk(whole):
        known = isinstance(node, _NODES)
        known &= not isinstance(node, ast.Name) or node.id in names and node.id not in assigned
        if not known or isinstance(node, ast.Attribute) and node.attr not in _OF_A_PLACE:
            raise ValueError(ast.unparse(place))
    try:
        return os.path.join(os.getcwd(), eval(compile(whole, "<path>", "eval"), {"__builtins__": {}, **names}))
    except Exception as error:
        raise ValueError(f"{ast.unparse(place)}: {error}") from error


def in_order(
    named: Iterable[ImportStatement], recorded: Iterable[str], left: Iterable[str], installed: Callable[[str], bool]
) -> list[ImportStatement]:
    """What to import: the base, what the script names, then the modules that its ranks had imported; of `installed`
    top-level packages, and not those that are `left` to the ranks. The adapter of a framework that is a checkout is
    left, too: it would import the framework."""
    everything = [*map(ImportStatement, BASE), *named, *map(ImportStatement, recorded)]
    answers: dict[str, bool] = {_OURS: True}
    for each in everything:
        if each.package not in answers:
            answers[each.package] = installed(each.package)
    adapters = [f"{_OURS}.adapters.{name}" for name in _FRAMEWORKS if not answers.get(name, True)]
    left_out = tuple(f"{name}." for name in (*left, *adapters, *_NOT_AHEAD))
    return [each for each in everything if answers[each.package] and not f"{each.module}.".startswith(left_out)]
