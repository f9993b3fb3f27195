"""Decide which version to write to storage, and when: whether a checkpoint is due, and which version a call gets.

Invariant: a version is chosen only if all ranks of this node hold it. A job on one node takes the newest. Several nodes
all choose the same: while the job trains, a version that was announced before it existed; once it has stopped, the
newest that all nodes offer (`retention`). If replicas are compared, a version waits for its verdict while the job
trains: versions whose replicas agreed are preferred, and those whose replicas differed are never chosen.

In: a `NodeView` of this node at one moment, notices of other nodes. Out: versions; seconds until the next look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...snapshot.capture import retention
from ...snapshot.capture.retention import Storage
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import Mark, Version, marks_of, recovery_order
from ..watch import liveness
from .notices import Notices

NEAR_SECONDS, FAR_SECONDS = 0.005, 0.1  # between two looks: if a checkpoint is due soon, and if not
_NEAR_ITERATIONS = 8
_NOTICE_SECONDS = 1.0  # between two looks at the notices of other nodes
_OFFER_SECONDS = 10.0  # for other nodes to offer what they hold; after that this node chooses alone
_PACE_SECONDS = 10.0  # over which the pace of training is measured
_MEASURED_SECONDS = 1.0  # of measuring before a version is announced
_STOP_SECONDS = 1.0  # for trainers to stop that have got the signal too; and without an iteration: they stand
REQUEST = "request"  # the reason of a call that a user makes
STOP = "ft-run is ended by a signal"  # of one while trainers may train on, because they hold the signal


@dataclass(eq=False)
class CheckpointCall:
    """A request to write the newest version to storage, because of `reason`. `only_due`: only what is due anyway;
    `keep`: retention never removes it."""

    reason: str
    only_due: bool = False
    patience: float = 0.0  # seconds to wait for the verdict on a version while the job trains
    keep: bool = False
    began: float = field(default_factory=time.monotonic)
    target: Version | None = None  # the announced version
    offered: frozenset[Version] | None = None
    outcome: dict[str, Any] | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self, state: str, **facts: Any) -> None:
        """End the call and wake its waiter."""
        self.outcome = {"state": state, **facts}
        self.over.set()


@dataclass(frozen=True)
class NodeView:
    """The participating ranks of this node. `held`: versions that all of them hold, except those whose replicas are
    known to differ; `marks`: verdicts that any rank knows; `good`: versions of which every rank knows a good
    verdict."""

    segments: Mapping[int, Segment]
    held: frozenset[Version]
    alone: bool  # the job has no other node
    marks: Mapping[Version, Mark] = field(default_factory=dict)
    good: frozenset[Version] = frozenset()

    @property
    def opened(self) -> bool:
        """Whether every rank has opened its lineage, so that versions newer than its base are void."""
        return all(segment.header.opened.token == segment.header.token for segment in self.segments.values())

    @property
    def moving(self) -> bool:
        """Whether a trainer of this node lives."""
        owners = [segment.header.owner for segment in self.segments.values()]
        return any(began and liveness.started(pid) == began for pid, began in owners)

    @property
    def lineage(self) -> int:
        return max(segment.header.opened.lineage for segment in self.segments.values())

    @property
    def completed(self) -> int:
        return min(segment.header.completed for segment in self.segments.values())


def taking_part(segments: Mapping[int, Segment], world_size: int) -> dict[int, Segment]:
    """The ranks that participate: all ranks of the job if all are here; otherwise those of the incarnation that runs or
    ran last; before any rank has attached, all that are here."""
    whole = {rank: segment for rank, segment in sorted(segments.items()) if rank < world_size}
    attached = {rank: segment for rank, segment in whole.items() if segment.header.attached}
    return whole if len(whole) == world_size else attached or whole


def view(segments: Mapping[int, Segment], world_size: int) -> NodeView:
    """The state of the participating `segments`. A version that may be about to be overwritten is not held."""
    all_slots = [segment.slots() for segment in segments.values()]
    marks = marks_of((slot.version, slot.mark) for slots in all_slots for slot in slots)
    versions = (
        {slot.version for slot in slots if slot.version and segment.pinnable(slots, slot.version) is not None}
        for slots, segment in zip(all_slots, segments.values(), strict=True)
    )
    held = frozenset(v for v in set.intersection(*versions) if marks.get(v) is not Mark.MISMATCHED)
    heard = [{slot.version for slot in slots if slot.mark} for slots in all_slots]
    good = frozenset(v for v in held if marks.get(v, Mark.NONE).preferred and all(v in each for each in heard))
    return NodeView(segments, held, len(segments) == world_size, marks, good)


class CheckpointSchedule:
    """The schedule of one node. Remembers the pace of training and the notices of other nodes."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._wanted: Version | None = None
        self._heard_at = 0.0
        self._pace = (0.0, 0)  # a time, and the iteration that was complete then
        self._seen = -1
        self._advanced = 0.0  # when the last iteration was completed
        self._settled: tuple[frozenset[Version], Version] | None = None  # the held versions, and the one agreed on
        self.pause = FAR_SECONDS

    def may_be_due(self, storage: Storage, segments: Mapping[int, Segment], last: Version | None) -> bool:
        """Whether a checkpoint may be due, so that the slots have to be read; sets `pause`, the time until the next
        call.

        The pause is shorter if one is due soon, and grows while no iteration completes. `last`: as for `due`.
        """
        now, completed = time.monotonic(), min(segment.header.completed for segment in segments.values())
        if completed < self._pace[1] or now - self._pace[0] > _PACE_SECONDS:
            self._pace = (now, completed)
        turn = retention.next_turn(max(0, completed - _NEAR_ITERATIONS), storage, self._wanted)
        rate = self._rate(now, completed, NEAR_SECONDS)
        if turn is not None and turn <= completed + _NEAR_ITERATIONS:
            self.pause = NEAR_SECONDS if completed != self._seen else min(2 * self.pause, FAR_SECONDS)
        elif turn is not None and rate:  # half of the time until then
            self.pause = max(NEAR_SECONDS, min(FAR_SECONDS, (turn - completed) / rate / 2))
        else:
            self.pause = FAR_SECONDS
        if completed != self._seen:
            self._seen, self._advanced = completed, now
        if len(segments) < storage.world_size:
            missed = now - self._heard_at > _NOTICE_SECONDS  # what another node may have announced
        else:
            missed = retention.is_behind(completed, storage, last)
        return missed or turn is not None and turn <= completed

    def _rate(self, now: float, completed: int, over: float) -> float | None:
        """Recent iterations per second; None until they were measured for `over` seconds."""
        began, first = self._pace
        return (completed - first) / (now - began) if now - began > over else None

    def due(
        self, storage: Storage, folder: Path, seen: NodeView, last: Version | None, ending: bool = False
    ) -> Version | None:
        """The version that is due, newer than `last`. `ending`: do not wait for a verdict."""
        if not seen.opened:
            return None
        wanted = None if seen.alone else self._heard(folder, seen)
        good = seen.good if storage.audits else None
        version = retention.due(seen.held, storage, last, wanted, seen.alone, good)
        if version is None and ending and not seen.moving:
            version = retention.due(seen.held, storage, last, wanted, seen.alone)
        return version

    def called(
        self, call: CheckpointCall, storage: Storage, folder: Path, seen: NodeView, known: Collection[Version]
    ) -> Version | None:
        """The version that `call` gets; None while there is none. `known` are written or complete."""
        if call.only_due:
            return max(known, default=None)
        if seen.alone:
            waits = seen.moving and time.monotonic() - call.began < call.patience
            if storage.audits and (seen.good or waits):
                return max(seen.good, default=None)
            return self._best(storage, seen)
        moving, now = seen.moving, time.monotonic()
        advances = moving and call.reason == STOP and now - self._advanced < _STOP_SECONDS
        if moving and call.reason == REQUEST or advances and now - call.began > _STOP_SECONDS:
            return self._named(call, storage, folder, seen, known)
        return None if advances else self._agreed(call, storage, folder, seen, moving)

    def _best(self, storage: Storage, seen: NodeView) -> Version | None:
        """The newest version, preferring good verdicts if replicas are compared."""
        return next(iter(recovery_order(seen.held, seen.marks if storage.audits else {})), None)

    def _heard(self, folder: Path, seen: NodeView) -> Version | None:
        """The version that a node has announced, if it is of the current lineage."""
        now = time.monotonic()
        if now - self._heard_at > _NOTICE_SECONDS:
            self._heard_at, self._wanted = now, Notices(folder, self._node).wanted()
        return self._wanted if self._wanted is not None and self._wanted.lineage == seen.lineage else None

    def _named(
        self, call: CheckpointCall, storage: Storage, folder: Path, seen: NodeView, known: Collection[Version]
    ) -> Version | None:
        """The version that all nodes write while the job trains."""
        if call.target in known:
            return call.target
        heard = self._heard(folder, seen)
        if heard is not None and heard.iteration > seen.completed:
            call.target = heard  # of two nodes that announce at the same time, the last one's is what both write
        if call.target is not None and call.target not in seen.held and seen.held and max(seen.held) > call.target:
            Notices(folder, self._node).have(call.target)
            call.target = self._wanted = None  # some node overwrote it before it was seen: announce another one
        if call.target is None:
            rate = self._rate(time.monotonic(), seen.completed, _MEASURED_SECONDS)
            if rate is None:
                return None
            step = storage.at(seen.completed + 1).step
            call.target = self._wanted = retention.to_announce(seen.lineage, seen.completed, step, rate)
            Notices(folder, self._node).want(call.target)
        return call.target if call.target in (seen.good if storage.audits else seen.held) else None

    def _agreed(
        self, call: CheckpointCall, storage: Storage, folder: Path, seen: NodeView, moving: bool
    ) -> Version | None:
        """The version that all nodes write once the job has stopped. It stays the same while the held versions do.
        `moving`: trainers live, but stand, so that this node does not choose alone."""
        if self._settled is not None and self._settled[0] == seen.held:
            return self._settled[1]
        notices = Notices(folder, self._node)
        if call.target is not None:  # it does not come any more
            notices.have(call.target)
            call.target = self._wanted = None
        if call.offered != seen.held:
            notices.offer(seen.segments, seen.held, storage.world_size, seen.marks if storage.audits else {})
            call.offered = seen.held
        agreed = retention.newest_held_by_all(notices.offers(storage.world_size), storage.world_size)
        if agreed is not None and agreed in seen.held:
            self._settled = (seen.held, agreed)
            return agreed
        late = not moving and time.monotonic() - call.began > _OFFER_SECONDS
        return self._best(storage, seen) if late else None
