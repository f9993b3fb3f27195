"""What a rank does at the moment: the phase between two edges, and what edges are reported to.

A phase *waits* if other ranks can keep it from ending, because it holds collectives or other messages of the job; in
all others the rank works alone. A *long* phase may take many times as long as an iteration without anything being
wrong. A *computing* phase is the rank's own work when ranks are compared.

Invariant: numbers of phases are in shared memory; those of long phases are LONG or larger.

In: edges, as hosts and session see them. Out: calls of a `ProgressReceiver`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, runtime_checkable

from .timeline import Kind

LONG = 32


class WorkPhase(IntEnum):
    """What a rank does since its last edge."""

    STARTING = 1
    DATA = 2
    FORWARD = 3
    AFTER_FORWARD = 4  # the backward is not seen by itself
    BACKWARD = 5
    SEND = 6
    RECV = 7
    REDUCE = 8
    SCHEDULE = 9
    FENCE = 10
    UPDATE = 11
    AFTER_UPDATE = 12
    VERSION_POINT = 13
    BETWEEN = 14
    EVALUATION = 32
    SAVING = 33
    ENDED = 34

    @property
    def words(self) -> str:
        """Where the rank is, for messages."""
        return _WORDS[self]

    @property
    def long(self) -> bool:
        return self >= LONG

    @property
    def waits(self) -> bool:
        return self not in _ALONE

    @property
    def sharded_waits(self) -> bool:
        """The same, if the forward and the backward of a microbatch hold collectives too."""
        return self.waits or self in (WorkPhase.FORWARD, WorkPhase.BACKWARD)


_WORDS = {
    WorkPhase.STARTING: "before its first iteration",
    WorkPhase.DATA: "before the forward, where it reads data",
    WorkPhase.FORWARD: "in the forward",
    WorkPhase.AFTER_FORWARD: "after the forward, in the backward or the reduction of gradients",
    WorkPhase.BACKWARD: "in the backward",
    WorkPhase.SEND: "in a send to another stage",
    WorkPhase.RECV: "in a receive from another stage",
    WorkPhase.REDUCE: "in the reduction of gradients or of their norm",
    WorkPhase.SCHEDULE: "between two microbatches",
    WorkPhase.FENCE: "at the fence",
    WorkPhase.UPDATE: "in the update",
    WorkPhase.AFTER_UPDATE: "after the update",
    WorkPhase.VERSION_POINT: "at the version point",
    WorkPhase.BETWEEN: "between two iterations",
    WorkPhase.EVALUATION: "in an evaluation",
    WorkPhase.SAVING: "in the framework's own checkpoint",
    WorkPhase.ENDED: "after its orderly end",
}
_ALONE = frozenset(
    {
        WorkPhase.STARTING,
        WorkPhase.DATA,
        WorkPhase.FORWARD,
        WorkPhase.BACKWARD,
        WorkPhase.SCHEDULE,
        WorkPhase.FENCE,
        WorkPhase.BETWEEN,
    }
)
PAST_UPDATE = frozenset({WorkPhase.AFTER_UPDATE, WorkPhase.VERSION_POINT, WorkPhase.BETWEEN})
COMPUTING = frozenset({WorkPhase.DATA, WorkPhase.FORWARD, WorkPhase.BACKWARD})

_OF_KIND = {
    Kind.FORWARD: WorkPhase.FORWARD,
    Kind.BACKWARD: WorkPhase.BACKWARD,
    Kind.SEND: WorkPhase.SEND,
    Kind.RECV: WorkPhase.RECV,
    Kind.REDUCE: WorkPhase.REDUCE,
    Kind.UPDATE: WorkPhase.UPDATE,
}


class ProgressReceiver(Protocol):
    """What edges are reported to, in the training thread. `edge` takes less than a microsecond and does not raise."""

    def edge(self, phase: WorkPhase) -> None:
        """`phase` begins, and the one before ends."""

    def shares_forward(self) -> None:
        """The forward and backward of a microbatch hold collectives on this rank."""


@runtime_checkable
class FollowedHost(Protocol):
    """What a host offers in addition, if it sees more edges than the hooks of its loop."""

    def install_progress(self, progress: ProgressReceiver, spans: bool) -> None:
        """Report edges from now on. `spans`: forwards and backwards are reported already, as spans."""


class ProgressEdges:
    """Passes the edges of spans on, as phases."""

    def __init__(self, progress: ProgressReceiver) -> None:
        self._edge = progress.edge

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        self._edge(_OF_KIND[kind])

    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        self._edge(WorkPhase.SCHEDULE)
