"""One ft-run per job and node: the lock on `<run_dir>/lock`, held for the life of the process.

Invariant: the kernel frees the lock when its owner dies, however it dies. A worker that was forked (not exec'ed) from
the owner closes its copy first thing, so that it never keeps the lock of a dead ft-run.

In: a run directory. Out: the lock, or a BusyError that names who has it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..errors import BusyError
from ..smp import liveness

_PATIENCE_SECONDS = 1.0  # with an owner that lives: it may have been killed just now
_DEAD_PATIENCE_SECONDS = 5.0  # with what a dead owner forked
_RETRY_SECONDS = 0.02


class JobLock:
    """This process is the ft-run of `run_dir`. Use as a context manager. Raises BusyError when another one is."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "lock"
        began = time.monotonic()
        while (descriptor := liveness.acquire(path)) is None:
            owner = liveness.pid_in(path)
            patience = _PATIENCE_SECONDS if liveness.started(owner) else _DEAD_PATIENCE_SECONDS
            if time.monotonic() - began > patience:
                raise BusyError(
                    f"job {run_dir.parent.name} is run on node {run_dir.name} already, by the ft-run with pid {owner}; "
                    "end that one, or name this job otherwise with --ftp-job (this node: --ftp-node-name)"
                )
            time.sleep(_RETRY_SECONDS)
        self._descriptor = descriptor

    def __enter__(self) -> JobLock:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this process's copy of the lock; in the owner that gives it up."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
