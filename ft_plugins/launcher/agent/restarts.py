"""Decide whether a failed job is restarted: bounded by progress, not by a count. Pure.

Invariant: a job that makes progress is always restarted, unless the same failure follows every resume (`Recurrence`).
One that does not is stopped after three restores of the same version, or when it fails twice in the same way before its
first iteration; the reason names the rank and the error. A failure that a restart cannot cure stops it at once.

A job that fails in the same way shortly after every resume is not restarted either (`Recurrence`). Each such
incarnation may commit newer versions, so that the job seems to make progress, but the versions hold what leads to the
failure: a NaN, a bad learning rate, data that cannot be read. Only a failure that the restored state can explain is
one. Lost nodes, errors that report a lost peer, a file system or a device, and failures far from the resume are not.
The state leads to its failure always after the same number of iterations, which is known to within one, or always at
the same one; others come by chance. A signal may come from outside, so it must strike the same rank after exactly the
same number.

In: how workers ended, and the newest restorable version at each failure. Out: a `Verdict`.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Collection, Sequence
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

Status = Literal["succeeded", "failed", "stuck", "recurring", "refused", "signalled", "drained", "stopped"]
LIVES = 3  # in a row
NEAR = 10  # iterations completed since the resume
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|remote process|network error|timed? ?out"
    r"|Dist(Network|Store|Backend)Error|NCCL|ProtocolError",
    re.IGNORECASE,
)
_OUTSIDE = re.compile(  # in any line: a loader's worker reports its error below another one
    "|".join(re.escape(os.strerror(number)) for number in (
        errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENODEV, errno.EBUSY,
        errno.EAGAIN, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
        errno.ENETUNREACH, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT,
    ))
    + r"|name resolution|\bECC\b|hardware (stack )?error|\bXid\b|NVLink|off the bus|GPU is lost|CUDA unknown error"
    r"|CUDA-capable device",
    re.IGNORECASE,
)  # fmt: skip


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

    @property
    def how(self) -> str:
        """How it ended, in words."""
        return f"was ended by {self.signal}" if self.exitcode < 0 else f"exited with status {self.exitcode}"

    @property
    def secondary(self) -> bool:
        """Whether it may only show that another rank or node was lost."""
        if self.exitcode < 0:
            return -self.exitcode in _SECONDARY
        return not self.refused and bool(_LOST_PEER.search(self.error))

    @property
    def name(self) -> str:
        """For a list of the ranks that ended with another one."""
        return f"rank {self.rank}" + (" (it may only have lost a peer)" if self.secondary else "")

    def line(self, node: str = "") -> str:
        """One line for people, with rank and error; with `node`, also where to look."""
        who = f"rank {self.rank} (pid {self.pid}, node {node})" if node else f"rank {self.rank}"
        first = self.message.splitlines()[0][:_LONGEST_ERROR] if self.message else ""
        hint = f"; {_GLOO_HINT}" if _GLOO_ON_LOOPBACK.search(self.message) else ""
        return f"{who} {self.how}" + (f": {first}" if first else "") + hint

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


# ---- the same failure after every resume ----


@dataclass(frozen=True)
class Life:
    """How one incarnation began and ended. `resumed`: the iteration that it restored, `completed`: the last one that
    all ranks of this node have completed; None if it began from the beginning, or ended before it had begun."""

    end: WorkerFailure | LostPeers
    resumed: int | None = None
    completed: int = 0

    @property
    def after(self) -> int:
        """How many iterations it has completed."""
        return self.completed - (self.resumed or 0)

    @property
    def signature(self) -> tuple[object, ...] | None:
        """What is equal in two lives that ended in the same way because of what they restored; None if nothing says
        that they did."""
        if self.resumed is None or not 0 <= self.after <= NEAR or isinstance(self.end, LostPeers):
            return None
        if self.end.exitcode < 0:
            return self.end.exitcode, self.end.rank, self.after
        if _LOST_PEER.search(self.end.error) or _OUTSIDE.search(self.end.message):
            return None
        return self.end.exitcode, self.end.error


@dataclass(frozen=True)
class Recurrence:
    """The same failure after each of the `resumed` iterations, ascending in time."""

    resumed: tuple[int, ...]
    completed: tuple[int, ...]
    cause: str


@dataclass(frozen=True)
class HeldVersion:
    """A version that is left, in memory here or in storage."""

    iteration: int
    tier: str
    certified: bool = False


def recurring(history: Sequence[Life]) -> Recurrence | None:
    """Whether the last `LIVES` incarnations ended in the same way near their resume; None if not."""
    last = history[-LIVES:]
    signatures = {life.signature for life in last}
    if len(last) < LIVES or len(signatures) > 1 or None in signatures:
        return None
    after, at = [life.after for life in last], {life.completed for life in last}
    if max(after) - min(after) > 1 and len(at) > 1:
        return None
    return Recurrence(
        tuple(life.resumed for life in last if life.resumed is not None),
        tuple(life.completed for life in last),
        last[-1].end.line(),
    )


def advice(found: Recurrence, held: Collection[HeldVersion]) -> str:
    """One line for people: what happened, and which version to go back to, one older than all that led to it."""
    first = min(found.resumed)
    older = [version for version in held if version.iteration < first]
    best = max(older, key=lambda version: (version.certified, version.iteration), default=None)
    pairs = zip(found.resumed, found.completed, strict=True)
    lives = ", ".join(f"resumed at {resumed}, failed after {completed}" for resumed, completed in pairs)
    if best is None:
        left = "; ".join(f"{version.iteration} in {version.tier}" for version in held) or "none"
        how = (
            f"no version older than iteration {first} is known here (left: {left}): load an older checkpoint of the "
            "framework's own, or start from the beginning, with --ftp-resume fresh"
        )
    else:
        word = "certified iteration" if best.certified else "iteration"
        bound = first if best.iteration == max(version.iteration for version in older) else best.iteration + 1
        how = f"give the same command with --ftp-resume before:{bound}, which restores {word} {best.iteration} from "
        how += best.tier
    return (
        f"stopped: {found.cause}; the same failure has ended {len(found.resumed)} incarnations in a row, each at most "
        f"{NEAR} iterations after its resume ({lives}), so the restored state leads to it and no restart helps; {how}"
    )
