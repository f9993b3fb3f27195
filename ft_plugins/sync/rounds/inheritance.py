"""Decide whose own state a replica of local SGD continues with when the number of replicas has changed. Pure.

What all replicas have in common (parameters of the last synchronisation, anchors, outer momentum) is re-partitioned
like any replicated state. What each has of its own (inner optimizer's state, generators, loss scale; parameters too
where replicas differ) follows this rule: replica i continues with that of replica i of the previous size, and a replica
that joins with that of replica i modulo their number. So the result depends on the two sizes alone, not on which node
was lost.

Statistics of the penalty are kept if the number of replicas is the same (a Megatron instance that lost some of its
ranks). Otherwise they start again from nothing: the members are other ones, and so is each one's part of the global
batch, on which norms depend.

In: what the ranks of the previous size carried. Out: which of them this rank takes over; the state to continue from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ResumeError

PLACE = "replica"  # in the carried state: position and number of replicas


@dataclass(frozen=True)
class ReplicaPlace:
    """A rank's replica: its `position` among `count`."""

    position: int
    count: int

    def values(self) -> list[int]:
        return [self.position, self.count]

    @classmethod
    def of(cls, carried: Mapping[str, Any]) -> ReplicaPlace:
        position, count = carried[PLACE]
        return cls(int(position), int(count))


def inherited(place: ReplicaPlace, previous: Sequence[Mapping[str, Any] | None]) -> tuple[int, ...]:
    """The places in `previous` of the ranks whose own state the rank at `place` takes over. `previous`: what all
    previous ranks at its place in the model carried, by rank. Raises ResumeError if that was not local SGD."""
    known = [carried for carried in previous if carried is not None]
    if len(known) < len(previous):
        raise ResumeError(
            "the state in memory was captured without local SGD and cannot be taken over at another size with it: "
            "start with the previous number of nodes and without --sync, or from the beginning with --ftp-resume fresh"
        )
    places = [ReplicaPlace.of(carried) for carried in known]
    wanted = place.position % places[0].count
    return tuple(number for number, one in enumerate(places) if one.position == wanted)


def continued(place: ReplicaPlace, taken_over: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The carried state of a rank at `place`, from that of the previous ranks that it takes over. It still names their
    number of replicas."""
    before = ReplicaPlace.of(taken_over[0])
    statistics: dict[str, Any] = {}
    if before.count == place.count:
        for carried in taken_over:
            statistics |= carried["statistics"]
    return {**taken_over[0], "statistics": statistics, PLACE: [place.position, before.count]}


def restarted(replicas: int, completed: int) -> str:
    """What `replicas` replicas lost that start from a checkpoint of the framework's own, of iteration `completed`."""
    return (
        f"the checkpoint of iteration {completed} holds one replica: all {replicas} start from its parameters and its "
        "optimizer's state; what the others had of their own, anchors, outer momentum and statistics of norms are lost"
    )


def described(place: ReplicaPlace, before: ReplicaPlace, momentum: bool) -> str:
    """A message on a resumed job's replicas; '' if there is nothing to say. `momentum`: whether the outer optimizer
    has one."""
    lines = []
    if place.count != before.count:
        lines.append(
            f"local SGD: {before.count} replicas became {place.count}; parameters"
            + (" and outer momentum" if momentum else "")
            + " of the last synchronisation continue on all of them, statistics of norms start again from nothing"
        )
    if place.count == 1:
        lines.append(
            "WARNING: local SGD with 1 replica: there is no other one to synchronise with; training goes on, through "
            "the outer optimizer alone, until the job has more nodes again"
        )
    return "\n  ".join(lines)
