"""One public class name means one thing in the whole package, and no module needs itself to be imported."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ft_plugins"
MIRRORED = "ft_plugins.adapters."  # an adapter names its parts as the other adapters do
ENTRY = "ft_plugins.deepspeed"  # what a script imports to switch protection on


@functools.cache
def modules():
    """Every module of the package by its dotted name; patches are linked from elsewhere, and left out."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "patches" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def test_no_two_public_classes_share_a_name():
    places = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice


def test_no_two_modules_share_a_name():
    """Packages may: `smp.resize` and `recovery.resize` are two sides of one thing."""
    places = defaultdict(list)
    for module in modules():
        if module != ENTRY and not (PACKAGE.parent / Path(*module.split("."))).is_dir():
            places[module.rpartition(".")[2]].append(module)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    for name, where in list(twice.items()):
        if all(module.startswith(MIRRORED) and module.count(".") == 3 for module in where):
            del twice[name]
    assert not twice


def test_imports_at_module_level_have_no_circle():
    trees = modules()
    imports = {name: set(_imported(name, tree, trees)) - {name} for name, tree in trees.items()}
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(imports[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in imports:
        visit(name, ())


def _imported(module, tree, trees):
    """The modules that `module` imports when it is imported itself, `TYPE_CHECKING` excluded. Of a package's own
    `__init__` what is imported is the module that has the name, where there is one."""
    is_package = (PACKAGE.parent / Path(*module.split("."))).is_dir()
    for node in _at_module_level(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in trees)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                if f"{source}.{alias.name}" in trees:
                    yield f"{source}.{alias.name}"
                elif source in trees:
                    yield source


def _at_module_level(body):
    """The statements that run at import: also inside `if` and `try`, but not under `if TYPE_CHECKING`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _at_module_level(node.orelse)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _at_module_level(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _at_module_level(handler.body)
