"""Carries out this node's part of an exchange: sends the blocks and copies of one version to the nodes that keep them.

Of state whose parity this node has computed itself, from its replicas, nothing is sent but digests (`checks`): the node
that captured the same bytes says whether it has the same.

What goes to a node goes in lanes, a thread and a connection each: one for every rank that has a pacer of its own (its
bubbles are not those of another), one for all else. A block of several ranks goes with the first of them.

A pacer says how many bytes may go, never which: frames are consecutive bytes of a stream, in its order. So where
bubbles are planned by whole layers, a window carries as many bytes as the layers chosen for it have, and not those
layers: a version is of use only when all of it is there, whatever came first, and a receiver needs to know no plan.

Invariant: nothing of it is in the step path; it is paced, and gets slower, never wrong. What a receiver says it has
taken decides what is sent next, so a broken connection, a frame that came twice or a receiver that was replaced costs
time only. Bytes leave a slot only after its digests have been verified, and only while the slot is pinned.

In: a plan, the pinned slots of this node, connections to the others. Out: frames; `done` when all has been taken and
nothing differs; `exchange.sent` and `replica.diverged` events.
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

from .. import faults
from ..errors import CorruptSlotError, FtError
from ..events import Events, catalogue
from ..model.pacer import Allowance, Pacer
from ..redundancy.plan import ExchangePlan, Send
from ..snapshot.segment import Segment
from ..snapshot.slots import Version
from . import checks
from .checks import Difference
from .priority import step_back
from .wire import PAYLOAD_LIMIT, Peer

_AGAIN_SECONDS = 0.2  # until a receiver that has all is asked whether it still has; or after an error
_REPORTED = 4  # differences one by one; a replica that has drifted as a whole has thousands
_WAIT_SECONDS = 0.02  # for a receiver that has not heard of the version yet

Bytes = npt.NDArray[np.uint8]
NO_RANK = -1


class RatePacer:
    """Lets so many bytes a second pass, over all threads. 0: as many as will."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, nbytes: int, stop: threading.Event) -> Allowance:
        """Wait until all of `nbytes` may go; none when stopped."""
        if self._rate:
            with self._lock:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + nbytes / self._rate
                wait = self._free_at - now
            stop.wait(wait)
        return Allowance(0 if stop.is_set() else nbytes)

    def ended(self, allowed: Allowance) -> bool | None:
        """A frame of the rate has no time by which it has to be through."""
        return None


@dataclass(frozen=True, order=True)
class Lane:
    """What goes to `target` of `rank`, by that rank's pacer; of all ranks without one, where it is NO_RANK."""

    target: int
    rank: int


def slot_of(segment: Segment, version: Version) -> int:
    """The slot that holds `version` CLEAN. Raises CorruptSlotError when none does (any more)."""
    for slot in segment.slots():
        if slot.version == version and slot.state.name == "CLEAN":
            return slot.index
    raise CorruptSlotError(f"rank {segment.rank}: version {version} is not in memory any more")


def copy_of(segment: Segment, version: Version) -> bytes:
    """What other nodes keep whole of a rank's slot: its small state and digest table."""
    index = slot_of(segment, version)
    return bytes(msgpack.packb([segment.small(index), segment.digests(index).tobytes()]))


