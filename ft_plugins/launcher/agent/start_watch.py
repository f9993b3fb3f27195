"""Watch ranks that have not attached yet: whether their start hangs, or goes on without anything that protects the job.

A start is over when all ranks of the node have attached. Until then no rank reports progress, so processors show it:

    hung         no rank of the node, with its children, has used a processor for as long as a start took here before
                 all attached (at least LEAST_SECONDS), or for UNKNOWN_SECONDS if that is not known; for LONG_SECONDS
                 where other nodes have ranks, which may be at work. One rank at work is enough: the others wait for it
    unattached   not all ranks have attached in LONG_SECONDS, or GROWTH times what a start took before, but they are at
                 work: the script may never do what attaches

Invariant: `judge_start` decides, and is pure; `StartWatch` looks. What happened while this process did not run either
is left out. In: whether ranks have attached, what processors their processes have used. Out: a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ...smp.watch import liveness
from ...smp.watch.hang import GROWTH, LEAST_SECONDS, LONG_SECONDS

UNKNOWN_SECONDS = 600.0
LOOK_SECONDS = 5.0  # between two looks
LEAST_USED = 0.05  # seconds of a processor in that time; a rank that looks for a file ten times a second uses a tenth
HUNG, UNATTACHED = "hung", "unattached"  # verdicts


def judge_start(seconds: float, idle: float, before: float | None = None, apart: bool = False) -> str:
    """The verdict on a start that is not over, '' for none. `seconds`: since it began; `idle`: since a rank was last
    seen at work; `before`: how long an earlier one took, None if unknown; `apart`: other nodes have ranks too."""
    usual = UNKNOWN_SECONDS if before is None else max(LEAST_SECONDS, before)
    if idle > (max(usual, LONG_SECONDS) if apart else usual):
        return HUNG
    longest = max(LONG_SECONDS, GROWTH * (before or 0.0))
    return UNATTACHED if seconds > longest and idle < LEAST_SECONDS else ""


class StartWatch:
    """The watch of one ft-run. `processes`: (pid, start time) by rank, none once nothing is left to see; `idle`:
    seconds without work."""

    def __init__(self) -> None:
        self._before: float | None = None

    def begin(self, pids: Mapping[int, int], apart: bool) -> None:
        """Watch the start of these processes, by rank."""
        self.processes = {rank: (pid, liveness.started(pid)) for rank, pid in pids.items()}
        self._apart, self._used, self.idle = apart, dict[int, float](), 0.0
        self._began = self._looked = self._worked = time.monotonic()

    def look(self, attached: Callable[[], bool], ended: bool = False) -> str:
        """Look at the processes. `attached`: whether all ranks have; `ended`: in order. Returns the verdict."""
        now = time.monotonic()
        if not self.processes or now - self._looked < LOOK_SECONDS and not ended:
            return ""
        over, use = attached(), liveness.use_of_trees({rank: pid for rank, (pid, _) in self.processes.items()})
        busy = (blocked or used - self._used.get(rank, 0.0) >= LEAST_USED for rank, (used, blocked) in use.items())
        self._worked = now if now - self._looked > 2 * LOOK_SECONDS or any(busy) else self._worked
        self._looked, self._used = now, {rank: used for rank, (used, _) in use.items()}
        self.idle = now - self._worked
        verdict = UNATTACHED if ended else judge_start(now - self._began, self.idle, self._before, self._apart)
        if over or verdict == UNATTACHED:  # which is said once
            self._before, self.processes = (now - self._began if over else self._before), {}
        return "" if over else verdict
