"""Find out which processes of this node are alive: by pidfd, and owners of files by lock.

Invariant: a pid is never trusted alone. It is paired with its start time, so that a reused pid is not mistaken for the
process that had it before.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ...base.outside_values import read_bytes
from ...errors import BusyError, ConfigError

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # of preemption; batch systems send them to all processes of a job
_PID_BYTES = 20
# `struct flock` of a write lock on a whole file, of the open file description: it lives as long as that does, also over
# fork, like a lock of flock(2), but can be queried without being taken for a moment.
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def ignore_notices() -> None:
    """Leave notices of preemption to ft-run, unless this process handles them. For the main thread."""
    for number in NOTICES:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)


@contextmanager
def notices_blocked() -> Iterator[None]:
    """A notice does not end a process that this thread starts meanwhile, before it calls `ignore_notices`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(pid: int) -> int:
    """When `pid` was started, in clock ticks since boot; 0 if there is no such process."""
    try:
        state, began = _stat(pid)
    except OSError:
        return 0
    return 0 if state in b"ZX" else began


def boot() -> str:
    """The identity of this machine since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identified(pid: int) -> str:
    """What names a process of this machine and process namespace for ever."""
    return f"{boot()} {os.readlink('/proc/self/ns/pid')} {pid} {started(pid)}"


def has_ended(process: str) -> bool:
    """Whether a process that was `identified` is known to be dead; False for those of other machines and namespaces."""
    place, _, rest = process.rpartition("] ")
    pid = rest.partition(" ")[0]
    return pid.isdigit() and process != (now := identified(int(pid))) and now.startswith(f"{place}] ")


def age(began: int) -> float:
    """Seconds since `began`, as `started` returns it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int, began: int) -> bool:
    """Whether that process exists and is stopped by a signal."""
    try:
        state, start = _stat(pid)
    except OSError:
        return False
    return start == began and state in b"Tt"


def use_of_trees(roots: Mapping[int, int]) -> dict[int, tuple[float, bool]]:
    """For each process of `roots`, by rank: seconds of processors that it and its descendants have used, and whether
    one of them waits for a device or a file system."""
    table, ticks = {}, os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = Path(entry, "stat").read_bytes().rsplit(b")", 1)[1].split()
            table[int(entry.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks, fields[0] == b"D"
    found = {}
    for rank, root in roots.items():
        members, known = {root}, 0
        while known < len(members):
            known = len(members)
            members |= {pid for pid, (parent, _, _) in table.items() if parent in members}
        tree = [table[pid] for pid in members if pid in table]
        found[rank] = sum((used for _, used, _ in tree), 0.0), any(blocked for _, _, blocked in tree)
    return found


def _stat(pid: int) -> tuple[bytes, int]:
    """The state of a process (one letter) and its start time. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()  # a process's name may hold any bytes
    return fields[0], int(fields[19])


def signal_process(pid: int, began: int, number: int) -> None:
    """Send a signal to that process alone. Raises ProcessLookupError if it has ended, PermissionError."""
    descriptor = os.pidfd_open(pid)
    try:
        if started(pid) != began:  # the pid was reused meanwhile
            raise ProcessLookupError(f"process {pid} has ended")
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def kill_and_wait(owners: Iterable[tuple[int, int]], timeout: float) -> list[int]:
    """SIGKILL each process given as (pid, start time), and wait until all are gone, stopped ones included.

    Returns the pids that are still there after `timeout` seconds.
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
            if started(pid) != began:  # the pid was reused meanwhile
                os.close(descriptor)
                continue
            waiting[descriptor] = pid
            with suppress(ProcessLookupError):  # it has ended and was reaped already
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
    """Whether a live process holds the lock file `lock` of this user. The query never prevents another process from
    taking it. Raises ConfigError if its file system has no locks."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # absent, or another user's, a folder, a link: not created by `acquire`
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        state = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    except OSError as error:
        raise ConfigError(_without_locks(lock, error)) from error
    finally:
        os.close(descriptor)
    return int(struct.unpack_from("h", state)[0]) != fcntl.F_UNLCK


def holder(lock: Path) -> list[tuple[int, int]]:
    """The process that holds the lock file `lock`, as (pid, start time); empty if none does."""
    pid = pid_in(lock) if held(lock) else 0
    return [(pid, began)] if pid and (began := started(pid)) else []


def pid_in(lock: Path) -> int:
    """The pid in a lock file; 0 if there is none: it is just being taken, was released meanwhile, or is damaged."""
    try:
        text = read_bytes(lock, _PID_BYTES)
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdigit() else 0


def acquire(lock: Path) -> int | None:
    """Take the lock file `lock` (created 0600) for the life of this process; None if another process holds it.

    Raises BusyError if the file belongs to another user, or is not a lock file; ConfigError if its file system has no
    locks.
    """
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise BusyError(_in_the_way(lock, error.strerror or str(error))) from error
        if (status := os.fstat(descriptor)).st_uid != os.getuid():
            os.close(descriptor)
            raise BusyError(_in_the_way(lock, f"it belongs to user {status.st_uid}"))
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:  # ENOLCK, EOPNOTSUPP, ENOSYS
            os.close(descriptor)
            raise ConfigError(_without_locks(lock, error)) from error
        if _is(lock, descriptor):
            break
        os.close(descriptor)  # its owner removed it meanwhile, so no other process would find this lock
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _in_the_way(lock: Path, reason: str) -> str:
    return f"{lock} cannot be locked ({reason}); remove it, or give this job another name with --ftp-job"


def _without_locks(lock: Path, error: OSError) -> str:
    return (
        f"{lock}: its file system ({file_system(lock)}) cannot lock files ({error.strerror}); "
        "point XDG_RUNTIME_DIR or TMPDIR to a folder on a local disk"
    )


def file_system(path: Path) -> str:
    """The type of the file system on which `path` is; 'unknown' if the kernel does not say."""
    with suppress(OSError, ValueError):
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
        return max((len(at), kind) for at, kind in mounts if path.resolve().is_relative_to(at))[1]
    return "unknown"


def _is(path: Path, descriptor: int) -> bool:
    """Whether `path` names the file that is open as `descriptor`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
