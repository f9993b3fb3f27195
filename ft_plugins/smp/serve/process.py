"""The SMP's daemon: outlives training, serves its node's requests, and ends in order.

Invariant: one such process per job and node, by two locks that the kernel releases when it dies: one in the run
directory, and one next to the segments, which also excludes logins with other run directories. It is not a child of
training. It ends on request, or if no new ft-run appears in time after the watched one is gone. If its run directory is
gone too, no ft-run can find it: it ends at once and leaves the segments, which the SMP of the same command adopts.
`owner` carries out the requests.

In: a command line; connections to a Unix socket. Out: replies; nothing is left behind at its end.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ...base import faults
from ...base.files import private
from ...errors import BusyError, ConfigError, FtError, ProtocolError
from ...events import Events, catalogue, file_sink
from ...snapshot.segment import paths
from ...transport import door, protocol
from ...transport.door import RejectedConnections
from ...transport.serving import Served, Serving
from ..exchange.traffic import step_back_session
from ..watch import liveness
from ..watch.job_history import was_drained
from .owner import SnapshotProcess

WATCH_SECONDS = 0.2  # maximum delay in noticing that another process is watched
_LAST_WRITE_SECONDS = 600.0  # for an orphaned SMP to finish writing to storage before it ends
_PREDECESSOR_SECONDS = 1.0  # for the kernel to release the lock of an SMP that was just killed
_CONNECTIONS = 512  # from this node's trainers, ft-run and command line
_ACCEPT_PAUSE_SECONDS = 0.1  # after a connection that could not be accepted
_FRAME_SECONDS = 10.0  # for a request to arrive whole once it has begun, and for its reply to be read
_LOCAL = "local"  # the address of all connections of this node


class _Server:
    """Accepts on the Unix socket, with a thread for each request.

    Liveness does not depend on a connection: `watch` and `attach` name a process, which is watched. So any idle
    connection may make room for a newer one; `client.Client` connects again at its next request.
    """

    def __init__(self, path: Path, process: SnapshotProcess, events: Events) -> None:
        path.unlink(missing_ok=True)  # left by a dead predecessor: the lock is ours
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(before)
        self._socket.listen(128)
        self._path = path
        self._process = process
        self._events = events
        self._rejected = RejectedConnections(events)
        places = door.places(_CONNECTIONS)
        self._serving = Serving[Served](self._serve, self._end, "smp-serve", _CONNECTIONS, places)
        threading.Thread(target=self._accept, name="smp-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # out of descriptors, or the peer has gone
                self._rejected.count(_LOCAL, f"a connection could not be accepted: {error.strerror}")
                self._process.ended.wait(_ACCEPT_PAUSE_SECONDS)
                continue
            try:
                protocol.check_peer(connection)
            except (ProtocolError, OSError) as error:
                connection.close()
                self._rejected.count(_LOCAL, str(error))
                continue
            served = Served(connection, _LOCAL)
            self._serving.take(served, None)
            self._serving.add(served)

    def _serve(self, served: Served) -> bool:
        """Carry out one request. False once the connection has ended."""
        connection, reason = served.connection, ""
        try:
            until = time.monotonic() + _FRAME_SECONDS
            if (request := protocol.receive(connection, until)) is not None:
                reply = self._answer(request)
                connection.settimeout(_FRAME_SECONDS)
                protocol.send(connection, reply)
                return True
        except (FtError, OSError) as error:  # a malformed frame or a dead peer: only its connection ends
            reason = str(error)
        self._end(served, reason)
        return False

    def _end(self, served: Served, reason: str) -> None:
        """Close a connection, because of an error if there is a reason."""
        self._serving.leave(served)
        served.connection.close()
        if reason:
            self._rejected.count(_LOCAL, reason)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply; an unexpected error becomes a refusal too."""
        try:
            return self._process.answer(request)
        except Exception as error:
            refused = protocol.unexpected(error)
            name = protocol.legible(request.get("do"), 60)
            self._events.emit(catalogue.REQUEST_REJECTED, request=name, reason=str(refused))
            return protocol.refusal(refused)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._serving.close()


def serve(run_dir: Path, job: str, node: str, orphan_seconds: float, ready: int, watch: int = 0) -> None:
    """Run until the orderly end, or until the watched process (at first `watch`, 0: none) has been gone for
    `orphan_seconds`. Writes a byte to the descriptor `ready` once it listens."""
    door.raise_limit()
    events = Events(node)
    events.subscribe(file_sink(run_dir / "events.jsonl"))
    process = SnapshotProcess(run_dir, job, node, events)
    process.watched = (watch, liveness.started(watch)) if watch else (0, 0)
    server = _Server(run_dir / "smp.sock", process, events)
    os.write(ready, b"1")
    os.close(ready)
    try:
        _run_until_end(process, events, orphan_seconds, run_dir)
    finally:
        server.close()


