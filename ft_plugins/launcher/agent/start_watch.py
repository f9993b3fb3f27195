"""Watch ranks that have not attached yet: whether their start hangs, or goes on without anything that protects the job.

A start is over when all ranks of the node have attached. Until then no rank reports progress, so processors show it:

    hung         no rank of the node, with its children, has used a processor for IDLE_SECONDS, or GROWTH times as long
                 as a start took here before all attached; for at least LONG_SECONDS where other nodes have ranks, since
                 one of those may be at work for long, unseen here, and a restart would undo it. One rank at work is
                 enough: the others wait for it. Each verdict makes the next one's time GROWTH times as long
    unattached   not all ranks have attached in LONG_SECONDS, or GROWTH times what a start took before, but they are at
                 work: the script may never do what attaches

Ranks that are idle may be healthy, and wait for a service outside. So only the first verdict, if it is a hang, starts
them again, which costs no more than the start. After it they may wait again, or train unprotected: an alarm is all.

Invariant: `judge_start` decides, and is pure; `StartWatch` looks, `answer` says what it finds. What happened while this
process did not run either is left out. In: whether ranks have attached, what processors their processes have used. Out:
a verdict; events, and why ranks have to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ...events import Events, catalogue
from ...smp.watch import liveness, stacks
from ...smp.watch.hang import GROWTH, HANG, LEAST_SECONDS, LONG_SECONDS
from .restarts import LostPeers
from .watcher import Job

IDLE_SECONDS = 600.0
LOOK_SECONDS = 5.0  # between two looks
LEAST_USED = 0.05  # seconds of a processor in that time; a rank that looks for a file ten times a second uses a tenth
HUNG, UNATTACHED, ATTACHED = "hung", "unattached", "attached"  # verdicts; the last one ends an alarm


def judge_start(seconds: float, idle: float, before: float = 0.0, apart: bool = False, alarms: int = 0) -> str:
    """The verdict on a start that is not over, '' for none. `seconds`: since it began; `idle`: since a rank was last
    seen at work; `before`: how long an earlier one took, 0 if unknown; `apart`: other nodes have ranks too; `alarms`:
    see `StartWatch`."""
    if idle > max(LONG_SECONDS if apart else IDLE_SECONDS, GROWTH * before) * GROWTH**alarms:
        return HUNG
    return UNATTACHED if seconds > max(LONG_SECONDS, GROWTH * before) and idle < LEAST_SECONDS else ""


class StartWatch:
    """The watch of one ft-run. `processes`: (pid, start time) by rank, none once nothing is left to see; `began`: when
    they did (monotonic); `idle`: seconds without work; `alarms`: verdicts on this start, and one more if that before
    hung."""

    def __init__(self) -> None:
        self._before, self.processes = 0.0, dict[int, tuple[int, int]]()

    def begin(self, pids: Mapping[int, int], apart: bool, again: bool = False) -> None:
        """Watch the start of these processes, by rank. `again`: the ranks before were not killed for one that failed,
        but for a hang, or for other nodes; if they had not attached either, this start is the next in a row."""
        self.alarms, self.processes = int(again and bool(self.processes)), {
            rank: (pid, liveness.started(pid)) for rank, pid in pids.items()
        }  # fmt: skip
        self._apart, self._used, self.idle, self._late = apart, dict[int, float](), 0.0, False
        self._row = self.alarms
        self.began = self._looked = self._worked = time.monotonic()

    def look(self, attached: Callable[[], bool], ended: bool = False) -> str:
        """Look at the processes. `attached`: whether all ranks have; `ended`: in order. Returns the verdict."""
        now = time.monotonic()
        if not self.processes or now - self._looked < LOOK_SECONDS and not ended:
            return ""
        over, use = attached(), liveness.use_of_trees({rank: pid for rank, (pid, _) in self.processes.items()})
        self._worked = now if now - self._looked > 2 * LOOK_SECONDS or any(
            blocked or used - self._used.get(rank, 0.0) >= LEAST_USED for rank, (used, blocked) in use.items()
        ) else self._worked  # fmt: skip
        self._used = {rank: used for rank, (used, _) in use.items()}
        self._looked, self.idle = now, now - self._worked
        verdict = ATTACHED * (self.alarms > self._row) if over else UNATTACHED if ended else judge_start(
            0.0 if self._late else now - self.began, self.idle, self._before, self._apart, self.alarms
        )  # fmt: skip
        self._late, self.alarms = self._late or verdict == UNATTACHED, self.alarms + bool(verdict)
        if over or ended:
            self._before, self.processes = (now - self.began if over else self._before), {}
        return verdict


def answer(
    verdict: str, start: StartWatch, job: Job, token: int, events: Events, ended: bool, last: bool
) -> LostPeers | None:
    """Say what a verdict on a start means. `ended`: its ranks have, in order; `last`: nothing may start them again.
    Returns why they have to end, None if they go on."""
    seconds, kind = round(time.monotonic() - start.began, 1), catalogue.RANKS_UNATTACHED
    if verdict == HUNG and job.config.hang_seconds != 0:
        return _report_hang(start, job, token, events, start.alarms > 1 or last)
    if verdict == ATTACHED:
        events.emit(catalogue.JOB_ADVANCED, iteration=0, seconds=seconds)
    if verdict == UNATTACHED:
        events.emit(kind, seconds=seconds)
        if ended and job.config.require_protection:
            return LostPeers((f"--ftp-require-protection: {kind.what} {kind.action}",), refused=True)
    return None


def _report_hang(start: StartWatch, job: Job, token: int, events: Events, waits: bool) -> LostPeers | None:
    """Write stacks, and report the hang; `waits`: only that the ranks wait. They may wait for something outside, so the
    job is never ended for it."""
    ranks, folder = sorted(start.processes), Path()
    with suppress(OSError):
        folder = stacks.dump(job.run_dir, token, start.processes)
    places = {rank: stacks.place(folder / f"rank{rank}.txt") for rank in ranks[:4]}
    idle = f"the start on node {job.node}: no rank has used a processor for {start.idle:.0f} s"
    said = "; ".join([idle, *(f"rank {rank} stands in {place}" for rank, place in places.items() if place)])
    facts = {
        "iteration": 0,
        "phase": "starting",
        "seconds": round(start.idle, 1),
        "stacks": str(folder),
        "reason": f"{said}; stacks in {folder}",
    }
    if waits:
        events.emit(catalogue.JOB_WAITING, about=ranks[0], **facts)
        return None
    events.emit(catalogue.JOB_HUNG, about=ranks[0], culprit=job.node, even=True, ranks=ranks, **facts)
    return LostPeers((f"{HANG}{said}",))
