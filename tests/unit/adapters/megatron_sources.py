"""What the sources of a Megatron-LM checkout define, read without importing them.

In: a checkout. Out: names of arguments, of dataclass fields, of what a module defines.
"""

import ast
import functools
import re

CONFIGS = (  # where megatron.core declares the options that training also takes as arguments
    *("model_parallel_config.py", "transformer/transformer_config.py", "optimizer/optimizer_config.py"),
    "distributed/distributed_data_parallel_config.py",
)


@functools.cache
def tree(file):
    return ast.parse(file.read_text())


def version(checkout):
    """Major and minor, as its package_info says."""
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\d+)", text, re.MULTILINE))


def fields(checkout, config):
    """The fields of the dataclasses in a file of megatron.core."""
    return set(_fields(checkout / "megatron" / "core" / config))


def _fields(file):
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ClassDef):
            yield from (
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            )


def arguments(checkout):
    """What a parsed namespace holds: options, what Megatron-LM sets on it, and fields of configurations, from which
    newer versions make options."""
    found = {name for config in CONFIGS for name in fields(checkout, config)}
    for file in (checkout / "megatron" / "training").rglob("*.py"):
        if "config" in str(file.relative_to(checkout)):
            found.update(_fields(file))
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                found.add(_destination(node))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _name(node.value) == "args":
                found.add(node.attr)
    return found


def _destination(call):
    given = {word.arg: word.value for word in call.keywords}
    if isinstance(given.get("dest"), ast.Constant):
        return str(given["dest"].value)
    words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
    long = [word for word in words if word.startswith("--")] or words or [""]
    return long[0].lstrip("-").replace("-", "_")


def _name(node):
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def file_of(checkout, module):
    """The file of a module, or the folder of a package without code; None where there is no such module."""
    place = checkout.joinpath(*module.split("."))
    found = (place.with_suffix(".py"), place / "__init__.py", place)
    return next((one for one in found if one.exists()), None)


def defined(checkout, module):
    """What can be imported from a module, or taken from it."""
    file = file_of(checkout, module)
    if file is None:
        return set()
    folder = file if file.is_dir() else file.parent if file.name == "__init__.py" else None
    found = {one.stem for one in folder.iterdir()} if folder else set()
    for node in ast.walk(tree(file)) if file.is_file() else ():
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found.update((one.asname or one.name).split(".")[0] for one in names)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def members(checkout, module):
    """What its classes have: methods, fields and attributes that they set."""
    file = file_of(checkout, module)
    found = defined(checkout, module)
    for node in ast.walk(tree(file)) if file else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def source(checkout, module, symbol):
    """Parameters and text of a function, dotted for a method; None for what is none."""
    file = file_of(checkout, module)
    node = tree(file) if file and file.is_file() else None
    for part in symbol.split("."):
        found = (
            one
            for one in ast.iter_child_nodes(node or ast.Module([], []))
            if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == part
        )
        node = next(found, None)
    if not isinstance(node, ast.FunctionDef) or file is None:
        return None
    given = node.args
    parameters = tuple(one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    return parameters, ast.get_source_segment(file.read_text(), node) or ""


def imports(file, package):
    """(module, name) of everything that one of our files imports from a package."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            yield from ((str(node.module), one.name) for one in node.names)


def read(file, owner):
    """The attributes that one of our files reads of a variable or attribute named `owner`, without a default."""
    return {
        node.attr
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _name(node.value) == owner
    }
