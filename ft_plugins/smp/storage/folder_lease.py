"""Keep this job's lease on its folder of checkpoints while the job lives, and notice when another run has it.

Invariant: nothing is begun or completed without the lease. It is renewed by the SMP of rank 0, or by another one that
sees it unchanged for longer, so that it outlives a lost node; not once ft-run and trainers are gone, so that it runs
out. A run that finds itself replaced reports that once, and trains on.

In: the opened lineages of segments, the folder. Out: the lease's file; the event `lease.lost`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...base.files import make_private
from ...errors import StorageError
from ...events import catalogue
from ...snapshot.checkpoint import lease
from ...snapshot.checkpoint.lease import Claim, Lease
from ...snapshot.segment.segment import Segment, newest_run
from ..serve.node_context import NodeContext
from ..watch import liveness

LOOK_SECONDS = lease.HOLD_SECONDS / 6  # between two looks on the node of rank 0, each of which renews the lease


class FolderLease:
    """The lease as one node keeps it. `lost`: why this run writes no more checkpoints, '' if it does. Any thread may
    call; one that finds the folder stalled holds up the others that do."""

    def __init__(self, smp: NodeContext, watched: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        """`watched`: pid and start of this node's ft-run."""
        self._smp, self._watched = smp, watched
        self._newest = (0, "")  # lineage and run that this node has opened
        self._seen: Lease | None = None
        self._held, self._looked = 0.0, 0.0  # seconds for which that did not change; when it was seen (monotonic)
        self._next = float("-inf")  # monotonic: of the next look
        self._lock = threading.Lock()
        self.lost = ""

    def keep(self, base: Path, segments: Mapping[int, Segment], world_size: int, writes: bool = False) -> None:
        """Look at the lease and renew it: each LOOK_SECONDS on the node of rank 0, less often on others; and always
        before something is written (`writes`). Raises StorageError then, unless this run has it; OSError."""
        with self._lock:
            if writes or time.monotonic() >= self._next:
                self._look(base, segments, world_size, writes)

    def _look(self, base: Path, segments: Mapping[int, Segment], world_size: int, writes: bool) -> None:
        order = min(segments) / world_size
        self._next = time.monotonic() + LOOK_SECONDS * (1.5 + order / 2 if order else 1.0)
        headers = [segment.header for segment in segments.values()]
        self._newest = max([self._newest, *((header.opened.lineage, header.opened.run) for header in headers)])
        (lineage, run), owners = self._newest, [header.owner for header in headers]
        lives = [(pid, began) for pid, began in (self._watched(), *owners) if began and liveness.started(pid) == began]
        trains = any(owner in lives for owner in owners)  # else what another node does in the next round is no loss
        opened = trains and all(header.opened.token == header.token for header in headers)
        processes = tuple(map(liveness.identified, (os.getpid(), *(pid for pid, _ in lives))))
        now, alone = time.time(), len(segments) == world_size
        mine = Lease(lineage, run, (self._smp.node,), alone, processes, now, now)
        waited, seen = min(time.monotonic() - self._looked, 2 * LOOK_SECONDS), lease.newest(base, lineage)
        unchanged = seen == self._seen
        self._held, self._looked = self._held + waited if unchanged else 0.0, time.monotonic()
        claim = partial(lease.in_training, run, lineage, opened, self._seen or seen, unchanged=self._held)
        if claim(now=seen) is Claim.TAKE and (lives and lineage or writes):
            make_private(base)
            with suppress(FileExistsError):  # of two nodes that take it, one is faster
                lease.take(base, mine, seen)
            seen = lease.newest(base, lineage)
        decision, self._seen, released = claim(now=seen), seen, alone and not lives
        if decision is Claim.KEEP and seen is not None:
            due = 0 in segments or unchanged or seen.released
            if lives and due or released and not seen.released:
                held = seen if seen.run else mine
                lease.renew(base, replace(held, alone=alone, processes=processes, renewed=now, released=released))
        reason = f"{base} is now used by {seen}; this one, run {run[:8]}, writes no more checkpoints there"
        if decision is Claim.REFUSE and trains and not self.lost:
            self._smp.events.emit(catalogue.LEASE_LOST, reason=reason)
            self._smp.alarms.say("lease", catalogue.LEASE_LOST, reason)
        if decision is not Claim.WAIT:
            self.lost = reason if decision is Claim.REFUSE else ""
        if writes and decision is not Claim.KEEP:
            raise StorageError(self.lost or f"{base}: it is not known yet whether another start uses it: {seen}")

    def release(self, base: Path, segments: Iterable[Segment]) -> None:
        """The job has ended in order: another run may use the folder at once. Raises OSError."""
        with self._lock:
            mine = max(self._newest, newest_run(segments))
            seen = lease.newest(base, mine[0])
            if seen is not None and (seen.lineage, seen.run) == mine:
                lease.renew(base, replace(seen, renewed=time.time(), released=True))
