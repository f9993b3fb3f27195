"""`import ft_plugins.deepspeed`: the one line for a DeepSpeed script that ft-run does not start.

Invariant: under ft-run the line changes nothing, for the hooks are there already. Under torchrun or DeepSpeed's own
launcher the block `ft_plugins` of the DeepSpeed configuration then means what it means under ft-run; without such a
block nothing is touched but DeepSpeed's build at start, which a CPU does not need. It stands before the first import of
deepspeed, or behind it.

In: the import. Out: `deepspeed.initialize` followed; an error of ours is one line.
"""

from __future__ import annotations

import sys
from types import TracebackType

from .adapters import deepspeed as _adapter
from .config import launch_context
from .errors import ConfigError, FtError
from .launcher.hooks import FirstImport
from .launcher.unlaunched import join


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


if not _by_ft_run():
    _adapter.prepare()
    _adapter.install(join)
    sys.excepthook = _in_one_line
