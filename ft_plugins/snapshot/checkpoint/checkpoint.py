"""Manage a job's checkpoint folders in storage: name, list, complete and remove them, read and write their small files.

Invariant: a checkpoint is complete when it has its manifest, which is written last, after every rank's file is durable.
A file is renamed into place only when it is durable, so a writer that stops at any instruction leaves earlier
checkpoints intact. Every small file carries its own digest and is size-limited and checked on reading. The
manifest seals the ranks' records: one of another run, or replaced later, is not of the checkpoint. Files are accessible
to their owner only (0600, folders 0700). Folders whose name is not a version's are neither read nor removed.

    <dir>/<job>/v<lineage>-<iteration>/    with the suffix `.partial` until the manifest is written
        rank-00003.safetensors             a rank's share: see `persist`
        rank-00003.json                    its size, layout, digest over the file's header, digest table, small state
        manifest.json                      job, run, fingerprint, number of ranks, digest of each rank's record
        keep                               empty; if it exists, retention does not remove the checkpoint

In: a job's folder in storage. Out: `StoredCheckpoint`, `RankRecord`, `CheckpointManifest`; complete or removed folders.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import ConfigDict, Field, TypeAdapter

from ...base import faults, files
from ...base.files import read_digested, write_digested
from ...base.intake import Count, RunIdentity, Text, Unfit, Word, shown, typed
from ...errors import StorageError
from ...events import catalogue
from ..capture.retention import StoredCheckpoint
from ..segment.slots import Mark, Version

FORMAT = "ft_plugins checkpoint 3"
_READABLE = (FORMAT, "ft_plugins checkpoint 2")  # the older one without runs and digests of records
_PARTIAL = ".partial"
_VOID = ".void"
_MOST_VOID = 100  # void checkpoints of one version
_KEEP = "keep"
# Names as `folder_of` writes them. Numbers are below 10**15: iterations of a millisecond reach it in 30,000 years.
_FOLDER = re.compile(
    rf"v(?P<lineage>0|[1-9][0-9]{{0,14}})-(?P<iteration>0|[1-9][0-9]{{0,14}})(?P<partial>{re.escape(_PARTIAL)})?"
)
_LIKE_A_FOLDER = re.compile(r"v[^.]*-[^.]*(\.partial)?")
_RECORD = re.compile(r"rank-([0-9]{5,10})\.json")
HEAD_LIMIT = 90 << 20  # bytes of the header of a rank's file; readers of safetensors take 100 MB

T = TypeVar("T")


@dataclass(frozen=True)
class Origin:
    """The job and the run that a checkpoint belongs to; the same in all of its files. `run`: '' if unknown."""

    job: str
    world_size: int
    fingerprint: Mapping[str, Any]
    run: str = ""

    @property
    def fingerprint_digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(json.dumps(self.fingerprint, sort_keys=True).encode())

    def own(self, stored: Iterable[StoredCheckpoint]) -> list[StoredCheckpoint]:
        """Those checkpoints that are not known to be of another run."""
        return [each for each in stored if not self.run or each.run in ("", self.run)]


@dataclass(frozen=True)
class RankRecord:
    """The content of `rank-N.json`. `seal` is the digest over the file's header, digest table and small state."""

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
    run: RunIdentity = ""
    mark: Annotated[int, Field(strict=True, ge=min(Mark), le=max(Mark))] = Mark.NONE  # when the file was completed

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.iteration)

    @property
    def digest(self) -> str:
        """Of what is not empty, so that fields of later builds do not change it."""
        return files.digest_of({name: value for name, value in vars(self).items() if value})


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of `manifest.json`. `certified`: True if the replicas are known to agree, False if they were captured
    in parts and not compared yet, None if there is nothing to compare (no audits, or each replica is captured whole:
    `Mark.DIVERGED`).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: Text
    job: Text
    lineage: Count
    iteration: Count
    world_size: Count
    fingerprint: dict[str, Any]
    nbytes: Count  # of all ranks' files
    certified: Annotated[bool, Field(strict=True)] | None = None
    run: RunIdentity = ""
    records: tuple[Text, ...] | None = None  # digests of the ranks' records; None in those of older builds


_RECORD_OF, _MANIFEST_OF = TypeAdapter(RankRecord), TypeAdapter(CheckpointManifest)


def folder_of(base: Path, version: Version) -> Path:
    """The folder of the complete checkpoint of `version`."""
    return base / f"v{version.lineage}-{version.iteration}"


def partial_of(base: Path, version: Version) -> Path:
    """The folder in which the checkpoint of `version` is built."""
    return base / f"v{version.lineage}-{version.iteration}{_PARTIAL}"


def data_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def record_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


# ---- completing and removing ----


def unusable(folder: Path, origin: Origin, version: Version) -> list[int]:
    """The ranks whose files are missing; if none are, those whose files are damaged or of another version or job."""
    named = {int(match[1]) for name in os.listdir(folder) if (match := _RECORD.fullmatch(name))}
    absent = [rank for rank in range(origin.world_size) if rank not in named]
    return absent or [rank for rank in range(origin.world_size) if not _belongs(folder, rank, origin, version)]


