"""Load Megatron's modules that import triton without it; their kernels raise when they are called.

Upstream files: the modules of megatron with `import triton` or `from triton ...` at their top level, outside of any
`try`. These change with every version, so they are recognised by their source, not listed.

Invariant: only such a module receives the stand-in, from its own import statements. Nothing is put into `sys.modules`,
so torch and other libraries that look for triton do not find it. The module's own code runs, so whatever needs no
kernel works.

In: the spec of a module of megatron. Out: a loader for it, if it needs one."""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from ..errors import UnsupportedError

_TRITON = "triton"


def loader(spec: importlib.machinery.ModuleSpec) -> importlib.abc.Loader | None:
    """A loader that gives the module a stand-in for triton; None if the module does not need one."""
    if not spec.has_location or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return None
    source = spec.loader.get_data(str(spec.origin))
    return _Loader(spec.loader) if needs_triton(source) else None


def needs_triton(source: bytes) -> bool:
    """Whether the module imports triton at its top level, outside of any `try`."""
    if _TRITON.encode() not in source:
        return False
    return any(_is_triton(name) for node in ast.parse(source).body for name in _imported(node))


def _imported(node: ast.stmt) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [one.name for one in names]
        case ast.ImportFrom(module=str(name), level=0):
            return [name]
    return []


def _is_triton(name: str) -> bool:
    return name.partition(".")[0] == _TRITON


class _Loader(importlib.abc.Loader):
    """The real loader; the module's import statements return a stand-in for triton."""

    def __init__(self, real: importlib.machinery.SourceFileLoader) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        triton = StandIn(_TRITON, module)

        def importing(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Mapping[str, Any] | None = None,
            fromlist: Sequence[str] = (),
            level: int = 0,
        ) -> Any:
            if level != 0 or not _is_triton(name):
                return builtins.__import__(name, globals, locals, fromlist, level)
            imported = triton
            for part in name.split(".")[1:] if fromlist else ():
                imported = getattr(imported, part)
            return imported

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": importing}
        self._real.exec_module(module)


class StandIn:
    """Stands for triton or an attribute of it. While its module loads it can be read, called and subscripted, as
    decorators and annotations do; afterwards a call raises UnsupportedError."""

    __version__ = "0"
    __iter__ = None  # else __getitem__ would make it iterable without end

    def __init__(self, name: str, module: ModuleType) -> None:
        self._name, self._module = name, module

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}", self._module)

    def __getitem__(self, key: object) -> StandIn:
        return StandIn(self._name, self._module)

    def __call__(self, *args: Any, **_: Any) -> StandIn:
        if not getattr(self._module.__spec__, "_initializing", False):
            raise UnsupportedError(
                f"{self._module.__name__}: {self._name} needs triton, which is not installed; drop the option that "
                "uses it, or install triton"
            )
        return StandIn(next(filter(None, map(_decorated, args)), self._name), self._module)


def _decorated(argument: Any) -> str:
    """The name of a decorator's argument: a function, or the result of another decorator; else ''."""
    if isinstance(argument, StandIn):
        return argument._name
    return argument.__name__ if isinstance(argument, FunctionType) else ""
