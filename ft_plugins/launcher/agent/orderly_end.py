"""Decide what becomes of the state in memory once the ranks of a job have ended in order. Pure.

    training is at its own end     memory is dropped, after a checkpoint that is due
    it is not                      the newest version is written, and memory dropped once it is in storage; without a
                                   folder for checkpoints memory is kept, as at SIGTERM
    nothing says where it ends     the same; without a folder the end of the script is taken for that of training

It is not at its own end if `ft-plugins stop` has ended it, an exit interval or a time limit of the framework, or
`sys.exit(0)` of a rank. Ranks that ended after different iterations hold versions of both: one that all of them hold is
the newest.

Invariant: memory is dropped only where nothing would be lost, or that is said.

In: what the SMP reports of its ranks, what became of a checkpoint. Out: an `EndPlan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...smp.serve.status import holds_nothing, newest_common
from ...smp.watch.job_state import span_text
from ...snapshot.segment.header import AT_END, EARLY, UNKNOWN
from .restarts import Status
from .signals import missed


@dataclass(frozen=True)
class EndPlan:
    """Whether memory is dropped, how the job has ended, and what is said of it, '' for nothing."""

    drop: bool
    status: Status = "succeeded"
    words: str = ""


def have_left(ranks: Collection[int], status: Mapping[str, Any]) -> bool:
    """Whether one of these ranks, which have ended with status 0, has done so before the end of training, by an SMP's
    `status`."""
    return any(each["rank"] in ranks and each["ending"] == EARLY for each in status["segments"])


def reached(status: Mapping[str, Any], left: bool) -> tuple[int, int, int | None]:
    """How far the ranks have come that have ended in order, by an SMP's `status`: as `Header.ending`; the last
    iteration that any of them has completed, and the newest one that all hold. `left`: a rank of the job, here or on
    another node, has left it."""
    ranks = [each for each in status["segments"] if each["attached"]]
    endings, completed = {each["ending"] for each in ranks}, {each["completed"] for each in ranks}
    newest = None if status.get("missing") else newest_common(status)
    ending = EARLY if left or EARLY in endings or len(completed) > 1 else UNKNOWN
    over = endings == {AT_END} or holds_nothing(status)
    return AT_END if over else ending, max(completed, default=0), newest.iteration if newest else None


def end_plan(
    ending: int, done: int, held: int | None, outcome: dict[str, Any], job: str, kept_seconds: float
) -> EndPlan:
    """What comes after a checkpoint with that `outcome`; the others as `reached` returns them. `kept_seconds`: for how
    long memory is kept."""
    if ending == AT_END:
        return EndPlan(
            True, words=f"the job succeeded: training ended after iteration {done}; exit status 0" * bool(done)
        )
    early, stored = ending == EARLY, outcome["state"] == "done"
    status: Status = "stopped" if early else "succeeded"
    newest = outcome["iteration"] if stored else held
    what = f"training ended after iteration {done}{', before its own end' * early}: "
    what += "what is in memory" if newest is None else f"iteration {newest}"
    on = "the same command goes on from there" + (
        f", and computes up to iteration {done} again" if newest is not None and newest < done else ""
    )
    if stored:
        return EndPlan(True, status, f"{what} is in {outcome['path']}; {on}")
    if outcome["state"] == "off" and not early:
        what += " is dropped, since nothing says where training ends; --reft-checkpoint-dir stores the last iteration"
        return EndPlan(True, status, what)
    kept = f"{what} is kept in memory for {span_text(kept_seconds)}" + f" ({missed(outcome)})" * bool(missed(outcome))
    return EndPlan(False, status, f"{kept}; {on}; `ft-plugins end {job}` on each node drops it")
