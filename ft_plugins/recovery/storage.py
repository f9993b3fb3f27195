"""Recover from checkpoints in storage when memory has no version: every rank reads its own file into its own slot.

Invariant: all ranks use the same checkpoint, the newest one of this job that every rank could read and verify. If
replicas are compared, certified checkpoints are tried first. One that is damaged for any rank is reported and skipped
by all. Once the slot is filled, state is restored from memory. Checkpoints that exist but cannot be used (of another
job, of another layout, all damaged, unreachable) are refused by name and never treated as absent. The new lineage is
newer than any in storage, of any job. Unreachable storage does not stop a job whose state is in memory, and no rank
waits long for it; rank 0 reports it.

Memory takes precedence, unless storage has a later lineage: then the job has continued elsewhere since.

In: the plan from memory, a folder. Out: a `RecoveryPlan`, and a sealed slot on every rank if its tier is `storage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from ..base import files
from ..base.intake import changes, shown, within
from ..collective import Collective
from ..errors import ResumeError, StorageError, printable
from ..events import EventType, catalogue
from ..model.host import resizable
from ..snapshot.capture import retention
from ..snapshot.checkpoint import checkpoint, persist
from ..snapshot.checkpoint.checkpoint import Origin
from ..snapshot.segment.segment import Segment
from ..snapshot.segment.slots import Mark, SlotState, Version
from .recovery_plan import RecoveryPlan
from .source_choice import choose_source, iteration_bound, nothing_older, require_older, set_aside

LOOK_SECONDS = 60.0  # timeout of listing the folder; slower storage is unreachable
_OFFERED = 16  # checkpoints tried, in the order of `retention.candidates`


@dataclass(frozen=True)
class StorageListing:
    """What rank 0 found in storage. Each of `candidates`: version, folder name, known problem ('' for none), mark.

    `other` describes the newest checkpoint of another job, `unreachable` says why storage could not be listed.
    """

    candidates: tuple[tuple[Version, str, str, Mark], ...]
    lineage: int  # the newest in storage
    other: str = ""
    unreachable: str = ""
    resized: Version | None = None  # the version of `other`, if that is of this job at another data-parallel size
    passed_over: tuple[str, ...] = ()  # names like those of checkpoints, but not valid


def with_storage(
    plan: RecoveryPlan, mode: str, loaded: int, stored: Version | None, later: bool, resized: Version | None = None,
    mark: Mark = Mark.NONE,
) -> RecoveryPlan:  # fmt: skip
    """`choose_source`, if a checkpoint of version `stored` is available as well. Pure.

    `later`: its lineage is newer than any in memory; `mark` is its mark. Of it and the framework's own checkpoint, the
    larger iteration wins. Raises ResumeError, also if `resized`, the version of a checkpoint of the job at another
    data-parallel size, is newer and the user did not ask for the older one.
    """
    memory = mode == "auto" and plan.version is not None and not later
    if iteration_bound(mode) is not None:  # the newest of both
        memory = plan.version is not None and (stored is None or plan.version >= stored)
    aside = set_aside(replace(plan, mark=mark), loaded) if mode == "auto" else None
    older = stored is not None and stored.iteration < loaded and aside is None
    if stored is None or memory or mode in ("memory", "fresh") or older:
        return choose_source(plan, mode, loaded)
    if mode == "auto" and resized is not None and resized > stored:
        raise ResumeError(
            f"the newest checkpoint of this job, version {resized}, is of another data-parallel size and cannot be "
            "loaded at this one; start with the size at which it was written, or restore iteration "
            f"{stored.iteration} with --ftp-resume storage"
        )
    if mode != "auto":
        reason = f"--ftp-resume {mode}"
    else:
        reason = "a later lineage than in memory" if plan.version is not None else plan.reason
    completed = max(plan.completed, stored.iteration)
    lost = completed - stored.iteration
    return replace(
        plan, version=stored, tier="storage", completed=completed, lost=lost, reason=reason, loaded=0, state_lost=False,
        mark=mark, passed_over=(), refused=aside.refused if aside and loaded > stored.iteration else 0,
        repeated=aside.repeated if aside and loaded > stored.iteration else 0,
    )  # fmt: skip


class StorageTier:
    """The storage tier in the recovery of one rank."""

    def __init__(
        self, folder: Path, job: str, collective: Collective, report: Callable[[EventType, str], None]
    ) -> None:
        """`folder` as configured; `report` is called with an event's declaration and its reason."""
        self._base = folder / job
        self._collective = collective
        self._report = report

    def recover(self, in_memory: RecoveryPlan, mode: str, loaded: int, segment: Segment, token: int) -> RecoveryPlan:
        """The plan, given the one from memory, `mode`, `loaded` and storage. Every rank of the job calls.

        If the plan's tier is `storage` and it names a version, that is CLEAN in a slot of every rank. Raises
        ResumeError, and the errors of `persist.read_rank`, on all ranks.
        """
        listing = self._list(segment.fingerprint, iteration_bound(mode))
        if listing.passed_over:
            names = ", ".join(map(shown, listing.passed_over))
            reason = f"{self._base}: {names}: not a checkpoint name"
            self._report_once(catalogue.CHECKPOINT_IGNORED, reason)
        needed = mode != "memory" and (in_memory.version is None or mode != "auto")
        if listing.unreachable:
            if needed:
                raise ResumeError(
                    f"--reft-checkpoint-dir: {self._base} cannot be used ({listing.unreachable}); "
                    "make it a folder that all nodes share and may write to, or drop the flag"
                )
            self._report_once(catalogue.STORAGE_FAILED, listing.unreachable)
        memory_lineage = in_memory.lineage - 1
        base = replace(in_memory, lineage=max(in_memory.lineage, listing.lineage + 1))
        if mode == "memory":  # listed for the lineage only: the job may have continued elsewhere in this one
            return choose_source(base, mode, loaded)
        damaged, before = "", iteration_bound(mode)
        if before is not None:
            require_older(loaded, before)
        candidates = [each for each in listing.candidates if before is None or each[0].iteration < before]
        for number, (version, name, problem, mark) in enumerate(candidates):
            # a certified one may come before one of a later lineage, which still shows that memory is outdated
            left = [version] if base.mark.preferred else [other[0] for other in candidates[number:]]
            later = max(other.lineage for other in left) > memory_lineage
            plan = with_storage(base, mode, loaded, version, later, listing.resized, mark)
            if (plan.tier, plan.version) != ("storage", version):
                return plan
            if problem:
                self._report_once(catalogue.CHECKPOINT_CORRUPTED, problem)
            elif self._fetch(name, version, segment, token):
                return plan
            damaged = damaged or problem or name
        if before is not None:
            if base.version is None and not loaded:
                raise ResumeError(nothing_older(base, mode, [each[1] for each in listing.candidates]))
        elif needed and mode != "fresh" and not loaded:
            self._refuse_fresh_start(listing, damaged)
        return choose_source(base, mode, loaded)

    def _refuse_fresh_start(self, listing: StorageListing, damaged: str) -> None:
        """Raises ResumeError if there are checkpoints, but none is usable."""
        if damaged:
            raise ResumeError(
                f"every checkpoint of this job in {self._base} is damaged or of another format, the newest: {damaged} "
                f"(see the events '{catalogue.CHECKPOINT_CORRUPTED.name}'); put the files back, or start from the "
                "beginning with --ftp-resume fresh"
            )
        if listing.other:
            raise ResumeError(
                f"the checkpoints in {self._base} belong to another job ({listing.other}); start that job again, give "
                "this one another name with --ftp-job, or start from the beginning with --ftp-resume fresh"
            )

    def _list(self, fingerprint: Mapping[str, Any], before: int | None) -> StorageListing:
        """Rank 0 lists the folder and sends the result to all ranks."""
        packed = b""
        if self._collective.rank == 0:
            packed = bytes(msgpack.packb(_listing(self._base, fingerprint, self._collective.world_size, before)))
        candidates, lineage, other, unreachable, resized, passed_over = msgpack.unpackb(
            self._collective.gather(packed)[0]
        )
        return StorageListing(
            tuple((Version(*version), name, problem, Mark(mark)) for version, name, problem, mark in candidates),
            lineage, other, unreachable, Version(*resized) if resized else None, tuple(passed_over),
        )  # fmt: skip

    def _fetch(self, name: str, version: Version, segment: Segment, token: int) -> bool:
        """Read this rank's file of a checkpoint; returns whether every rank could. Raises on all ranks or none. If some
        could not, the slot that it took is free for the next one."""
        folder, final = self._base / name, checkpoint.folder_of(self._base, version)
        held = any((slot.state, slot.version) == (SlotState.CLEAN, version) for slot in segment.slots())
        index: int | None = None
        with self._collective.agreement():
            try:
                index = persist.read_rank(final if final.exists() else folder, segment, version, token)
            except StorageError as error:
                self._report(catalogue.CHECKPOINT_CORRUPTED, str(error))
        complete = all(self._collective.gather(b"" if index is None else b"1"))
        if not complete and index is not None and not held:  # else each one tried costs a version in memory
            segment.dirty(index, None, token)
        return complete

    def _report_once(self, kind: EventType, reason: str) -> None:
        if self._collective.rank == 0:
            self._report(kind, reason)


