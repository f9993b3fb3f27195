"""What can be said of a node in one word (REFT's signals), for people and for whoever watches the job. Pure.

Invariant: a word follows from facts of this moment, and the worse one goes first: it decides nothing. Whom the job goes
on without is decided by silence alone (`peers.Coordinator`, `SnapshotProcess.look_at_trainers`).

In: what an SMP knows of its trainers and versions. Out: `Signal`.
"""

from __future__ import annotations

from enum import Enum


class Signal(str, Enum):
    """How a node stands."""

    HEALTHY = "HEALTHY"  # its trainers live; nothing is on its way, and nothing was captured yet
    SNAP = "SNAP"  # a version is being captured, or sent to other nodes
    CLEAN = "CLEAN"  # what its ranks captured last is complete, and counts where nodes protect each other
    UNHEALTHY = "UNHEALTHY"  # a trainer has died or is stopped
    OFFLINE = "OFFLINE"  # nobody answers


def signal(*, answers: bool, trainers_work: bool, on_its_way: bool, complete: bool) -> Signal:
    """The signal of a node: whether its SMP `answers`, its `trainers_work`, a version is `on_its_way`, and what was
    captured last is `complete`."""
    if not answers:
        return Signal.OFFLINE
    if not trainers_work:
        return Signal.UNHEALTHY
    if on_its_way:
        return Signal.SNAP
    return Signal.CLEAN if complete else Signal.HEALTHY
