"""Send requests to the SMP of this node, start it, and sweep what SMPs have left. For trainers, launcher, command line.

Invariant: every call is bounded in time; a refusal arrives as the error that the SMP raised.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import TypeAdapter

from ..errors import BusyError, ProtectionError, ProtocolError, SegmentError
from ..intake import Seconds, read_json
from ..snapshot import paths
from ..snapshot import segment as segments
from ..snapshot.retention import Storage
from ..snapshot.shape import Shape
from ..snapshot.slots import Version
from . import isolated, liveness, protocol
from .checkpoint_schedule import REQUEST as REQUEST  # the reason of a checkpoint that a person asks for
from .protection import Protection

_SOCKET_PATH_LIMIT = 107  # bytes, of sockaddr_un
_RETRY_SECONDS = 0.05
_LOOK_SECONDS = 1.0  # for an SMP that holds its lock to answer, before another look at the lock
_SECONDS = TypeAdapter(Seconds)
_TRIES = 3  # of a request over which the SMP dies
_REBUILT_BYTES_PER_SECOND = 10e6  # pessimistic as well: over a slow link
_FAULT_BYTES_PER_SECOND = 50e6  # pessimistic pace at which fresh pages are allocated: bounds the wait for an attach


class Client:
    """A connection to the SMP of `run_dir`. Use as a context manager."""

    def __init__(self, run_dir: Path, timeout: float = 30.0) -> None:
        """Connect, trying for `timeout` seconds: a lost SMP is being replaced. Raises ProtectionError for none."""
        self._run_dir = run_dir
        self._timeout = timeout
        self._connection = self._connect()

    def _connect(self) -> socket.socket:
        path = self._run_dir / "smp.sock"
        if len(str(path).encode()) > _SOCKET_PATH_LIMIT:
            raise ProtectionError(
                f"the socket's path {path} is longer than {_SOCKET_PATH_LIMIT} bytes; give a shorter --ftp-job"
            )
        deadline = time.monotonic() + self._timeout
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._timeout)
            try:
                connection.connect(str(path))
                return connection
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise ProtectionError(
                        f"no SMP answers at {path} ({error.strerror}); start the job with ft-run, "
                        f"and see {self._run_dir / 'smp.log'}"
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _ask(self, name: str, *, extra_seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        """One request, repeated when the SMP dies over it: requests may be carried out twice without harm."""
        for left in reversed(range(_TRIES)):
            try:
                self._connection.settimeout(self._timeout + extra_seconds)
                protocol.send(self._connection, {"do": name, **fields})
                reply = protocol.receive(self._connection)
            except TimeoutError as error:
                raise ProtocolError(f"the SMP of {self._run_dir} did not answer '{name}' in time") from error
            except OSError:
                reply = None
            if reply is not None:
                protocol.raise_refusal(reply)
                return reply
            self._connection.close()
            if name == "end":
                return {"ok": True}  # it was gone before its answer was sent; the lock shows whether it is
            if left:
                self._connection = self._connect()
        raise ProtocolError(f"the SMP of {self._run_dir} hung up on '{name}' {_TRIES} times; see its smp.log")

    def status(self) -> dict[str, Any]:
        """pid, job, node, token, watched_pid and the segments with their slots."""
        return self._ask("status")

    def watch(self, pid: int, detect_seconds: float, orphan_seconds: float | None = None) -> None:
        """While `pid` lives, the SMP is not orphaned; a trainer that is stopped for `detect_seconds` is lost.

        `orphan_seconds`: how long the SMP waits for another one when `pid` is gone; None leaves it as it is.
        """
        more = {} if orphan_seconds is None else {"orphan_seconds": orphan_seconds}
        self._ask("watch", pid=pid, detect_seconds=detect_seconds, **more)

    def fence(self) -> int:
        """Supersede the running incarnation, its trainers gone; returns the new token."""
        return int(self._ask("fence")["token"])

    def attach(
        self,
        rank: int,
        token: int,
        shape: Shape,
        fingerprint: Mapping[str, Any],
        *,
        fresh: bool,
        world_size: int = 0,
        storage: Storage | None = None,
    ) -> Path:
        """Create or find this rank's segment; `storage` says where checkpoints go. Raises BudgetError, ResumeError
        (unless `fresh`), FencedError."""
        reply = self._ask(
            "attach",
            extra_seconds=shape.total / _FAULT_BYTES_PER_SECOND,
            rank=rank,
            token=token,
            shape=asdict(shape),
            fingerprint=dict(fingerprint),
            pid=os.getpid(),
            fresh=fresh,
            world_size=world_size,
            storage=asdict(storage) if storage else None,
        )
        return Path(reply["path"])

    def restore(self, rank: int, token: int, lineage: int, base: Version | None) -> None:
        """Open `lineage`, growing from `base`, for this rank."""
        self._ask(
            "restore", rank=rank, token=token, lineage=lineage, base=protocol.packed(base)
        )

    def shutdown(self, rank: int, token: int) -> None:
        """This rank ends in order."""
        self._ask("shutdown", rank=rank, token=token)

    def endpoint(self, address: str, secret_file: str, encrypt: bool = False) -> tuple[str, int]:
        """Where the SMP listens for those of other nodes, on `address`. Raises ConfigError."""
        reply = self._ask("endpoint", address=address, secret_file=secret_file, encrypt=encrypt)
        return str(reply["host"]), int(reply["port"])

    def inventory(self) -> dict[str, Any]:
        """Versions that this node can hand out: `slots` by rank, `parity`, and the plan and position of that."""
        return self._ask("inventory")

    def rebuild(
        self,
        rank: int,
        token: int,
        version: Version,
        protection: Protection,
        source: tuple[str, int] | None,
        holders: Mapping[int, tuple[str, int]],
        lost: Collection[int],
        previous: Mapping[str, Any] | None = None,
    ) -> None:
        """Put this rank's slot back together: from the node at `source`, or (None) from parity, without the positions
        `lost`; `holders` are the endpoints of those that can be read. `previous` is the fingerprint of the job at the
        size that `protection` describes, if that is a previous one: the slot is rebuilt in a segment of that size."""
        self._ask(
            "rebuild",
            extra_seconds=protection.shapes[rank].nbytes / _REBUILT_BYTES_PER_SECOND,
            rank=rank,
            token=token,
            version=protocol.packed(version),
            protection=protection.block(),
            source=list(source) if source else None,
            holders=[[position, *where] for position, where in sorted(holders.items())],
            lost=sorted(lost),
            previous=previous is not None,
            fingerprint=dict(previous or {}),
        )

    def resize(self, rank: int, token: int, world_size: int) -> bool:
        """The job has `world_size` ranks; whether this node has state of a previous size."""
        return bool(self._ask("resize", rank=rank, token=token, world_size=world_size)["previous"])

    def previous_sizes(self) -> dict[str, Any]:
        """The state of previous sizes of the job on this node (`PreviousSegments.report`), with its `parity`,
        `position`, `plan` and `protection`."""
        return self._ask("previous_sizes")

    def spare(
        self, rank: int, token: int, world_size: int, node: str, where: tuple[str, int], timeout: float
    ) -> dict[str, Any]:
        """As `previous_sizes`, of the SMP of `node` at `where`, which has no part in the job of `world_size` ranks.

        `busy` where it has trainers. Raises ProtocolError where that one does not answer in `timeout` seconds.
        """
        reply = self._ask(
            "spare", extra_seconds=3 * timeout, rank=rank, token=token, world_size=world_size, node=node,
            where=list(where), seconds=timeout,
        )  # fmt: skip
        return dict(reply["told"])

    def settle(
        self, rank: int, token: int, world_size: int, version: Version | None,
        spares: Sequence[tuple[str, int]] = (),
    ) -> None:  # fmt: skip
        """Of state of previous sizes, keep only `version` of the job of `world_size` ranks; nothing, if it is None.

        `spares` are released when the job is safe without their state."""
        self._ask(
            "settle", rank=rank, token=token, world_size=world_size, version=protocol.packed(version),
            spares=[list(where) for where in spares],
        )  # fmt: skip

    def protect(self, rank: int, token: int, protection: Protection) -> dict[str, Any]:
        """Protect this node's slots on other nodes from now on; returns `bytes` claimed and `resident_bytes`."""
        seconds = sum(shape.total for shape in protection.shapes) / _FAULT_BYTES_PER_SECOND
        return self._ask("protect", extra_seconds=seconds, rank=rank, token=token, protection=protection.block())

    def checkpoint(self, reason: str, seconds: float, only_due: bool = False, keep: bool = False) -> dict[str, Any]:
        """Have the newest version (or what was due anyway) written to storage, and wait for it up to `seconds`. `keep`:
        it stays there for good.

        `state`: 'done' (with lineage, iteration, path), 'failed' (with reason), 'writing' when the time is over,
        'nothing' when there is no version, 'off' when the job has no folder for checkpoints.
        """
        return self._ask(
            "checkpoint", extra_seconds=seconds, reason=reason, seconds=float(seconds), only_due=only_due, keep=keep
        )

    def end(self) -> None:
        """The job is over: segments removed, the SMP ends. Returns when it is gone."""
        self._ask("end")
        deadline = time.monotonic() + 10
        while liveness.held(self._run_dir / "smp.lock"):
            if time.monotonic() > deadline:
                raise ProtocolError(f"the SMP of {self._run_dir} did not end within 10 s after it agreed to")
            time.sleep(_RETRY_SECONDS)
        paths.remove(self._run_dir.parent.name, self._run_dir.name)  # left by one that was killed over it


