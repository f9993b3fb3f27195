"""Wait for the end of any worker, as soon as the kernel knows of it.

Invariant: a process is not reaped, and an end is reported once. Descriptors are of this process alone.

In: process ids. Out: a wait that ends early.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable


class WorkerExits:
    """The ends of the processes `pids`, children of this process that are not reaped yet."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._poller = select.poll()
        self._open: set[int] = set()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                self._open.add(descriptor)
                self._poller.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Wait until one more of them has ended, at most for `seconds`."""
        for descriptor, _ in self._poller.poll(1000 * seconds):
            self._close(descriptor)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all of them have ended, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while self._open and (left := deadline - time.monotonic()) > 0:
            self.wait(left)

    def close(self) -> None:
        """Watch none of them any longer. Idempotent."""
        for descriptor in list(self._open):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        self._open.remove(descriptor)
        os.close(descriptor)
