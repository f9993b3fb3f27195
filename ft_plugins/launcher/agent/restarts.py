"""Decide whether a failed job is restarted: bounded by progress, not by a count. `judge` is pure.

Invariant: a job that makes progress is always restarted, unless the same failure follows every start. `judge` is the
one rule; of what holds, the first decides, and the reason names the rank and the error:

    a failure that a restart cannot cure                              refused
    `--max-restarts`, if given, is used up                            failed
    the last LIVES starts ended in the same way, near their begin     recurring: the state, or the data, leads to it
    its ranks were idle before they began: perhaps they waited        restart
    two starts failed in the same way before the first iteration      stuck
    RESTORES_OF_ONE_VERSION restores of one version, no newer one     stuck

Starts that end in the same way may each commit newer versions, so that the job seems to make progress, but the versions
hold what leads to the failure: a NaN, a bad learning rate, data that cannot be read. Only a failure that what a start
began from can explain is one: lost nodes, errors that report a lost peer, a file system or a device, and failures far
from the begin are not. The state leads to its failure always after the same number of iterations, which is known to
within one, or always at the same one; others come by chance. A signal may come from outside, so it must strike the same
rank after exactly the same number.

In: how each incarnation began and ended, and the newest restorable version at each failure; `Incarnations` gathers
them from the SMP of this node. Out: a `Verdict`.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...errors import EXIT_REFUSED
from ...smp.watch.hang import HANG

if TYPE_CHECKING:
    from .watcher import Watcher

RESTORES_OF_ONE_VERSION = 3
_GLOO_HINTS = {
    re.compile(  # a connection that was never made, not one that ended
        r"gloo.*(connectFullMesh|connecting|refused|timed out).*\b127\.\d+\.\d+\.\d+", re.IGNORECASE | re.DOTALL
    ): "gloo chose a loopback address, which no other host reaches: on several hosts set GLOO_SOCKET_IFNAME to the "
    "device between them",
    re.compile(
        r"ss_family. 2 vs 10"
    ): "gloo has an IPv4 address of this node and an IPv6 one of another, as their names "
    "resolve: correct /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME to the device between them",
    re.compile(
        r"ss_family. 10 vs 2"
    ): "gloo has an IPv6 address of this node and an IPv4 one of another, as their names "
    "resolve: correct /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME to the device between them",
}
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
        lost_peer = not self.refused and bool(_LOST_PEER.search(self.error))
        return -self.exitcode in _SECONDARY if self.exitcode < 0 else lost_peer

    @property
    def name(self) -> str:
        """For a list of the ranks that ended with another one."""
        return f"rank {self.rank}" + (" (it may only have lost a peer)" if self.secondary else "")

    def line(self, node: str = "") -> str:
        """One line for people, with rank and error; with `node`, also where to look."""
        who = f"rank {self.rank} (pid {self.pid}, node {node})" if node else f"rank {self.rank}"
        first = self.message.splitlines()[0][:_LONGEST_ERROR] if self.message else ""
        hint = "".join(f"; {words}" for pattern, words in _GLOO_HINTS.items() if pattern.search(self.message))
        return f"{who} {self.how}" + (f": {first}" if first else "") + hint

    @property
    def error(self) -> str:
        """The first line of the error, without numbers: ranks, ports, process ids, iterations."""
        return re.sub(r"\d+", "#", self.message.partition("\n")[0])


@dataclass(frozen=True)
class LostPeers:
    """Nodes that stopped responding to the SMPs, stopped ranks, or a hang. `refused`: `lost` says why no restart
    helps."""

    lost: tuple[str, ...]
    refused: bool = False

    def line(self) -> str:
        """One line for people."""
        names = ", ".join(self.lost)
        return names if self.refused or names.startswith(HANG) else f"{names} stopped responding"


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
class Life:
    """How one incarnation began and ended. `resumed`: the iteration that it restored, 0 if it began from the beginning,
    None if it ended before it had begun; `completed`: the last one that all ranks of this node have completed. `first`:
    it is certain that no node of the job had completed an iteration, or had a version."""

    end: WorkerFailure | LostPeers
    resumed: int | None = None
    completed: int = 0
    first: bool = False

    @property
    def early(self) -> tuple[object, ...] | None:
        """What is equal in two lives that ended in the same way before the job's first iteration; None if nothing shows
        that they did. Neither a signal nor a lost peer does, because the cause may be outside."""
        return (self.end.exitcode, self.end.error) if (
            self.first and isinstance(self.end, WorkerFailure) and self.end.exitcode > 0 and not self.end.secondary
        ) else None  # fmt: skip

    @property
    def idle(self) -> bool:
        """Whether it was ended because its ranks were idle before they had begun: perhaps for something outside."""
        return self.resumed is None and isinstance(self.end, LostPeers) and self.end.line().startswith(HANG)

    @property
    def after(self) -> int:
        """How many iterations it has completed."""
        return self.completed - (self.resumed or 0)

    @property
    def signature(self) -> tuple[object, ...] | None:
        """What is equal in two lives that ended in the same way because of what they began from; None if nothing says
        that they did."""
        if self.resumed is None or not 0 <= self.after <= NEAR or isinstance(self.end, LostPeers):
            return None
        if self.end.exitcode < 0:
            return self.resumed > 0, self.end.exitcode, self.end.rank, self.after
        if _LOST_PEER.search(self.end.error) or _OUTSIDE.search(self.end.message):
            return None
        return self.resumed > 0, self.end.exitcode, self.end.error


@dataclass(frozen=True)
class HeldVersion:
    """A version that is left, in memory here or in storage."""

    iteration: int
    tier: str
    certified: bool = False


@dataclass(frozen=True)
class Verdict:
    """The decision after a failure. `reason`: one line for people, '' for a restart. `recurring`: the lives that ended
    in the same way, for that status."""

    restart: bool
    status: Status
    reason: str
    recurring: Sequence[Life] = ()

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
    lives: Sequence[Life],
    versions: Sequence[int | None],
    remaining: int | None,
    held: Callable[[], Collection[HeldVersion]] = tuple,
) -> Verdict:
    """Decide after the end of the last one of `lives`.

    `versions`: as for `restores_so_far`, including this failure. `remaining`: restarts left of `--max-restarts`, None
    if progress decides. `held`: what is left to go back to, asked for only where the advice needs it.
    """
    cause = lives[-1].end
    if cause.refused:
        return Verdict(False, "refused", isinstance(cause, WorkerFailure) and cause.message.strip() or cause.line())
    if remaining is not None:
        return Verdict(True, "failed", "") if remaining > 0 else Verdict(False, "failed", cause.line())
    if found := recurring(lives):
        return Verdict(False, "recurring", advice(found, held()), found)
    if len(lives) > 1 and lives[-1].early and lives[-1].early == lives[-2].early:
        why = "the job failed twice in the same way before the first iteration"
    elif lives[-1].idle or restores_so_far(versions) < RESTORES_OF_ONE_VERSION:
        return Verdict(True, "failed", "")
    else:
        why = "the beginning was tried again" if versions[-1] is None else f"iteration {versions[-1]} was restored"
        why += f" {RESTORES_OF_ONE_VERSION} times without a newer version"
    return Verdict(
        False, "stuck",
        f"stopped: {why}: {cause.line()}; remove the cause and give the same command again, or set --max-restarts",
    )  # fmt: skip


class Incarnations:
    """Those that have ended under this ft-run, and what could be restored each time."""

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self.newest: int | None = None  # iteration in this node's memory, at the last failure here
        self._versions: list[int | None] = []  # as for `restores_so_far`

    def end(
        self,
        cause: WorkerFailure | LostPeers,
        remaining: int | None,
        watcher: Watcher | None,
        token: int,
        trained: Callable[[], bool],
    ) -> Verdict:
        """Decide after another one, `token`, has ended for `cause`. `remaining`: as for `judge`; `trained`: whether a
        node of the job had completed an iteration before, or had a version, asked for only where this node had none.
        Raises ProtectionError."""
        self.lives.append(Life(cause))
        if remaining is None and not cause.refused:
            self._versions.append(watcher.newest() if watcher else None)
            if watcher:
                resumed, completed = watcher.progress(token) or (None, 0)
                first = isinstance(cause, WorkerFailure) and not watcher.begun() and not trained()
                self.lives[-1] = Life(cause, resumed, completed, first)
        verdict = judge(self.lives, self._versions, remaining, watcher.held if watcher else tuple)
        self.newest = self._versions[-1] if self._versions else None
        del self._versions[len(self._versions) - self.lives[-1].idle :]  # such a start is no attempt at a restore
        return verdict


def recurring(history: Sequence[Life]) -> Sequence[Life]:
    """The last `LIVES` incarnations, if they ended in the same way near where they began; else none."""
    last = history[-LIVES:]
    signatures = {life.signature for life in last}
    if len(last) < LIVES or len(signatures) > 1 or None in signatures:
        return ()
    after, at = [life.after for life in last], {life.completed for life in last}
    return last if max(after) - min(after) <= 1 or len(at) == 1 else ()


def advice(same: Sequence[Life], held: Collection[HeldVersion]) -> str:
    """One line for people: what happened, and which version to go back to, one older than all that led to it."""
    first = min(life.resumed or 0 for life in same)
    older = [version for version in held if version.iteration < first]
    best = max(older, key=lambda version: (version.certified, version.iteration), default=None)
    lives = ", ".join(f"resumed at {life.resumed}, failed after {life.completed}" for life in same)
    if not first:
        how = "remove the cause and give the same command again"
    elif best is None:
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
        f"stopped: {same[-1].end.line()}; the same failure has ended {len(same)} incarnations in a row, each at most "
        f"{NEAR} iterations after its begin ({lives}), so what it begins from leads to it and no restart helps; {how}"
    )
