"""Run audits, averagings and synchronisations on one background thread, in the order in which they were started.

Invariant: tasks run one at a time in start order, so collectives have the same order on all ranks if all ranks start
the same tasks in the same order. An error in a task is raised where the task is waited for; later tasks do not run and
raise the same error. On a device, a task sees what was written before it was started, and its waiter sees what it
wrote.

In: callables. Out: `BackgroundTask`, to be waited for."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """One task and its result."""

    def __init__(self, work: Callable[[], T], ready: torch.cuda.Event | None) -> None:
        self._work = work
        self.ready = ready
        self._done = threading.Event()
        self._result: list[T] = []
        self._failure: BaseException | None = None
        self.waited = 0.0  # seconds, summed over all waiters

    def wait(self) -> T:
        """Its result, once it is done. Raises its error, or that of an earlier task."""
        started = time.perf_counter()
        self._done.wait()
        self.waited += time.perf_counter() - started
        if self._failure is not None:
            raise self._failure
        return self._result[0]

    def ends_within(self, seconds: float) -> bool:
        """Whether it is done, or is so within `seconds`."""
        return self._done.wait(seconds)

    def run(self) -> None:
        self._result.append(self._work())

    def end(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._done.set()


class Background:
    """Owns the thread. `close` ends it once all tasks that were started have run."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: queue.SimpleQueue[BackgroundTask[Any] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ftp-sync", daemon=True)
        self._thread.start()
        # a thread that is inside torch when the interpreter exits aborts the process
        atexit.register(self.close, 5.0)

    def start(self, work: Callable[[], T]) -> BackgroundTask[T]:
        """Run `work` after all tasks that were started before."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        task = BackgroundTask(work, ready)
        self._tasks.put(task)
        return task

    def close(self, seconds: float | None = None) -> None:
        """End the thread after its tasks; wait at most `seconds`. Idempotent."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._failure is None:
                    self._do(task)
            except BaseException as failure:  # raised in the waiters
                self._failure = failure
            finally:
                task.end(self._failure)

    def _do(self, task: BackgroundTask[Any]) -> None:
        if self._stream is None:
            task.run()
            return
        with torch.cuda.stream(self._stream):
            if task.ready is not None:
                self._stream.wait_event(task.ready)
            task.run()
            self._stream.synchronize()
