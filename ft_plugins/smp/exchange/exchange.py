"""Send this node's part of an exchange: parity data and copies of one version, to the nodes that store them.

Data goes to a node in lanes, each with a thread and a connection: one for every rank with a pacer of its own (whose
bubbles are its own), and one for everything else. Data of several ranks goes in the lane of the first of them. For
state whose parity this node's ranks computed themselves, from replicas, only digests are sent: the node that captured
the same bytes compares them (`replica_checks`).

A pacer decides how many bytes may be sent, never which: frames are consecutive bytes of a stream. If bubbles are
planned by whole layers, a window carries as many bytes as the chosen layers have, but not those layers: a version is
useful only once all of it has arrived, in any order, and the receiver need not know the plan.

Invariant: nothing here is in the step path; pacing makes it slower, never wrong. What a receiver reports as taken
decides what is sent next, so a broken connection, a repeated frame or a replaced receiver costs only time. Bytes leave
a slot only after its digests were verified, and only while the slot is pinned.

In: a plan, the pinned slots of this node, connections to other nodes. Out: frames; `done` once everything was taken and
no replica is mismatched; `exchange.sent` and `replica.mismatched` events.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ...base import faults
from ...errors import CorruptSlotError, FtError
from ...events import Events, catalogue
from ...model.pacer import Allowance, Pacer
from ...redundancy.exchange_plan import ExchangePlan, Send
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import Version
from ...transport.calls import Peer
from ...transport.frame_codec import PAYLOAD_LIMIT
from . import replica_checks
from .replica_checks import Difference
from .traffic import step_back

_RETRY_SECONDS = 0.2  # after an error
# Before a receiver is asked again that does not expect the version yet: the first pause, and the longest. Almost none
# has to be: a version is announced to all nodes before any rank captures it.
_WAIT_SECONDS = (0.02, 0.2)
# Before a receiver that has everything is asked again, while the connection lasts: an SMP that replaces it has nothing,
# but does not have this connection either.
_CHECK_SECONDS = 10.0
_REPORTED = 4  # differences with an event of their own; a wholly corrupt replica has thousands

Bytes = npt.NDArray[np.uint8]
NO_RANK = -1


@dataclass(frozen=True, order=True)
class Lane:
    """The data of `rank` for `target`, by that rank's pacer; NO_RANK: the data of all ranks without one."""

    target: int
    rank: int

    def __str__(self) -> str:
        return f"{self.target}" if self.rank == NO_RANK else f"{self.target}-r{self.rank}"


def slot_of(segment: Segment, version: Version) -> int:
    """The slot that holds `version` CLEAN. Raises CorruptSlotError if there is none."""
    for slot in segment.slots():
        if slot.version == version and slot.state.name == "CLEAN":
            return slot.index
    held = ", ".join(f"{slot.state.name} {slot.version or ''}".rstrip() for slot in segment.slots())
    raise CorruptSlotError(f"rank {segment.rank}: no CLEAN slot holds version {version} (slots: {held})")


def parity_slot_of(segment: Segment, version: Version) -> int:
    """The slot that holds the parity which the rank computed of `version`. Raises CorruptSlotError if there is none."""
    index = segment.parity_of(version)
    if index is None:
        raise CorruptSlotError(f"rank {segment.rank}: it holds no parity of version {version}")
    return index


def descriptor_of(segment: Segment, version: Version) -> bytes:
    """Small state and digest table of a rank's slot, which other nodes keep to rebuild it; not its data."""
    index = slot_of(segment, version)
    return bytes(msgpack.packb([segment.small(index), segment.digests(index).tobytes()]))


@dataclass(frozen=True)
class ExchangeSource:
    """One node as the source of exchanges in one incarnation (`epoch`). `segments` are those of its ranks; `connect`
    makes a connection to a position's SMP. `agreed` is called once every replica from which parity was computed here
    equals its counterpart, `progressed` whenever a sender's `done`, `corrupt` or `differences` have changed."""

    plan: ExchangePlan
    position: int
    epoch: int
    segments: Mapping[int, Segment]
    connect: Callable[[int], Peer]
    events: Events
    agreed: Callable[[Version], None]
    progressed: Callable[[], None]


