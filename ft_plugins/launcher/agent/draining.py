"""Have this node leave a job at a version that is committed on all nodes, so that no iteration is lost.

    the node is to leave      its ranks wait at the next version that is exchanged (`Reft.hold`); so all ranks do
    that version is committed the others can rebuild what this node holds: its ranks end, and the others go on
    it is not, for too long   the ranks go on, and the node stays

Invariant: the node leaves only at a version that all nodes have committed, and at which a rank of it waits: no rank of
the job has completed another iteration, nor can it.

In: whether the node is to leave; what its SMP reports. Out: holds; when to leave; `drain.failed` events.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from ...errors import ProtectionError
from ...events import Events, catalogue
from .watcher import Job, Watcher

MOST_SECONDS = 240.0  # for which ranks are held: less than `Reft.HOLD_SECONDS`, which is for an agent that is gone
_PATIENCE = 7200.0  # seconds from the request on: ranks that no longer capture reach no version, and train on
_LOOK_SECONDS = 0.2  # between two questions to the SMP


@dataclass(frozen=True)
class DrainStep:
    """What comes now: `leave` at that iteration, or `give_up` for that reason; neither: go on."""

    leave: int | None = None
    give_up: str = ""


def longest_wait(hang_seconds: float | Literal["auto"], sync_timeout: float = 2 * MOST_SECONDS) -> float:
    """Seconds for which ranks are held: they must not be taken for a hang by a limit that was given, and replicas that
    wait for them must not give up (`sync_timeout`). Pure."""
    limits = [sync_timeout, *([] if hang_seconds == "auto" or not hang_seconds else [hang_seconds])]
    return min(MOST_SECONDS, min(limits) / 2)


def next_step(iteration: int | None, waited: float, longest: float = MOST_SECONDS, asked: float = 0.0) -> DrainStep:
    """`iteration`: at which the node can leave, None for none yet. `waited`: seconds for which a rank has been held;
    `longest`: at most. `asked`: seconds since the node is to leave. Pure."""
    if iteration is not None:
        return DrainStep(leave=iteration)
    if waited > longest:
        return DrainStep(
            give_up=f"no version was committed while the ranks waited for {waited:.0f} s; training goes on with this "
            "node"
        )
    if asked > _PATIENCE:
        return DrainStep(
            give_up=f"the ranks came to no version that is exchanged for {asked / 60:.0f} min; training goes on with "
            "this node"
        )
    return DrainStep()


class Departure:
    """The departure of this node from one incarnation. `longest`: see `longest_wait`; `began`: when the node was to
    leave (monotonic), 0 if it is not."""

    def __init__(self, watcher: Watcher, events: Events, longest: float = MOST_SECONDS) -> None:
        self._watcher, self._events, self._longest = watcher, events, longest
        self.began = 0.0
        self._held_at, self._held_since = 0, 0.0
        self._looked = 0.0

    def step(self, wanted: bool) -> DrainStep:
        """To be called often. `wanted`: the node is to leave."""
        now = time.monotonic()
        if not wanted:
            self._release()
            return DrainStep()
        try:
            if self.began and now - self._looked < _LOOK_SECONDS:
                return DrainStep()
            if not self.began:
                self.began, self._held_at = now, 0
            self._watcher.hold(True)  # each time: ranks that start were not there the last time
            self._looked = now
            iteration, held_at = self._watcher.leaves_at()
        except ProtectionError as error:
            return self._given_up(DrainStep(give_up=str(error)))
        if held_at != self._held_at:
            self._held_at, self._held_since = held_at, now
        waited = now - self._held_since if held_at else 0.0
        found = next_step(iteration, waited, self._longest, now - self.began)
        return self._given_up(found) if found.give_up else found

    def _given_up(self, step: DrainStep) -> DrainStep:
        self._events.emit(catalogue.DRAIN_FAILED, reason=step.give_up)
        self._release()
        return step

    def _release(self) -> None:
        if self.began:
            self.began = 0.0
            try:
                self._watcher.hold(False)
            except ProtectionError as error:  # the ranks go on after HOLD_SECONDS
                self._events.emit(catalogue.DRAIN_FAILED, reason=str(error))


def departure_of(job: Job | None, watcher: Watcher | None, events: Events) -> Departure | None:
    """That of a node from the incarnation that starts; None if nothing is protected."""
    if job is None or watcher is None:
        return None
    timeout = () if job.config.sync is None else (job.config.sync.timeout,)
    return Departure(watcher, events, longest_wait(job.config.hang_seconds, *timeout))


def cannot_be_drained(redundancy: str, apart: bool, deferred: bool = False) -> str:
    """Why no node of a job with such a configuration can leave it without loss, for people; '' if they can. `apart`:
    replicas train without each other between versions. `deferred`: all versions that are exchanged are complete only
    in the next iteration. Pure."""
    if redundancy in ("", "none"):
        return "nodes of this job do not protect each other, so the others could not go on without its state"
    if apart:
        return (
            "replicas of local SGD train on without this node until the next synchronisation, and would lose that: it "
            "takes --reft-versions every, with which they wait for each other in each iteration; end the job, or the "
            "node, by SIGTERM to ft-run"
        )
    if deferred:
        return (
            "all versions that are sent to other nodes are those of synchronisations, which end in the next iteration "
            "(--sync-apply forward): it takes a --reft-interval times --reft-exchange-interval that --sync-tau does "
            "not divide; end the job, or the node, by SIGTERM to ft-run"
        )
    return ""
