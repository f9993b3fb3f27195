"""Run audits: start them behind the step, await them at a fence, report them, and carry out their remedies.

Invariant: what is done is what `audit.remedy` says, on all ranks of the job at the same iteration. One rank reports for
each replica set: the first of the majority, or its first rank without a majority.

In: an executor of audits. Out: repaired live tensors; `audit.failed` and `rank.suspected` events, at the end
`suspect.listed`; the outcome of the last audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ReplicaError
from ...events import Events, catalogue
from ..background import Background, BackgroundTask
from .audit import REPEATED, Audit, Offences
from .compare import Auditing, AuditOutcome

SHOWN = 4  # buckets named in a report


class Verdicts:
    """Runs one rank's audits. Owns the audit in flight."""

    def __init__(self, rank: int, auditing: Auditing, background: Background, events: Events) -> None:
        self._rank, self._auditing, self._background, self._events = rank, auditing, background, events
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
        self.under_way = self._background.start(lambda: self._auditing.compare(iteration))

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
            error = ReplicaError(
                f"rank {self._rank}: the replicas of iteration {outcome.iteration} differ: the job goes back to a "
                "snapshot in which they agreed (--paft-on-corruption rollback)"
            )
            error.echo = not any(audit.state for audit in outcome.audits)
            raise error
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
