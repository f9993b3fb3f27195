"""Decide whether a failed job is restarted: bounded by progress, not by a count. Pure.

Invariant: a job that makes progress is always restarted, unless the same failure follows every resume (`recurring`).
One that does not is stopped after three restores of the same version, or when it fails twice in the same way before its
first iteration; the reason names the rank and the error. A failure that a restart cannot cure stops it at once.

In: how workers ended, and the newest restorable version at each failure. Out: a `Verdict`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...errors import EXIT_REFUSED
from ...smp.watch.hang import HANG

RESTORES_OF_ONE_VERSION = 3
_GLOO_ON_LOOPBACK = re.compile(  # a connection that was never made, not one that ended
    r"gloo.*(connectFullMesh|connecting|refused|timed out).*\b127\.\d+\.\d+\.\d+", re.IGNORECASE | re.DOTALL
)
_GLOO_HINT = (
    "gloo chose a loopback address, which no other host reaches: on several hosts set GLOO_SOCKET_IFNAME to the device "
    "between them"
)
_LONGEST_ERROR = 300  # characters of an error in a line
_SECONDARY = (signal.SIGABRT, signal.SIGTERM)  # from a watchdog that saw a dead peer, from a shutdown

Status = Literal["succeeded", "failed", "stuck", "recurring", "refused", "signalled"]


@dataclass(frozen=True)
class WorkerFailure:
    """How one worker of this node failed. `time`: when it reported its error, or was found dead (seconds)."""

    rank: int
    local_rank: int
    pid: int
    exitcode: int  # negative: the signal, as in subprocess
    message: str
    time: float

    @property
    def signal(self) -> str:
        """Name of the signal that ended it; '' for none."""
        return signal.Signals(-self.exitcode).name if self.exitcode < 0 else ""

    @property
    def refused(self) -> bool:
        """Whether it ended with an error that a restart cannot cure."""
        return self.exitcode == EXIT_REFUSED

    def line(self, node: str = "") -> str:
        """One line for people, with rank and error; with `node`, also where to look."""
        who = f"rank {self.rank} (pid {self.pid}, node {node})" if node else f"rank {self.rank}"
        how = f"was ended by {self.signal}" if self.exitcode < 0 else f"exited with status {self.exitcode}"
        first = self.message.splitlines()[0][:_LONGEST_ERROR] if self.message else ""
        hint = f"; {_GLOO_HINT}" if _GLOO_ON_LOOPBACK.search(self.message) else ""
        return f"{who} {how}" + (f": {first}" if first else "") + hint

    @property
    def error(self) -> str:
        """The first line of the error, without numbers: ranks, ports, process ids, iterations."""
        return re.sub(r"\d+", "#", self.message.partition("\n")[0])

    def repeats(self, other: WorkerFailure) -> bool:
        """Whether this is the same failure as `other`: the same exit status and error. A signal is never the same,
        because it may come from outside."""
        return self.exitcode > 0 and (self.exitcode, self.error) == (other.exitcode, other.error)


@dataclass(frozen=True)
class LostPeers:
    """Nodes that stopped responding to the SMPs, stopped ranks, or a hang."""

    lost: tuple[str, ...]

    def line(self) -> str:
        """One line for people."""
        names = ", ".join(self.lost)
        return names if names.startswith(HANG) else f"{names} stopped responding"


def root_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The failure that caused the others. Raises ValueError if `failures` is empty.

    A refusal is always the cause. Next comes a worker killed by a signal, except those that watchdogs send: peers only
    report that they lost it. Otherwise it is the earliest failure.
    """

    def order(failure: WorkerFailure) -> tuple[bool, bool, float]:
        killed = failure.exitcode < 0 and -failure.exitcode not in _SECONDARY
        return (not failure.refused, not killed, failure.time)

    return min(failures, key=order)


def restores_so_far(versions: Sequence[int | None]) -> int:
    """How often the version to be restored next, the last of `versions`, was already restored without progress since.

    `versions` holds the newest restorable iteration at each failure (None: only the beginning); each but the last was
    restored once. Counting starts at the first occurrence of the newest one: before that, there was progress.
    """
    ages = [0 if version is None else version for version in versions]
    since = ages.index(max(ages))
    return ages[since:-1].count(ages[-1])


@dataclass(frozen=True)
class Verdict:
    """The decision after a failure. `reason`: one line for people, '' for a restart."""

    restart: bool
    status: Status
    reason: str

    def what_comes(self, held: int | None, left: int | None) -> str:
        """For people, after the cause. `held`: the newest iteration in this node's memory. `left`: restarts of
        `--max-restarts`, after this one; None if progress decides."""
        if not self.restart:
            return "the job stops"
        if left is not None:
            return f"all workers restart ({left} restarts are left)"
        if held is None:
            return "all workers restart; this node has nothing in memory to resume from"
        return f"all workers restart, and resume from memory (iteration {held} is there on this node)"


def judge(
    cause: WorkerFailure | LostPeers,
    versions: Sequence[int | None],
    remaining: int | None,
    before: WorkerFailure | None = None,
) -> Verdict:
    """Decide after a failure with this `cause`.

    `versions`: as for `restores_so_far`, including this failure. `remaining`: restarts left of `--max-restarts`, None
    if progress decides. `before`: the cause of the previous failure, if the job had neither a version nor an iteration
    at both.
    """
    if isinstance(cause, WorkerFailure) and cause.refused:
        return Verdict(False, "refused", cause.message.strip() or cause.line())
    if remaining is not None:
        return Verdict(True, "failed", "") if remaining > 0 else Verdict(False, "failed", cause.line())
    if before is not None and isinstance(cause, WorkerFailure) and cause.repeats(before):
        reason = (
            f"stopped: the job failed twice in the same way before the first iteration: {cause.line()}; "
            "remove the cause and give the same command again, or set --max-restarts"
        )
        return Verdict(False, "stuck", reason)
    if restores_so_far(versions) < RESTORES_OF_ONE_VERSION:
        return Verdict(True, "failed", "")
    restored = "the beginning was tried again" if versions[-1] is None else f"iteration {versions[-1]} was restored"
    reason = (
        f"stopped: {restored} {RESTORES_OF_ONE_VERSION} times without a newer version: {cause.line()}; "
        "remove the cause and give the same command again, or set --max-restarts"
    )
    return Verdict(False, "stuck", reason)
