"""Audits: compare digests of all buckets over each replica set, start that behind the step, await it at a fence, report
what differs and carry out the remedy.

    compare   digests, gathered as 8 bytes per bucket and replica. Only reads live tensors, so it may run behind forward
              and backward. Ends with a small gather over the job, so that all ranks know whether anything differs
    settle    copies and averages the buckets that differ. Rare; training waits for it

Invariant: nothing is decided here (see `audit.judge`, `audit.remedy`): what is done is what `audit.remedy` says, on all
ranks of the job at the same iteration, and all ranks enter `settle` knowing what any of them will do. One rank reports
for each replica set: the first of the majority, or its first rank without a majority.

In: buckets, live tensors. Out: `AuditOutcome`; repaired live tensors; `audit.failed` and `rank.suspected` events, at
the end `suspect.listed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ...errors import ReplicaError
from ...events import Events, catalogue
from ...model.host import ReplicaOperations
from ..averaging.aggregate import Aggregate
from ..averaging.averager import LiveTensors, aggregated, read, views, write
from ..background import Background, BackgroundTask
from ..buckets import Buckets, ReplicaBucket
from ..links import Links
from .audit import REPEATED, Audit, Offences, OnCorruption, Remedy, ScalarCopy, judge, remedy

SHOWN = 4  # buckets named in a report


@dataclass(frozen=True)
class AuditOutcome:
    """One audit as one rank knows it: the details of its own replica sets, and for the whole job whether any replica
    changes, whether the job goes back, and whether copies are rebuilt."""

    iteration: int
    audits: tuple[Audit, ...]
    remedies: tuple[Remedy, ...]
    changes: bool
    rollback: bool
    derives: bool = False

    @property
    def agreed(self) -> bool:
        """Whether all replicas of the job are identical, copies included."""
        return self.state_agreed and not self.derives

    @property
    def state_agreed(self) -> bool:
        """Whether all replicas of state are identical; a version does not contain copies."""
        return not (self.changes or self.rollback)


class Auditing:
    """Audits one rank's replicas."""

    def __init__(
        self, buckets: Buckets, links: Links, tensors: LiveTensors, chosen: OnCorruption,
        operations: ReplicaOperations,
    ) -> None:  # fmt: skip
        self._operations = operations
        self._buckets = buckets
        self._links = links
        self._tensors = tensors
        self._chosen = chosen

    def compare(self, iteration: int) -> AuditOutcome:
        """Digest and compare. A collective of the job."""
        live = self._tensors()
        audits = []
        for replicas, buckets in self._buckets.by_set.items():
            digests = np.array([digest(views(bucket, live)) for bucket in buckets], dtype=np.uint64)
            audits.append(judge(iteration, replicas, buckets, self._links.gather_words(replicas, digests)))
        remedies = tuple(remedy(audit, self._chosen) for audit in audits)
        own = [any(getattr(one, name) for one in remedies) for name in ("changes", "rollback", "derives")]
        flags = self._links.gather_job([float(flag) for flag in own])
        return AuditOutcome(iteration, tuple(audits), remedies, *(bool(column.any()) for column in flags.T))

    def compared_with(self, rank: int) -> set[int]:
        """The ranks that share a replica set with `rank`, as far as this rank knows."""
        return {other for replicas in self._buckets.by_set if rank in replicas for other in replicas} - {rank}

    def settle(self, outcome: AuditOutcome) -> None:
        """Carry out the remedies, except for copies, which the host rebuilds. A collective of each set that changes."""
        live = self._tensors()
        rank = self._links.rank
        for one in outcome.remedies:
            for copy in one.copies:
                replicas = copy.bucket.replicas
                if rank == copy.source:
                    values = read(copy.bucket, live)
                    for target in copy.targets:
                        self._links.send(replicas, target, values)
                elif rank in copy.targets:
                    like = torch.cat(views(copy.bucket, live))
                    write(copy.bucket, live, self._links.receive(replicas, copy.source, like))
            for bucket in one.averages:
                self._average(bucket)
        for audit, one in zip(outcome.audits, outcome.remedies, strict=True):
            if one.scalars is not None:
                self._copy_scalars(audit.replicas, one.scalars)

    def _copy_scalars(self, replicas: tuple[int, ...], copy: ScalarCopy) -> None:
        if self._links.rank == copy.source:
            encoded = self._operations.scalars()
            for target in copy.targets:
                self._links.send_bytes(replicas, target, encoded)
        elif self._links.rank in copy.targets:
            self._operations.restore_scalars(self._links.receive_bytes(replicas, copy.source))

    def _average(self, bucket: ReplicaBucket) -> None:
        live = self._tensors()
        write(bucket, live, aggregated(self._links, bucket, read(bucket, live), Aggregate.MEAN, 1))


