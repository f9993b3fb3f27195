"""The node tier's state machine: `step(state, event)` returns the next state and the actions to carry out. Pure.

One round: `ReportDue` -> `SendReport` -> `Announced` -> `CommitVersion`, `SwitchExchange`, `DeclareLost`; then
`SealChecked` until this node's ranks have sealed the version that the job exchanges -> `StartExchange`.

Invariant: a state never claims more than was carried out. `CommitVersion`, `SwitchExchange` and `DeclareLost` are
confirmed by events (`Committed`, `Switched`, `Declared`). If one is not, because a disk was full or a version has not
arrived here, the next round requests it again. So every action may be carried out twice.

In: events. Out: a `NodeState`, actions for `node_driver.NodeDriver`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...events import EventType, catalogue
from ...snapshot.schedule import ChosenSchedule
from ...snapshot.segment.slots import Mark, Version
from .agreement import FURTHER, ExchangeDecision, ExchangeEpoch, NodeReport, Sealing
from .standstill import Behind, Lack, Standing


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
    standing: Standing = Standing()
    target: int | None = None  # the first position that has not yet taken what this node sends of `sending`
    chosen: ChosenSchedule | None = None  # the intervals that its ranks chose


# ---- events ----


@dataclass(frozen=True)
class ReportDue:
    """It is time for the next report."""

    seen: Observation


@dataclass(frozen=True)
class Announced:
    """The job's newest decision, as it is known here. `lost`: positions that have been silent for too long. `reason`:
    why position 0 is presumed to be one of them, if this node found that out itself."""

    decision: ExchangeDecision
    lost: tuple[int, ...] = ()
    reason: str = ""
    behind: Behind | None = None  # what the exchange lacks, as position 0 knows


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
    """Whether this node's ranks have sealed the version to exchange."""

    sealed: Sealing


Event = ReportDue | Announced | Committed | Switched | Declared | SealChecked


# ---- actions ----


@dataclass(frozen=True)
class SendReport:
    """Report to the job; continue with `Announced`."""

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
    """Record why position 0, which decides, is presumed lost."""

    reason: str


@dataclass(frozen=True)
class RaiseAlarm:
    """Have a trainer print an event of `kind`, which replaces the last text on `topic`."""

    topic: str
    kind: EventType
    words: str


@dataclass(frozen=True)
class ReportStandstill:
    """Record that commits stand still, and what is lacking, as far as it is known. `aloud`: have a trainer print it."""

    standing: Standing
    behind: Behind | None
    aloud: bool


@dataclass(frozen=True)
class EndStandstill:
    """Record that `version` was committed after a standstill."""

    version: Version
    aloud: bool


Action = (
    SendReport | CommitVersion | SwitchExchange | StartExchange | DeclareLost | ReportSilence | RaiseAlarm
    | ReportStandstill | EndStandstill
)  # fmt: skip


@dataclass(frozen=True)
class NodeState:
    """The state of one node in one incarnation."""

    epoch: ExchangeEpoch
    position: int
    audited: bool  # a version is committed only if its replicas were compared and agree
    decision: ExchangeDecision = ExchangeDecision()
    committed: Version | None = None
    sending: Version | None = None
    missed: Version | None = None  # the version that this node can never send or complete
    late: Version | None = None  # the same, if ranks were past it when it was announced
    declared: bool = False  # lost nodes were declared, which happens once per incarnation
    protected: bool = False  # a version was committed in this incarnation
    still: bool = False  # it was reported that commits stand still
    behind: Behind | None = None  # what the exchange lacked when that was last known, since the last commit

    @property
    def awaited(self) -> Version | None:
        """The version that this node's ranks are expected to seal, so that this node can send it."""
        wanted = self.decision.exchange
        return wanted if self.sending is None and self.missed != wanted else None


def step(state: NodeState, event: Event) -> tuple[NodeState, tuple[Action, ...]]:
    """The state after `event`, and what to do now, in order."""
    match event:
        case ReportDue(seen):
            return _report(state, seen)
        case Announced():
            return _follow(state, event)
        case Committed(version):
            return _committed(state, version)
        case Switched(decision):
            return replace(state, decision=decision, sending=None, missed=None, late=None), ()
        case Declared():
            return replace(state, declared=True), ()
        case SealChecked(sealed):
            return _start(state, sealed)


