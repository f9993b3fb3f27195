"""When workers of a node end, which of them failed, and how: from the kernel, their exit statuses and error files.

In: process ids, torch's context of the workers. Out: waits that end early; exit codes, `WorkerFailure`. Nothing here
reaps a worker: that is torch's part.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ...base.intake import read_json
from .restarts import WorkerFailure

_REPORT, _REPORT_BYTES = TypeAdapter(dict[str, Any]), 16 << 20  # with the traceback of a worker


def failed_workers(context: PContext) -> dict[int, int]:
    """Exit codes by local rank of the workers that failed on their own: ended with an error, or reported one."""
    failed = {}
    for local_rank, pid in context.pids().items():
        try:
            exited = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue  # already reaped, so it did not fail
        if exited and exited.si_status:  # else it has ended in order, or lives
            failed[local_rank] = exited.si_status if exited.si_code == os.CLD_EXITED else -exited.si_status
    if failed:  # a worker that has written its report is about to end, and may be the cause
        for local_rank, path in context.error_files.items():
            if report := read_report(path):
                code = report.get("errorCode", 1)
                failed.setdefault(local_rank, code if type(code) is int else 1)
    return failed


def dumping(context: PContext) -> int | None:
    """The local rank of a worker that has crashed and whose core the kernel writes now: it ends when that is written.
    Raises OSError if one was reaped."""
    status = {local: Path(f"/proc/{pid}/status").read_bytes() for local, pid in context.pids().items()}
    return next((local for local, text in status.items() if b"\nCoreDumping:\t1" in text), None)


def read_report(path: str) -> dict[str, Any]:
    """The content of a worker's error file; {} if it is missing or incomplete."""
    try:
        message = read_json(Path(path), _REPORT, _REPORT_BYTES).get("message", {}) if path else {}
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def described(rank: int, failure: ProcessFailure) -> WorkerFailure:
    """torch's failure of global rank `rank`, with its message as text and the most precise time available."""
    report = Path(failure.error_file)
    reported = report.is_file()
    message: Any = failure.message if reported else ""  # else it is torch's advice, or names the signal once more
    return WorkerFailure(
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exitcode=failure.exitcode,
        message=message.get("message", "") if isinstance(message, dict) else str(message),
        time=report.stat().st_mtime if reported else time.time(),
    )


def failure_of(context: PContext, local_rank: int, exitcode: int) -> ProcessFailure:
    """A failure as torch describes it."""
    path = context.error_files.get(local_rank, "")
    return ProcessFailure(local_rank, context.pids()[local_rank], exitcode, path if read_report(path) else "")


def unreaped(context: PContext) -> list[int]:
    """The process ids of workers that are certainly theirs, because they have not been reaped."""
    found = []
    for pid in context.pids().values():
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            found.append(pid)
    return found


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a worker that is not reaped yet, and to its process group if it leads one."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        return  # reaped: it ended in order


def close_at_once(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
    """`PContext.close`, which torch calls without a signal after a failure: with SIGKILL instead of SIGTERM."""
    type(context).close(context, death_sig or signal.SIGKILL, timeout)


class WorkerExits:
    """The ends of the processes `pids`, children of this process that are not reaped yet. Each is reported once, when
    the kernel knows of it. Descriptors are of this process alone."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._poller = select.poll()
        self._open: dict[int, int] = {}  # by descriptor: the process
        self.ended: set[int] = set()  # as far as was waited for them
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                self._open[descriptor] = pid
                self._poller.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Wait until one more of them has ended, at most for `seconds`."""
        for descriptor, _ in self._poller.poll(1000 * seconds):
            self._close(descriptor)

    def in_order(self, context: PContext) -> set[int]:
        """The local ranks of the workers that have ended with status 0."""
        self.wait(0.0)
        failed = failed_workers(context)
        return {local for local, pid in context.pids().items() if pid in self.ended and local not in failed}

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
        self.ended.add(self._open.pop(descriptor))
        os.close(descriptor)
