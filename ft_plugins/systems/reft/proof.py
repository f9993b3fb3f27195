"""Prove a restore: compare an iteration that is computed again with the version that recovery chose.

    resume          the version before it is loaded (`recovery.proof_plan`)
    iteration_end   the capture thread compares this rank's state with the slot, in place of a capture
    next fence      the rank's verdict; a difference ends the job here, before anything newer is captured
    later fences    the verdicts of all ranks, which have gone up the ranks' tree and down, as one line

Invariant: the restored version stays what the next restore begins with, whatever the proof finds. No rank waits for the
job's verdict: if it does not come, because connections were lost, each rank has still judged its own state.

In: the plan, items that differ, the ledger's comparisons. Out: `resume.proven`, `resume.unproven`, `resume.differed`;
LoopError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...collective import Collective, PendingGather
from ...errors import ProtocolError
from ...events import Events, catalogue, say
from ...recovery.proof_plan import ProofPlan, ProofVerdict, RankVerdict, judge_parts, judge_state, verdict_of_job
from ...snapshot.segment.header import Header
from ..iteration_ledger import IterationLedger

_SHOWN = 12  # values in a sentence
_LAST_SECONDS = 2.0  # to wait for the verdict of all ranks where training ends before it


@dataclass(frozen=True)
class Judging:
    """By what a rank judges its state: how many `items` it has; whether kernels give the same every time; the `mode` of
    --ftp-on-difference; whether it `leads` its node, and reports for it."""

    items: int
    deterministic: bool
    mode: str
    leads: bool


def in_words(uncaptured: tuple[str, ...]) -> str:
    """Pure: the values that are not captured and were not what they were, after a sentence; '' for none."""
    more = f" and {len(uncaptured) - _SHOWN} more" if len(uncaptured) > _SHOWN else ""
    return f"; of what is not captured these differ: {', '.join(uncaptured[:_SHOWN])}{more}" if uncaptured else ""


class RestoreProof:
    """The proof of one restore on one rank."""

    def __init__(
        self,
        plan: ProofPlan,
        base: int,
        judging: Judging,
        header: Header,
        ledger: IterationLedger,
        collective: Collective,
        events: Events,
    ) -> None:
        """`base`: the restored iteration. Every rank calls."""
        self._plan, self._base, self._judging, self._header = plan, base, judging, header
        self._ledger, self._collective, self._events = ledger, collective, events
        self.uncaptured: tuple[str, ...] = ()  # values that are not captured, and were not what they were
        self._found: Mapping[str, tuple[int, float]] | None = None
        self._error = ""
        self._own = RankVerdict(ProofVerdict.UNKNOWN)
        self._pending: PendingGather | None = None
        self._until = plan.until
        if plan.start is not None:
            header.proving = base
        elif header.proving != base:  # else a failure during its proof is not forgotten
            header.proving = 0
        if plan.reason:
            self._say(ProofVerdict.UNKNOWN, f"unproven: {plan.reason}")

    @property
    def iteration(self) -> int:
        """The iteration whose state is compared at its version point, in place of a capture; 0 for none."""
        return self._until if self._plan.start is not None else 0

    def compared(self, found: Mapping[str, tuple[int, float]] | None, error: str = "") -> None:
        """The items that differ; None if an `error` came between. Called before the fence opens."""
        self._found, self._error = found, error

    def fence(self, iteration: int) -> None:
        """The fence of `iteration`: captures are sealed and the ledger has compared. Raises LoopError."""
        if self._until and iteration > self._until:
            self._judge()
        elif self._pending is not None and not self._pending.waits(0.0):
            self._conclude()

    def close(self, completed: int) -> None:
        """Training ends in order after iteration `completed`, and no capture is running. Raises LoopError."""
        if self._until and completed >= self._until and (self._plan.start is None or self._found is not None):
            self._judge()
        if self._pending is not None:
            self._pending.waits(_LAST_SECONDS)
            self._conclude()
        self._header.proving = 0

    def _judge(self) -> None:
        """Judge this rank's state, and send the verdict: every rank calls, at the same fence."""
        until, self._until = self._until, 0
        self._header.proving = 0  # also if it differs: the next start tries again
        self._own = self._of_ledger(until) if self._plan.start is None else self._of_state(until)
        if self._own.verdict is ProofVerdict.VARIES:
            self._header.varies = True
        self._pending = self._collective.start_gather(self._own.pack())

    def _of_state(self, iteration: int) -> RankVerdict:
        judging, (compared, differing) = self._judging, self._ledger.compared(iteration)
        if self._found is None:
            reason = f"rank {self._collective.rank}: its state was not compared: {self._error or 'no version point'}"
            self._events.emit(catalogue.RESUME_UNPROVEN, iteration=iteration, reason=reason)
            return RankVerdict(ProofVerdict.UNKNOWN)
        judged = judge_state(
            iteration, judging.items, self._found, differing, compared, judging.deterministic, judging.mode
        )
        if judged.sentence and (judged.ends or judged.verdict.verdict is ProofVerdict.DIFFERS):
            self._ledger.differs(iteration, judged.sentence + in_words(self.uncaptured), judged.ends)
        return judged.verdict

    def _of_ledger(self, until: int) -> RankVerdict:
        """What the ledger has compared of all iterations after the restored one."""
        parts = {each: self._ledger.compared(each) for each in range(self._base + 1, until + 1)}
        compared = {iteration: known for iteration, (known, _) in parts.items()}
        return judge_parts(compared, parts[until][1], self._judging.items, self._judging.deterministic)

    def _conclude(self) -> None:
        """Say the job's verdict; that of this rank, if a connection was lost or a rank has ended."""
        pending, self._pending = self._pending, None
        first = self._base + (self._plan.start is None)
        try:
            assert pending is not None
            if pending.refused or pending.waits(0.0):
                raise ProtocolError("no rank knows the verdicts of all")
            self._say(*verdict_of_job([RankVerdict.unpack(packed) for packed in pending.result()], first))
        except (ProtocolError, ValueError):
            verdict, words = verdict_of_job([self._own], first)
            self._say(verdict, f"{words}; what other ranks found is not known")

    def _say(self, verdict: ProofVerdict, words: str) -> None:
        """A verdict: in the events of each node, and once in the job's log."""
        if self._judging.leads:
            kind = catalogue.RESUME_PROVEN if verdict is ProofVerdict.PROVEN else catalogue.RESUME_UNPROVEN
            self._events.emit(kind, iteration=self._plan.until or self._base, reason=words)
        if self._collective.rank == 0:
            say(words)
