"""The part of a `Protection` that is the same on all nodes, in a file of the run directory that is named by its digest.

In a large job that part (names, shapes, groups, endpoints) is longer than a message may be. So it is written once for
each node, and messages, replies and other files name it by its digest.

Invariant: the content of a name never changes. A reader checks length and digest before it uses the content. The files
are the owner's alone (0600). Several processes may write the same file at once.

In: a `Protection`; content that another node sent. Out: files `job-DIGEST.json`; `ProtectionReference`s, and the
`Protection`s that they name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, TypeAdapter

from ...base import files
from ...base.intake import Count, Text, Unfit, json_value, read_bytes, read_json, typed
from ...errors import ProtocolError
from ...redundancy.exchange_plan import positions
from ...transport.protocol import packed
from ..tree.protection import MaybeVersion, Protection

PROTECTION_FILE = "protection.json"  # in the run directory: a reference to what is protected now, and the token
JOB_FILE_LIMIT = 64 << 20  # bytes: ten times what a job of 16,384 ranks needs
_NAME = "job-{}.json"

_NAMES, _COUNTS = TypeAdapter(tuple[Text, ...]), TypeAdapter(tuple[Count, ...])
_FIELDS = TypeAdapter(dict[str, Any])

JobDigest = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{32}$")]
JobFileBytes = Annotated[int, Field(strict=True, ge=1, le=JOB_FILE_LIMIT)]


@dataclass(frozen=True)
class ProtectionReference:
    """A `Protection`: the digest of its job file, of `nbytes` bytes, and what is not in that file. `ranks`: how
    many the job has."""

    job: JobDigest
    nbytes: JobFileBytes
    ranks: Count
    lineage: Count
    base: MaybeVersion
    position: Count
    committed: MaybeVersion = None

    def block(self) -> dict[str, Any]:
        """As plain values, for a message or a file."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"base": packed(self.base), "committed": packed(self.committed)}


@dataclass(frozen=True)
class RecordedDomains:
    """By which failure domains the groups of a lineage were cut; `nodes` of each rank."""

    lineage: Count
    nodes: tuple[Text, ...]
    domains: tuple[Text, ...] = ()


@dataclass(frozen=True)
class _Token:
    """What PROTECTION_FILE holds in addition to a reference: the token of the incarnation."""

    token: Count


def refer(protection: Protection) -> tuple[ProtectionReference, bytes]:
    """The reference to a `Protection`, and the content of its job file."""
    content = _encoded(protection)
    reference = ProtectionReference(
        _digest_of(content), len(content), len(protection.nodes), protection.lineage, protection.base,
        protection.position, protection.committed,
    )  # fmt: skip
    return reference, content


def write(run_dir: Path, protection: Protection) -> ProtectionReference:
    """Write the job file of `protection`, unless it is there. Raises ProtocolError if it is too long or cannot
    be written."""
    reference, content = refer(protection)
    if not holds(run_dir, reference.job):
        write_content(run_dir, reference.job, content)
    return reference


def write_content(run_dir: Path, digest: str, content: bytes) -> None:
    """Write a job file that came from another node. Raises ProtocolError if that digest is not
    its own, or the file cannot be written."""
    if len(content) > JOB_FILE_LIMIT:
        raise ProtocolError(f"the description of the job has {len(content)} bytes; the limit is {JOB_FILE_LIMIT}")
    if _digest_of(content) != digest:
        raise ProtocolError(f"the description of the job does not match its digest {digest}")
    path = run_dir / _NAME.format(digest)
    try:
        files.write(path, content, shared=True)
    except OSError as error:
        raise ProtocolError(f"the description of the job cannot be written: {path}: {error.strerror}") from error


def holds(run_dir: Path, digest: str) -> bool:
    """Whether the job file is there, and whole."""
    try:
        read_content(run_dir, digest)
    except ProtocolError:
        return False
    return True


def read_content(run_dir: Path, digest: str) -> bytes:
    """The content of a job file. Raises ProtocolError if it is missing, or does not match its digest."""
    path = run_dir / _NAME.format(digest)
    try:
        content = read_bytes(path, JOB_FILE_LIMIT)
    except (OSError, Unfit) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProtocolError(f"the description of the job cannot be read: {path}: {reason}") from error
    if _digest_of(content) != digest:
        raise ProtocolError(f"the description of the job does not match its digest: {path}")
    return content


def read(run_dir: Path, reference: ProtectionReference) -> Protection:
    """The `Protection` that a reference names. Raises ProtocolError."""
    block = _block(run_dir, reference.job)
    own = {"lineage": reference.lineage, "base": packed(reference.base), "position": reference.position}
    return Protection.read({**block, **own, "committed": packed(reference.committed)})


def read_domains(run_dir: Path) -> RecordedDomains | None:
    """The failure domains by which the groups were cut that are protected now, or were last; None if this node protects
    nothing, or a file cannot be read."""
    try:
        reference = read_record(run_dir)[0]
        block = _block(run_dir, reference.job)
        record = typed(RecordedDomains, {**block, "lineage": reference.lineage})
    except (ProtocolError, OSError, ValueError):
        return None
    return record if len(record.domains) in (0, len(set(record.nodes))) else None


def _block(run_dir: Path, digest: str) -> dict[str, Any]:
    """The plain values of a job file. Raises ProtocolError."""
    try:
        block = dict(json_value(read_content(run_dir, digest)))
        names = typed(_NAMES, block.pop("names"))
        block["nodes"] = [names[position] for position in typed(_COUNTS, block.pop("node_of"))]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ProtocolError(f"the description of the job {digest} cannot be used: {error}") from error
    return block


def forget(run_dir: Path, kept: Collection[str] = ()) -> None:
    """Remove all job files but those with the digests `kept`."""
    names = {_NAME.format(digest) for digest in kept}
    for path in run_dir.glob(_NAME.format("*") + "*"):
        if path.name not in names:
            with suppress(OSError):  # not a file of ours
                path.unlink(missing_ok=True)


def read_record(run_dir: Path) -> tuple[ProtectionReference, int]:
    """What `record` wrote: the reference and the token of the incarnation. Raises OSError, ValueError."""
    block = read_json(run_dir / PROTECTION_FILE, _FIELDS)
    return typed(ProtectionReference, block), typed(_Token, block).token


def record(run_dir: Path, reference: ProtectionReference, token: int) -> None:
    """Record what is protected now, for another SMP of this node, and remove the job files of before."""
    files.write_json(run_dir / PROTECTION_FILE, {**reference.block(), "token": token})
    forget(run_dir, (reference.job,))


def _encoded(protection: Protection) -> bytes:
    block: Mapping[str, Any] = protection.job_block()
    names, ranks = positions(protection.nodes)
    node_of = [0] * len(protection.nodes)
    for position, members in enumerate(ranks):
        for rank in members:
            node_of[rank] = position
    named = {name: value for name, value in block.items() if name != "nodes"}
    return json.dumps({**named, "names": names, "node_of": node_of}, separators=(",", ":")).encode()


def _digest_of(content: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(content))
