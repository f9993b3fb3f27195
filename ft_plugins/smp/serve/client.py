"""Send requests to the SMP of this node, and start it. For trainers, launcher and command line.

Invariant: every call is bounded in time; a refusal arrives as the error that the SMP raised.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...base import files
from ...errors import BusyError, ProtectionError, ProtocolError
from ...snapshot.capture.retention import Storage
from ...snapshot.segment import paths
from ...snapshot.segment.shape import Shape
from ...snapshot.segment.slots import Version
from ...transport import protocol
from ..storage.checkpoint_schedule import REQUEST as REQUEST  # the reason of a checkpoint that a user requests
from ..storage.checkpoint_schedule import STOP as STOP  # of one that ft-run requests because of a signal
from ..tree.protection import Protection
from ..watch import liveness
from . import isolated, job_file
from .local_connection import RETRY_SECONDS, LocalConnection

_START_SECONDS = 120.0  # for an SMP to start: nothing but a node that is overloaded takes so long
_STATUS_SECONDS = 1.0  # for an SMP that holds its lock to answer, before the lock is checked again
_FAULT_BYTES_PER_SECOND = 50e6  # pessimistic rate at which fresh pages are allocated: bounds the wait for an attach
_REBUILT_BYTES_PER_SECOND = 10e6  # pessimistic rate of a rebuild over a slow link


class Client(LocalConnection):
    """All requests of trainers, launcher and command line."""

    def watch(
        self,
        pid: int,
        detect_seconds: float,
        orphan_seconds: float | None = None,
        metrics: tuple[str, int] | None = None,
    ) -> str:
        """While `pid` lives, the SMP is not orphaned; a trainer that is stopped for `detect_seconds` is lost.

        `orphan_seconds`: how long the SMP waits for another ft-run when `pid` is gone; None: unchanged. `metrics`: the
        address and port at which it serves them; None: nowhere. Returns why it does not, '' if it does.
        """
        optional: dict[str, Any] = {"orphan_seconds": orphan_seconds, "metrics": metrics}
        given = {name: value for name, value in optional.items() if value is not None}
        return str(self._ask("watch", pid=pid, detect_seconds=detect_seconds, **given).get("metrics_error", ""))

    def fence(self) -> int:
        """Supersede the running incarnation and kill its trainers; returns the new token."""
        return int(self._ask("fence")["token"])

    def hold(self, value: int) -> None:
        """Have the ranks of this node wait, or no longer, at the next version that is exchanged, or all of the job end
        in order: a value of `Header.held`."""
        self._ask("hold", value=int(value))

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
            "attach", extra_seconds=shape.total / _FAULT_BYTES_PER_SECOND, rank=rank, token=token, shape=asdict(shape),
            fingerprint=dict(fingerprint), pid=os.getpid(), fresh=fresh, world_size=world_size,
            storage=asdict(storage) if storage else None,
        )  # fmt: skip
        return Path(reply["path"])

    def open_lineage(
        self, rank: int, token: int, lineage: int, base: Version | None, loaded: int = 0, run: str = ""
    ) -> None:
        """Open `lineage`, growing from `base`, for this rank; `loaded`, `run`: see `requests.Restore`."""
        base_version = protocol.packed(base)
        self._ask("restore", rank=rank, token=token, lineage=lineage, base=base_version, loaded=loaded, run=run)

    def shutdown(self, rank: int, token: int) -> None:
        """This rank has ended in order."""
        self._ask("shutdown", rank=rank, token=token)

    def endpoint(self, address: str, secret_file: str, encrypt: bool = False) -> tuple[str, int]:
        """Have the SMP listen for other nodes' SMPs on `address`; returns host and port. Raises ConfigError."""
        whole = os.path.abspath(secret_file)  # the SMP runs in another folder
        reply = self._ask("endpoint", address=address, secret_file=whole, encrypt=encrypt)
        return str(reply["host"]), int(reply["port"])

    def inventory(self) -> dict[str, Any]:
        """The versions that this node can provide: `slots` by rank, `parity` with its plan and position."""
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
        """Rebuild this rank's slot: from the node at `source`, or, if that is None, from parity.

        `lost` are the positions that cannot be read, `holders` the endpoints of those that can. If `protection`
        describes a previous size of the job, `previous` is that job's fingerprint, and the slot is rebuilt in a segment
        of that size."""
        reference = job_file.write(self._run_dir, protection)
        needed = protection.plan().nodes_for(rank)
        self._ask(
            "rebuild", extra_seconds=protection.shapes[rank].nbytes / _REBUILT_BYTES_PER_SECOND, rank=rank, token=token,
            version=protocol.packed(version), protection=reference.block(), source=list(source) if source else None,
            holders=[[position, *where] for position, where in sorted(holders.items()) if position in needed],
            lost=sorted(needed.intersection(lost)),
            previous=previous is not None, fingerprint=dict(previous or {}),
        )  # fmt: skip

    def resize(self, rank: int, token: int, world_size: int) -> bool:
        """The job has `world_size` ranks now. Returns whether this node has state of a previous size."""
        return bool(self._ask("resize", rank=rank, token=token, world_size=world_size)["previous"])

    def previous_sizes(self) -> dict[str, Any]:
        """The state of previous sizes of the job on this node (`PreviousSegments.report`), with its `parity`,
        `position`, `plan` and `protection`."""
        return self._ask("previous_sizes")

    def spare(
        self, rank: int, token: int, world_size: int, node: str, where: tuple[str, int], timeout: float
    ) -> dict[str, Any]:
        """The same as `previous_sizes` from `node`, a spare with its SMP at `where`, for the job of `world_size` ranks.

        `busy` if it has trainers. Raises ProtocolError if it does not answer in `timeout` seconds.
        """
        reply = self._ask(
            "spare", extra_seconds=3 * timeout, rank=rank, token=token, world_size=world_size, node=node,
            where=list(where), seconds=timeout,
        )  # fmt: skip
        return dict(reply["report"])

    def settle(self, rank: int, token: int, world_size: int, version: Version | None) -> None:
        """Drop all state of previous sizes but `version` of the job of `world_size` ranks; None: drop everything."""
        self._ask("settle", rank=rank, token=token, world_size=world_size, version=protocol.packed(version))

    def claim(self, rank: int, token: int, protection: Protection) -> None:
        """Prepare for `protect`, which then takes no time worth mentioning, however much memory is needed."""
        self._protect("claim", rank, token, protection)

    def protect(self, rank: int, token: int, protection: Protection) -> dict[str, Any]:
        """Protect this node's slots on other nodes from now on. Returns `bytes` claimed, `resident_bytes`, `links`."""
        return self._protect("protect", rank, token, protection)

    def _protect(self, name: str, rank: int, token: int, protection: Protection) -> dict[str, Any]:
        seconds = sum(shape.total for shape in protection.shapes) / _FAULT_BYTES_PER_SECOND
        reference = job_file.write(self._run_dir, protection)
        return self._ask(name, extra_seconds=seconds, rank=rank, token=token, protection=reference.block())

    def checkpoint(self, reason: str, seconds: float, only_due: bool = False, keep: bool = False) -> dict[str, Any]:
        """Have the newest version written to storage, and wait up to `seconds` for it.

        `only_due`: write only what is due anyway. `keep`: retention never removes it. `state` of the reply: 'done'
        (with lineage, iteration, path), 'failed' (with reason), 'writing' if the time ran out, 'nothing' if there is
        no version, 'off' if the job has no folder for checkpoints.
        """
        return self._ask(
            "checkpoint", extra_seconds=seconds, reason=reason, seconds=float(seconds), only_due=only_due, keep=keep
        )

    def end(self) -> None:
        """End the job: the SMP removes its segments and exits. Returns when it is gone."""
        self._ask("end")
        deadline = time.monotonic() + self._timeout
        while liveness.held(self._run_dir / "smp.lock"):
            if time.monotonic() > deadline:
                raise ProtocolError(
                    f"the SMP of {self._run_dir} is still running {self._timeout:.0f} s after it agreed to end"
                )
            time.sleep(RETRY_SECONDS)
        paths.remove(self._run_dir.parent.name, self._run_dir.name)  # in case it was killed before it removed them


