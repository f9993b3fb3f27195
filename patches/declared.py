"""What a patch is: one upstream symbol, the versions it was checked with, the reason, and what takes its place.

Invariant: a patch either applies as declared or raises PatchError naming file, symbol and version; it is applied once
per module, whoever asks how often. What was applied is written on the patched module itself (`__ft_patched__`), so
there is no state here.

In: a module that has just been imported. Out: the same module with one symbol replaced.
"""

from __future__ import annotations

import contextlib
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


def version_of(distribution: str) -> str:
    """The version that is imported: of Megatron that of the checkout, where one comes before the installed package;
    'not installed', or the interpreter's."""
    if distribution == "python":
        return platform.python_version()
    try:
        if distribution == "megatron-core":
            with contextlib.suppress(Exception):  # of a checkout that is no longer like the others
                return _megatron_version()
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _megatron_version() -> str:
    """From the file itself: importing it runs megatron.core, which a patch may have just kept from being imported."""
    core = importlib.util.find_spec("megatron.core")
    assert core is not None and core.origin is not None
    return str(runpy.run_path(str(Path(core.origin).with_name("package_info.py")))["__version__"])
