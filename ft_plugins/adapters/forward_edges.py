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
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..model.progress import ProgressReceiver, WorkPhase
from .script.script_hooks import wrap

_CHECKPOINTS = "torch.distributed.checkpoint"


class _Hook:
    """A hook at an edge of a forward: `trained` is the phase that begins there, None for none."""

    def __init__(
        self, progress: ProgressReceiver | None = None, trained: WorkPhase | None = None, evaluated: bool = False
    ) -> None:
        self._progress, self._trained, self._evaluated = progress, trained, evaluated

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling() or self._progress is None:
            return
        if torch.is_grad_enabled():
            if self._trained is not None:
                self._progress.edge(self._trained)
        elif self._evaluated:
            self._progress.edge(WorkPhase.EVALUATION)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def follow_forwards(
    modules: Iterable[torch.nn.Module], progress: ProgressReceiver, evaluations_only: bool = False
) -> None:
    """Report each forward of `modules`. `evaluations_only`: others are reported already."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):  # its forward calls no hooks
            continue
        before = _Hook(progress, None if evaluations_only else WorkPhase.FORWARD, evaluated=True)
        module.register_forward_pre_hook(before, prepend=True)
        if not evaluations_only:
            module.register_forward_hook(_Hook(progress, WorkPhase.AFTER_FORWARD))


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