def digest(pieces: list[torch.Tensor]) -> int:
    """xxh3 of the bytes of flat tensors, one after another."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece.cpu().view(torch.uint8).numpy().data)
    return hasher.intdigest()


class Verdicts:
    """Runs one rank's audits. Owns the audit in flight."""

    def __init__(
        self, rank: int, auditing: Auditing, background: Background, events: Events,
        agreed: Callable[[int], None] = lambda iteration: None,
    ) -> None:  # fmt: skip
        """`agreed` is called with an iteration, on the background's thread, once its replicas are known to agree."""
        self._rank, self._auditing, self._background, self._events = rank, auditing, background, events
        self._agreed = agreed
        self.under_way: BackgroundTask[AuditOutcome] | None = None
        self.last: AuditOutcome | None = None
        self.offences = Offences()
        self._agreed_at = 0
        self._tainted: int | None = None

    def begin(self, completed: int, state: Mapping[str, Any]) -> None:
        """Continue after `completed` iterations from `state`. Drops an audit in flight: its version is abandoned."""
        if self.under_way is not None:
            self.under_way.wait()
        self.under_way = self.last = self._tainted = None
        self._agreed_at = completed
        self.offences = Offences({int(rank): int(count) for rank, count in state.items()})

    def state(self) -> dict[str, int]:
        """How often each rank was in a minority, for a restart."""
        return {str(rank): count for rank, count in self.offences.by_rank.items()}

    def start(self, iteration: int) -> None:
        """Start comparing the replicas as they are after the update of `iteration`."""
        self.under_way = self._background.start(lambda: self._compared(iteration))

    def _compared(self, iteration: int) -> AuditOutcome:
        outcome = self._auditing.compare(iteration)
        if outcome.agreed:
            self._agreed(iteration)
        return outcome

    def differ(self) -> bool:
        """Wait for the audit in flight, if any, and leave it in flight. Returns whether replicas differ."""
        return self.under_way is not None and not self.under_way.wait().agreed

    def await_(self) -> AuditOutcome:
        """The fence: wait for the audit in flight and report it. Changes no tensor."""
        assert self.under_way is not None
        task, self.under_way = self.under_way, None
        self.last = task.wait()
        for audit in self.last.audits:
            self._report(audit, task.waited)
        self.offences = self.offences.after(*self.last.audits)
        self._report_repeated(self.last.audits)
        if self.last.state_agreed:
            self._agreed_at = self.last.iteration
        else:  # a version that is void on one rank is useless to the others
            self._tainted = self._agreed_at
        return self.last

    def close(self) -> None:
        """The orderly end: report the audit in flight and the ranks that were wrong repeatedly. The first rank that was
        compared with a suspect reports it."""
        if self.under_way is not None:
            self.await_()
        for rank in self.offences.repeated():
            witnesses = self._auditing.compared_with(rank)
            if witnesses and min(witnesses) == self._rank:
                count = self.offences.by_rank[rank]
                reason = f"rank {rank} was wrong at {count} audits: drain its device"
                self._events.emit(catalogue.SUSPECT_LISTED, rank=rank, count=count, reason=reason)

    def tainted(self) -> int | None:
        """Once after any rank of the job was wrong: the iteration of the last audit at which the replicas agreed, the
        same on all ranks; else None."""
        since, self._tainted = self._tainted, None
        return since

    def settle(self, outcome: AuditOutcome) -> None:
        """Carry out the remedies. Raises ReplicaError, on all ranks, if the job must go back."""
        if outcome.rollback:
            raise ReplicaError(
                f"rank {self._rank}: the replicas of iteration {outcome.iteration} differ: the job goes back to a "
                "snapshot in which they agreed (--paft-on-corruption rollback)",
                echo=not any(audit.state for audit in outcome.audits),
            )
        self._auditing.settle(outcome)
        self._agreed_at = outcome.iteration

    def _report(self, audit: Audit, waited: float) -> None:
        if audit.agreed or audit.reporter != self._rank:
            return
        wrong = sorted({rank for verdict in audit.verdicts for rank in verdict.wrong})
        more = len(audit.verdicts) - SHOWN
        shown = "; ".join(map(str, audit.verdicts[:SHOWN])) + (f"; and {more} more buckets" if more > 0 else "")
        self._events.emit(
            catalogue.AUDIT_FAILED, iteration=audit.iteration, ranks=wrong, majority=bool(audit.accused),
            waited_seconds=waited,
            layers=sorted({v.bucket.layer for v in audit.verdicts if v.bucket.layer is not None}),
            buckets=[v.bucket.number for v in audit.verdicts], reason=f"after iteration {audit.iteration}: {shown}",
        )  # fmt: skip

    def _report_repeated(self, audits: Sequence[Audit]) -> None:
        """Report ranks that were wrong again, each once: by the first reporter of its replica sets."""
        for rank in self.offences.repeated():
            reporters = [audit.reporter for audit in audits if rank in audit.accused]
            if reporters and min(reporters) == self._rank:
                count = self.offences.by_rank[rank]
                reason = f"rank {rank} was wrong at {count} audits (suspected from {REPEATED} on): drain its device"
                self._events.emit(catalogue.RANK_SUSPECTED, rank=rank, count=count, reason=reason)
