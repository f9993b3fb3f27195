"""A-EDiT on one rank: its replica's own iterations, and the synchronisations that all replicas have agreed on.

Versions are numbered by synchronisations, because replicas that train at their own pace have no iteration in common:
version w + n is that of the n-th synchronisation after w, where w counts what came before (the warm-up). During the
warm-up all ranks are in step, and versions are iterations.

The first rank of each replica keeps its time, announces that it is ready, and learns when all are. The other ranks of
the replica get its decision from it after every iteration, so all of them join at the same one. That costs a gather of
one number in the replica, between processors; nothing between replicas.

Invariant: `WorkDone` is equal on all ranks of the job after each synchronisation, so all of them end at the same one.

In: links between the first ranks, within the replica, within the sync group. Out: answers to LocalSgd; events' fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...errors import ConfigError
from ...sync.background import Background, BackgroundTask
from ...sync.links import Links
from ...sync.rounds.local_policy import LocalSgdPolicy
from ...sync.rounds.own_pace import Timekeeper, WorkDone, next_period
from .sync_groups import PeerWait


class GatheredReadiness:
    """Announcements by a gather of the first ranks, on a thread of its own: it ends when all of them have called."""

    def __init__(self, first_ranks: Links, background: Background) -> None:
        self._links, self._background = first_ranks, background
        self._gather: BackgroundTask[object] | None = None

    def announce(self) -> None:
        self._gather = self._background.start(lambda: self._links.gather_job([1.0]))

    def all_ready(self, patience: float) -> bool:
        """Raises the error of the gather: another replica is lost."""
        if self._gather is None or not self._gather.ends_within(patience):
            return False
        self._gather.wait()
        return True


class ClockedReplica:
    """One rank of a replica that trains at its own pace."""

    def __init__(
        self, policy: LocalSgdPolicy, place: int, peers: Links, replica: Links, keeper: Timekeeper | None,
        readiness: PeerWait,
    ) -> None:  # fmt: skip
        """`place` of the replica among the replicas. `keeper`: None on all but the first rank of the replica.
        `readiness`: its wait for the other replicas to be ready."""
        assert policy.seconds is not None
        self._seconds, self._warmup, self._weights_by_steps = policy.seconds, policy.warmup, policy.weights == "tokens"
        self._place, self._peers, self._replica = place, peers, replica
        self._keeper, self._readiness = keeper, readiness
        self._last = 0  # iterations asked for, of each replica on average
        self._base = 0  # versions before the first synchronisation
        self._at = 0  # this replica's iteration at the last synchronisation, or at the start
        self._progress = WorkDone(0, ())
        self.done: tuple[int, ...] = ()  # iterations of each replica in the period before the last synchronisation

    # ---- resume ----

    def state(self) -> dict[str, Any]:
        return asdict(self._progress)

    def begin(self, version: int, state: Mapping[str, Any] | None, last: int | None, members: int) -> int:
        """Continue after `version`. Returns this replica's own iteration there. Raises ConfigError."""
        if last is None:
            raise ConfigError(
                f"--sync-policy a_edit: replicas make different numbers of iterations, which this loop does not allow "
                f"for (rank {self._peers.rank}): iterate over session.iterations(last), or choose --sync-policy edit"
            )
        self._last = last
        if state is None:
            self._progress = WorkDone(0, (version,) * members)
        else:
            self._progress = WorkDone(state["number"], tuple(state["steps"]))
        self._base = max(self._warmup, version - self._progress.number)
        self._at = self._progress.steps[self._place]
        self._begin_first_period()
        return self._at

    def _begin_first_period(self) -> None:
        """Begin a period in which no replica's speed is known."""
        if self._keeper is not None:
            self._keeper.begin(self._seconds, self._progress.first_quota(self._last))

    # ---- versions ----

    def version(self, step: int) -> int:
        """The number of the version at the end of this replica's iteration `step`; 0 if there is none."""
        if step <= self._warmup:
            return step
        return self._base + self._progress.number if step == self._at else 0

    def continues(self, step: int) -> bool:
        """Whether this rank trains on after its iteration `step`."""
        return step < self._warmup or not self._progress.reaches(self._last)

    # ---- after an update ----

    def warmed_up(self, step: int) -> None:
        """Iteration `step` was the last one of the warm-up: the first period begins."""
        self._at = step
        self._progress = WorkDone(0, (step,) * len(self._progress.steps))
        self._begin_first_period()

    def joins(self, step: int) -> bool:
        """Whether the replica is synchronised after its iteration `step`. A collective of the replica's ranks."""
        keeper = self._keeper
        decision = keeper is not None and self._readiness.within(step, "the readiness of all replicas", keeper.joins)
        return bool(self._replica.gather_job([float(decision)])[0, 0])

    def join(self, step: int) -> tuple[float, ...] | None:
        """Count what all replicas have done, and begin the next period. Returns the factors of their weights, None for
        equal ones. A collective of the sync group: it waits for all replicas to join."""
        elapsed = 0.0 if self._keeper is None else self._keeper.elapsed
        table = self._peers.gather_job([float(step), elapsed])
        before, self._at = self._progress, step
        self._progress = before.after([int(steps) for steps in table[:, 0]])
        self.done = self._progress.since(before)
        if self._keeper is not None:
            period = next_period(self._seconds, self._progress, self.done, float(table[:, 1].max()), self._last)
            self._keeper.begin(period)
        return tuple(map(float, self.done)) if self._weights_by_steps else None
