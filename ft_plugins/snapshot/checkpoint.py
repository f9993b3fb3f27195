"""A job's checkpoints in storage as folders: their names, what their small files say, listed, completed, removed.

Invariant: a checkpoint is complete when its manifest is there, and the manifest is written last, after every rank's
file is durable. A file gets its name only when it is durable, so whatever stops a writer at any instruction leaves the
checkpoints before it as they were. Every small file carries its own digest, is bounded and checked when it is read.
Files are for their owner alone (0600, folders 0700). A name that cannot be a version's is none: nothing reads it or
removes it.

    <dir>/<job>/v<lineage>-<iteration>/    `.partial` behind the name until the manifest is there
        rank-00003.safetensors             a rank's share: see `persist`
        rank-00003.json                    its size, layout, digest over the file's header, digest table, small state
        rank-00003.index.json              what lies where in it, for an export: see `index`
        manifest.json                      which job, its fingerprint, how many ranks
        keep                               empty, where a person wants it to stay: retention does not remove it

In: a job's folder in storage. Out: `StoredCheckpoint`, `RankRecord`, `CheckpointManifest`; complete or removed folders.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import ConfigDict, Field, TypeAdapter

from .. import faults, files
from ..errors import StorageError
from ..events import catalogue
from ..intake import FILE_LIMIT, Count, Text, Unfit, Word, json_value, open_regular, read_bytes, shown, typed
from .retention import StoredCheckpoint
from .slots import Mark, Version

FORMAT = "ft_plugins checkpoint 1"
_PARTIAL = ".partial"
_KEEP = "keep"
# As `folder_of` writes them, of numbers that counters reach: 10**15 iterations of a millisecond are 30,000 years.
_FOLDER = re.compile(
    rf"v(?P<lineage>0|[1-9][0-9]{{0,14}})-(?P<iteration>0|[1-9][0-9]{{0,14}})(?P<partial>{re.escape(_PARTIAL)})?"
)
_LIKE_A_FOLDER = re.compile(r"v[^.]*-[^.]*(\.partial)?")
_RECORD = re.compile(r"rank-([0-9]{5,10})\.json")
_DATA = re.compile(r"rank-[0-9]{5,10}\.safetensors(\.new)?")
HEAD_LIMIT = 64 << 20  # bytes of the header of a rank's file; one of a thousand buckets has 20 KB

T = TypeVar("T")


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
class RankRecord:
    """What `rank-N.json` says of a rank's file. `seal` is the digest over header, digest table and small state."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    rank: Count
    lineage: Count
    iteration: Count
    world_size: Count
    fingerprint: Text
    nbytes: Count  # of the file
    data_nbytes: Count  # of the share
    buckets: Count
    layout: Word
    seal: Text
    mark: Annotated[int, Field(strict=True, ge=min(Mark), le=max(Mark))] = Mark.NONE  # when the last byte was written

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.iteration)


