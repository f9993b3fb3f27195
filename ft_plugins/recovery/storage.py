"""Recover from checkpoints in storage when memory has no version: every rank reads its own file into its own slot.

Invariant: all ranks use the same checkpoint, the newest one of this job that every rank could read and verify. If
replicas are compared, certified checkpoints are tried first. One that is damaged for any rank is reported and skipped
by all. Once the slot is filled, state is restored from memory. Checkpoints that exist but cannot be used (of another
job, of another layout, all damaged, unreachable) are refused by name and never treated as absent. The new lineage is
newer than any in storage, of any job. Unreachable storage does not stop a job whose state is in memory, and no rank
waits long for it; rank 0 reports it.

Memory takes precedence, unless storage has a later lineage (then the job has continued elsewhere since), or a newer
version of the newest one (then memory has lost it).

In: the plan from memory, a folder. Out: a `RecoveryPlan`, and a sealed slot on every rank if its tier is `storage`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from ..base import files
from ..base.intake import changes, shown, within
from ..collective import Collective
from ..errors import ResumeError, StorageError, printable
from ..events import EventType, catalogue, say
from ..model.host import resizable
from ..smp.watch import liveness
from ..snapshot.capture import retention
from ..snapshot.checkpoint import checkpoint, lease, persist
from ..snapshot.checkpoint.checkpoint import Origin
from ..snapshot.checkpoint.lease import Claim, Lease
from ..snapshot.segment.segment import Segment
from ..snapshot.segment.slots import Mark, SlotState, Version
from .recovery_plan import RecoveryPlan
from .source_choice import choose_source, is_doubted, iteration_bound, nothing_older, require_older, set_aside

LOOK_SECONDS = 60.0  # timeout of listing the folder; slower storage is unreachable
_PAUSE_SECONDS = 1.0  # between two looks at a lease
_NODES = 8  # that a lease names
_OFFERED = 16  # checkpoints tried, in the order of `retention.candidates`


@dataclass(frozen=True)
class StorageListing:
    """What rank 0 found in storage. Each of `candidates`: version, folder name, known problem ('' for none), mark, run.

    `other` describes the newest checkpoint of another job or run, `unreachable` says why storage could not be listed.
    """

    candidates: tuple[tuple[Version, str, str, Mark, str], ...]
    lineage: int  # the newest in storage, or taken by a run that had the folder
    other: str = ""
    unreachable: str = ""
    resized: Version | None = None  # the version of `other`, if that is of this job at another data-parallel size
    passed_over: tuple[str, ...] = ()  # names like those of checkpoints, but not valid
    run: str = ""  # that of this job, or that had the folder last


def outdates(stored: Version, mark: Mark, memory: RecoveryPlan, lineage: int) -> bool:
    """Whether a checkpoint shows that the version of `memory` is outdated: it is of a later lineage than `lineage`, the
    newest that memory has opened, or a newer version of that one, unless only memory's replicas are known to agree.
    Checkpoints of older lineages are void then, as versions are. Pure."""
    if memory.version is None or stored.lineage != lineage:
        return stored.lineage > lineage
    doubted = memory.mark.preferred or is_doubted(replace(memory, mark=Mark.CERTIFIED), stored.iteration)
    return stored.iteration > memory.version.iteration and (mark.preferred or not doubted)


def with_storage(
    plan: RecoveryPlan, mode: str, loaded: int, stored: Version | None, later: bool, resized: Version | None = None,
    mark: Mark = Mark.NONE,
) -> RecoveryPlan:  # fmt: skip
    """`choose_source`, if a checkpoint of version `stored` is available as well. Pure.

    `later`: memory is outdated (`outdates`); `mark` is its mark. Of it and the framework's own checkpoint, the
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
        held = plan.version
        reason = f"newer than iteration {held.iteration} of lineage {held.lineage} in memory" if held else plan.reason
    completed = max(0 if plan.at_least else plan.completed, stored.iteration)
    lost = completed - stored.iteration
    return replace(
        plan, version=stored, tier="storage", completed=completed, lost=lost, reason=reason, loaded=0, state_lost=False,
        sources=(), mark=mark, passed_over=(), refused=aside.refused if aside and loaded > stored.iteration else 0,
        repeated=aside.repeated if aside and loaded > stored.iteration else 0,
    )  # fmt: skip


