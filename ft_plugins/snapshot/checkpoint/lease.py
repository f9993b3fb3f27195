"""The lease on a job's folder of checkpoints: which run may write there, and whether it still does. Decisions are pure.

    lease-<lineage>.json    of the run that has opened that lineage: identity, nodes, times, the processes of
                            the node that renewed it last; renewed while the run lives, `released` at its orderly end

Invariant: the file of the largest lineage holds. A lineage is taken by creating its file, which fails if it is there:
no lineage is opened twice in a folder, and a writer whose lineage is not the largest finds that it was replaced. The
holder of a lease that does not change for HOLD_SECONDS is gone; clocks of two machines are never compared.

In: a job's folder in storage; what a run has in memory. Out: `Lease`s, decisions. Raises OSError.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ...base import files
from ...base.intake import Count, Flag, RunIdentity, Text, Unfit, typed
from ...errors import StorageError

HOLD_SECONDS = 30.0  # for which a lease holds that is not renewed
_Time = Annotated[float, Field(strict=True, ge=0, le=1e11, allow_inf_nan=False)]
_NAME = re.compile(r"lease-(0|[1-9][0-9]{0,14})\.json")


@dataclass(frozen=True)
class Lease:
    """Times are seconds since the epoch by the holder's clock, for people. `alone`: the run has one node, that of
    `processes` (`liveness.identified`): which took or renewed it last, and those that it found to live."""

    lineage: Count
    run: RunIdentity
    nodes: tuple[Text, ...] = ("unknown nodes",)
    alone: Flag = False
    processes: tuple[Text, ...] = ()
    taken: _Time = 0.0
    renewed: _Time = 0.0
    released: Flag = False

    def __str__(self) -> str:
        """For people."""
        begun, last = (time.strftime("%F %T", time.localtime(at)) for at in (self.taken, self.renewed))
        last = f"{'ended in order' if self.released else 'last renewed'} at {last}"
        return f"run {self.run[:8] or 'unknown'} on {', '.join(self.nodes)}, since {begun}, {last} by its clock"


class Claim(Enum):
    """What a run does about the lease in its folder."""

    TAKE = "take"
    KEEP = "keep"
    WAIT = "wait"
    REFUSE = "refuse"  # another run has it


def at_start(
    run: str, lineage: int, first: Lease | None, now: Lease | None, unchanged: float, holder_gone: bool
) -> Claim:  # fmt: skip
    """For a start with memory of `lineage` of `run` (0 and '': none), which saw the lease as `first` and as `now`, the
    same for `unchanged` seconds. `holder_gone`: its processes are known to be dead."""
    if now is None or now.released or run and run == now.run and lineage >= now.lineage:
        return Claim.TAKE  # its own: a run that opened a later lineage would have left a later lease
    if now != first:
        return Claim.REFUSE
    # its own start may have been killed before it opened that lineage: then no SMP has renewed the lease
    gone = holder_gone and (now.alone or run == now.run and now.taken == now.renewed)
    return Claim.TAKE if gone or unchanged >= HOLD_SECONDS else Claim.WAIT


def in_training(
    run: str, lineage: int, opened: bool, first: Lease | None, now: Lease | None, unchanged: float
) -> Claim:  # fmt: skip
    """For a run whose newest lineage this is. `opened`: by the incarnation that runs now, whose trainers live; else a
    start is under way, or this node has no part in it. `first`, `now`, `unchanged`: see `at_start`."""
    if now is None or now.lineage < lineage:  # its folder could not be reached at its start
        own = now is None or now.run in ("", run)
        return Claim.TAKE if own else at_start(run, lineage, first, now, unchanged, holder_gone=False)
    if now.lineage > lineage and not opened:
        return Claim.WAIT
    return Claim.KEEP if now.lineage == lineage and now.run in ("", run) else Claim.REFUSE


def newest(base: Path, known: int = 0) -> Lease | None:
    """The lease of a job's folder; None without one. One that cannot be read is of run ''. `known`: a lineage whose
    lease is looked for by name: a network file system may list it a minute late."""
    named = (_NAME.fullmatch(path.name) for path in base.glob("lease-*.json"))
    for lineage in sorted({known, *(int(name[1]) for name in named if name)}, reverse=True):
        try:
            return typed(Lease, files.read_digested(_path(base, lineage)))
        except FileNotFoundError:  # of `known`; or just replaced
            continue
        except (StorageError, Unfit):  # just being written, or damaged
            return Lease(lineage, "")
    return None


def take(base: Path, lease: Lease, before: Lease | None) -> None:
    """Take the lineage of `lease`, and remove the lease that was there `before`. Raises FileExistsError if it is taken,
    or a larger one."""
    open(_path(base, lease.lineage), "x", opener=files.private).close()
    renew(base, lease)
    if (now := newest(base, lease.lineage)) is None or now.lineage != lease.lineage:
        raise FileExistsError(f"{base}: a later lineage than {lease.lineage} is taken")
    if before is not None:
        _path(base, before.lineage).unlink(missing_ok=True)


def renew(base: Path, lease: Lease) -> None:
    """Replace the content of a lease that is held."""
    files.write_digested(_path(base, lease.lineage), asdict(lease), durable=False, shared=True)


def _path(base: Path, lineage: int) -> Path:
    return base / f"lease-{lineage}.json"
