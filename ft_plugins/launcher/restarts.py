"""Whether a failed job is started again: bounded by progress, not by a count. Pure.

Invariant: a job that gets further is restarted for ever; one that does not is stopped after three restores of the same
version, or when it fails twice in the same way before its first iteration, with the rank and the error that stopped it.
What no restart can cure is never restarted.

In: how workers ended, and the newest restorable version at each failure. Out: a `Verdict`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import EXIT_REFUSED

RESTORES_OF_ONE_VERSION = 3
_SECONDARY = (signal.SIGABRT, signal.SIGTERM)  # of a watchdog that saw a dead peer, of a shutdown

Status = Literal["succeeded", "failed", "stuck", "refused", "signalled"]


@dataclass(frozen=True)
class WorkerFailure:
    """How one worker of this node ended by itself. `time`: when it reported its error, or was found dead (seconds)."""

    rank: int
    local_rank: int
    pid: int
    exitcode: int  # negative: the signal, as in subprocess
    message: str
    time: float

    @property
    def signal(self) -> str:
        """Name of the signal that ended it, '' if none did."""
        return signal.Signals(-self.exitcode).name if self.exitcode < 0 else ""

    @property
    def refused(self) -> bool:
        """Whether it ended with an error which a restart cannot cure."""
        return self.exitcode == EXIT_REFUSED

    def line(self) -> str:
        """One line for people, naming rank and error."""
        how = f"was ended by {self.signal}" if self.exitcode < 0 else f"exited with status {self.exitcode}"
        first = self.message.splitlines()[0] if self.message else ""
        return f"rank {self.rank} {how}" + (f": {first}" if first else "")

    def repeats(self, other: WorkerFailure) -> bool:
        """Whether a worker ended in the same way as another one before: by its own status, with the same error but for
        numbers (ranks, ports, process ids). A signal may come from outside: it repeats nothing."""
        own, others = (
            (failure.exitcode, re.sub(r"\d+", "#", failure.message.partition("\n")[0])) for failure in (self, other)
        )
        return self.exitcode > 0 and own == others


@dataclass(frozen=True)
class LostPeers:
    """The snapshot processes hear nothing any more of `lost`: nodes, or ranks that were stopped."""

    lost: tuple[str, ...]

    def line(self) -> str:
        """One line for people."""
        return f"nothing is heard any more of {', '.join(self.lost)}"


def root_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The failure that the others followed from. Raises ValueError when there is none.

    A refusal is always the cause. A worker killed by a signal died of nothing that its peers did (but for the signals
    of watchdogs); those that lost a peer report errors of their own a moment later. Else the first one.
    """

    def order(failure: WorkerFailure) -> tuple[bool, bool, float]:
        killed = failure.exitcode < 0 and -failure.exitcode not in _SECONDARY
        return (not failure.refused, not killed, failure.time)

    return min(failures, key=order)


def restores_so_far(versions: Sequence[int | None]) -> int:
    """How often the version to be restored next, the last of `versions`, was restored already without a newer one.

    `versions` holds the newest restorable iteration at each failure (None: only the beginning); each but the last was
    restored once. Counting starts where the newest of all was first seen: whatever was newer is progress.
    """
    ages = [0 if version is None else version for version in versions]
    since = ages.index(max(ages))
    return ages[since:-1].count(ages[-1])


@dataclass(frozen=True)
class Verdict:
    """What happens after a failure. `reason` is one line for people, '' for a restart."""

    restart: bool
    status: Status
    reason: str


def judge(
    cause: WorkerFailure | LostPeers,
    versions: Sequence[int | None],
    remaining: int | None,
    before: WorkerFailure | None = None,
) -> Verdict:
    """Decide after a failure caused by `cause`.

    `versions` as for `restores_so_far`, this failure's included. `remaining` restarts are left where `--max-restarts`
    was given, None where progress decides. `before` caused the failure before this one, if the job had neither a
    version nor an iteration at either of them.
    """
    if isinstance(cause, WorkerFailure) and cause.refused:
        return Verdict(False, "refused", cause.message.strip() or cause.line())
    if remaining is not None:
        return Verdict(True, "failed", "") if remaining > 0 else Verdict(False, "failed", cause.line())
    if before is not None and isinstance(cause, WorkerFailure) and cause.repeats(before):
        reason = (
            f"stopped, as it failed twice in the same way before the first iteration: {cause.line()}; "
            "remove the cause and give the same command again, or set --max-restarts"
        )
        return Verdict(False, "stuck", reason)
    if restores_so_far(versions) < RESTORES_OF_ONE_VERSION:
        return Verdict(True, "failed", "")
    place = "the beginning was tried again" if versions[-1] is None else f"iteration {versions[-1]} was restored"
    reason = (
        f"stopped, as {place} {RESTORES_OF_ONE_VERSION} times without a newer version: {cause.line()}; "
        "remove the cause and give the same command again, or set --max-restarts"
    )
    return Verdict(False, "stuck", reason)