def commit(
    base: Path, version: Version, origin: Origin, *, audited: bool = False, mark: Mark = Mark.NONE, **facts: object
) -> Path:
    """Complete a checkpoint of which all ranks' files exist: write the manifest, then rename the folder. Returns it.

    `audited`: the job compares replicas. `mark` is the version's current mark, in addition to those in the records.
    Raises StorageError if replicas are mismatched on any rank: a checkpoint assembled from their parts would hide that.
    Also if files of a rank are missing after all; the checkpoint is unfinished then.
    """
    building, final = partial_of(base, version), folder_of(base, version)
    nbytes = sum((building / data_file(rank)).stat().st_size for rank in range(origin.world_size))
    records = [read_record(building, rank) for rank in range(origin.world_size)]
    marks = {record.rank: record.mark for record in records}
    mismatched = [rank for rank, recorded in marks.items() if recorded == Mark.MISMATCHED]
    if mismatched or mark is Mark.MISMATCHED:
        raise StorageError(mixture_reason(version, mismatched))
    best = Mark(max([mark, *marks.values()]))
    certified = True if best is Mark.CERTIFIED else False if audited and best is not Mark.DIVERGED else None
    manifest = CheckpointManifest(
        FORMAT, origin.job, version.lineage, version.iteration, origin.world_size, dict(origin.fingerprint), nbytes,
        certified, origin.run, tuple(record.digest for record in records),
    )  # fmt: skip
    faults.reach("persist.manifest.before", iteration=version.iteration, **facts)
    for left in building.glob("*.new"):  # by a writer that was killed
        left.unlink(missing_ok=True)
    write_digested(building / "manifest.json", asdict(manifest), shared=True)
    faults.reach("persist.manifest.after", iteration=version.iteration, **facts)
    publish(building, final)
    # a node that gave up before the rename took its files, or another writer replaced one; now it shows
    absent = [rank for rank in range(origin.world_size) if not _belongs(final, rank, origin, version, manifest)]
    if absent:
        (final / "manifest.json").unlink()
        files.sync_folder(final)
        with suppress(OSError):  # where the other nodes withdraw their files
            os.rename(final, building)
        raise StorageError(f"{final}: files of ranks {absent} were removed or replaced while it was being completed")
    return final


def mixture_reason(version: Version, ranks: Sequence[int]) -> str:
    """The message that a version cannot be a checkpoint because its replicas differ."""
    which = f" on ranks {', '.join(map(str, ranks[:8]))}" if ranks else ""
    return (
        f"the replicas of version {version} differ{which}: it is a mixture of their parts and is never restored; the "
        f"next version whose replicas agree is written (see the events '{catalogue.AUDIT_FAILED.name}')"
    )


def publish(building: Path, final: Path) -> Path:
    """Durably rename a folder that has a durable manifest."""
    os.rename(building, final)
    files.sync_folder(final.parent)
    return final


