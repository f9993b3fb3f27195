"""Names of jobs and nodes, which become folders, sockets and shared memory; one ft-run for each of them; its secret.

Invariant: the same command is the same job; different commands are different jobs unless they are given one name.
Different inputs never yield the same derived name. The kernel frees the lock of a job on a node when its owner dies. A
worker that is forked (not exec'ed) from the owner closes its copy first, so it never holds the lock of a dead ft-run.
The secret is stored in a file that only its owner can read, never in an environment, a command line or a store.

In: flags, rendezvous id, user, working directory, script and its arguments; a run directory. Out: names that match
config's rule; the lock, or a BusyError that names its owner; the secret. Raises ConfigError.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path, PurePath

from ..base.files import private
from ..config import run_root
from ..errors import BusyError, ConfigError
from ..smp.watch import liveness
from ..transport.calls import read_secret

NAME_LIMIT = 40  # characters; job and node together are part of a socket's path (107 bytes)
_DIGEST = 10
_NO_RENDEZVOUS_ID = ("", "none")  # the default of torchrun, the same for all jobs
_PATIENCE_SECONDS = 1.0  # for a live owner, which may have just been killed
_DEAD_PATIENCE_SECONDS = 5.0  # for processes that a dead owner forked
_RETRY_SECONDS = 0.02


def job_name(
    given: str | None, rendezvous_id: str, uid: int, folder: str, script: str, arguments: Sequence[str]
) -> str:
    """The name of the job: `given` by --ftp-job, else an explicit rendezvous id, else a digest of the command.

    Do not pass an id that torchrun generated (--standalone): it differs each time.
    """
    if given:
        return given
    if rendezvous_id not in _NO_RENDEZVOUS_ID:
        return safe_name(rendezvous_id)
    digest = _digest("\0".join([str(uid), folder, script, *arguments]))
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", PurePath(script).stem).strip("-_") or "job"
    return f"{stem[: NAME_LIMIT - _DIGEST - 1]}-{digest}"


def safe_name(text: str) -> str:
    """`text` itself if it is a valid name; else its legible part and a digest of all of it."""
    if re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{NAME_LIMIT - 1}}}", text):
        return text
    legible = re.sub(r"[^A-Za-z0-9_-]", "-", text).lstrip("-_")[: NAME_LIMIT - _DIGEST - 1]
    return f"{legible or 'x'}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]


class JobLock:
    """Makes this process the ft-run of `run_dir`, by a lock on `lock` there, held for its life; a context manager.
    Raises BusyError if another process is."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "lock"
        began = time.monotonic()
        while (descriptor := liveness.acquire(path)) is None:
            owner = liveness.pid_in(path)
            patience = _PATIENCE_SECONDS if liveness.started(owner) else _DEAD_PATIENCE_SECONDS
            if time.monotonic() - began > patience:
                raise BusyError(
                    f"job {run_dir.parent.name} is already running on node {run_dir.name} under the ft-run with pid "
                    f"{owner}; end that one, or give this job another name with --ftp-job (this node: --ftp-node-name)"
                )
            time.sleep(_RETRY_SECONDS)
        self._descriptor = descriptor

    def __enter__(self) -> JobLock:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this process's copy of the lock; the owner thereby releases it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def load_secret(file: str | Path | None) -> bytes:
    """The secret in the user's `file`; without one, that of this user's jobs on this machine."""
    return read_secret(Path(file)) if file else user_secret()


def user_secret() -> bytes:
    """The secret for jobs that only this machine can reach, generated once among this user's run directories."""
    path = run_root() / "secret"
    if not path.exists():
        building = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with open(building, "x", opener=private) as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another process was first: use its secret
                os.link(building, path)
        except OSError as error:
            reason = f"the secret cannot be written ({error.strerror}); give --ftp-secret-file"
            raise ConfigError(f"{path}: {reason}") from error
        finally:
            building.unlink(missing_ok=True)
    return read_secret(path)
