"""A thread for what loop 2 does behind the step: jobs in the order in which they were given.

Invariant: jobs run one after another, on one thread, so that collectives of all ranks are in one order; what a job
raises is raised where it is waited for, and the jobs after it do not run. On a device, a job sees what was written
before it was given, and who has waited for it sees what it wrote.

In: callables. Out: `BackgroundJob`, to be waited for.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class BackgroundJob(Generic[T]):
    """One piece of work."""

    def __init__(self, work: Callable[[], T], ready: torch.cuda.Event | None) -> None:
        self._work = work
        self.ready = ready
        self._done = threading.Event()
        self._result: list[T] = []
        self._failure: BaseException | None = None
        self.waited = 0.0  # seconds, by all that have waited for it

    def wait(self) -> T:
        """What it has found, when it is done. Raises what it ended with, or what one before it did."""
        started = time.perf_counter()
        self._done.wait()
        self.waited += time.perf_counter() - started
        if self._failure is not None:
            raise self._failure
        return self._result[0]

    def run(self) -> None:
        """Do it."""
        self._result.append(self._work())

    def end(self, failure: BaseException | None) -> None:
        """Let go whoever waits."""
        self._failure = failure
        self._done.set()


class Background:
    """Guards the thread. `close` ends it after what was given."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[BackgroundJob[Any] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ftp-sync", daemon=True)
        self._thread.start()
        # a thread that is inside torch when the interpreter goes away aborts the process
        atexit.register(self.close, 5.0)

    def start(self, work: Callable[[], T]) -> BackgroundJob[T]:
        """Have `work` done after all that was given before."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        job = BackgroundJob(work, ready)
        self._jobs.put(job)
        return job

    def close(self, seconds: float | None = None) -> None:
        """End the thread when it is through, or wait no longer than `seconds` for it. Idempotent."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is None:
                    self._do(job)
            except BaseException as failure:  # carried to whoever waits
                self._failure = failure
            finally:
                job.end(self._failure)

    def _do(self, job: BackgroundJob[Any]) -> None:
        if self._stream is None:
            job.run()
            return
        with torch.cuda.stream(self._stream):
            if job.ready is not None:
                self._stream.wait_event(job.ready)
            job.run()
            self._stream.synchronize()