@dataclass(frozen=True)
class CheckpointManifest:
    """What `manifest.json` says. `certified` is None of a job whose replicas are not compared, or are let drift and
    each captured whole; False of parts of replicas of which nobody knew yet whether they are alike."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: Text
    job: Text
    lineage: Count
    iteration: Count
    world_size: Count
    fingerprint: dict[str, Any]
    nbytes: Count  # of all ranks' files
    # whether the replicas were known to agree; None where there was nothing to find out
    certified: Annotated[bool, Field(strict=True)] | None = None


_RECORD_OF, _MANIFEST_OF = TypeAdapter(RankRecord), TypeAdapter(CheckpointManifest)


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
    certified = True if best is Mark.CERTIFIED else False if audited and best is not Mark.DIVERGED else None
    manifest = CheckpointManifest(
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
        f"restored; the next version whose replicas agree is written (see the events '{catalogue.AUDIT_FAILED.name}')"
    )


def publish(building: Path, final: Path) -> Path:
    """Rename a folder with a durable manifest, durably."""
    os.rename(building, final)
    files.sync_folder(final.parent)
    return final


def keep(folder: Path) -> None:
    """Have a complete checkpoint stay, durably, until a person removes it. Raises OSError."""
    with suppress(FileExistsError):  # its name counts, whatever it is
        os.close(os.open(folder / _KEEP, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    files.sync_folder(folder)


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
    if folder.is_symlink():  # somebody keeps the checkpoint elsewhere
        folder.unlink()
        return
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


# ---- reading ----


def listing(base: Path, passed_over: Callable[[str], None] = lambda name: None) -> tuple[StoredCheckpoint, ...]:
    """Every checkpoint in a job's folder; () where there is no such folder. Raises OSError.

    A folder with a manifest is complete, whatever its name: its writer died before it could rename it. `passed_over` is
    called with each name that looks like a checkpoint's and is none: no version, or no folder.
    """
    try:
        names = sorted(os.listdir(base))
    except FileNotFoundError:
        return ()
    found: dict[Version, StoredCheckpoint] = {}
    for name in names:
        matched = _FOLDER.fullmatch(name)
        if not (matched and (base / name).is_dir()):
            if _LIKE_A_FOLDER.fullmatch(name):
                passed_over(name)
            continue
        version = Version(int(matched["lineage"]), int(matched["iteration"]))
        each = _stored(base / name, version)
        if version not in found or each.complete:
            found[version] = each
    return tuple(found.values())


def _stored(folder: Path, version: Version) -> StoredCheckpoint:
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return StoredCheckpoint(version, folder.name, complete=False, fingerprint=_begun_by(folder))
    except StorageError as error:
        return StoredCheckpoint(version, folder.name, complete=True, problem=str(error))
    if Version(manifest.lineage, manifest.iteration) != version:
        problem = f"{folder}: its manifest is of another version"
        return StoredCheckpoint(version, folder.name, complete=True, problem=problem)
    digest = Origin(manifest.job, manifest.world_size, manifest.fingerprint).digest
    kept = os.path.lexists(folder / _KEEP)
    return StoredCheckpoint(version, folder.name, True, fingerprint=digest, certified=manifest.certified, kept=kept)


def _begun_by(folder: Path) -> str:
    """The digest of the fingerprint of the job that has begun a checkpoint, as the first file that tells it has it; ''
    where none does."""
    with suppress(OSError):
        names = sorted(os.listdir(folder))
        for name in names:
            if _RECORD.fullmatch(name):
                with suppress(StorageError, FileNotFoundError):
                    return _record(folder / name).fingerprint
        for name in filter(_DATA.fullmatch, names):
            with suppress(OSError, ValueError, KeyError, TypeError):
                with open(open_regular(folder / name), "rb") as file:
                    head = file.read(min(FILE_LIMIT, int.from_bytes(file.read(8), "little")))
                return str(json_value(head)["__metadata__"]["fingerprint"])
    return ""


def is_complete(folder: Path, origin: Origin) -> bool:
    """Whether `folder` is a complete checkpoint of this job. Raises StorageError for one of another job, OSError."""
    try:
        found = read_manifest(folder)
    except FileNotFoundError:
        return False
    if Origin(found.job, found.world_size, found.fingerprint).digest != origin.digest:
        raise StorageError(f"{folder} is there already, the checkpoint of another job; give another folder")
    return True


def read_manifest(folder: Path) -> CheckpointManifest:
    """Raises FileNotFoundError where there is none, StorageError when it is damaged or of another version of ours."""
    path = folder / "manifest.json"
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise StorageError(f"{folder}: expected format '{FORMAT}', found {shown(content.get('format'))}")
    return _checked(path, _MANIFEST_OF, content)


def read_record(folder: Path, rank: int) -> RankRecord:
    """Raises StorageError when it is missing or damaged."""
    try:
        return _record(folder / record_file(rank))
    except FileNotFoundError as error:
        raise StorageError(f"{folder / record_file(rank)}: there is no such file; is the folder shared?") from error


def _record(path: Path) -> RankRecord:
    return _checked(path, _RECORD_OF, read_json(path))


def _belongs(folder: Path, rank: int, origin: Origin, version: Version) -> bool:
    try:
        record = read_record(folder, rank)
        size = (folder / data_file(rank)).stat().st_size
    except (StorageError, OSError):
        return False
    ours = (version, origin.world_size, origin.digest)
    return (record.version, record.world_size, record.fingerprint) == ours and size == record.nbytes


# ---- small files ----


def make_job_folder(base: Path) -> None:
    """The folder of a job's checkpoints, where it is not there yet, for its owner alone. Raises OSError."""
    base.parent.mkdir(parents=True, exist_ok=True)
    base.mkdir(mode=0o700, exist_ok=True)


def make_folder(folder: Path) -> None:
    """The folder of a checkpoint, likewise. Raises OSError."""
    make_job_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Durably, with a digest of itself."""
    files.write(path, json.dumps({**content, "digest": _digest_of(content)}), durable=True)


def _digest_of(content: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode()))


def read_json(path: Path, limit: int = FILE_LIMIT) -> dict[str, Any]:
    """Raises FileNotFoundError, StorageError."""
    try:
        content = json_value(read_bytes(path, limit))
        if not (isinstance(content, dict) and "digest" in content):
            raise Unfit(f"expected an object with its digest, found {shown(content)}")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    digest = content.pop("digest")
    if digest != _digest_of(content):
        raise StorageError(f"{path}: does not match its digest")
    return content


def _checked(path: Path, adapter: TypeAdapter[T], content: dict[str, Any]) -> T:
    """`content` of `path` as the type of `adapter`. Raises StorageError."""
    try:
        return typed(adapter, content)
    except Unfit as error:
        raise StorageError(f"{path}: it is damaged, or of another ft_plugins ({error})") from error
