"""A job's checkpoints in storage as folders: their names, what their small files say, listed, completed, removed.

Invariant: a checkpoint is complete when its manifest is there, and the manifest is written last, after every rank's
file is durable. A file gets its name only when it is durable, so whatever stops a writer at any instruction leaves the
checkpoints before it as they were. Every small file carries its own digest.

    <dir>/<job>/v<lineage>-<iteration>/    `.partial` behind the name until the manifest is there
        rank-00003.safetensors             a rank's share: see `persist`
        rank-00003.json                    its size, layout, digest over the file's header, digest table, small state
        rank-00003.index.json              what lies where in it, for an export: see `index`
        manifest.json                      which job, its fingerprint, how many ranks
        keep                               empty, where a person wants it to stay: retention does not remove it

In: a job's folder in storage. Out: `Stored`, `Record`, `Manifest`; folders made complete or removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from .. import faults
from ..errors import StorageError
from .retention import Stored
from .slots import Mark, Version

FORMAT = "ft_plugins checkpoint 1"
_PARTIAL = ".partial"
_KEEP = "keep"
_FOLDER = re.compile(rf"v(?P<lineage>\d+)-(?P<iteration>\d+)(?P<partial>{re.escape(_PARTIAL)})?")
_RECORD = re.compile(r"rank-(\d+)\.json")


@dataclass(frozen=True)
class Origin:
    """Whose checkpoint it is: the same in every file of one."""

    job: str
    world_size: int
    fingerprint: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Of the fingerprint."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.fingerprint, sort_keys=True).encode())


@dataclass(frozen=True)
class Record:
    """What `rank-N.json` says of a rank's file. `seal` is the digest over header, digest table and small state."""

    rank: int
    lineage: int
    iteration: int
    world_size: int
    fingerprint: str
    nbytes: int  # of the file
    data_nbytes: int  # of the share
    buckets: int
    layout: int
    seal: str
    mark: int = Mark.NONE  # what was known of its replicas when the last byte was written

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.iteration)


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. `certified` is None of a job whose replicas are not compared, or are let drift and
    each captured whole; False of parts of replicas of which nobody knew yet whether they are alike."""

    format: str
    job: str
    lineage: int
    iteration: int
    world_size: int
    fingerprint: dict[str, Any]
    nbytes: int  # of all ranks' files
    certified: bool | None = None  # whether the replicas were known to agree; None where there was nothing to find out


def folder_of(base: Path, version: Version) -> Path:
    """Where the complete checkpoint of `version` is."""
    return base / f"v{version.lineage}-{version.iteration}"


def partial_of(base: Path, version: Version) -> Path:
    """Where it is being built."""
    return base / f"v{version.lineage}-{version.iteration}{_PARTIAL}"


def data_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def record_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def index_file(rank: int) -> str:
    return f"rank-{rank:05d}.index.json"


# ---- completing and removing ----


def missing(folder: Path, origin: Origin, version: Version) -> list[int]:
    """The ranks whose files are not there yet, or are of another version or job; by name, then by what they say."""
    named = {int(found[1]) for name in os.listdir(folder) if (found := _RECORD.fullmatch(name))}
    absent = [rank for rank in range(origin.world_size) if rank not in named]
    return absent or [rank for rank in range(origin.world_size) if not _belongs(folder, rank, origin, version)]


def commit(
    base: Path, version: Version, origin: Origin, *, audited: bool = False, heard: Mark = Mark.NONE, **facts: object
) -> Path:
    """All ranks' files are there: write the manifest, then give the folder its name. Returns the folder.

    `audited`: the job compares replicas; `heard` is what is known of this version by now, beside what the records say.
    Raises StorageError where they differed on any rank: put together such parts would look alike ever after.
    """
    building, final = partial_of(base, version), folder_of(base, version)
    nbytes = sum((building / data_file(rank)).stat().st_size for rank in range(origin.world_size))
    marks = {rank: read_record(building, rank).mark for rank in range(origin.world_size)}
    differing = [rank for rank, mark in marks.items() if mark == Mark.DIFFERING]
    if differing or heard is Mark.DIFFERING:
        raise StorageError(differed(version, differing))
    best = Mark(max([heard, *marks.values()]))
    certified = True if best is Mark.CERTIFIED else False if audited and best is not Mark.DRIFTING else None
    manifest = Manifest(
        FORMAT, origin.job, version.lineage, version.iteration, origin.world_size, dict(origin.fingerprint), nbytes,
        certified,
    )  # fmt: skip
    faults.reach("persist.manifest.before", iteration=version.iteration, **facts)
    write_json(building / "manifest.json", asdict(manifest))
    faults.reach("persist.manifest.after", iteration=version.iteration, **facts)
    return publish(building, final)


def differed(version: Version, ranks: Sequence[int]) -> str:
    """Why a version is no checkpoint, for people."""
    which = f" on ranks {', '.join(map(str, ranks[:8]))}" if ranks else ""
    return (
        f"the replicas of version {version} were found unlike{which}: it is a mixture of their parts and is never "
        "restored; the next version whose replicas agree is written (see the events 'sync.differs')"
    )


def publish(building: Path, final: Path) -> Path:
    """Rename a folder with a durable manifest, durably."""
    os.rename(building, final)
    sync_folder(final.parent)
    return final


def keep(folder: Path) -> None:
    """Have a complete checkpoint stay, durably, until a person removes it. Raises OSError."""
    os.close(os.open(folder / _KEEP, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    sync_folder(folder)


def withdraw(folder: Path, ranks: list[int]) -> None:
    """Remove what `ranks` have in an unfinished checkpoint, and the folder with the last of them. Never raises: what
    a storage that is gone or read-only will not let go of is stale and removed by a later `remove`. A checkpoint that
    has its manifest stays."""
    with suppress(OSError):
        if (folder / "manifest.json").exists():
            return
        for rank in ranks:
            for name in (record_file(rank), data_file(rank), index_file(rank)):
                for path in (folder / name, folder / f"{name}.new"):
                    path.unlink(missing_ok=True)
        folder.rmdir()  # not while others' files are in it


def remove(folder: Path) -> None:
    """Remove a checkpoint: first what makes it one. Raises OSError."""
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


# ---- reading ----


def listing(base: Path) -> tuple[Stored, ...]:
    """Everything in a job's folder that is named like a checkpoint; () where there is no such folder. Raises OSError.

    A folder with a manifest is complete, whatever its name: its writer died before it could rename it.
    """
    try:
        names = sorted(os.listdir(base))
    except FileNotFoundError:
        return ()
    found: dict[Version, Stored] = {}
    for name in names:
        matched = _FOLDER.fullmatch(name)
        if not matched:
            continue
        version = Version(int(matched["lineage"]), int(matched["iteration"]))
        each = _stored(base / name, version)
        if version not in found or each.complete:
            found[version] = each
    return tuple(found.values())


def _stored(folder: Path, version: Version) -> Stored:
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return Stored(version, folder.name, complete=False)
    except StorageError as error:
        return Stored(version, folder.name, complete=True, problem=str(error))
    if Version(manifest.lineage, manifest.iteration) != version:
        return Stored(version, folder.name, complete=True, problem=f"{folder}: its manifest is of another version")
    digest = Origin(manifest.job, manifest.world_size, manifest.fingerprint).digest
    kept = (folder / _KEEP).exists()
    return Stored(version, folder.name, complete=True, fingerprint=digest, certified=manifest.certified, kept=kept)


def is_complete(folder: Path, origin: Origin) -> bool:
    """Whether `folder` is a complete checkpoint of this job. Raises StorageError for one of another job, OSError."""
    try:
        found = read_manifest(folder)
    except FileNotFoundError:
        return False
    if Origin(found.job, found.world_size, found.fingerprint).digest != origin.digest:
        raise StorageError(f"{folder} is there already, the checkpoint of another job; give another folder")
    return True


def read_manifest(folder: Path) -> Manifest:
    """Raises FileNotFoundError where there is none, StorageError when it is damaged or of another version of ours."""
    content = read_json(folder / "manifest.json")
    if content.get("format") != FORMAT:
        raise StorageError(f"{folder}: expected format '{FORMAT}', found {content.get('format')!r}")
    return Manifest(**content)


def read_record(folder: Path, rank: int) -> Record:
    """Raises StorageError when it is missing or damaged."""
    try:
        return Record(**read_json(folder / record_file(rank)))
    except FileNotFoundError as error:
        raise StorageError(f"{folder / record_file(rank)}: there is no such file; is the folder shared?") from error


def _belongs(folder: Path, rank: int, origin: Origin, version: Version) -> bool:
    try:
        record = read_record(folder, rank)
        size = (folder / data_file(rank)).stat().st_size
    except (StorageError, FileNotFoundError):
        return False
    ours = (version, origin.world_size, origin.digest)
    return (record.version, record.world_size, record.fingerprint) == ours and size == record.nbytes


# ---- small files ----


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Durably, with a digest of itself."""
    building = path.with_name(path.name + ".new")
    with open(building, "w") as file:
        json.dump({**content, "digest": _digest_of(content)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(building, path)
    sync_folder(path.parent)


def _digest_of(content: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode()))


def read_json(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, StorageError."""
    try:
        content = json.loads(path.read_text())
        digest = content.pop("digest")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if digest != _digest_of(content):
        raise StorageError(f"{path}: does not match its digest")
    return dict(content)
