"""Which job this is, and which node: names that become folders, sockets and shared memory. Pure.

Invariant: the same command given again is the same job; two commands that differ are two jobs, unless a name says
otherwise. A name made of something else never equals the name made of another thing.

In: flags, rendezvous id, user, working directory, script and its arguments. Out: names that fit config's rule.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePath

NAME_LIMIT = 40  # characters; job and node together stand in the path of a socket (107 bytes)
_DIGEST = 10
_NO_RENDEZVOUS_ID = ("", "none")  # torchrun's default is shared by all jobs that name none


def job_name(
    given: str | None, rendezvous_id: str, uid: int, folder: str, script: str, arguments: Sequence[str]
) -> str:
    """The name of the job: `given` by --ftp-job, else an explicit rendezvous id, else a digest of the command.

    A rendezvous id that torchrun made up (--standalone) must not be passed: it is another one each time.
    """
    if given:
        return given
    if rendezvous_id not in _NO_RENDEZVOUS_ID:
        return safe_name(rendezvous_id)
    digest = _digest("\0".join([str(uid), folder, script, *arguments]))
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", PurePath(script).stem).strip("-_") or "job"
    return f"{stem[: NAME_LIMIT - _DIGEST - 1]}-{digest}"


def safe_name(text: str) -> str:
    """`text` itself where it can be a name; else its legible part and a digest of all of it."""
    if re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{NAME_LIMIT - 1}}}", text):
        return text
    legible = re.sub(r"[^A-Za-z0-9_-]", "-", text).lstrip("-_")[: NAME_LIMIT - _DIGEST - 1]
    return f"{legible or 'x'}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]
