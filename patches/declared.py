"""What a patch is: one upstream symbol, the versions it was checked with, the reason, and what takes its place.

Invariant: a patch either applies as declared or raises PatchError naming file, symbol and version; it is applied once
per module, whoever asks how often. What was applied is written on the patched module itself (`__ft_patched__`), so
there is no state here.

In: a module that has just been imported. Out: the same module with one symbol replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

from ..errors import PatchError, UnsupportedError

APPLIED = "__ft_patched__"


@dataclass(frozen=True)
class Patch:
    """One replaced symbol. `replace` gets the original (None if it is absent) and returns the replacement."""

    distribution: str  # whose version is meant: 'torch', 'megatron-core', 'python'
    module: str
    symbol: str  # within the module, dotted for a method
    versions: tuple[str, ...]  # checked with
    reason: str
    replace: Callable[[Any], Any]
    parameters: tuple[str, ...] | None = None  # expected names, in order; None: not a function of ours to call
    contains: tuple[str, ...] = ()  # fragments of the original's source that the patch relies on
    absent: bool = False  # the symbol is added where it does not exist, and left alone where it does

    def apply(self, module: ModuleType) -> bool:
        """Replace the symbol in `module`. False if that was done before, or is not needed."""
        applied: set[str] = module.__dict__.setdefault(APPLIED, set())
        if self.symbol in applied:
            return False
        owner: Any = module
        *path, name = self.symbol.split(".")
        for part in path:
            owner = getattr(owner, part, None)
            if owner is None:
                raise self._error(module, "the symbol does not exist")
        original = inspect.getattr_static(owner, name, None) if inspect.isclass(owner) else getattr(owner, name, None)
        if self.absent:
            if original is not None:
                return False
        else:
            self._check(module, original)
        setattr(owner, name, self.replace(original))
        applied.add(self.symbol)
        return True

    def _check(self, module: ModuleType, original: Any) -> None:
        """Raises PatchError unless the original is what this patch was written for."""
        if original is None:
            raise self._error(module, "the symbol does not exist")
        if self.parameters is not None:
            found = tuple(inspect.signature(original).parameters)
            if found != self.parameters:
                raise self._error(module, f"expected parameters {self.parameters}, found {found}")
        if self.contains:
            source = inspect.getsource(original)
            for fragment in self.contains:
                if fragment not in source:
                    raise self._error(module, f"expected '{fragment}' in its source and did not find it")

    def _error(self, module: ModuleType, found: str) -> PatchError:
        return PatchError(
            f"patch of {module.__name__}.{self.symbol} ({getattr(module, '__file__', None)}) no longer applies to "
            f"{self.distribution} {version_of(self.distribution)}: {found}; it was checked with "
            f"{', '.join(self.versions)}. Reason of the patch: {self.reason}. Use a checked version"
        )


@dataclass(frozen=True)
class Stub:
    """A module that cannot be imported on this machine and is not needed: its functions refuse when called."""

    distribution: str
    module: str
    versions: tuple[str, ...]
    reason: str
    needs: str  # the top-level module whose absence makes the stub necessary
    answers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # functions that have a true answer

    def fill(self, module: ModuleType) -> None:
        """Make `module` answer `answers`, and hand out refusing functions for every other name."""
        module.__dict__.update(self.answers)

        def absent(name: str) -> Callable[..., Any]:
            if name.startswith("__"):
                raise AttributeError(name)

            def refuse(*_: object, **__: object) -> None:
                raise UnsupportedError(f"{self.module}.{name} cannot be used on this machine: {self.reason}")

            return refuse

        module.__dict__["__getattr__"] = absent


def version_of(distribution: str) -> str:
    """The installed version, 'not installed' or the interpreter's."""
    import platform

    if distribution == "python":
        return platform.python_version()
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
