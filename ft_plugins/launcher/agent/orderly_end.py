"""Decide what becomes of the state in memory once the ranks of a job have ended in order, and carry that out.

    training is at its own end     memory is dropped, after a checkpoint that is due
    it is not                      the newest version is written, and memory dropped once it is in storage; without a
                                   folder for checkpoints memory is kept, as at SIGTERM
    nothing says where it ends     the same; without a folder the end of the script is taken for that of training

It is not at its own end if `ft-plugins stop` has ended it, an exit interval or a time limit of the framework, or
`sys.exit(0)` of a rank. Ranks that ended after different iterations hold versions of both: one that all of them hold is
the newest.

Invariant: memory is dropped only where nothing would be lost, or that is said.

In: what the SMP reports of its ranks. Out: a checkpoint, lines for people, an `EndPlan`; `checkpoint.missed` events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ProtectionError
from ...events import Events, say
from ...smp.serve.status import holds_nothing, newest_common
from ...smp.watch.job_state import span_text
from ...snapshot.segment.header import Ending
from .restarts import Status
from .signals import missed, report_missed
from .watcher import Job, Watcher

_ELSEWHERE = "other nodes may still resume from these snapshots; run 'ft-plugins end' when the job is over"


@dataclass(frozen=True)
class EndFacts:
    """What is known of the ranks of this node, which have ended in order. `left`: the job has ended because it was left
    by a rank of any node. `held`: the newest iteration that all ranks here hold; `empty`: memory holds nothing at
    all."""

    endings: tuple[Ending, ...] = ()
    completed: tuple[int, ...] = ()
    held: int | None = None
    empty: bool = True
    left: bool = False

    @classmethod
    def of(cls, status: Mapping[str, Any], left: bool) -> EndFacts:
        """By an SMP's `status`."""
        ranks = [each for each in status["segments"] if each["attached"]]
        newest = None if status.get("missing") else newest_common(status)
        return cls(
            tuple(Ending[each["ending"]] for each in ranks), tuple(each["completed"] for each in ranks),
            newest.iteration if newest else None, holds_nothing(status), left,
        )  # fmt: skip

    @property
    def ending(self) -> Ending:
        """How far training has come on this node."""
        if self.endings and set(self.endings) == {Ending.OWN}:
            return Ending.OWN
        apart = len(set(self.completed)) > 1
        return Ending.EARLY if self.left or apart or Ending.EARLY in self.endings else Ending.UNKNOWN


@dataclass(frozen=True)
class EndPlan:
    """Whether memory is dropped, how the job has ended, and what is said of it, '' for nothing."""

    drop: bool
    status: Status = "succeeded"
    words: str = ""


def end_plan(facts: EndFacts, outcome: dict[str, Any], job: str, kept_seconds: float) -> EndPlan:
    """What comes after a checkpoint with that `outcome`. `kept_seconds`: for how long memory is kept. Pure."""
    early = facts.ending is Ending.EARLY
    if facts.ending is Ending.OWN or not early and facts.empty:
        return EndPlan(drop=True)
    status: Status = "stopped" if early else "succeeded"
    done, state = max(facts.completed, default=0), outcome["state"]
    ended = f"training ended after iteration {done}" + ", before its own end" * early
    if facts.empty:
        return EndPlan(True, status, f"{ended}; memory holds no version")
    if state == "off" and not early:
        lost = "nothing says where it ends, so memory is dropped; --reft-checkpoint-dir stores the last iteration"
        return EndPlan(True, status, f"{ended}: {lost}")
    newest = outcome["iteration"] if state == "done" else facts.held
    what = "what is in memory" if newest is None else f"iteration {newest}"
    on = "the same command goes on from there"
    if newest is not None and newest < done:
        on += f", and computes iteration {newest + 1} to {done} again"
    if state == "done":
        return EndPlan(True, status, f"{ended}: {what} is in {outcome['path']}; {on}")
    why = f" ({reason})" if (reason := missed(outcome)) else ""
    drop = f"`ft-plugins end {job}` on each node drops it"
    return EndPlan(False, status, f"{ended}: {what} is kept in memory for {span_text(kept_seconds)}{why}; {on}; {drop}")


def conclude(watcher: Watcher, job: Job, events: Events, everywhere: bool, left: bool) -> EndPlan:
    """Write what has to be written, and say what becomes of memory. `everywhere`: the ranks of all nodes are known to
    have ended; `left`: see `EndFacts`."""
    try:
        facts = EndFacts.of(watcher.status(), left)
    except ProtectionError as error:
        return EndPlan(False, "stopped" if left else "succeeded", str(error))
    try:
        outcome = watcher.checkpoint("the job ends", only_due=facts.ending is Ending.OWN)
    except ProtectionError as error:
        outcome = {"state": "failed", "reason": str(error)}
    report_missed(events, outcome)
    plan = end_plan(facts, outcome, job.name, job.config.orphan_seconds)
    if plan.words:
        say(plan.words, alarm=True, who="ft-run: ")
    return plan if everywhere else replace(plan, drop=False, words=_ELSEWHERE)
