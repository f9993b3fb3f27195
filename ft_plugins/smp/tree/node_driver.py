"""Drive one incarnation's node tier: a thread that feeds `node_step.step` and carries out the actions it returns.

Invariant: it decides nothing. It reads the node's memory, reports, and runs the exchange; `node_step` decides for the
node, and `agreement` for the job. An action that fails, for example because a disk is full, ends its round; the next
round requests it again.

A round begins when the tree has an announcement, when the exchange has progressed, and otherwise every OBSERVE_SECONDS:
ranks only write to shared memory, so what they capture and seal, and the verdicts of audits, are looked for.

In: one incarnation's `Protection`, its parity store and pins. Out: reports to the tree, an `ExchangeSender`, pins;
`version.committed`, `exchange.started` and `coordinator.lost` events, alarms.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ...bubbles.bubble_plan import rate_duties
from ...bubbles.gate.gate import Gate
from ...bubbles.gate.gate_pacer import GatePacer
from ...errors import FtError
from ...events import Events, catalogue
from ...snapshot.schedule import newest
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import Mark, Version
from ...transport.calls import Handover, Peer
from ...transport.loop import Loop
from ..exchange.exchange import NO_RANK, ExchangeSender, ExchangeSource
from ..exchange.pace import Pace
from ..exchange.parity_store import ParityStore
from ..exchange.traffic import RatePacer
from ..watch.alarms import Alarms
from ..watch.hang import Stall
from . import node_step as steps
from .agreement import NodeReport, Sealing
from .pinned import PinnedVersions
from .protection import Protection
from .standstill import Standing
from .tree_member import TreeMember
from .tree_peers import TreePeers
from .tree_state import TreeState

OBSERVE_SECONDS = 0.05  # between two looks at this node's memory; less than `detect_seconds` / 5 if that is short
_POLL_SECONDS = 0.005  # while the version to exchange is being sealed: must be shorter than two iterations


class NodeDriver:
    """The driver of one node, for one incarnation. `lock` guards the memory that it shares with the SMP's requests."""

    def __init__(
        self,
        protection: Protection,
        store: ParityStore,
        pinned: PinnedVersions,
        segments: Mapping[int, Segment],
        connect: Callable[..., Peer],
        lock: AbstractContextManager[Any],
        events: Events,
        alarms: Alarms,
        declare: Callable[[list[str]], None],
        still: bool = False,
    ) -> None:
        """`connect(position, patience)` makes a connection to the SMP at a position, within that share of
        `detect_seconds`; `declare` notifies the agent of lost nodes. `still`: it was reported before that
        commits stand still."""
        self.protection = protection
        self.plan = protection.plan()
        self.store = store
        self.pace = Pace(protection.interval, pinned.committed, protection.base)
        self._pinned = pinned
        self._segments = segments
        self._connect = connect
        self._lock = lock
        self._events = events
        self._alarms = alarms
        self._declare = declare
        now, epoch = time.monotonic(), protection.epoch()
        self._state = steps.NodeState(epoch, protection.position, protection.audited, still=still)
        self._period = min(OBSERVE_SECONDS, protection.detect_seconds / 5)
        self.stall: Stall | None = None  # of this node's ranks
        self._reported: NodeReport | None = None
        self._reported_at, self._refresh = now, protection.detect_seconds / 10
        self._wake = threading.Event()  # there is something to look at
        self._peers = TreePeers(protection, self.plan.nodes, connect, events)
        self._loop = Loop("smp-tree")
        place = TreeState(epoch, protection.position, protection.detect_seconds, now)
        self._member = TreeMember(
            self._loop, place, self._peers.connect, self.wake, self._peers.disconnected, self._peers.rejected
        )
        self._exchange: ExchangeSender | None = None
        self._switched_at = self._committed_at = self._exchanging_since = now
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def stopped(self) -> bool:
        """Whether the exchange has ended."""
        return self._stop.is_set()

    @property
    def expected(self) -> Version | None:
        """The version that the job exchanges now."""
        return self._state.decision.exchange

    @property
    def announced_stall(self) -> Stall | None:
        """Where the job hangs, as its root has found."""
        return self._member.announcement.stall

    def start(self) -> None:
        """Join the tree and run the thread."""
        self._loop.start()
        self._thread = threading.Thread(target=self._run, name="smp-node-tier", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, the exchange and the connections of the tree; complete versions can be read. Idempotent."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        self.leave()
        with self._lock:
            self._end_exchange()
            self.pace.pacers = {}  # they reference the segments
            self.store.pause()

    def wake(self) -> None:
        """Begin a round now: the exchange has progressed."""
        self._wake.set()

    def leave(self) -> None:
        """Close the connections of the tree, as if this SMP had died: another one may take its place. Idempotent."""
        self._loop.stop()
        self._member.close()
        self._peers.close()
        self._loop.close()

    def join(self, position: int) -> Handover:
        """Have the node at `position` report to this one. Raises ProtocolError."""
        return self._peers.handover(position, self._member)

    # ---- the thread ----

    def _run(self) -> None:
        while not self.stopped:
            began = time.monotonic()
            self._wake.clear()
            with self._lock:
                due = None if self.stopped else steps.ReportDue(self._observe())
            if due is not None:
                self._feed(due)
            while not self._wake.is_set() and self._seal_awaited() and time.monotonic() - began < self._period:
                self._wake.wait(_POLL_SECONDS)
            self._wake.wait(max(0.0, self._period - (time.monotonic() - began)))

    def _feed(self, first: steps.Event) -> None:
        """Step with `first`, and with the events that its actions lead to."""
        events = deque([first])
        while events:
            with self._lock:
                if self.stopped:
                    return
                self._state, actions = steps.step(self._state, events.popleft())
            for action in actions:
                try:
                    event = self._carry_out(action)
                except (FtError, OSError):  # for example a full disk: unconfirmed, so requested again
                    break
                if event is not None:
                    events.append(event)

    def _carry_out(self, action: steps.Action) -> steps.Event | None:
        """Carry out one action; returns the event that it leads to."""
        if isinstance(action, steps.SendReport):
            return self._report(action.report)
        with self._lock:
            if self.stopped:
                return None
            match action:
                case steps.CommitVersion(version):
                    return self._commit(version)
                case steps.SwitchExchange(decision):
                    self._end_exchange()
                    self._pinned.switch_to(decision)
                    self._switched_at = time.monotonic()
                    if decision.exchange is not None:
                        self.store.begin(decision.exchange)
                    return steps.Switched(decision)
                case steps.StartExchange(version):
                    self._start_exchange(version)
                case steps.DeclareLost(positions):
                    self._declare([f"node {self.plan.nodes[position]}" for position in positions])
                    return steps.Declared()
                case steps.ReportSilence(reason):
                    self._events.emit(catalogue.COORDINATOR_LOST, reason=reason)
                case steps.RaiseAlarm(topic, kind, words):
                    self._alarms.say(topic, kind, words)
                case steps.ReportStandstill(standing, behind, aloud):
                    words = standing.words(behind.words(self.plan.nodes) if behind else "")
                    named = self.plan.nodes[behind.position] if behind else ""
                    fields = {
                        "iterations": standing.waits,
                        "seconds": standing.seconds,
                        "usual": standing.usual or None,
                    }
                    self._events.emit(catalogue.PROTECTION_STALLED, reason=words, waits_for=named, **fields)
                    if aloud:
                        self._alarms.say("commits", catalogue.PROTECTION_STALLED, words)
                case steps.EndStandstill(version, aloud):
                    words = f"iteration {version.iteration} is committed: versions are again"
                    self._events.emit(catalogue.PROTECTION_RESUMED, reason=words)
                    if aloud:
                        self._alarms.say("commits", catalogue.PROTECTION_RESUMED, words)
        return None

    def _report(self, report: NodeReport) -> steps.Announced:
        """Report to the job, if there is news or as a sign of life; what the job has announced so far."""
        now, report = time.monotonic(), replace(report, stall=self.stall)
        if report != self._reported or now >= self._reported_at + self._refresh:
            self._member.report(report)
            self._reported, self._reported_at = report, now
        announcement = self._member.announcement
        return steps.Announced(announcement.decision, announcement.lost, self._member.reason, announcement.behind)

    def _observe(self) -> steps.Observation:
        """The state of this node's memory now. Call with the lock held."""
        sender, begun = self._exchange, self._pinned.begun(self.protection.lineage)
        if self.pace.captured(Version(self.protection.lineage, begun)):
            self._report_pace()
        chosen = newest(segment.header.chosen for segment in self._segments.values())
        epoch = replace(self._state.epoch, chosen=chosen)
        protection, seconds = self.protection, time.monotonic() - self._committed_at
        standing = Standing(self.pace.waits, seconds, self.pace.usual, epoch.distance, protection.detect_seconds)
        if sender is None:
            return steps.Observation(begun, self._pinned.committed, standing=standing, chosen=chosen)
        complete = sender.done and sender.version in self.store.versions()
        return steps.Observation(
            begun, self._pinned.committed, sender.version, complete, sender.corrupt,
            str(sender.differences[0]) if sender.differences else "",
            self._pinned.mark(sender.version) if self.protection.audited else Mark.NONE, standing, sender.target,
            chosen,
        )  # fmt: skip

    def _seal_awaited(self) -> bool:
        """Start the exchange if this node's ranks have sealed the expected version. Returns whether they may still do
        so."""
        with self._lock:
            version = self._state.awaited
            if version is None or self.stopped:
                return False
            sealed = self._pinned.pin_sealed(version)
            self._feed(steps.SealChecked(sealed))
            return sealed is Sealing.PENDING

    def _commit(self, version: Version) -> steps.Event | None:
        if not self._pinned.commit(version):
            return None  # not complete here yet: the next answer requests it again
        self._committed_at = time.monotonic()
        for segment in self._segments.values() if version == self._state.sending else ():
            segment.header.exchanged_ms = round(1e3 * (self._committed_at - self._exchanging_since))
        pace_changed = self.pace.committed(version)
        self._events.emit(
            catalogue.VERSION_COMMITTED, lineage=version.lineage, iteration=version.iteration,
            seconds=round(time.monotonic() - self._switched_at, 3), position=self.protection.position,
            **self.pace.fields(), **self._filled(),
        )  # fmt: skip
        if pace_changed:
            self._report_pace()
        return steps.Committed(version)

    def _report_pace(self) -> None:
        """Report a change of pace; every node knows it, so one does."""
        if self.protection.position == 0:
            kind = catalogue.EXCHANGE_SLOWED if self.pace.rarer else catalogue.EXCHANGE_RECOVERED
            self._events.emit(kind, **self.pace.fields())
            self._alarms.say("checkpoints", kind, self.pace.words())

    def _filled(self) -> dict[str, list[list[int]]]:
        """Bytes of copies in the bubbles that carried most, as [rank, bubble, bytes]; {} if there are none."""
        filled = [[rank, *one] for rank, pacer in sorted(self.pace.pacers.items()) for one in pacer.filled()]
        return {"filled": filled} if filled else {}

    def _start_exchange(self, version: Version) -> None:
        self._exchanging_since = time.monotonic()
        self._events.emit(catalogue.EXCHANGE_STARTED, lineage=version.lineage, iteration=version.iteration)
        rate = RatePacer(self.protection.exchange_mbps * 1e6 / 8)
        ranks = self.plan.ranks[self.protection.position]
        if self.protection.stages and not self.pace.pacers:
            duties = rate_duties({rank: self.plan.nbytes[rank] for rank in ranks})
            self.pace.pacers = {
                rank: GatePacer(Gate(self._segments[rank].gate), rate, rate_duty=duty) for rank, duty in duties.items()
            }
        segments = {rank: self._segments[rank] for rank in ranks}
        source = ExchangeSource(
            self.plan, self.protection.position, self.protection.lineage, segments, self._connect, self._events,
            self.store.replicas_agree, self.wake,
        )  # fmt: skip
        self._exchange = ExchangeSender(source, version, {NO_RANK: rate, **self.pace.pacers})

    def _end_exchange(self) -> None:
        sender, self._exchange = self._exchange, None
        if sender is not None:
            sender.stop()
