"""Report the forwards of a model, and calls that save checkpoints, as phases of progress.

A forward without gradients is an evaluation, which lasts until another edge: what the loop does between the batches of
an evaluation belongs to it. A forward that torch.compile traces is not seen: its code is compiled without the hooks.

Invariant: hooks and wrappers change nothing; arguments, results and errors are passed on. A copied or pickled module
takes no hook of another process with it.

In: modules, functions. Out: edges.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..model.progress import ProgressReceiver, WorkPhase
from .script.script_hooks import wrap

_CHECKPOINTS = "torch.distributed.checkpoint"


class Hook:
    """A hook of a module that a copied or pickled one does not take along, and that torch.compile does not trace."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def with_hooks(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Those whose forwards call hooks."""
    return (module for module in modules if not isinstance(module, torch.jit.ScriptModule))


def follow_forwards(
    modules: Iterable[torch.nn.Module], progress: ProgressReceiver, evaluations_only: bool = False
) -> None:
    """Report each forward of `modules`. `evaluations_only`: others are reported already."""

    def before(*args: Any) -> None:
        if not torch.is_grad_enabled():
            progress.edge(WorkPhase.EVALUATION)
        elif not evaluations_only:
            progress.edge(WorkPhase.FORWARD)

    def after(*args: Any) -> None:
        if torch.is_grad_enabled() and not evaluations_only:
            progress.edge(WorkPhase.AFTER_FORWARD)

    for module in with_hooks(modules):
        module.register_forward_pre_hook(Hook(before), prepend=True)
        module.register_forward_hook(Hook(after))


class Saving:
    """Reports saves by the thread that made it. One that is called by another is a part of that one."""

    def __init__(self, progress: ProgressReceiver) -> None:
        self._progress, self._thread, self._within = progress, threading.get_ident(), False

    def follow(self, owner: Any, names: Iterable[str]) -> None:
        """Report calls of these functions of `owner`, as far as it has them.

        A script may have imported the functions of torch's distributed checkpoints by name, or import them later, so
        what calls `torch.save` there is taken for one of them: it lasts until another edge, while the file reaches the
        disk.
        """
        for name in names:
            if callable(getattr(owner, name, None)):
                wrap(owner, name, self._save)

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread or self._within:
            return original(*args, **kwargs)
        self._within = True
        self._progress.edge(WorkPhase.SAVING)
        try:
            return original(*args, **kwargs)
        finally:
            self._within = False
            caller = sys._getframe(2).f_globals.get("__name__")  # 1 is the function that `wrap` has put there
            if not str(caller).startswith(_CHECKPOINTS):
                self._progress.edge(WorkPhase.AFTER_UPDATE)
