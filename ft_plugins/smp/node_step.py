"""The node tier's state machine: `step(state, event)` returns the next state and the actions to carry out. Pure.

One round: `HeartbeatDue` -> `SendHeartbeat` -> `HeartbeatAnswered` -> `CommitVersion`, `SwitchExchange`, `DeclareLost`;
then `SealChecked` until this node's ranks have sealed the version that the job exchanges -> `StartExchange`.

Invariant: a state never claims more than was carried out. `CommitVersion`, `SwitchExchange` and `DeclareLost` are
confirmed by events (`Committed`, `Switched`, `Declared`). If one is not, because a disk was full or a version has not
arrived here, the answer to the next heartbeat requests it again. So every action may be carried out twice.

In: events with times (seconds, monotonic). Out: a `NodeState`, actions for `node.NodeTier`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..events import EventType, catalogue
from ..snapshot.slots import Mark, Version
from .agreement import ExchangeDecision, ExchangeEpoch, NodeReport

_HEARTBEATS_PER_DETECTION = 5
_FASTEST_SECONDS = 0.05
_NODES_PER_SECOND = 1000  # heartbeats that the coordinator can take


@dataclass(frozen=True)
class Observation:
    """What this node's memory shows at one moment. `sending` is the version whose exchange is under way here."""

    begun: int  # the newest iteration that a rank of this node has begun to capture
    committed: Version | None = None
    sending: Version | None = None
    complete: bool = False  # every receiver has taken `sending`, and what this node stores of it is complete
    corrupt: bool = False  # a slot of `sending` fails its digests, so it is not sent
    difference: str = ""  # the first difference between replicas of `sending`, as text
    mark: Mark = Mark.NONE  # the audit's verdict on `sending`


# ---- events ----


@dataclass(frozen=True)
class HeartbeatDue:
    """It is time for the next heartbeat."""

    seen: Observation


@dataclass(frozen=True)
class HeartbeatAnswered:
    """The coordinator has answered the heartbeat. `lost` are positions that have been silent for too long."""

    now: float
    decision: ExchangeDecision
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class HeartbeatUnanswered:
    """The coordinator has not answered the heartbeat, for this reason."""

    now: float
    reason: str


@dataclass(frozen=True)
class Committed:
    """`version` is committed on this node."""

    version: Version


@dataclass(frozen=True)
class Switched:
    """The exchange of another version has ended here; that of `decision` is awaited."""

    decision: ExchangeDecision


@dataclass(frozen=True)
class Declared:
    """The agent has been notified of lost nodes."""


@dataclass(frozen=True)
class SealChecked:
    """Whether all ranks of this node have sealed the version to exchange; None if one of them has skipped it."""

    sealed: bool | None


Event = HeartbeatDue | HeartbeatAnswered | HeartbeatUnanswered | Committed | Switched | Declared | SealChecked


# ---- actions ----


@dataclass(frozen=True)
class SendHeartbeat:
    """Send `report` to the coordinator; continue with `HeartbeatAnswered` or `HeartbeatUnanswered`."""

    report: NodeReport


@dataclass(frozen=True)
class CommitVersion:
    """Pin `version` in place of the previously committed one, if all of it is here; continue with `Committed`."""

    version: Version


@dataclass(frozen=True)
class SwitchExchange:
    """End the running exchange, prepare for that of `decision`; continue with `Switched`."""

    decision: ExchangeDecision


@dataclass(frozen=True)
class StartExchange:
    """Send `version`, which this node's ranks have sealed and pinned."""

    version: Version


