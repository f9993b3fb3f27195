"""Report the forwards of a model, and calls that save checkpoints, as phases of progress.

A forward without gradients is an evaluation, which lasts until another edge: what the loop does between the batches of
an evaluation belongs to it. A forward that torch.compile traces is not seen: its code is compiled without the hooks.

Invariant: hooks and wrappers change nothing; arguments, results and errors are passed on. A copied or pickled module
takes no hook of another process with it.

In: modules, functions. Out: edges.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..model.progress import ProgressReceiver, WorkPhase
from .script.script_hooks import REPLACED

_CHECKPOINTS = "torch.distributed.checkpoint"
_saving_now = [False]  # in the thread that trains


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


def follow_saving(owner: Any, names: Iterable[str], progress: ProgressReceiver) -> None:
    """Report calls of these functions of `owner`, as far as it has them, by this thread. One that is called by another
    is a part of that one.

    A script may have imported the functions of torch's distributed checkpoints by name, or import them later, so what
    calls `torch.save` there is taken for one of them: it lasts until another edge, while the file reaches the disk.
    """
    for name in names:
        original = getattr(owner, name, None)
        if callable(original):
            setattr(owner, name, _saving(original, progress, threading.get_ident()))


def _saving(original: Callable[..., Any], progress: ProgressReceiver, trains: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != trains or _saving_now[0]:
            return original(*args, **kwargs)
        _saving_now[0] = True
        progress.edge(WorkPhase.SAVING)
        try:
            return original(*args, **kwargs)
        finally:
            _saving_now[0] = False
            if not str(sys._getframe(1).f_globals.get("__name__")).startswith(_CHECKPOINTS):
                progress.edge(WorkPhase.AFTER_UPDATE)

    if getattr(original, REPLACED, False):
        setattr(save, REPLACED, True)
    return save
