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

Invariant: `judge_start` decides, and is pure; `StartWatch` looks. What happened while this process did not run either
is left out. In: whether ranks have attached, what processors their processes have used. Out: a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ...smp.watch import liveness
from ...smp.watch.hang import GROWTH, LEAST_SECONDS, LONG_SECONDS

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
    """The watch of one ft-run. `processes`: (pid, start time) by rank, none once nothing is left to see; `idle`:
    seconds without work; `alarms`: verdicts on this start, and one more if that before hung."""

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
        self._began = self._looked = self._worked = time.monotonic()

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
            0.0 if self._late else now - self._began, self.idle, self._before, self._apart, self.alarms
        )  # fmt: skip
        self._late, self.alarms = self._late or verdict == UNATTACHED, self.alarms + bool(verdict)
        if over or ended:
            self._before, self.processes = (now - self._began if over else self._before), {}
        return verdict
