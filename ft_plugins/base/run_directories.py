"""Find the private run directory of a job on a node: lock, socket, token, events. Imports nothing that is slow.

Invariant: a folder that another user could enter is never used. The environment is read when called, from a mapping;
no other module but `config.launch_context` reads it.

In: an environment, names of job and node. Out: folders, created 0700. Raises ConfigError.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from .outside_values import shown

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$"  # becomes part of paths and of names in shared memory
NAME_RULE = "1 to 48 letters, digits, '.', '_' or '-', the first a letter or digit"
_SOCKET = "smp.sock"
_SOCKET_PATH_BYTES = 107  # sun_path of a Unix socket, without the closing zero


def run_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of this user's run directories: `$XDG_RUNTIME_DIR/ft_plugins`, else `<tempdir>/ft_plugins-<uid>`.

    Created 0700. Raises ConfigError if it exists and is not a folder that only this user can enter.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and os.access(runtime, os.W_OK | os.X_OK):
        return _private_folder(Path(runtime) / "ft_plugins")
    return _private_folder(Path(environ.get("TMPDIR") or "/tmp") / f"ft_plugins-{os.getuid()}")


def run_directory(job: str, node: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of `job` on `node`: lock, socket, token, events.jsonl. Created 0700. Raises ConfigError."""
    for flag, name in (("--ftp-job", job), ("--ftp-node-name", node)):
        if not re.fullmatch(NAME_PATTERN, name):
            raise ConfigError(f"{flag}: expected {NAME_RULE}, found {shown(name)}")
    folder = run_root(environ) / job / node
    length = len(os.fsencode(folder / _SOCKET))
    if length > _SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{folder}: the path of a socket in it would have {length} bytes, the system allows {_SOCKET_PATH_BYTES}; "
            "choose a shorter --ftp-job or --ftp-node-name, or a shorter XDG_RUNTIME_DIR"
        )
    _private_folder(folder.parent)
    return _private_folder(folder)


def _private_folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot create this folder ({error.strerror}); set XDG_RUNTIME_DIR") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise ConfigError(
            f"{path}: expected a folder of user {os.getuid()} with mode 0700, found user {status.st_uid}, "
            f"mode {mode:04o}; remove it, or point XDG_RUNTIME_DIR to a folder of your own"
        )
    return path
