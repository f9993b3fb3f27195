"""Hooks that act when, and only if, a rank's script imports a framework.

Invariant: for a script that imports no framework, the interpreter is unchanged. Patches for a CPU are applied right
before the framework's first module is found, so before any of its code runs; Megatron's only if the job asks for a CPU.
At that time only ft-run's configuration and the script's `sys.argv` are known.

In: the rank's launch context. Out: a finder in `sys.meta_path` that finds nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..config import LaunchContext


class FirstImport(importlib.abc.MetaPathFinder):
    """Calls `action` once, right before the first import of the top-level package `package`."""

    def __init__(self, package: str, action: Callable[[], None]) -> None:
        self._package = package
        self._action: Callable[[], None] | None = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None: leave it to the other finders. For the package itself, ask all finders again: the action may have
        inserted one in front of this one. Of a package that has been imported ahead, the spec is read, as by an import
        of it, before a module in it is found: see `preload.traces`."""
        getattr(getattr(sys.modules.get(fullname.rpartition(".")[0]), "__spec__", None), "_initializing", None)
        if self._action is None or fullname != self._package:
            return None
        action, self._action = self._action, None
        action()
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None


@dataclass
class FrameworkHooks:
    """What hooks use when they act, and the functions to call after an orderly end of the script."""

    context: LaunchContext
    endings: list[Callable[[], None]] = field(default_factory=list)


def register(context: LaunchContext) -> FrameworkHooks:
    """Prepare and hook the frameworks when the script imports them: Megatron and Hugging Face's Trainer if a system is
    on, DeepSpeed always, because its own configuration can switch one on."""
    hooks = FrameworkHooks(context)
    followed = False  # Hugging Face's packages

    def megatron() -> None:
        adapter: Any = importlib.import_module("ft_plugins.adapters.megatron")
        adapter.prepare_launched(hooks.context, sys.argv[1:])
        if hooks.context.config is not None and hooks.context.config.systems:
            adapter.install()

    def deepspeed() -> None:
        adapter: Any = importlib.import_module("ft_plugins.adapters.deepspeed")
        adapter.prepare_launched(hooks.context)
        hooks.endings.append(adapter.install())

    def hugging_face() -> None:
        nonlocal followed
        adapter: Any = importlib.import_module("ft_plugins.adapters.hf")
        if not followed and hooks.context.config is not None and hooks.context.config.systems:
            hooks.endings.append(adapter.install())
        followed = True

    for package in ("transformers", "accelerate"):  # whichever is first
        sys.meta_path.insert(0, FirstImport(package, hugging_face))
    sys.meta_path.insert(0, FirstImport("megatron", megatron))
    sys.meta_path.insert(0, FirstImport("deepspeed", deepspeed))
    return hooks
