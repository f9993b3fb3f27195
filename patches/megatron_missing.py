"""Load Megatron's modules that import triton or torchvision without it; what they use of it raises when it is called.

Upstream files: the modules of megatron with `import triton` or `from triton ...` at their top level, outside of any
`try`. These change with every version, so they are recognised by their source, not listed. torchvision is imported by
the vision data sets of Megatron-DeepSpeed, whatever is trained.

Invariant: only such a module receives the stand-in, from its own import statements. Nothing is put into `sys.modules`,
so torch and other libraries that look for triton do not find it. The module's own code runs, so whatever needs no
kernel works.

In: what is not installed, the spec of a module of megatron. Out: a loader for it, if it needs one."""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from ..errors import UnsupportedError

NAMES = ("triton", "torchvision")


def loader(missing: Sequence[str], spec: importlib.machinery.ModuleSpec) -> importlib.abc.Loader | None:
    """A loader that gives the module stand-ins for the `missing` ones; None if the module does not need one."""
    if not spec.has_location or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return None
    source = spec.loader.get_data(str(spec.origin))
    needed = needed_by(source, missing)
    return _Loader(spec.loader, needed) if needed else None


def needed_by(source: bytes, missing: Sequence[str] = NAMES) -> tuple[str, ...]:
    """Those of `missing` that the module imports at its top level, outside of any `try`."""
    mentioned = [name for name in missing if name.encode() in source]
    body = ast.parse(source).body if mentioned else []
    imported = {_package(name) for node in body for name in _imported(node)}
    return tuple(name for name in mentioned if name in imported)


def _imported(node: ast.stmt) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [one.name for one in names]
        case ast.ImportFrom(module=str(name), level=0):
            return [name]
    return []


def _package(name: str) -> str:
    return name.partition(".")[0]


class _Loader(importlib.abc.Loader):
    """The real loader; the module's import statements return stand-ins for what it needs."""

    def __init__(self, real: importlib.machinery.SourceFileLoader, needed: Sequence[str]) -> None:
        self._real = real
        self._needed = needed

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        stand_ins = {name: StandIn(name, module) for name in self._needed}

        def importing(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Mapping[str, Any] | None = None,
            fromlist: Sequence[str] = (),
            level: int = 0,
        ) -> Any:
            if level != 0 or _package(name) not in stand_ins:
                return builtins.__import__(name, globals, locals, fromlist, level)
            imported = stand_ins[_package(name)]
            for part in name.split(".")[1:] if fromlist else ():
                imported = getattr(imported, part)
            return imported

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": importing}
        self._real.exec_module(module)


class StandIn:
    """Stands for a missing package or an attribute of it. While its module loads it can be read, called, subscripted
    and inherited from, as decorators, annotations and classes do; afterwards a call raises UnsupportedError."""

    __version__ = "0"
    __iter__ = None  # else __getitem__ would make it iterable without end

    def __init__(self, name: str, module: ModuleType) -> None:
        self._name, self._module = name, module

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}", self._module)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (StandInBase,)

    def __getitem__(self, key: object) -> StandIn:
        return StandIn(self._name, self._module)

    def __call__(self, *args: Any, **_: Any) -> StandIn:
        if not getattr(self._module.__spec__, "_initializing", False):
            package = _package(self._name) if _package(self._name) in NAMES else NAMES[0]  # else a decorated kernel
            raise UnsupportedError(
                f"{self._module.__name__}: {self._name} needs {package}, which is not installed; drop the option that "
                f"uses it, or install {package}"
            )
        return StandIn(next(filter(None, map(_decorated, args)), self._name), self._module)


class StandInBase:
    """Stands for a class of a missing package that a class of Megatron inherits from."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError(f"{type(self).__module__}.{type(self).__name__} needs a package that is not installed")


def _decorated(argument: Any) -> str:
    """The name of a decorator's argument: a function, or the result of another decorator; else ''."""
    if isinstance(argument, StandIn):
        return argument._name
    return argument.__name__ if isinstance(argument, FunctionType) else ""
