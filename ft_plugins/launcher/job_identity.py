"""Names of jobs and nodes, which become folders, sockets and shared memory. Pure.

Invariant: the same command is the same job; different commands are different jobs unless they are given one name.
Different inputs never yield the same derived name.

In: flags, rendezvous id, user, working directory, script and its arguments. Out: names that match config's rule.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePath

NAME_LIMIT = 40  # characters; job and node together are part of a socket's path (107 bytes)
_DIGEST = 10
_NO_RENDEZVOUS_ID = ("", "none")  # the default of torchrun, the same for all jobs


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
