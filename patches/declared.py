"""A patch: one upstream symbol, the versions it was checked with, the reason, and the replacement.

Invariant: a patch applies as declared or raises PatchError naming file, symbol and version; it is applied at most once
per module. The patched module itself lists its patched symbols (`__ft_patched__`), so there is no state here.

In: a module that has just been imported. Out: the same module with one symbol replaced."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import platform
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import PatchError

APPLIED = "__ft_patched__"


def around(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a function by one that calls `call(original, *arguments)`."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replacement

    return replace


@dataclass(frozen=True)
class Patch:
    """One replaced symbol. `replace` receives the original (None if absent) and returns the replacement."""

    distribution: str  # that `versions` refers to: 'torch', 'megatron-core', 'python'
    module: str
    symbol: str  # within the module, dotted for a method
    versions: tuple[str, ...]  # that it was checked with
    reason: str
    replace: Callable[[Any], Any]
    parameters: tuple[str, ...] | None = None  # expected names, in order; None: not checked
    contains: tuple[str, ...] = ()  # fragments of the original's source that the patch relies on
    absent: bool = False  # add the symbol if it does not exist, else leave it alone

    def apply(self, module: ModuleType) -> None:
        """Replace the symbol in `module`, unless that is already done or not needed."""
        applied: set[str] = module.__dict__.setdefault(APPLIED, set())
        if self.symbol in applied:
            return
        owner: Any = module
        *path, name = self.symbol.split(".")
        for part in path:
            owner = getattr(owner, part, None)
            if owner is None:
                raise self._error(module, "the symbol does not exist")
        original = inspect.getattr_static(owner, name, None) if inspect.isclass(owner) else getattr(owner, name, None)
        if not self.absent:
            self._check(module, original)
        elif original is not None:
            return
        setattr(owner, name, self.replace(original))
        applied.add(self.symbol)

    def _check(self, module: ModuleType, original: Any) -> None:
        """Raises PatchError unless the original is what this patch expects."""
        if original is None:
            raise self._error(module, "the symbol does not exist")
        if self.parameters is not None:
            parameters = tuple(inspect.signature(original).parameters)
            if parameters != self.parameters:
                raise self._error(module, f"expected parameters {self.parameters}, found {parameters}")
        if self.contains:
            source = inspect.getsource(original)
            for fragment in self.contains:
                if fragment not in source:
                    raise self._error(module, f"its source does not contain '{fragment}'")

    def _error(self, module: ModuleType, problem: str) -> PatchError:
        return PatchError(
            f"patch of {module.__name__}.{self.symbol} ({getattr(module, '__file__', None)}) no longer applies to "
            f"{self.distribution} {version_of(self.distribution)}: {problem}. It was checked with "
            f"{', '.join(self.versions)}; use one of these. Purpose of the patch: {self.reason}"
        )


def version_of(distribution: str) -> str:
    """The version that is imported, or 'not installed'; for 'python' the interpreter's. A Megatron checkout that comes
    before the installed package on the path is the one imported."""
    if distribution == "python":
        return platform.python_version()
    try:
        if distribution == "megatron-core":
            with contextlib.suppress(Exception):  # a checkout with another layout
                return _megatron_version()
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _megatron_version() -> str:
    """Read it from the file: importing megatron.core may be what the failing patch has just aborted."""
    core = importlib.util.find_spec("megatron.core")
    assert core is not None and core.origin is not None
    return str(runpy.run_path(str(Path(core.origin).with_name("package_info.py")))["__version__"])