def _listing(base: Path, fingerprint: Mapping[str, Any], world_size: int, before: int | None) -> list[Any]:
    """The fields of a `StorageListing` as plain values, for the other ranks; candidates older than iteration `before`
    come first. Creates the folder if it is missing."""
    origin = Origin("", world_size, fingerprint)
    other_fingerprint: Mapping[str, Any] = {}
    ignored: list[str] = []
    try:
        stored = within(LOOK_SECONDS, lambda: _folders(base, lambda name: ignored.append(printable(name))))
        others = [each for each in stored if each.complete and each.fingerprint not in (origin.fingerprint_digest, "")]
        newest = max(others, key=lambda each: each.version, default=None)
        if newest is not None:
            other_fingerprint = within(LOOK_SECONDS, lambda: checkpoint.read_manifest(base / newest.name)).fingerprint
    except (OSError, TimeoutError, StorageError) as error:
        return [[], 0, "", getattr(error, "strerror", None) or str(error), None, []]
    own = sorted(
        retention.candidates(stored, origin.fingerprint_digest),
        key=lambda each: before is not None and each.version.iteration >= before,
    )[:_OFFERED]
    other, resized = "", None
    if newest is not None:
        other = f"{newest.name}: {changes(other_fingerprint, fingerprint)}"
        if resizable(other_fingerprint) == resizable(fingerprint):
            resized = [newest.version.lineage, newest.version.iteration]
    candidates = [
        [
            [each.version.lineage, each.version.iteration],
            each.name,
            each.problem,
            int(Mark.CERTIFIED if each.certified else Mark.NONE),
        ]
        for each in own
    ]
    lineage = max((each.version.lineage for each in stored), default=0)
    return [candidates, lineage, other, "", resized, ignored[:_OFFERED]]


def _folders(base: Path, passed_over: Callable[[str], None]) -> tuple[retention.StoredCheckpoint, ...]:
    files.make_private(base)
    return checkpoint.listing(base, passed_over)