class ExchangeSender:
    """Sends `version` until it is stopped, with a thread per lane."""

    def __init__(self, source: ExchangeSource, version: Version, pacers: Mapping[int, Pacer]) -> None:
        """The segments hold `version` pinned. `pacers` pace the data of their ranks, that of NO_RANK everything else.
        Raises ProtocolError if the layout of a slot differs from the plan's."""
        plan, position, segments = source.plan, source.position, source.segments
        self._plan, self._position, self._segments, self._epoch = plan, position, segments, source.epoch
        self.version, self._pacers, self._events = version, pacers, source.events
        self._stop = threading.Event()
        self._frames = itertools.count()  # number of the next frame, for faults
        self._started = time.monotonic()
        self._verified: bool | None = None
        self._verifying = threading.Lock()
        self._agreed, self._progressed = source.agreed, source.progressed
        self._checks = replica_checks.by_target(plan, plan.ranks[position], segments)
        self._unchecked = set(self._checks)  # positions that have not yet confirmed that replicas agree
        self._counting = threading.Lock()
        self._sent_bytes = self._inside_bytes = self._late_bytes = 0
        self._announced = False
        self.differences: list[Difference] = []
        if not self._checks:  # including parity of no bytes
            source.agreed(version)
        self._lanes: dict[Lane, tuple[list[Send], list[int]]] = {Lane(to, NO_RANK): ([], []) for to in self._checks}
        for send in plan.sends[position]:
            members = plan.sections[send.area.section].members(send.node)
            lane = self._lane(send.area.position, members[0] if members else NO_RANK)
            self._lanes.setdefault(lane, ([], []))[0].append(send)
        for rank in plan.ranks[position]:
            for holder in plan.small_state_holders(rank):
                self._lanes.setdefault(self._lane(holder, rank), ([], []))[1].append(rank)
        for rank, pacer in pacers.items():
            sends = (send for lane, (those, _) in self._lanes.items() if lane.rank == rank for send in those)
            pacer.begins(sum(send.stop - send.start for send in sends))
        self._done = dict.fromkeys(sorted(self._lanes), False)
        self._peers = {lane: source.connect(lane.target) for lane in self._done}
        self._threads = [
            threading.Thread(target=self._feed, args=(lane,), name=f"smp-send-{lane}", daemon=True)
            for lane in self._done
        ]
        for thread in self._threads:
            thread.start()

    def _lane(self, target: int, rank: int) -> Lane:
        return Lane(target, rank if rank in self._pacers else NO_RANK)

    @property
    def done(self) -> bool:
        """Whether every target had taken everything when it was last queried."""
        return all(self._done.values())

    @property
    def target(self) -> int | None:
        """The first position that has not taken everything; None if all have."""
        return next((lane.target for lane, done in self._done.items() if not done), None)

    @property
    def corrupt(self) -> bool:
        """Whether a slot failed its digests, so that none of it was sent."""
        return self._verified is False

    def stop(self) -> None:
        """Stop sending. When this returns, no thread reads the slots."""
        self._stop.set()
        for peer in self._peers.values():
            peer.close()  # a request in flight fails
        for thread in self._threads:
            thread.join()

    def _feed(self, lane: Lane) -> None:
        reported = False
        first, longest = _WAIT_SECONDS
        wait = first
        step_back()
        while not self._stop.is_set():
            pause = _RETRY_SECONDS
            try:
                if not self._slots_match():
                    self._progressed()
                    return
                waiting = self._feed_once(lane)
                if self.differences:
                    self._progressed()
                    return
                pause, wait = (wait, min(2 * wait, longest)) if waiting else (0.0, first)
                if self._done[lane]:
                    if self.done:
                        self._progressed()
                    self._peers[lane].is_readable(_CHECK_SECONDS)  # its end
            except Exception as error:  # any error: without this thread no version would ever be committed again
                if self._stop.is_set():
                    return
                self._done[lane] = False
                if isinstance(error, CorruptSlotError):  # of a slot here, which is looked at again, or of a peer
                    with self._verifying:
                        if self._verified:
                            self._verified = None
                if not reported:  # once per version and lane, not five times a second
                    expected = isinstance(error, (FtError, OSError))
                    reason = str(error) if expected else f"{type(error).__name__}: {error}"
                    self._events.emit(catalogue.EXCHANGE_RETRIED, target=self._plan.nodes[lane.target], reason=reason)
                reported = True
            self._stop.wait(pause)

    def _slots_match(self) -> bool:
        """Verify the digests of all slots, once."""
        with self._verifying:
            if self._verified is None:
                try:
                    for rank in self._plan.ranks[self._position]:
                        segment = self._segments[rank]
                        slots = [slot_of(segment, self.version)]
                        if segment.shape.parity_indices:
                            slots.append(parity_slot_of(segment, self.version))
                        if not all(segment.verify(slot, self._stop.is_set) for slot in slots):
                            return False  # `stop` waits for this, and the node's reports for `stop`
                    self._verified = True
                except CorruptSlotError as error:
                    self._events.emit(catalogue.SLOT_CORRUPTED, reason=str(error))
                    self._verified = False
            return self._verified

    def _feed_once(self, lane: Lane) -> bool:
        """Send what the target lacks. Returns whether to wait for the target."""
        sends, ranks = self._lanes[lane]
        fields: dict[str, Any] = {"version": [self.version.lineage, self.version.iteration], "epoch": self._epoch}
        nodes = sorted({(send.area.section, send.node) for send in sends})
        reply, _ = self._peers[lane].ask("begin", nodes=nodes, ranks=ranks, **fields)
        if reply.get("wait"):
            self._done[lane] = False
            return True
        taken = {(section, stripe, which, node): done for section, stripe, which, node, done in reply["taken"]}
        for send in sends:
            key = (send.area.section, send.area.stripe, send.area.which)
            at = taken.get((*key, send.node), 0)
            while at < send.stop - send.start:
                self._done[lane] = False
                if self._stop.is_set():
                    return False
                if self._fault(lane, at) == "hold":
                    self._stop.wait()
                    return False
                allowed = self._pacers[lane.rank].take(min(PAYLOAD_LIMIT, send.stop - send.start - at), self._stop)
                if not allowed.nbytes:
                    return False
                frame = self._frame(send, at, allowed.nbytes)
                answer, _ = self._peers[lane].ask(
                    "take", frame, key=list(key), node=send.node, at=at, exponent=send.exponent, **fields
                )
                self._count(len(frame), self._pacers[lane.rank].ended(allowed))
                at = int(answer["taken"])
        for rank in sorted(set(ranks) - set(reply["copies"])):
            self._done[lane] = False
            self._send_descriptor(lane, rank, fields)
        if lane.rank == NO_RANK and lane.target in self._unchecked and not self._compare(lane, fields):
            self._done[lane] = False
            return True
        self._done[lane] = True
        self._announce()
        return False

    def _fault(self, lane: Lane, at: int) -> str | None:
        """The fault point before each frame; `frame` numbers the frames of this exchange from 0, over all lanes."""
        return faults.reach(
            "exchange.frame", position=self._position, target=lane.target, at=at, epoch=self._epoch,
            iteration=self.version.iteration, frame=next(self._frames),
        )  # fmt: skip

    def _compare(self, lane: Lane, fields: dict[str, Any]) -> bool:
        """Have the target compare its shares with the replicas from which parity was computed here. Returns whether all
        agree."""
        tables = {
            rank: segment.digests(parity_slot_of(segment, self.version)).copy()
            for rank, segment in self._segments.items()
            if segment.shape.parity_indices
        }
        for batch in replica_checks.batches(self._checks[lane.target]):
            checks = replica_checks.payload(batch, tables)
            faults.reach("exchange.check", position=self._position, target=lane.target)
            self._pacers[lane.rank].take(len(checks), self._stop)
            if self._stop.is_set():
                return False
            reply, _ = self._peers[lane].ask("check", checks, **fields)
            if reply.get("wait"):
                return False
            self._count(len(checks))
            mismatched = [Difference(self.version, batch[place]) for place in reply["differ"]]
            for difference in mismatched[:_REPORTED]:
                self._report(difference, len(mismatched))
            if mismatched:
                return False
        with self._counting:
            self._unchecked.discard(lane.target)
            last = not self._unchecked
        if last:
            self._agreed(self.version)
        return True

    def _report(self, difference: Difference, count: int) -> None:
        check, version = difference.check, difference.version
        self.differences.append(difference)
        self._events.emit(
            catalogue.REPLICA_MISMATCHED, about=check.keeper, ranks=[check.keeper, check.source.rank],
            bucket=check.bucket, lineage=version.lineage, iteration=version.iteration,
            offset=check.source.offset, bytes=check.source.nbytes, count=count, reason=str(difference),
        )  # fmt: skip

    def _count(self, nbytes: int, in_time: bool | None = None) -> None:
        with self._counting:
            self._sent_bytes += nbytes
            self._inside_bytes += nbytes if in_time else 0
            self._late_bytes += nbytes if in_time is False else 0

    def _announce(self) -> None:
        """Emit `exchange.sent`, once: how many bytes were sent within their bubble, and how many after it."""
        with self._counting:
            if self._announced or not self.done:
                return
            self._announced = True
        self._events.emit(
            catalogue.EXCHANGE_SENT, lineage=self.version.lineage, iteration=self.version.iteration,
            bytes=self._sent_bytes, in_bubbles=self._inside_bytes, late=self._late_bytes,
            compared=sum(map(len, self._checks.values())), seconds=round(time.monotonic() - self._started, 3),
        )  # fmt: skip

    def _frame(self, send: Send, at: int, nbytes: int) -> Bytes:
        """The next `nbytes` of a block, from byte `at`: a view of a slot, or a concatenation across ranks."""
        start = send.start + at
        stop = start + nbytes
        section = self._plan.sections[send.area.section]
        parts = []
        for extent in section.extents(send.node, start, stop):
            segment = self._segments[extent.rank]
            data = segment.data(slot_of(segment, self.version))
            parts.append(data[extent.offset : extent.offset + extent.nbytes])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _send_descriptor(self, lane: Lane, rank: int, fields: dict[str, Any]) -> None:
        whole = np.frombuffer(descriptor_of(self._segments[rank], self.version), dtype=np.uint8)
        at = 0
        while at < len(whole) and not self._stop.is_set():
            allowed = Allowance(PAYLOAD_LIMIT)
            if lane.rank != NO_RANK:  # a rate limit applies to data only
                allowed = self._pacers[lane.rank].take(min(PAYLOAD_LIMIT, len(whole) - at), self._stop)
                if not allowed.nbytes:
                    return
            part = whole[at : at + allowed.nbytes]
            answer, _ = self._peers[lane].ask("copy", part, rank=rank, at=at, total=len(whole), **fields)
            self._count(len(part), self._pacers[lane.rank].ended(allowed))
            at = int(answer["taken"])