class StorageTier:
    """The storage tier in the recovery of one rank."""

    def __init__(
        self, folder: Path, job: str, collective: Collective, report: Callable[[EventType, str], None],
        nodes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`folder` as configured; `report` is called with an event's declaration and its reason; `nodes`: by rank."""
        self._base = folder / job
        self._collective = collective
        self._report = report
        self._nodes = sorted(set(nodes))
        self._memory = ("", 0)  # the run in memory, and its newest lineage
        self._replaced: Lease | None = None  # the lease that was there
        self._unreachable = ""

    def take(self, plan: RecoveryPlan) -> None:
        """Take the folder for the lineage of `plan`, before any version becomes void. Every rank of the job calls.
        Raises ResumeError, on all ranks, if another run has taken it meanwhile. One that cannot be written to is
        reported."""
        now, me, nodes = time.time(), (liveness.identified(os.getpid()),), tuple(self._nodes[:_NODES])
        taken = Lease(plan.lineage, plan.run, nodes, processes=me, taken=now, renewed=now)  # SMPs know if it is alone
        with self._collective.agreement():
            if self._collective.rank == 0 and not self._unreachable:
                try:
                    lease.take(self._base, taken, self._settled(self._replaced, float("inf")))
                except FileExistsError:
                    raise self._refusal(lease.newest(self._base)) from None
                except (OSError, TimeoutError) as error:
                    self._report(catalogue.STORAGE_FAILED, f"{self._base}: no lease can be written ({error})")

    def _settled(self, first: Lease | None, unchanged: float) -> Lease | None:
        """The lease, once this start may go on: it was `first`, the same for `unchanged` seconds. A folder that stalls
        does not count as one that does not change. Raises ResumeError if another run has it, OSError, TimeoutError."""
        while True:
            looked, now = time.monotonic(), within(LOOK_SECONDS, lambda: lease.newest(self._base))
            gone = now is not None and now.processes != () and all(map(liveness.has_ended, now.processes))
            decision = lease.at_start(*self._memory, first, now, unchanged, gone)
            if decision is Claim.REFUSE:
                raise self._refusal(now)
            if decision is Claim.TAKE:
                return now
            if not unchanged:
                say(
                    f"{self._base}: waiting up to {lease.HOLD_SECONDS:.0f} seconds to see whether its last user lives "
                    f"({now}); if not, this run goes on"
                )
            time.sleep(_PAUSE_SECONDS)
            unchanged += min(time.monotonic() - looked, 2 * _PAUSE_SECONDS)

    def _refusal(self, now: Lease | None) -> ResumeError:
        (run, _), job = self._memory, self._base.name
        return ResumeError(
            f"{self._base} is in use by {now}; this start, on {', '.join(self._nodes)} at {time.strftime('%F %T')}, "
            f"has {f'older memory of run {run[:8]}' if run else 'no memory of a run'}: end the other one ('ft-plugins "
            f"stop --job {job}' on one of its nodes) and start again, or give this job another name (--ftp-job; under "
            "Slurm --job-name) or another folder (--reft-checkpoint-dir)"
        )

    def recover(self, in_memory: RecoveryPlan, mode: str, loaded: int, segment: Segment, token: int) -> RecoveryPlan:
        """The plan, given the one from memory, `mode`, `loaded` and storage. Every rank of the job calls.

        If the plan's tier is `storage` and it names a version, that is CLEAN in a slot of every rank. Raises
        ResumeError, and the errors of `persist.read_rank`, on all ranks.
        """
        listing = self._list(segment.fingerprint, mode, in_memory)
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
        run = listing.run if loaded else in_memory.run  # the framework's own does not say of which run it is
        at_least = in_memory.at_least or listing.lineage > memory_lineage
        base = replace(in_memory, lineage=max(in_memory.lineage, listing.lineage + 1), run=run, at_least=at_least)
        if mode == "memory":  # listed for the lineage only: the job may have continued elsewhere in this one
            return choose_source(base, mode, loaded)
        damaged, before = "", iteration_bound(mode)
        if before is not None:
            require_older(loaded, before)
        candidates = [each for each in listing.candidates if before is None or each[0].iteration < before]
        for number, (version, name, problem, mark, run) in enumerate(candidates):
            # a certified one may come before a newer one, which still shows that memory is outdated
            left = candidates[number:][: 1 if base.mark.preferred else None]
            later = any(outdates(other[0], other[3], base, memory_lineage) for other in left)
            plan = with_storage(base, mode, loaded, version, later, listing.resized, mark)
            if (plan.tier, plan.version) != ("storage", version):
                return plan
            if problem:
                self._report_once(catalogue.CHECKPOINT_CORRUPTED, problem)
            elif self._fetch(name, version, segment, token):
                return replace(plan, run=run or listing.run)
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
                f"the checkpoints in {self._base} belong to another job or run ({listing.other}); start that one "
                "again, give this one another name with --ftp-job, or start from the beginning with --ftp-resume fresh"
            )

    def _list(self, fingerprint: Mapping[str, Any], mode: str, in_memory: RecoveryPlan) -> StorageListing:
        """Rank 0 waits until this run may use the folder, lists it, and sends the result to all ranks. Raises
        ResumeError, on all ranks, if another run uses it."""
        packed = b""
        with self._collective.agreement():
            if self._collective.rank == 0:
                packed = bytes(msgpack.packb(self._found(fingerprint, mode, in_memory)))
        found, lineage, other, unreachable, resized, passed_over, run = msgpack.unpackb(
            self._collective.gather(packed)[0]
        )
        self._unreachable = unreachable
        return StorageListing(
            tuple((Version(*version), name, problem, Mark(mark), own) for version, name, problem, mark, own in found),
            lineage, other, unreachable, Version(*resized) if resized else None, tuple(passed_over), run,
        )  # fmt: skip

    def _found(self, fingerprint: Mapping[str, Any], mode: str, in_memory: RecoveryPlan) -> list[Any]:
        """The fields of a `StorageListing` as plain values. Creates the folder if it is missing."""
        try:
            within(LOOK_SECONDS, lambda: files.make_private(self._base))
            self._memory = (in_memory.run, in_memory.lineage - 1)
            self._replaced = self._settled(within(LOOK_SECONDS, lambda: lease.newest(self._base)), 0.0)
            before = self._replaced or Lease(0, "")
            origin = Origin("", self._collective.world_size, fingerprint, in_memory.run or before.run)
            return _listing(self._base, origin, mode, before.lineage)
        except (OSError, TimeoutError, StorageError) as error:
            return [[], 0, "", getattr(error, "strerror", None) or str(error), None, [], in_memory.run]

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