def ensure(
    run_dir: Path,
    job: str,
    node: str,
    orphan_seconds: float,
    faults: str = "",
    timeout: float = 30.0,
    watch: int | None = None,
) -> int:
    """Start the node's SMP outside of this process tree, or find it; returns its pid.

    One that is started watches `watch` from the beginning: it is never orphaned before that. Raises
    BusyError when the SMP of another run directory has the memory of this job, ProtectionError for all else.
    """
    if reason := paths.foreign_files(job, node):
        raise BusyError(reason)
    deadline = time.monotonic() + timeout
    while liveness.held(run_dir / "smp.lock"):  # alive, or on its way out with its memory still to be let go of
        try:
            with Client(run_dir, min(_LOOK_SECONDS, timeout)) as client:
                return int(client.status()["pid"])
        except (ProtectionError, ProtocolError):
            if time.monotonic() > deadline:
                raise
    if not liveness.held(run_dir / "smp.lock"):
        command = [*isolated.command(), "--run-dir", str(run_dir), "--job", job, "--node", node]
        command += ["--orphan-seconds", str(orphan_seconds), "--faults", faults, "--watch", str(watch or 0)]
        with open(run_dir / "smp.log", "ab") as log:
            started = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout)
        if started.returncode != 0 and not liveness.held(run_dir / "smp.lock"):
            lock = paths.lock_of(job, node)
            if liveness.held(lock):
                raise BusyError(
                    f"job {job} has memory on node {node} already, of the SMP with pid {liveness.pid_in(lock)} in "
                    f"another run directory ({lock} is locked; was XDG_RUNTIME_DIR another one?); end it where it was "
                    "started, or name this one otherwise with --ftp-job"
                )
            raise ProtectionError(f"the SMP of node {node} did not start; see {run_dir / 'smp.log'}")
    with Client(run_dir, timeout) as client:
        return int(client.status()["pid"])


