"""The secret that authenticates the nodes of a job: from a file, or generated for a user's jobs on this machine.

Invariant: it is stored in a file that only its owner can read, never in an environment, a command line or a store.

In: --ftp-secret-file, or nothing. Out: bytes. Raises ConfigError.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ..config import run_root
from ..errors import ConfigError
from ..transport.wire import read_secret


def load_secret(file: str | Path | None) -> bytes:
    """The secret in the user's `file`; without one, that of this user's jobs on this machine."""
    return read_secret(Path(file)) if file else user_secret()


def user_secret() -> bytes:
    """The secret for jobs that only this machine can reach, generated once among this user's run directories."""
    path = run_root() / "secret"
    if not path.exists():
        building = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with open(os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another process was first: use its secret
                os.link(building, path)
        except OSError as error:
            reason = f"the secret cannot be written ({error.strerror}); give --ftp-secret-file"
            raise ConfigError(f"{path}: {reason}") from error
        finally:
            building.unlink(missing_ok=True)
    return read_secret(path)