def _listing(base: Path, origin: Origin, mode: str, taken: int) -> list[Any]:
    """The fields of a `StorageListing` as plain values, for the other ranks; with --ftp-resume before:N, candidates
    older than that come first. `taken`: the newest lineage of a lease. Raises OSError, TimeoutError, StorageError."""
    fingerprint, before = origin.fingerprint, iteration_bound(mode)
    other_fingerprint: Mapping[str, Any] = {}
    ignored: list[str] = []
    stored = within(LOOK_SECONDS, lambda: checkpoint.listing(base, lambda name: ignored.append(printable(name))))
    others = [each for each in stored if each.complete and each.fingerprint not in (origin.fingerprint_digest, "")]
    newest = max(others, key=lambda each: each.version, default=None)
    if newest is not None:
        other_fingerprint = within(LOOK_SECONDS, lambda: checkpoint.read_manifest(base / newest.name)).fingerprint
    of_job = retention.candidates(stored, origin.fingerprint_digest)
    offered = retention.candidates(origin.own(stored), origin.fingerprint_digest)
    other, resized = "", None
    if of_job and not offered:
        other = f"{of_job[0].name}: run {of_job[0].run[:8]}, not {origin.run[:8]}; --ftp-resume storage goes on from it"
        offered = of_job if mode == "storage" else offered
    own = sorted(offered, key=lambda each: before is not None and each.version.iteration >= before)[:_OFFERED]
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
            each.run,
        ]
        for each in own
    ]
    lineage = max([taken, *(each.version.lineage for each in stored)])
    return [candidates, lineage, other, "", resized, ignored[:_OFFERED], origin.run]
