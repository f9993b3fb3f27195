"""Recover from checkpoints in storage when memory has no version: every rank reads its own file into its own slot.

Invariant: all ranks take the same checkpoint, the newest one of this job that every rank could read and verify; where
replicas are compared, certified ones are tried first. A checkpoint that is damaged for any rank is reported and skipped
by all. Once the slot is filled, the restore is one from memory. Checkpoints that exist but cannot be used (of another
job, of another layout, all damaged, unreachable) are refused by name and never treated as absent. The new lineage is
newer than any in storage, whichever job wrote it. Unreachable storage neither blocks a job that has memory nor keeps
other ranks waiting: rank 0 reports it.

Memory goes first, unless storage has a later lineage: then the job has continued elsewhere since.

In: the plan from memory, a folder. Out: a `RecoveryPlan`, and a sealed slot on every rank if its tier is `storage`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from ..collective import Collective
from ..errors import ResumeError, StorageError, printable
from ..events import EventType, catalogue
from ..intake import shown, within
from ..model.host import resizable
from ..snapshot import checkpoint, persist, retention
from ..snapshot.checkpoint import Origin
from ..snapshot.segment import Segment
from ..snapshot.slots import Mark, Version
from .recovery_plan import RecoveryPlan, choose_source

LOOK_SECONDS = 60.0  # for the folder to be listed; a storage that hangs longer is out of reach
_OFFERED = 16  # checkpoints that are tried, in the order of `retention.candidates`


@dataclass(frozen=True)
class Shelf:
    """What rank 0 found in storage, the same on all ranks. `candidates`: version, folder name, known problem ('' for
    none), and what is known of its replicas.

    `other` describes the newest checkpoint of another job, `unreachable` is why storage could not be listed.
    """

    candidates: tuple[tuple[Version, str, str, Mark], ...]
    lineage: int  # the newest in storage
    other: str = ""
    unreachable: str = ""
    resized: Version | None = None  # `other` is of this job at another data-parallel size, and of this version
    passed_over: tuple[str, ...] = ()  # names that resemble a checkpoint's but are not valid


def with_storage(
    found: RecoveryPlan,
    mode: str,
    loaded: int,
    stored: Version | None,
    later: bool,
    resized: Version | None = None,
    mark: Mark = Mark.NONE,
) -> RecoveryPlan:
    """`choose_source`, where a checkpoint of version `stored` is available as well. Pure. Raises ResumeError, also if
    `resized`, a checkpoint of the job at another data-parallel size, is newer and the user did not ask for the older.

    `later`: its lineage is newer than any in memory; `mark`: what is known of its replicas. Compared with the
    framework's own checkpoint, the larger iteration wins.
    """
    memory = mode == "auto" and found.version is not None and not later
    if stored is None or memory or mode not in ("auto", "storage") or stored.iteration < loaded:
        return choose_source(found, mode, loaded)
    if mode == "auto" and resized is not None and resized > stored:
        raise ResumeError(
            f"the newest checkpoint of this job, of version {resized}, is of another data-parallel size and cannot be "
            f"loaded at this one; start as it was written, or --ftp-resume storage takes iteration {stored.iteration}"
        )
    if mode == "storage":
        why = "--ftp-resume storage"
    else:
        why = "a later lineage than in memory" if found.version is not None else found.reason
    completed = max(found.completed, stored.iteration)
    lost = completed - stored.iteration
    return replace(
        found, version=stored, tier="storage", completed=completed, lost=lost, reason=why, loaded=0, state_lost=False,
        mark=mark, passed_over=(),
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

    def recover(self, found: RecoveryPlan, mode: str, loaded: int, segment: Segment, token: int) -> RecoveryPlan:
        """The plan, given `found` in memory, `mode`, `loaded` and storage. Every rank of the job calls.

        If the plan's tier is `storage` and it names a version, that is CLEAN in a slot of every rank. Raises
        ResumeError, and what `persist.read_rank` refuses with, on all ranks.
        """
        if mode == "memory":
            return choose_source(found, mode, loaded)
        shelf = self._look(segment.fingerprint)
        if shelf.passed_over:
            names = ", ".join(map(shown, shelf.passed_over))
            reason = f"{self._base}: {names}: not the name of a checkpoint"
            self._report_once(catalogue.CHECKPOINT_IGNORED, reason)
        needed = found.version is None or mode != "auto"
        if shelf.unreachable:
            if needed:
                raise ResumeError(
                    f"--reft-checkpoint-dir: {self._base} cannot be used ({shelf.unreachable}); "
                    "make it a folder that all nodes share and may write to, or drop the key"
                )
            self._report_once(catalogue.STORAGE_FAILED, shelf.unreachable)
        memory_lineage = found.lineage - 1
        found = replace(found, lineage=max(found.lineage, shelf.lineage + 1))
        damaged = ""
        for number, (version, name, problem, mark) in enumerate(shelf.candidates):
            # a certified one may precede one of a later lineage, which still shows that memory is outdated
            left = [version] if found.mark.preferred else [each[0] for each in shelf.candidates[number:]]
            later = max(each.lineage for each in left) > memory_lineage
            plan = with_storage(found, mode, loaded, version, later, shelf.resized, mark)
            if (plan.tier, plan.version) != ("storage", version):
                return plan
            if problem:
                self._report_once(catalogue.CHECKPOINT_CORRUPTED, problem)
            elif self._fetch(name, version, segment, token):
                return plan
            damaged = damaged or name
        if needed and mode != "fresh" and not loaded:
            self._refuse_scratch(shelf, damaged)
        return choose_source(found, mode, loaded)

    def _refuse_scratch(self, shelf: Shelf, damaged: str) -> None:
        """Raises ResumeError where there are checkpoints, but none is usable."""
        if damaged:
            raise ResumeError(
                f"every checkpoint of this job in {self._base} is damaged, the newest is {damaged} (see the events "
                f"'{catalogue.CHECKPOINT_CORRUPTED.name}'); put the files back, or --ftp-resume fresh starts from the "
                "beginning"
            )
        if shelf.other:
            raise ResumeError(
                f"the checkpoints in {self._base} belong to another job ({shelf.other}); start as they were written, "
                "name this job otherwise with --ftp-job, or --ftp-resume fresh starts from the beginning"
            )

    def _look(self, fingerprint: Mapping[str, Any]) -> Shelf:
        """Rank 0 lists the folder and sends the result to all ranks."""
        listed = b""
        if self._collective.rank == 0:
            listed = bytes(msgpack.packb(_shelf(self._base, fingerprint, self._collective.world_size)))
        candidates, lineage, other, unreachable, resized, passed_over = msgpack.unpackb(
            self._collective.gather(listed)[0]
        )
        known = tuple((Version(*version), name, why, Mark(mark)) for version, name, why, mark in candidates)
        return Shelf(known, lineage, other, unreachable, Version(*resized) if resized else None, tuple(passed_over))

    def _fetch(self, name: str, version: Version, segment: Segment, token: int) -> bool:
        """Read this rank's file of a checkpoint; returns whether every rank could. Raises any rank's refusal on all."""
        folder, final = self._base / name, checkpoint.folder_of(self._base, version)
        whole = False
        with self._collective.agreement():
            try:
                persist.read_rank(final if final.exists() else folder, segment, version, token)
                whole = True
            except StorageError as error:
                self._report(catalogue.CHECKPOINT_CORRUPTED, str(error))
        return all(self._collective.gather(b"1" if whole else b""))

    def _report_once(self, kind: EventType, reason: str) -> None:
        if self._collective.rank == 0:
            self._report(kind, reason)


def _shelf(base: Path, fingerprint: Mapping[str, Any], world_size: int) -> list[Any]:
    """The fields of a `Shelf` as plain values, for the other ranks. Creates the folder where there is none."""
    origin = Origin("", world_size, fingerprint)
    theirs: Mapping[str, Any] = {}
    ignored: list[str] = []
    try:
        stored = within(LOOK_SECONDS, lambda: _listed(base, lambda name: ignored.append(printable(name))))
        others = [each for each in stored if each.complete and each.fingerprint not in (origin.digest, "")]
        newest = max(others, key=lambda each: each.version, default=None)
        if newest is not None:
            theirs = within(LOOK_SECONDS, lambda: checkpoint.read_manifest(base / newest.name)).fingerprint
    except (OSError, TimeoutError, StorageError) as error:
        return [[], 0, "", getattr(error, "strerror", None) or str(error), None, []]
    own = retention.candidates(stored, origin.digest)[:_OFFERED]
    other, resized = "", None
    if newest is not None:
        other = f"{newest.name}: {_differing(theirs, fingerprint)}"
        if resizable(theirs) == resizable(fingerprint):
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


def _listed(base: Path, passed_over: Callable[[str], None]) -> tuple[retention.StoredCheckpoint, ...]:
    checkpoint.make_job_folder(base)
    return checkpoint.listing(base, passed_over)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two fingerprints, key by key."""
    return ", ".join(
        f"{shown(key)[1:-1]}: {shown(before.get(key))} -> {shown(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if json.dumps(before.get(key), sort_keys=True) != json.dumps(now.get(key), sort_keys=True)
    )