def _patience(run_dir: Path) -> float:
    """How long the job of a run directory wanted its segments to be kept (seconds); 0 where it did not say."""
    try:
        return read_json(run_dir / paths.PATIENCE_FILE, _SECONDS)
    except (OSError, ValueError):
        return 0.0


def sweep(
    base: Path,
    older_than_seconds: float,
    keep: tuple[str, str] | None = None,
    patient: bool = False,
    job: str | None = None,
) -> list[Path]:
    """Remove what no living job owns: for every run directory `base`/job/node whose SMP and ft-run are both gone for
    longer than `older_than_seconds`, its segments; and those whose run directory is gone or is another login's, when
    neither SMP nor trainer has been there for that long. Of `job` alone where it is given; nothing of the (job, node)
    `keep`; where `patient`, nothing that its own job wanted to be kept for longer. Returns the removed files.
    """
    removed: list[Path] = []
    seen = {keep}
    for run_dir in sorted(path for path in base.glob("*/*") if path.is_dir()):
        name = (run_dir.parent.name, run_dir.name)
        if name in seen or job not in (None, name[0]):
            continue
        seen.add(name)
        if any(liveness.held(run_dir / lock) for lock in ("smp.lock", "lock")) or liveness.held(
            paths.lock_of(*name)
        ):
            continue
        last = max(_touched(path) for path in [run_dir, *run_dir.iterdir()])
        if time.time() - last < (max(older_than_seconds, _patience(run_dir)) if patient else older_than_seconds):
            continue
        removed += paths.segments_of(*name)
        paths.remove(*name)
    for name in set(paths.jobs()) - seen:
        if job not in (None, name[0]) or not _abandoned(*name, older_than_seconds):
            continue
        removed += paths.segments_of(*name)
        paths.remove(*name)
    return sorted(removed)


def _abandoned(job: str, node: str, seconds: float) -> bool:
    """Whether neither an SMP nor a trainer has been at a job's segments for that long. An SMP touches its lock file."""
    lock = paths.lock_of(job, node)
    left = paths.segments_of(job, node)
    if liveness.held(lock) or time.time() - max(_touched(path) for path in [*left, lock]) < seconds:
        return False
    for path in left:
        try:
            found = segments.Segment(path)
        except SegmentError:
            continue  # damaged, or of another version: no process uses it
        pid, began = found.owner
        found.close()
        if began and liveness.started(pid) == began:
            return False
    return True


def _touched(path: Path) -> float:
    """When a file was last touched (seconds since the epoch), 0 for one that is not there."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
