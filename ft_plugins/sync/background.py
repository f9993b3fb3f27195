"""A thread that runs loop 2's jobs behind the step, in the order in which they were started.

Invariant: jobs run one after another on one thread, so collectives have the same order on all ranks. An error in a job
is raised where the job is waited for; later jobs do not run and raise the same error. On a device, a job sees what was
written before it was started, and its waiter sees what it wrote.

In: callables. Out: `BackgroundJob`, to be waited for."""

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
    """One job and its result."""

    def __init__(self, work: Callable[[], T], ready: torch.cuda.Event | None) -> None:
        self._work = work
        self.ready = ready
        self._done = threading.Event()
        self._result: list[T] = []
        self._failure: BaseException | None = None
        self.waited = 0.0  # seconds, summed over all waiters

    def wait(self) -> T:
        """Its result, once it is done. Raises its error, or that of an earlier job."""
        started = time.perf_counter()
        self._done.wait()
        self.waited += time.perf_counter() - started
        if self._failure is not None:
            raise self._failure
        return self._result[0]

    def run(self) -> None:
        """Do the work, on the thread."""
        self._result.append(self._work())

    def end(self, failure: BaseException | None) -> None:
        """Release the waiters."""
        self._failure = failure
        self._done.set()


class Background:
    """Owns the thread. `close` ends it after the jobs that were started."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[BackgroundJob[Any] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ftp-sync", daemon=True)
        self._thread.start()
        # a thread that is inside torch when the interpreter exits aborts the process
        atexit.register(self.close, 5.0)

    def start(self, work: Callable[[], T]) -> BackgroundJob[T]:
        """Run `work` after all jobs that were started before."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        job = BackgroundJob(work, ready)
        self._jobs.put(job)
        return job

    def close(self, seconds: float | None = None) -> None:
        """End the thread after its jobs; wait at most `seconds`. Idempotent."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is None:
                    self._do(job)
            except BaseException as failure:  # raised in the waiters
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