class Exchange:
    """Sends `version` until it is stopped. A thread per lane."""

    def __init__(
        self,
        plan: ExchangePlan,
        position: int,
        version: Version,
        epoch: int,
        segments: Mapping[int, Segment],
        connect: Callable[[int], Peer],
        pacer: Pacer,
        events: Events,
        alike: Callable[[Version], None] = lambda version: None,
        pacers: Mapping[int, Pacer] | None = None,
    ) -> None:
        """`segments` of this node's ranks hold `version` pinned; `connect` gives a connection to a position's SMP.

        `pacers` are those of ranks by which goes what is theirs; `pacer` is for all else.

        `alike` is called when every replica that parity was made from here has been found equal to its other side.
        Raises ProtocolError when a slot is laid out otherwise than the plan has it.
        """
        self._plan = plan
        self._position = position
        self._version = version
        self._epoch = epoch
        self._segments = segments
        self._pacers = {NO_RANK: pacer, **(pacers or {})}
        self._events = events
        self._stop = threading.Event()
        self._frames = itertools.count()  # that were about to go, for faults
        self._started = time.monotonic()
        self._verified: bool | None = None
        self._verifying = threading.Lock()
        self._alike = alike
        self._checks = checks.by_target(plan, plan.ranks[position], segments)
        self._unchecked = set(self._checks)  # positions that have not said yet that all is equal
        self._counting = threading.Lock()
        self._sent_bytes = self._inside_bytes = self._late_bytes = 0
        self._announced = False
        self.differences: list[Difference] = []
        if not self._checks:  # also where there is parity, of nothing
            alike(version)
        self._lanes: dict[Lane, tuple[list[Send], list[int]]] = {Lane(to, NO_RANK): ([], []) for to in self._checks}
        for send in plan.sends[position]:
            members = plan.sections[send.area.section].members(send.node)
            lane = self._lane(send.area.position, members[0] if members else NO_RANK)
            self._lanes.setdefault(lane, ([], []))[0].append(send)
        for rank in plan.ranks[position]:
            for holder in plan.copy_holders(rank):
                self._lanes.setdefault(self._lane(holder, rank), ([], []))[1].append(rank)
        self._done = dict.fromkeys(sorted(self._lanes), False)
        self._peers = {lane: connect(lane.target) for lane in self._done}
        self._threads = [
            threading.Thread(target=self._feed, args=(lane,), name=f"smp-send-{lane.target}", daemon=True)
            for lane in self._done
        ]
        for thread in self._threads:
            thread.start()

    def _lane(self, target: int, rank: int) -> Lane:
        return Lane(target, rank if rank in self._pacers else NO_RANK)

    @property
    def version(self) -> Version:
        """What is sent."""
        return self._version

    @property
    def done(self) -> bool:
        """Whether every target has taken all that it was last asked about."""
        return all(self._done.values())

    @property
    def corrupt(self) -> bool:
        """Whether a slot does not match its digests: then nothing of it was sent."""
        return self._verified is False

    def stop(self) -> None:
        """Send no more; returns when no thread reads the slots."""
        self._stop.set()
        for peer in self._peers.values():
            peer.close()  # a request in flight fails
        for thread in self._threads:
            thread.join()

    def _feed(self, lane: Lane) -> None:
        complained = False
        step_back()
        while not self._stop.is_set():
            pause = _AGAIN_SECONDS
            try:
                if not self._slots_match():
                    return
                waiting = self._feed_once(lane)
                if self.differences:
                    return
                pause = _WAIT_SECONDS if waiting else _AGAIN_SECONDS
            except Exception as error:  # whatever it is: without this thread no version would ever count again
                if self._stop.is_set():
                    return
                self._done[lane] = False
                if not complained:  # once per version and lane, not five times a second
                    expected = isinstance(error, (FtError, OSError))
                    reason = str(error) if expected else f"{type(error).__name__}: {error}"
                    self._events.emit(catalogue.EXCHANGE_RETRIED, target=self._plan.nodes[lane.target], reason=reason)
                complained = True
            self._stop.wait(pause)

    def _slots_match(self) -> bool:
        """Verify the digests of all slots, once."""
        with self._verifying:
            if self._verified is None:
                try:
                    for rank in self._plan.ranks[self._position]:
                        if self._stop.is_set():
                            return False
                        segment = self._segments[rank]
                        segment.verify(slot_of(segment, self._version))
                    self._verified = True
                except CorruptSlotError as error:
                    self._events.emit(catalogue.SLOT_CORRUPTED, reason=str(error))
                    self._verified = False
            return self._verified

    def _feed_once(self, lane: Lane) -> bool:
        """Send what the target lacks; whether it has to be waited for."""
        sends, ranks = self._lanes[lane]
        fields: dict[str, Any] = {"version": [self._version.lineage, self._version.iteration], "epoch": self._epoch}
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
            self._send_copy(lane, rank, fields)
        if lane.rank == NO_RANK and lane.target in self._unchecked and not self._compare(lane, fields):
            self._done[lane] = False
            return True
        self._done[lane] = True
        self._announce()
        return False

    def _fault(self, lane: Lane, at: int) -> str | None:
        """The point before each frame; `frame` counts those of this exchange, from 0, over all lanes."""
        return faults.reach(
            "exchange.frame", position=self._position, target=lane.target, at=at, epoch=self._epoch,
            iteration=self._version.iteration, frame=next(self._frames),
        )  # fmt: skip

    def _compare(self, lane: Lane, fields: dict[str, Any]) -> bool:
        """Have the target compare its shares with what parity was made from here; whether all of them are equal."""
        tables = {
            rank: segment.digests(slot_of(segment, self._version)).copy() for rank, segment in self._segments.items()
        }
        for batch in checks.batches(self._checks[lane.target]):
            asked = checks.payload(batch, tables)
            faults.reach("exchange.check", position=self._position, target=lane.target)
            self._pacers[lane.rank].take(len(asked), self._stop)
            if self._stop.is_set():
                return False
            reply, _ = self._peers[lane].ask("check", asked, **fields)
            if reply.get("wait"):
                return False
            self._count(len(asked))
            differ = [Difference(self._version, batch[place]) for place in reply["differ"]]
            for found in differ[:_REPORTED]:
                self._differs(found, len(differ))
            if differ:
                return False
        with self._counting:
            self._unchecked.discard(lane.target)
            last = not self._unchecked
        if last:
            self._alike(self._version)
        return True

    def _differs(self, found: Difference, count: int) -> None:
        check = found.check
        self.differences.append(found)
        self._events.emit(
            catalogue.REPLICA_DIVERGED, about=check.keeper, ranks=[check.keeper, check.source.rank],
            bucket=check.bucket, lineage=found.version.lineage, iteration=found.version.iteration,
            offset=check.source.offset, bytes=check.source.nbytes, count=count, reason=str(found),
        )  # fmt: skip

    def _count(self, nbytes: int, in_time: bool | None = None) -> None:
        with self._counting:
            self._sent_bytes += nbytes
            self._inside_bytes += nbytes if in_time else 0
            self._late_bytes += nbytes if in_time is False else 0

    def _announce(self) -> None:
        """Say once what it took: of the bytes, how many were through within their bubble, and how many after it."""
        with self._counting:
            if self._announced or not self.done:
                return
            self._announced = True
        self._events.emit(
            catalogue.EXCHANGE_SENT, lineage=self._version.lineage, iteration=self._version.iteration,
            bytes=self._sent_bytes, inside=self._inside_bytes, late=self._late_bytes,
            compared=sum(map(len, self._checks.values())), seconds=round(time.monotonic() - self._started, 3),
        )  # fmt: skip

    def _frame(self, send: Send, at: int, nbytes: int) -> Bytes:
        """The next `nbytes` of a block, `at` from its start: a view of a slot, or a copy where ranks meet."""
        start = send.start + at
        stop = start + nbytes
        section = self._plan.sections[send.area.section]
        parts = []
        for extent in section.extents(send.node, start, stop):
            segment = self._segments[extent.rank]
            data = segment.data(slot_of(segment, self._version))
            parts.append(data[extent.offset : extent.offset + extent.nbytes])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _send_copy(self, lane: Lane, rank: int, fields: dict[str, Any]) -> None:
        whole = np.frombuffer(copy_of(self._segments[rank], self._version), dtype=np.uint8)
        at = 0
        while at < len(whole) and not self._stop.is_set():
            allowed = Allowance(PAYLOAD_LIMIT)
            if lane.rank != NO_RANK:  # what a rate lets go is measured by data alone
                allowed = self._pacers[lane.rank].take(min(PAYLOAD_LIMIT, len(whole) - at), self._stop)
                if not allowed.nbytes:
                    return
            part = whole[at : at + allowed.nbytes]
            answer, _ = self._peers[lane].ask("copy", part, rank=rank, at=at, total=len(whole), **fields)
            self._count(len(part), self._pacers[lane.rank].ended(allowed))
            at = int(answer["taken"])
