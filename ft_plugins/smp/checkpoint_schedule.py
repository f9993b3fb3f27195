"""Whether a checkpoint's turn is near, and which version is called for: what the persister's thread asks at each look.

Invariant: no version is chosen that the ranks of this node do not all hold. Of a job on one node that is the newest.
Of several nodes all choose the same: while the job trains, a version that was named before it existed; when nothing
moves any more, the newest in what all nodes offer (`retention`). Where replicas are compared a version waits for its
verdict while the job trains: those that agreed go first, and those that differed are never chosen.

In: a `View` of this node at a moment, notices of other nodes. Out: versions; seconds until the next look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..snapshot import retention
from ..snapshot.retention import Storage
from ..snapshot.segment import Segment
from ..snapshot.slots import Mark, Version, in_order, marks_of, may_pin
from . import liveness
from .notices import Notices

NEAR_SECONDS, FAR_SECONDS = 0.005, 0.1  # between two looks, when a turn is near and when it is not
_NEAR_ITERATIONS = 8
_NOTICE_SECONDS = 1.0  # between two looks at what other nodes want
_OFFER_SECONDS = 10.0  # for other nodes to say what they hold; then this one goes by what it holds itself
_PACE_SECONDS = 10.0  # over which the pace of training is taken
_MEASURED_SECONDS = 1.0  # of a pace by which something is named ahead
REQUEST = "request"  # the reason of a call that a person has made


@dataclass(eq=False)
class Call:
    """Somebody wants the newest version in storage, or what was due anyway (`only_due`), because of `reason`, and there
    for good (`keep`)."""

    reason: str
    only_due: bool = False
    patience: float = 0.0  # seconds for the verdict on a version while the job trains
    keep: bool = False
    began: float = field(default_factory=time.monotonic)
    target: Version | None = None  # that was named ahead
    offered: bool = False
    outcome: dict[str, Any] | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self, state: str, **facts: Any) -> None:
        """It is over: whoever waits goes on."""
        self.outcome = {"state": state, **facts}
        self.over.set()


@dataclass(frozen=True)
class View:
    """The ranks of this node that count, and the versions that all of them hold and whose replicas are not known to
    differ. `marks`: what any rank knows of replicas; `good`: of which every rank knows the verdict, and it is good."""

    segments: Mapping[int, Segment]
    held: frozenset[Version]
    alone: bool  # the job has no other node
    marks: Mapping[Version, Mark] = field(default_factory=dict)
    good: frozenset[Version] = frozenset()

    @property
    def opened(self) -> bool:
        """Whether every rank has opened its lineage: what is newer than its base is void by now."""
        return all(segment.lineage_token == segment.token for segment in self.segments.values())

    @property
    def moving(self) -> bool:
        """Whether a trainer of this node lives."""
        owners = [segment.owner for segment in self.segments.values()]
        return any(began and liveness.started(pid) == began for pid, began in owners)

    @property
    def lineage(self) -> int:
        return max(segment.lineage for segment in self.segments.values())

    @property
    def completed(self) -> int:
        return min(segment.completed for segment in self.segments.values())


def counting(segments: Mapping[int, Segment], world_size: int) -> dict[int, Segment]:
    """The ranks that count: all of the job where all are here; else those of the incarnation that runs or ran last,
    and before any rank of one has attached all that are here."""
    whole = {rank: segment for rank, segment in sorted(segments.items()) if rank < world_size}
    attached = {rank: segment for rank, segment in whole.items() if segment.attached}
    return whole if len(whole) == world_size else attached or whole


def view(segments: Mapping[int, Segment], world_size: int) -> View:
    """What there is now of `segments`, those that count; a version that may be about to be overwritten is not held."""
    found = [segment.slots() for segment in segments.values()]
    marks = marks_of((slot.version, slot.mark) for slots in found for slot in slots)
    versions = (
        {slot.version for slot in slots if slot.version is not None and may_pin(slots, slot.version) is not None}
        for slots in found
    )
    held = frozenset(v for v in set.intersection(*versions) if marks.get(v) is not Mark.DIFFERING)
    heard = [{slot.version for slot in slots if slot.mark} for slots in found]
    good = frozenset(v for v in held if marks.get(v, Mark.NONE).preferred and all(v in each for each in heard))
    return View(segments, held, len(segments) == world_size, marks, good)


class Turns:
    """When and what, for one node. Guards the pace of training and what is known of other nodes' wishes."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._wanted: Version | None = None
        self._heard_at = 0.0
        self._pace = (0.0, 0)  # when which iteration was completed
        self._seen = -1
        self._settled: tuple[frozenset[Version], Version] | None = None  # what was held then, what was agreed on
        self.pause = FAR_SECONDS

    def come(self, storage: Storage, segments: Mapping[int, Segment], last: Version | None) -> bool:
        """Whether a turn may have come, so that it is worth to look at the slots; sets `pause` until the next question.

        Shorter when a turn is near; a job that stands still is asked less and less often. `last`: as for `due`.
        """
        now, completed = time.monotonic(), min(segment.completed for segment in segments.values())
        if completed < self._pace[1] or now - self._pace[0] > _PACE_SECONDS:
            self._pace = (now, completed)
        turn = retention.next_turn(max(0, completed - _NEAR_ITERATIONS), storage, self._wanted)
        rate = self._rate(now, completed, NEAR_SECONDS)
        if turn is not None and turn <= completed + _NEAR_ITERATIONS:
            self.pause = NEAR_SECONDS if completed != self._seen else min(2 * self.pause, FAR_SECONDS)
        elif turn is not None and rate:  # half of the way
            self.pause = max(NEAR_SECONDS, min(FAR_SECONDS, (turn - completed) / rate / 2))
        else:
            self.pause = FAR_SECONDS
        self._seen = completed
        if len(segments) < storage.world_size:
            missed = now - self._heard_at > _NOTICE_SECONDS  # what another node may want
        else:
            missed = retention.is_behind(completed, storage, last)
        return missed or turn is not None and turn <= completed

    def _rate(self, now: float, completed: int, over: float) -> float | None:
        """Iterations per second of late; None before they were watched for `over` seconds."""
        began, first = self._pace
        return (completed - first) / (now - began) if now - began > over else None

    def due(
        self, storage: Storage, folder: Path, seen: View, last: Version | None, ending: bool = False
    ) -> Version | None:
        """The version whose turn it is, newer than `last`. `ending`: no verdict is waited for any more."""
        if not seen.opened:
            return None
        wanted = None if seen.alone else self._heard(folder, seen)
        good = seen.good if storage.audits else None
        found = retention.due(seen.held, storage, last, wanted, seen.alone, good)
        if found is None and ending and not seen.moving:
            found = retention.due(seen.held, storage, last, wanted, seen.alone)
        return found

    def called(
        self, call: Call, storage: Storage, folder: Path, seen: View, known: Collection[Version]
    ) -> Version | None:
        """The version that `call` is to have; None as long as there is none. `known` are written or complete."""
        if call.only_due:
            return max(known, default=None)
        if seen.alone:
            waits = seen.moving and time.monotonic() - call.began < call.patience
            if storage.audits and (seen.good or waits):
                return max(seen.good, default=None)
            return self._best(storage, seen)
        if call.reason == REQUEST and seen.moving:
            return self._named(call, storage, folder, seen, known)
        return self._agreed(call, storage, folder, seen)

    def _best(self, storage: Storage, seen: View) -> Version | None:
        """The newest version, by what is known of its replicas where they are compared."""
        return next(iter(in_order(seen.held, seen.marks if storage.audits else {})), None)

    def _heard(self, folder: Path, seen: View) -> Version | None:
        """The version that a node wants by name, if it is of the present lineage."""
        now = time.monotonic()
        if now - self._heard_at > _NOTICE_SECONDS:
            self._heard_at, self._wanted = now, Notices(folder, self._node).wanted()
        return self._wanted if self._wanted is not None and self._wanted.lineage == seen.lineage else None

    def _named(
        self, call: Call, storage: Storage, folder: Path, seen: View, known: Collection[Version]
    ) -> Version | None:
        """The version that all nodes write while the job trains."""
        if call.target in known:
            return call.target
        if call.target is not None and call.target not in seen.held and seen.held and max(seen.held) > call.target:
            Notices(folder, self._node).have(call.target)
            call.target = self._wanted = None  # overwritten before it was seen, here or there: another one
        if call.target is None:
            heard = self._heard(folder, seen)
            rate = self._rate(time.monotonic(), seen.completed, _MEASURED_SECONDS)
            if heard is None or heard.iteration <= seen.completed:
                if rate is None:
                    return None
                heard = retention.name_ahead(seen.lineage, seen.completed, storage.step, rate)
                Notices(folder, self._node).want(heard)
            call.target = self._wanted = heard
        return call.target if call.target in (seen.good if storage.audits else seen.held) else None

    def _agreed(self, call: Call, storage: Storage, folder: Path, seen: View) -> Version | None:
        """The version that all nodes write when nothing moves any more. It stays agreed on as long as nothing moves."""
        if self._settled is not None and self._settled[0] == seen.held:
            return self._settled[1]
        notices = Notices(folder, self._node)
        if not call.offered:
            notices.offer(seen.segments, seen.held, storage.world_size, seen.marks if storage.audits else {})
            call.offered = True
        agreed = retention.held_by_job(notices.offers(storage.world_size), storage.world_size)
        if agreed is not None and agreed in seen.held:
            self._settled = (seen.held, agreed)
            return agreed
        return self._best(storage, seen) if time.monotonic() - call.began > _OFFER_SECONDS else None