def _report(state: NodeState, seen: Observation) -> tuple[NodeState, tuple[Action, ...]]:
    """Report a version as missed if it differs, is corrupt or failed its audit: it can never be committed. That is
    known long before all of it is sent, and until another one is exchanged none is committed.

    A version that this node still waits for is reported too: a replaced SMP at position 0 has no other way to know that
    it was announced, once ranks have begun to capture it.
    """
    sending, missed = seen.sending, state.missed
    encoded = sending if seen.complete else None
    alarms: tuple[Action, ...] = ()
    if sending is not None and seen.difference:
        missed = sending
        alarms = (RaiseAlarm("replicas", catalogue.REPLICA_MISMATCHED, seen.difference),)
    if sending is not None and seen.corrupt:
        missed = sending
    if sending is not None and state.audited and sending != state.epoch.base:
        if seen.mark in (Mark.UNAUDITED, Mark.MISMATCHED):
            missed = sending
        encoded = encoded if seen.mark.preferred else None
    exchange = sending or state.decision.exchange
    behind = None
    if exchange is not None and encoded != exchange and seen.standing.seconds > seen.standing.detect_seconds:
        behind = _behind(state, seen, exchange, missed == exchange)
    report = NodeReport(seen.begun, exchange, missed, encoded, seen.committed, state.late, None, behind, seen.chosen)
    epoch = replace(state.epoch, chosen=seen.chosen)
    state = replace(state, epoch=epoch, committed=seen.committed, sending=sending, missed=missed)
    if seen.standing.still and not state.still:
        # all nodes know it, so one has it printed; and one on which a version is not committed that is on others
        own = state.decision.committed is not None and state.decision.committed != seen.committed
        alarms += (ReportStandstill(seen.standing, state.behind or behind, own or state.position == 0),)
        state = replace(state, still=True)
    return state, (*alarms, SendReport(report))


def _behind(state: NodeState, seen: Observation, exchange: Version, missed: bool) -> Behind:
    """What the exchange lacks at this node, or because of it. What is announced is the next version that is due, or
    further ahead (`agreement.decide`): by half of the iterations since the committed one, or by FURTHER."""
    position, epoch = state.position, state.epoch
    if seen.sending is None and exchange.lineage == epoch.lineage:
        since = max((one for one in (seen.committed, epoch.base) if one is not None), default=None)
        further = FURTHER if since is None else max(seen.begun - since.iteration, 0) // 2
        if (ahead := exchange.iteration - seen.begun) > further + 2 * epoch.distance:
            return Behind(Lack.AHEAD, position, ahead)
    if seen.sending is None or missed:
        return Behind(Lack.SNAPSHOT, position)
    if seen.target is not None:
        return Behind(Lack.TRANSFER, position, seen.target)
    return Behind(Lack.PARTS, position)


def _follow(state: NodeState, announced: Announced) -> tuple[NodeState, tuple[Action, ...]]:
    decision, actions = announced.decision, list[Action]()
    state = replace(state, behind=announced.behind or state.behind)
    if decision.committed is not None and (state.committed is None or decision.committed > state.committed):
        actions.append(CommitVersion(decision.committed))
    if decision.exchange != state.decision.exchange:
        actions.append(SwitchExchange(decision))
    else:
        state = replace(state, decision=decision)
    if announced.lost and not state.declared:
        if announced.reason:
            actions.append(ReportSilence(announced.reason))
        actions.append(DeclareLost(announced.lost))
    return state, tuple(actions)


def _committed(state: NodeState, version: Version) -> tuple[NodeState, tuple[Action, ...]]:
    """The first version committed after a recovery restores the redundancy that was lost; one node announces it."""
    first = not state.protected and state.position == 0 and state.epoch.base is not None
    words = f"iteration {version.iteration} is protected on all nodes: a lost node is survived again"
    alarms: tuple[Action, ...] = (RaiseAlarm("protection", catalogue.PROTECTION_RESTORED, words),) if first else ()
    if state.still:
        alarms += (EndStandstill(version, state.position == 0),)
    return replace(state, committed=version, protected=True, still=False, behind=None), alarms


def _start(state: NodeState, sealed: Sealing) -> tuple[NodeState, tuple[Action, ...]]:
    version = state.awaited
    if version is None or sealed is Sealing.PENDING:
        return state, ()
    if sealed is Sealing.MISSED:
        return replace(state, missed=version, late=version), ()
    return replace(state, sending=version), (StartExchange(version),)
