"""Decide whether a job fails in the same way shortly after every resume: then its state leads to the failure. Pure.

Each such incarnation may commit newer versions, so that the job seems to make progress (`restarts`), but the versions
hold what leads to the failure: a NaN, a bad learning rate, data that cannot be read.

Invariant: only a failure that the restored state can explain is one. Lost nodes, errors that report a lost peer, a
file system or a device, and failures far from the resume are not. The state leads to its failure always after the same
number of iterations, which is known to within one, or always at the same one; others come by chance. A signal may come
from outside, so it must strike the same rank after exactly the same number.

In: how each incarnation began and ended; versions that are left. Out: `Recurrence`, and what to do about it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .restarts import LostPeers, WorkerFailure

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
