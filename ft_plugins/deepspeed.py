"""`import ft_plugins.deepspeed`: protect a DeepSpeed script that ft-run does not start.

Invariant: under ft-run the import changes nothing, because the hooks are already installed. Under torchrun or
DeepSpeed's launcher it gives the block `ft_plugins` of the DeepSpeed configuration the same effect as under ft-run.
Without such a block it only skips DeepSpeed's build at start, which a CPU does not need. It may come before or after
the first import of deepspeed. A script that ends in order removes its segments; one that fails leaves them.

`ignore(object, ...)` names what the search for state that is not captured should pass over, also under ft-run.

In: the import. Out: a hook on `deepspeed.initialize`; an error of this package is one line.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch

from .adapters import deepspeed as _adapter
from .adapters.script.script_hooks import follow_end, on_import
from .adapters.script.undeclared_search import ignore
from .config import launch_context
from .errors import ConfigError, FtError
from .launcher.external_launch import join
from .launcher.hooks import FirstImport

__all__ = ["ignore"]

_LOCAL_RANK = launch_context().local_rank


def _in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, FtError):
        repeated = isinstance(error, ConfigError) and _LOCAL_RANK  # every rank of a node has the same one
        if not (error.echo or repeated):
            print(f"ft_plugins: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return
    sys.__excepthook__(kind, error, trace)


def _by_ft_run() -> bool:
    """Whether ft-run has started this rank, protected or not."""
    return launch_context().run_dir is not None or any(isinstance(finder, FirstImport) for finder in sys.meta_path)


def _finish_at_exit(finish: Callable[[], None], orderly: Callable[[], bool]) -> None:
    """Call `finish` at the end of a script that did not fail, even if it does not destroy the process group."""

    def end() -> None:
        if orderly() and torch.distributed.is_initialized():
            finish()

    def follow(module: ModuleType) -> None:
        original = module.initialize

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            engine = original(*args, **kwargs)
            atexit.register(end)  # after the engine registered its own functions, so it is called before them
            return engine

        module.initialize = initialize  # type: ignore[attr-defined]

    on_import("deepspeed", follow)


if not _by_ft_run():
    _adapter.prepare_launched(launch_context())
    _finish_at_exit(_adapter.install(join), follow_end(sys._getframe()))
    sys.excepthook = _in_one_line
