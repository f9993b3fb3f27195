"""A thread for what loop 2 does behind the step: jobs in the order in which they were given.

Invariant: jobs run one after another, on one thread, so that collectives of all ranks are in one order; what a job
raises is raised where it is waited for, and the jobs after it do not run. On a device, a job sees what was written
before it was given, and who has waited for it sees what it wrote.

In: callables. Out: `Job`, to be waited for.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch


class Job:
    """One piece of work."""

    def __init__(self, work: Callable[[], None], ready: torch.cuda.Event | None) -> None:
        self.work = work
        self.ready = ready
        self.done = threading.Event()
        self.failure: BaseException | None = None

    def wait(self) -> float:
        """Until it is done; the seconds waited. Raises what it ended with, or what one before it did."""
        started = time.perf_counter()
        self.done.wait()
        if self.failure is not None:
            raise self.failure
        return time.perf_counter() - started


class Background:
    """Guards the thread. `close` ends it after what was given."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ftp-sync", daemon=True)
        self._thread.start()
        # a thread that is inside torch when the interpreter goes away aborts the process
        atexit.register(self.close, 5.0)

    def start(self, work: Callable[[], None]) -> Job:
        """Have `work` done after all that was given before."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        job = Job(work, ready)
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
                if self._failure is not None:
                    raise self._failure
                with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                    if job.ready is not None and self._stream is not None:
                        self._stream.wait_event(job.ready)
                    job.work()
                    if self._stream is not None:
                        self._stream.synchronize()
            except BaseException as failure:  # carried to whoever waits
                self._failure = job.failure = failure
            finally:
                job.done.set()
