"""Decide in what state a job is on this node, and what a person should do about it. Pure.

Invariant: says only what is known. A job whose ft-run left no word of its end is never called ended in order, and none
that has nothing in memory is said to resume from it.

In: `JobFacts`. Out: a `JobState`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .job_history import FtRunNote, FtRunPhase

NOTHING = "nothing to do"


class State(str, Enum):
    """What a job does on this node."""

    ENDED = "ENDED"
    DRAINED = "DRAINED"
    REFUSED = "REFUSED"
    STARTING = "STARTING"
    TRAINING = "TRAINING"
    WAITING = "WAITING"
    HUNG = "HUNG"
    ORPHANED = "ORPHANED"
    UNPROTECTED = "UNPROTECTED"


@dataclass(frozen=True)
class JobFacts:
    """What is known of a job on this node. `note`: the last word of its ft-run. `holds`: memory has something to resume
    from, `newest` is the newest iteration there. `kept_seconds`: for how long the SMP keeps it while ft-run is gone.
    `trains`: all ranks have begun to train. `failed`: one has died, or is stopped (`stopped` names those ranks)."""

    job: str
    now: float
    launched: bool  # ft-run, or another launcher, lives
    note: FtRunNote | None = None
    smp_answers: bool = True
    smp_hangs: bool = False  # it lives, but does not answer
    holds: bool = False
    newest: int | None = None
    kept_seconds: float | None = None
    trains: bool = False
    failed: bool = False
    stopped: tuple[int, ...] = ()
    restarts: int = 0
    idle_seconds: float = 0.0  # without a completed iteration
    hang_seconds: float = 0.0  # after which that is a hang; 0: unknown
    alarm: bool = False  # one stands
    waits_for: str = ""  # the rank that may be at work for longer than that
    went_on: str = ""  # where, and up to which iteration, the job has continued since without this node
    had_others: bool = False  # other nodes took part with this one: the job may go on there
    node: str = ""  # in commands; '' for any


@dataclass(frozen=True)
class JobState:
    """`headline`: what is known, `remedy`: what to do; each one sentence for people."""

    state: State
    headline: str
    remedy: str = NOTHING


def job_state(facts: JobFacts) -> JobState:
    """The state of a job on this node."""
    return _running(facts) if facts.launched else _gone(facts)


def needs_restart(state: State, ft_run_alive: bool) -> bool:
    """Whether only a restart of the container would bring training on: ft-run ends a hang and replaces what died by
    itself, as long as it lives and its SMP answers."""
    if state is State.HUNG:
        return not ft_run_alive
    return state not in (State.STARTING, State.TRAINING, State.WAITING, State.DRAINED)


def _running(facts: JobFacts) -> JobState:
    note = facts.note
    phase = note.phase if note else FtRunPhase.STARTING
    if note and phase is FtRunPhase.STOPPING:  # ranks have died because they were asked to, the SMP may have, too
        return JobState(State.WAITING, note.reason)
    starts = note is not None and phase in (FtRunPhase.STARTING, FtRunPhase.WAITING) and not facts.alarm
    if not facts.smp_answers and (facts.smp_hangs or not starts):  # the loss of an SMP is an alarm at once
        why = "the SMP gives no answer" if facts.smp_hangs else "the SMP is gone"
        return JobState(State.UNPROTECTED, f"ft-run is running, but {why}; ft-run replaces it")
    if facts.stopped:
        many = len(facts.stopped) > 1
        ranks = f"rank{'s' * many} {', '.join(map(str, facts.stopped))} {'are' if many else 'is'}"
        remedy = "continue the process (kill -CONT); otherwise ft-run soon takes it for lost and starts all ranks again"
        return JobState(State.HUNG, f"{ranks} stopped by a signal; the others wait", remedy)
    if 0 < facts.hang_seconds < facts.idle_seconds:
        if facts.waits_for:
            headline = f"no iteration was completed for {facts.idle_seconds:.0f} s; {facts.waits_for}, may be at work: "
            remedy = "read its stack, see job.waiting; if it hangs, end the job and give the same command again"
            return JobState(State.WAITING, f"{headline}nothing is killed for half an hour", remedy)
        headline = f"no iteration was completed for {facts.idle_seconds:.0f} s; {facts.hang_seconds:.0f} s are a hang"
        remedy = (
            "ft-run writes the stacks of all ranks and starts them again; without ft-run: end the ranks and give the "
            "same command again"
        )
        return JobState(State.HUNG, headline, remedy)
    if note and phase is FtRunPhase.WAITING:
        remedy = note.remedy or "start the missing nodes with the same command; the job's log has it"
        return JobState(State.WAITING, f"{note.reason}, for {span_text(facts.now - note.time)} so far", remedy)
    if note and phase in (FtRunPhase.SPARE, FtRunPhase.LEAVING):
        older = f"; what is in memory here is older than what the job has ({facts.went_on})" * bool(facts.went_on)
        return JobState(State.WAITING, note.reason + older)
    if facts.failed:
        return JobState(State.STARTING, "a training process has died: the ranks start again")
    if facts.trains:
        return JobState(State.TRAINING, "all ranks of this node train")
    return JobState(
        State.STARTING, "the ranks start" + (f", restart {facts.restarts}" if facts.restarts else ""),
        "do what the last alarm says" if facts.alarm else NOTHING,
    )  # fmt: skip


def _gone(facts: JobFacts) -> JobState:
    note = facts.note if facts.note and facts.note.phase is FtRunPhase.ENDED else None
    kept = "; ".join(_kept(facts))
    if note is None:
        who = "ft-run" if facts.note else "the launcher"
        state = State.ORPHANED if facts.holds or facts.smp_answers or facts.smp_hangs else State.ENDED
        return JobState(state, f"{who} is gone and left no reason: killed, perhaps; {kept}", _resume(facts))
    ago = f"{span_text(facts.now - note.time)} ago"
    if note.status in ("refused", "recurring"):
        remedy = f"remove the reason, then {_resume(facts)}"
        return JobState(State.REFUSED, f"{ago}, exit status {note.exit_status}: {note.reason}; {kept}", remedy)
    headline = f"{ago}, {note.status}, exit status {note.exit_status}"
    headline += f": {note.reason}" if note.reason else ""
    if note.status in ("succeeded", "drained"):
        state = State.DRAINED if note.status == "drained" else State.ENDED
        if not facts.smp_answers and not facts.holds:
            return JobState(state, headline)
        remedy = f"when the job is over on all nodes: {_drop(facts)}"
        return JobState(state, f"{headline}; {kept}", remedy)
    return JobState(State.ENDED, f"{headline}; {kept}", _resume(facts))


def _kept(facts: JobFacts) -> Iterator[str]:
    """What memory holds, and for how long."""
    if facts.smp_hangs:
        yield "the SMP gives no answer, so what memory holds is not known"
        return
    if not facts.holds:
        yield "nothing is in memory" if not facts.smp_answers else "memory holds no version"
        return
    what = "memory" if facts.newest is None else f"iteration {facts.newest} in memory"
    what += f", older than what the job has without this node ({facts.went_on})," if facts.went_on else ""
    if facts.kept_seconds is not None:
        yield f"{what} is kept for another {span_text(facts.kept_seconds)}"
    elif facts.smp_answers:
        yield f"{what} is kept for a while"
    else:
        yield f"{what} is kept until a sweep: the SMP is gone too"


def _resume(facts: JobFacts) -> str:
    """How to go on, or to give up."""
    if facts.holds:
        again = (
            "the command that the job's log names to take part in it again, perhaps as a spare"
            if facts.went_on
            else "the same command again to resume from memory"
        )
        return f"give {again}, or drop it: {_drop(facts)}"
    again = (
        "if the job goes on without this node, give the command that its log there names to bring this node back; else "
        * facts.had_others
    ) + "give the same command again: it starts from a checkpoint if storage has one, else from the beginning"
    return f"{again}; or {_drop(facts)}" if facts.smp_answers else again


def _drop(facts: JobFacts) -> str:
    """The command that drops what is in memory."""
    if facts.smp_answers:
        return f"ft-plugins end {facts.job}" + f" --node {facts.node}" * bool(facts.node)
    return f"ft-plugins sweep --job {facts.job} --older-than 0"


def span_text(seconds: float) -> str:
    """A duration as text, in the largest unit of which it has two."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