def _run_until_end(process: SnapshotProcess, events: Events, orphan_seconds: float, run_dir: Path) -> None:
    """Wait for the orderly end; once the watched ft-run is gone, only as long as it requested (default:
    `orphan_seconds`), and as long as there is the run directory."""
    own = os.stat(run_dir)
    orphaned_at = time.monotonic()
    was_alive = bool(process.watched[1])  # it may be gone before the first check
    last_written = False
    while not process.ended.is_set():
        patience = orphan_seconds if process.orphan_seconds is None else process.orphan_seconds
        process.touch()
        process.check_trainers()
        process.check_files()
        process.look()
        pid, began = process.watched
        if pid and liveness.started(pid) == began and began:
            was_alive, last_written, process.kept_until = True, False, None
            _wait_exit(pid, process)
            continue
        if was_alive:
            was_alive = False
            orphaned_at = time.monotonic()
            events.emit(catalogue.SMP_ORPHANED, seconds=patience)
            last_written = was_drained(run_dir)  # the other nodes go on from it: they would not write their parts
            if not last_written:
                process.to_storage("orphaned")
        if not (_is_there(run_dir, own) or process.storing or process.in_use):
            process.finish_alone("its run directory is gone", keep=True)
            return
        process.kept_until = orphaned_at + patience
        left = process.kept_until - time.monotonic()
        if left <= 0 and not last_written:
            last_written = True
            process.to_storage("before removal")
        if left <= 0 and not process.storing or left < -_LAST_WRITE_SECONDS:
            process.finish_alone(f"orphaned for {patience:.0f} s")
            return
        process.ended.wait(min(left, WATCH_SECONDS) if left > 0 else WATCH_SECONDS)  # a new ft-run may come meanwhile


def _is_there(folder: Path, status: os.stat_result) -> bool:
    """Whether `folder` still is the one with this `status`."""
    try:
        return os.path.samestat(os.stat(folder), status)
    except FileNotFoundError:
        return False
    except OSError:  # a file system that does not answer now
        return True


def _wait_exit(pid: int, process: SnapshotProcess) -> None:
    """Wait until `pid` is gone, another process is watched, or the SMP ends."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while not process.ended.is_set() and process.watched[0] == pid:
            process.touch()
            process.check_trainers()
            process.check_files()
            process.look()
            if poller.poll(1000 * WATCH_SECONDS):
                return
    finally:
        os.close(descriptor)


def main(argv: list[str] | None = None) -> int:
    """Detach (double fork, own session) and serve. The parent returns once the daemon listens."""
    parser = argparse.ArgumentParser(prog="ft_plugins.smp.serve.process")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--orphan-seconds", type=float, required=True)
    parser.add_argument("--faults", default="")
    parser.add_argument("--watch", type=int, default=0)
    options = parser.parse_args(argv)
    listening, ready = os.pipe()
    if os.fork() > 0:
        os.close(ready)
        return 0 if os.read(listening, 1) else 1
    os.close(listening)
    os.setsid()
    liveness.ignore_notices()
    step_back_session()
    if os.fork() > 0:
        os._exit(0)
    try:
        lock = liveness.acquire(options.run_dir / "smp.lock")
        if lock is None:
            os._exit(0)  # another SMP was faster; the caller connects to that one
        _detach(options.run_dir)
        memory_lock = _lock_memory(options.job, options.node)
    except (BusyError, ConfigError) as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    if memory_lock is None:
        print(f"another SMP owns the memory of job {options.job} on node {options.node}", file=sys.stderr, flush=True)
        os._exit(1)
    os.chdir("/")
    faults.arm(options.faults)
    try:
        serve(options.run_dir, options.job, options.node, options.orphan_seconds, ready, options.watch)
    except BaseException:
        if not paths.segments_of(options.job, options.node):
            paths.lock_of(options.job, options.node).unlink(missing_ok=True)
        raise
    return 0


def _lock_memory(job: str, node: str) -> int | None:
    """Lock this job's shared memory for the life of this process; None if the SMP of another run directory has it.

    Run directories differ between logins, cron and batch systems, but /dev/shm does not: two SMPs of one job would take
    over each other's segments and kill each other's trainers.
    """
    deadline = time.monotonic() + _PREDECESSOR_SECONDS
    while (descriptor := liveness.acquire(paths.lock_of(job, node))) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return descriptor


def _detach(run_dir: Path) -> None:
    """Standard input from /dev/null, output to the run directory's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(run_dir / "smp.log", "ab", opener=private) as log, open(os.devnull, "rb") as nowhere:
        for source, target in ((nowhere, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), target)


if __name__ == "__main__":
    raise SystemExit(main())