def ensure(
    run_dir: Path,
    job: str,
    node: str,
    orphan_seconds: float,
    faults: str = "",
    timeout: float = 30.0,
    watch: int | None = None,
) -> int:
    """Start the node's SMP outside of this process tree, unless it runs already; returns its pid.

    A new SMP watches the process `watch` from the beginning, so it is not orphaned before the first request. Raises
    BusyError if the SMP of another run directory owns the memory of this job, ProtectionError for everything else.
    """
    if reason := paths.foreign_files(job, node):
        raise BusyError(reason)
    deadline = time.monotonic() + timeout
    while liveness.held(run_dir / "smp.lock"):  # it lives, or is ending and still has its memory
        try:
            with Client(run_dir, min(_STATUS_SECONDS, timeout)) as client:
                return int(client.status()["pid"])
        except (ProtectionError, ProtocolError):
            if time.monotonic() > deadline:
                raise
    if not liveness.held(run_dir / "smp.lock"):
        command = [*isolated.command(), "--run-dir", str(run_dir), "--job", job, "--node", node]
        command += ["--orphan-seconds", str(orphan_seconds), "--faults", faults, "--watch", str(watch or 0)]
        with open(run_dir / "smp.log", "ab", opener=files.private) as log:
            seconds = max(timeout, _START_SECONDS)
            try:
                started = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=seconds)
            except subprocess.TimeoutExpired as error:
                raise ProtectionError(
                    f"the SMP of node {node} did not start within {seconds:g} s; is the node overloaded? See "
                    f"{run_dir / 'smp.log'}"
                ) from error
        if started.returncode != 0 and not liveness.held(run_dir / "smp.lock"):
            lock = paths.lock_of(job, node)
            if liveness.held(lock):
                raise BusyError(
                    f"job {job} has memory on node {node} already, owned by the SMP with pid {liveness.pid_in(lock)} "
                    f"of another run directory ({lock} is locked; was XDG_RUNTIME_DIR different?); end it where it was "
                    "started, or give this job another name with --ftp-job"
                )
            raise ProtectionError(f"the SMP of node {node} did not start; see {run_dir / 'smp.log'}")
    with Client(run_dir, timeout) as client:
        return int(client.status()["pid"])
