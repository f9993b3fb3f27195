"""Audits as they come: started behind the step, awaited at a fence, carried out, reported, remembered.

Invariant: what is done is what `audit.remedy` says, on all ranks of the job at the same iteration. Each set of replicas
is spoken for once: by the first rank of those that are right, or by its first rank where nobody can be named.

In: an executor of audits. Out: repaired live tensors; `audit.failed` and `rank.suspected` events, at the end
`suspect.listed`; what the last audit has found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DivergedError
from ..events import Events, catalogue
from .audit import REPEATED, Audit, Offences
from .background import Background, BackgroundJob
from .compare import Auditing, AuditOutcome

SHOWN = 4  # buckets named in a line


class Verdicts:
    """One rank's. Guards the audit that is under way."""

    def __init__(self, rank: int, auditing: Auditing, background: Background, events: Events) -> None:
        self._rank, self._auditing, self._background, self._events = rank, auditing, background, events
        self.under_way: BackgroundJob[AuditOutcome] | None = None
        self.last: AuditOutcome | None = None
        self.offences = Offences()
        self._agreed_at = 0
        self._tainted: int | None = None

    def begin(self, completed: int, state: Mapping[str, Any]) -> None:
        """Go on after so many iterations, with what was known. An audit under way is of what is not gone on from."""
        if self.under_way is not None:
            self.under_way.wait()
        self.under_way = self.last = self._tainted = None
        self._agreed_at = completed
        self.offences = Offences({int(rank): int(count) for rank, count in state.items()})

    def state(self) -> dict[str, int]:
        """How often each rank was in a minority."""
        return {str(rank): count for rank, count in self.offences.by_rank.items()}

    def start(self, iteration: int) -> None:
        """Compare the replicas as they are after the update of `iteration`, behind what follows."""
        self.under_way = self._background.start(lambda: self._auditing.compare(iteration))

    def await_(self) -> AuditOutcome:
        """The fence. Reports; changes nothing."""
        assert self.under_way is not None
        job, self.under_way = self.under_way, None
        self.last = job.wait()
        for audit in self.last.audits:
            self._report(audit, job.waited)
        self.offences = self.offences.after(*self.last.audits)
        self._report_repeated(self.last.audits)
        if self.last.state_agreed:
            self._agreed_at = self.last.iteration
        else:  # a version that one rank lacks is worth nothing to the others
            self._tainted = self._agreed_at
        return self.last

    def close(self) -> None:
        """The orderly end: what is under way is reported, and who was wrong again and again. Of each such rank the
        first of the other ranks that were compared with it speaks."""
        if self.under_way is not None:
            self.await_()
        for rank in self.offences.repeated():
            witnesses = self._auditing.compared_with(rank)
            if witnesses and min(witnesses) == self._rank:
                count = self.offences.by_rank[rank]
                reason = f"rank {rank} was wrong at {count} audits: drain its device"
                self._events.emit(catalogue.SUSPECT_LISTED, rank=rank, count=count, reason=reason)

    def tainted(self) -> int | None:
        """Once after any rank of the job was found wrong: the iteration of the audit before, in which the replicas
        agreed; the same on all ranks."""
        found, self._tainted = self._tainted, None
        return found

    def settle(self, found: AuditOutcome) -> None:
        """Carry out what is to be done. Raises DivergedError, on all ranks, where the job is to go back."""
        if found.rollback:
            error = DivergedError(
                f"rank {self._rank}: the replicas of iteration {found.iteration} differ, and are to be restored from a "
                "snapshot in which they agreed (--paft-on-corruption rollback)"
            )
            error.echo = not any(audit.state for audit in found.audits)
            raise error
        self._auditing.settle(found)
        self._agreed_at = found.iteration

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
        """Who was wrong again, once however many replica sets say so: by the first of their reporters."""
        for rank in self.offences.repeated():
            reporters = [audit.reporter for audit in audits if rank in audit.accused]
            if reporters and min(reporters) == self._rank:
                count = self.offences.by_rank[rank]
                reason = f"rank {rank} was wrong at {count} audits ({REPEATED} are enough): let its device be drained"
                self._events.emit(catalogue.RANK_SUSPECTED, rank=rank, count=count, reason=reason)
