"""Which processes are alive on this node: processes by pidfd, owners by lock; no signal can be missed.

Invariant: a pid is never trusted alone; it goes with its start time, so that a number used again is not mistaken for
the process that had it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import BusyError
from ..intake import read_bytes

# `struct flock` of a write lock on all of a file. Locks of the open file description: they live as long as it does,
# over fork too, like those of flock(2), but can be asked about without being taken for a moment.
_PID_BYTES = 20
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def started(pid: int) -> int:
    """When `pid` was started, in clock ticks since boot; 0 if there is no such process."""
    try:
        state, began = _stat(pid)
    except OSError:
        return 0
    return 0 if state in b"ZX" else began


def age(began: int) -> float:
    """Seconds since `began`, as `started` returns it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int, began: int) -> bool:
    """Whether that process exists and is stopped by a signal."""
    try:
        state, found = _stat(pid)
    except OSError:
        return False
    return found == began and state in b"Tt"


def _stat(pid: int) -> tuple[bytes, int]:
    """The state of a process, a letter, and when it was started. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()  # a process chooses its name's bytes
    return fields[0], int(fields[19])


def kill_and_wait(owners: Iterable[tuple[int, int]], timeout: float) -> list[int]:
    """SIGKILL each (pid, start time) that still is that process, and wait until all are gone (a stopped process too).

    Returns the pids that were not gone after `timeout` seconds.
    """
    waiting: dict[int, int] = {}
    try:
        for pid, began in owners:
            if pid <= 0 or began == 0 or started(pid) != began:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            if started(pid) != began:  # the number went to another process in between
                os.close(descriptor)
                continue
            waiting[descriptor] = pid
            with suppress(ProcessLookupError):  # it ended by itself, and its parent has seen that already
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return _wait_gone(waiting, timeout)
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def _wait_gone(waiting: dict[int, int], timeout: float) -> list[int]:
    poller = select.poll()
    remaining = set(waiting)
    for descriptor in remaining:
        poller.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + timeout
    while remaining and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left * 1000):
            poller.unregister(descriptor)
            remaining.discard(descriptor)
    return [waiting[descriptor] for descriptor in remaining]


def held(lock: Path) -> bool:
    """Whether a living process holds the lock file `lock`, which is this user's. Asking never prevents another process
    from taking it."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # not there; or another user's, a folder, a link: none that `acquire` has made
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    finally:
        os.close(descriptor)
    return int(struct.unpack_from("h", found)[0]) != fcntl.F_UNLCK


def holder(lock: Path) -> list[tuple[int, int]]:
    """The process that holds the lock file `lock`, as (pid, start time); empty if none does."""
    pid = pid_in(lock) if held(lock) else 0
    return [(pid, began)] if pid and (began := started(pid)) else []


def pid_in(lock: Path) -> int:
    """The pid that a lock file names; 0 where it names none: taken this moment, let go of in between, or damaged."""
    try:
        text = read_bytes(lock, _PID_BYTES)
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdigit() else 0


def acquire(lock: Path) -> int | None:
    """Take the lock file `lock` (created 0600) for the life of this process; None when another holds it.

    Raises BusyError if what is there belongs to another user, or is not a lock file.
    """
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise BusyError(_in_the_way(lock, error.strerror or str(error))) from error
        if (found := os.fstat(descriptor)).st_uid != os.getuid():
            os.close(descriptor)
            raise BusyError(_in_the_way(lock, f"it belongs to user {found.st_uid}"))
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is(lock, descriptor):
            break
        os.close(descriptor)  # its owner has removed it in between: a lock that no other process would find
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _in_the_way(lock: Path, reason: str) -> str:
    return f"{lock} cannot be locked ({reason}); remove it, or name this job otherwise with --ftp-job"


def _is(path: Path, descriptor: int) -> bool:
    """Whether `path` names the file that is open as `descriptor`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