@dataclass(frozen=True)
class DeclareLost:
    """Notify the agent that the nodes at `positions` are lost; continue with `Declared`."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class ReportSilence:
    """Record why the coordinator is presumed lost."""

    reason: str


@dataclass(frozen=True)
class RaiseAlarm:
    """Have a trainer print an event of `kind`, which replaces the last text on `topic`."""

    topic: str
    kind: EventType
    words: str


Action = SendHeartbeat | CommitVersion | SwitchExchange | StartExchange | DeclareLost | ReportSilence | RaiseAlarm


@dataclass(frozen=True)
class NodeState:
    """The state of one node in one incarnation. `heard`: when the coordinator last answered."""

    epoch: ExchangeEpoch
    position: int
    audited: bool  # a version is committed only if its replicas were compared and agree
    detect_seconds: float
    heard: float
    decision: ExchangeDecision = ExchangeDecision()
    committed: Version | None = None
    sending: Version | None = None
    missed: Version | None = None  # the version that this node can never send or complete
    declared: bool = False  # lost nodes were declared, which happens once per incarnation
    protected: bool = False  # a version was committed in this incarnation

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between heartbeats: several within `detect_seconds`, but no more than the coordinator can take."""
        fastest = max(_FASTEST_SECONDS, self.epoch.nodes / _NODES_PER_SECOND)
        return min(self.detect_seconds / _HEARTBEATS_PER_DETECTION, fastest)

    @property
    def awaited(self) -> Version | None:
        """The version that this node's ranks are expected to seal, so that this node can send it."""
        wanted = self.decision.exchange
        return wanted if self.sending is None and self.missed != wanted else None


def step(state: NodeState, event: Event) -> tuple[NodeState, tuple[Action, ...]]:
    """The state after `event`, and what to do now, in order."""
    match event:
        case HeartbeatDue(seen):
            return _report(state, seen)
        case HeartbeatAnswered(now, decision, lost):
            return _follow(replace(state, heard=now), decision, lost)
        case HeartbeatUnanswered(now, reason):
            if state.declared or now - state.heard <= state.detect_seconds:
                return state, ()
            return state, (ReportSilence(reason), DeclareLost((0,)))
        case Committed(version):
            return _committed(state, version)
        case Switched(decision):
            return replace(state, decision=decision, sending=None, missed=None), ()
        case Declared():
            return replace(state, declared=True), ()
        case SealChecked(sealed):
            return _start(state, sealed)


def _report(state: NodeState, seen: Observation) -> tuple[NodeState, tuple[Action, ...]]:
    """Report a version as missed if it differs, is corrupt or failed its audit: it can never be committed.

    A version that this node still waits for is reported too: a replaced coordinator has no other way to know that it
    was announced, once ranks have begun to capture it.
    """
    sending, missed = seen.sending, state.missed
    encoded = sending if seen.complete else None
    alarms: tuple[Action, ...] = ()
    if sending is not None and seen.difference:
        missed = sending
        alarms = (RaiseAlarm("replicas", catalogue.REPLICA_MISMATCHED, seen.difference),)
    if sending is not None and seen.corrupt:
        missed = sending
    if encoded is not None and state.audited and encoded != state.epoch.base:
        if seen.mark in (Mark.UNAUDITED, Mark.MISMATCHED):
            missed = sending
        encoded = encoded if seen.mark.preferred else None
    report = NodeReport(seen.begun, sending or state.decision.exchange, missed, encoded, seen.committed)
    state = replace(state, committed=seen.committed, sending=sending, missed=missed)
    return state, (*alarms, SendHeartbeat(report))


def _follow(
    state: NodeState, decision: ExchangeDecision, lost: tuple[int, ...]
) -> tuple[NodeState, tuple[Action, ...]]:
    actions: list[Action] = []
    if decision.committed is not None and decision.committed != state.committed:
        actions.append(CommitVersion(decision.committed))
    if decision.exchange != state.decision.exchange:
        actions.append(SwitchExchange(decision))
    else:
        state = replace(state, decision=decision)
    if lost and not state.declared:
        actions.append(DeclareLost(lost))
    return state, tuple(actions)


def _committed(state: NodeState, version: Version) -> tuple[NodeState, tuple[Action, ...]]:
    """The first version committed after a recovery restores the redundancy that was lost; one node announces it."""
    first = not state.protected and state.position == 0 and state.epoch.base is not None
    words = f"iteration {version.iteration} is protected on all nodes: a lost node is survived again"
    alarms = (RaiseAlarm("protection", catalogue.PROTECTION_RESTORED, words),) if first else ()
    return replace(state, committed=version, protected=True), alarms


def _start(state: NodeState, sealed: bool | None) -> tuple[NodeState, tuple[Action, ...]]:
    version = state.awaited
    if version is None or sealed is False:
        return state, ()
    if sealed is None:
        return replace(state, missed=version), ()
    return replace(state, sending=version), (StartExchange(version),)