def keep(folder: Path) -> None:
    """Durably protect a complete checkpoint from retention. Raises OSError."""
    with suppress(FileExistsError):  # any file of that name will do
        os.close(os.open(folder / _KEEP, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    files.sync_folder(folder)


def withdraw(folder: Path, ranks: list[int], run: str = "") -> None:
    """Remove the files of `ranks` of `run` from an unfinished checkpoint, and the folder once it is empty. A checkpoint
    with a manifest stays. Never raises: what unavailable or read-only storage retains is stale, and `remove` deletes it
    later."""
    with suppress(OSError):
        if (folder / "manifest.json").exists():
            return
        for rank in ranks:
            with suppress(StorageError):
                require_own(folder, rank, run)
                for path in folder.glob(f"rank-{rank:05d}.*"):  # also of earlier formats, or not renamed yet
                    path.unlink(missing_ok=True)
        folder.rmdir()  # fails while files of other ranks are in it


def require_own(folder: Path, rank: int, run: str) -> None:
    """Raises StorageError if a record of that rank is there, of another run than `run`."""
    try:
        found = read_record(folder, rank).run
    except StorageError:  # none, or a damaged one
        return
    if found != run:
        raise StorageError(
            f"{folder / record_file(rank)} is of another run of this job's name ({found or 'unknown'}; this one is "
            f"{run or 'unknown'}) and is not overwritten; give one of the two another name with --ftp-job"
        )


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first. Raises OSError."""
    if folder.is_symlink():  # the checkpoint itself is elsewhere and stays
        folder.unlink()
        return
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


def void(base: Path, after: int, lineage: int) -> list[str]:
    """Rename the checkpoints in a job's folder that are newer than iteration `after` and of an older lineage than
    `lineage`, so that no recovery finds them: v1-200 becomes v1-200.void, or v1-200.void.2 if that is there already.
    Returns the new names. Raises StorageError.

    They are neither read nor removed by this package again.
    """
    voided = []
    try:
        for each in _folders(base):
            if each.version.iteration > after and each.version.lineage < lineage:
                voided.append(_void_name(base, each.name))
                os.rename(base / each.name, base / voided[-1])
        if voided:
            files.sync_folder(base)
    except OSError as error:
        raise StorageError(f"{base}: newer checkpoints cannot be renamed ({error}); rename them yourself") from error
    return voided


def _void_name(base: Path, name: str) -> str:
    """The first name for a void checkpoint that is free: an older one of the same version may have the others."""
    names = [f"{name}{_VOID}", *(f"{name}{_VOID}.{number}" for number in range(2, _MOST_VOID + 1))]
    return next((one for one in names if not os.path.lexists(base / one)), names[0])


# ---- reading ----


def listing(base: Path, on_invalid: Callable[[str], None] = lambda name: None) -> tuple[StoredCheckpoint, ...]:
    """Every checkpoint in a job's folder; () if the folder does not exist. Raises OSError.

    A folder with a manifest is complete, whatever its name: its writer died before it could rename it. Of two folders
    of a version the one that can be used is listed. `on_invalid` is called with each name that resembles a checkpoint's
    but is not a version's or not a folder's.
    """
    stored: dict[Version, StoredCheckpoint] = {}
    for each in sorted(_folders(base, on_invalid), key=lambda one: (not one.complete, bool(one.problem))):
        stored.setdefault(each.version, each)
    return tuple(stored.values())


def _folders(base: Path, on_invalid: Callable[[str], None] = lambda name: None) -> Iterator[StoredCheckpoint]:
    try:
        names = sorted(os.listdir(base))
    except FileNotFoundError:
        return
    for name in names:
        matched = _FOLDER.fullmatch(name)
        if not (matched and (base / name).is_dir()):
            if _LIKE_A_FOLDER.fullmatch(name):
                on_invalid(name)
            continue
        yield _stored(base / name, Version(int(matched["lineage"]), int(matched["iteration"])))


def _stored(folder: Path, version: Version) -> StoredCheckpoint:
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return StoredCheckpoint(version, folder.name, complete=False)
    except StorageError as error:
        return StoredCheckpoint(version, folder.name, complete=True, problem=str(error))
    if Version(manifest.lineage, manifest.iteration) != version:
        problem = f"{folder}: its manifest is of another version"
        return StoredCheckpoint(version, folder.name, complete=True, problem=problem)
    digest = Origin(manifest.job, manifest.world_size, manifest.fingerprint).fingerprint_digest
    kept = os.path.lexists(folder / _KEEP)
    return StoredCheckpoint(version, folder.name, True, digest, "", manifest.certified, kept, manifest.run)


def is_complete(folder: Path, origin: Origin) -> bool:
    """Whether `folder` is a complete checkpoint of this run. Raises StorageError for one of another, OSError."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return False
    found = Origin(manifest.job, manifest.world_size, manifest.fingerprint, manifest.run)
    if (found.fingerprint_digest, found.run) != (origin.fingerprint_digest, origin.run):
        raise StorageError(f"{folder} is a checkpoint of another job or run; choose another folder")
    return True


def read_manifest(folder: Path) -> CheckpointManifest:
    """Raises FileNotFoundError if there is none, StorageError if it is damaged or of another format version."""
    path = folder / "manifest.json"
    content = read_digested(path)
    if content.get("format") not in _READABLE:
        raise StorageError(
            f"{folder}: expected format '{FORMAT}', found {shown(content.get('format'))}: resume or export it with the "
            "ft_plugins that wrote it"
        )
    return _checked(path, _MANIFEST_OF, content)


def read_record(folder: Path, rank: int, sealed_by: CheckpointManifest | None = None) -> RankRecord:
    """Raises StorageError if it is missing or damaged, or is not the one that is sealed by the manifest, if given."""
    path = folder / record_file(rank)
    try:
        record = _record(path)
    except FileNotFoundError as error:
        raise StorageError(f"{path}: there is no such file; is the folder shared?") from error
    if sealed_by is not None and sealed_by.records is not None and record.digest not in sealed_by.records[rank:][:1]:
        whose = "was replaced after" if record.run == sealed_by.run else f"is of another run ({record.run}) than"
        raise StorageError(f"{path}: it {whose} the manifest, so the checkpoint is incomplete")
    return record


def _record(path: Path) -> RankRecord:
    return _checked(path, _RECORD_OF, read_digested(path))


def _belongs(
    folder: Path, rank: int, origin: Origin, version: Version, sealed_by: CheckpointManifest | None = None
) -> bool:  # fmt: skip
    try:
        record = read_record(folder, rank, sealed_by)
        size = (folder / data_file(rank)).stat().st_size
    except (StorageError, OSError):
        return False
    ours = (version, origin.world_size, origin.fingerprint_digest, origin.run)
    return (record.version, record.world_size, record.fingerprint, record.run) == ours and size == record.nbytes


# ---- checking small files ----


def _checked(path: Path, adapter: TypeAdapter[T], content: dict[str, Any]) -> T:
    """`content` of `path` as the type of `adapter`. Raises StorageError."""
    try:
        return typed(adapter, content)
    except Unfit as error:
        raise StorageError(f"{path}: damaged, or written by another version of ft_plugins ({error})") from error
