"""One ft-run per job and node: a lock on `<run_dir>/lock`, held for the life of the process.

Invariant: the kernel frees the lock when its owner dies. A worker that is forked (not exec'ed) from the owner closes
its copy first, so it never holds the lock of a dead ft-run.

In: a run directory. Out: the lock, or a BusyError that names its owner.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..errors import BusyError
from ..smp.watch import liveness

_PATIENCE_SECONDS = 1.0  # for a live owner, which may have just been killed
_DEAD_PATIENCE_SECONDS = 5.0  # for processes that a dead owner forked
_RETRY_SECONDS = 0.02


class JobLock:
    """Makes this process the ft-run of `run_dir`; a context manager. Raises BusyError if another process is."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "lock"
        began = time.monotonic()
        while (descriptor := liveness.acquire(path)) is None:
            owner = liveness.pid_in(path)
            patience = _PATIENCE_SECONDS if liveness.started(owner) else _DEAD_PATIENCE_SECONDS
            if time.monotonic() - began > patience:
                raise BusyError(
                    f"job {run_dir.parent.name} is already running on node {run_dir.name} under the ft-run with pid "
                    f"{owner}; end that one, or give this job another name with --ftp-job (this node: --ftp-node-name)"
                )
            time.sleep(_RETRY_SECONDS)
        self._descriptor = descriptor

    def __enter__(self) -> JobLock:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this process's copy of the lock; the owner thereby releases it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
