"""`import ft_plugins.deepspeed`: the one line for a DeepSpeed script that ft-run does not start.

Invariant: under ft-run the line changes nothing, for the hooks are there already. Under torchrun or DeepSpeed's own
launcher the block `ft_plugins` of the DeepSpeed configuration then means what it means under ft-run; without such a
block nothing is touched but DeepSpeed's build at start, which a CPU does not need. It stands before the first import of
deepspeed, or behind it. A script that ends in order leaves no memory behind, one that fails does.

In: the import. Out: `deepspeed.initialize` followed; an error of ours is one line.
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
from .adapters.script_hooks import follow_end, on_import
from .config import launch_context
from .errors import ConfigError, FtError
from .launcher.external_launch import join
from .launcher.hooks import FirstImport

_LOCAL_RANK = launch_context().local_rank


def _in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, FtError):
        alike = isinstance(error, ConfigError) and _LOCAL_RANK  # all ranks of a node read the same words
        if not (error.echo or alike):
            print(f"ft_plugins: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return
    sys.__excepthook__(kind, error, trace)


def _by_ft_run() -> bool:
    """Whether ft-run has started this rank, also one that it does not protect."""
    return launch_context().run_dir is not None or any(isinstance(one, FirstImport) for one in sys.meta_path)


def _finish_at_exit(finish: Callable[[], None], orderly: Callable[[], bool]) -> None:
    """A script that does not take the process group down ends in order all the same; what a failed one has stays."""

    def end() -> None:
        if orderly() and torch.distributed.is_initialized():
            finish()

    def follow(module: ModuleType) -> None:
        original = module.initialize

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            built = original(*args, **kwargs)
            atexit.register(end)  # later than what was built has registered its own: called before that
            return built

        module.initialize = initialize  # type: ignore[attr-defined]

    on_import("deepspeed", follow)


if not _by_ft_run():
    _adapter.prepare_launched(launch_context())
    _finish_at_exit(_adapter.install(join), follow_end(sys._getframe()))
    sys.excepthook = _in_one_line
