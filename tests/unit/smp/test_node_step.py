"""The node tier's state machine, without a process: one node by itself, and a job of thousands of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from ft_plugins.errors import ProtocolError
from ft_plugins.events import catalogue
from ft_plugins.smp.agreement import Coordinator, ExchangeDecision, ExchangeEpoch
from ft_plugins.smp.node_step import (
    Action,
    Committed,
    CommitVersion,
    Declared,
    DeclareLost,
    Event,
    HeartbeatAnswered,
    HeartbeatDue,
    HeartbeatUnanswered,
    NodeState,
    Observation,
    RaiseAlarm,
    ReportSilence,
    SealChecked,
    SendHeartbeat,
    StartExchange,
    Switched,
    SwitchExchange,
    step,
)
from ft_plugins.snapshot.slots import Mark, Version

DETECT = 5.0


def v(iteration: int, lineage: int = 1) -> Version:
    return Version(lineage, iteration)


FRESH = NodeState(ExchangeEpoch(1, None, 3, 4), 1, False, DETECT, 100.0)
RESTORED = replace(FRESH, epoch=ExchangeEpoch(2, v(10), 3, 4), position=0)


def run(state: NodeState, *events: Event) -> tuple[NodeState, list[Action]]:
    actions: list[Action] = []
    for event in events:
        state, more = step(state, event)
        actions += more
    return state, actions


def reported(state: NodeState, seen: Observation) -> tuple[NodeState, SendHeartbeat]:
    state, actions = run(state, HeartbeatDue(seen))
    assert isinstance(actions[-1], SendHeartbeat)
    return state, actions[-1]


def test_a_version_is_exchanged_once_its_ranks_have_sealed_it() -> None:
    decision = ExchangeDecision(v(4))
    state, actions = run(FRESH, HeartbeatAnswered(101.0, decision))
    assert actions == [SwitchExchange(decision)] and state.awaited is None
    state, actions = run(state, Switched(decision), SealChecked(False), SealChecked(False))
    assert actions == [] and state.awaited == v(4)
    state, actions = run(state, SealChecked(True), SealChecked(True))
    assert actions == [StartExchange(v(4))] and state.awaited is None


def test_a_version_that_a_rank_has_passed_by_is_reported_as_missed_until_another_is_exchanged() -> None:
    state, actions = run(FRESH, Switched(ExchangeDecision(v(4))), SealChecked(None))
    assert actions == [] and state.awaited is None
    state, heartbeat = reported(state, Observation(6))
    assert heartbeat.report.missed == v(4)
    state, _ = run(state, Switched(ExchangeDecision(v(8))))
    assert state.awaited == v(8) and reported(state, Observation(6))[1].report.missed is None


@pytest.mark.parametrize(
    ("seen", "encoded", "missed"),
    [
        (Observation(5, None, v(4)), None, None),
        (Observation(5, None, v(4), complete=True), v(4), None),
        (Observation(5, None, v(4), corrupt=True), None, v(4)),
        (Observation(5, None, v(4), complete=True, difference="ranks 0 and 2"), v(4), v(4)),
    ],
)
def test_a_report_says_what_is_complete_and_what_never_will_be(
    seen: Observation, encoded: Version | None, missed: Version | None
) -> None:
    _, heartbeat = reported(FRESH, seen)
    assert (heartbeat.report.exchange, heartbeat.report.encoded, heartbeat.report.missed) == (v(4), encoded, missed)


@pytest.mark.parametrize(
    ("mark", "encoded", "missed"),
    [
        (Mark.NONE, None, None),
        (Mark.CERTIFIED, v(4), None),
        (Mark.UNAUDITED, None, v(4)),
        (Mark.MISMATCHED, None, v(4)),
    ],
)
def test_with_an_audit_a_version_is_complete_once_its_replicas_agree(
    mark: Mark, encoded: Version | None, missed: Version | None
) -> None:
    seen = Observation(5, None, v(4), complete=True, mark=mark)
    _, heartbeat = reported(replace(FRESH, audited=True), seen)
    assert (heartbeat.report.encoded, heartbeat.report.missed) == (encoded, missed)


def test_the_restored_version_needs_no_audit() -> None:
    seen = Observation(10, None, v(10), complete=True, mark=Mark.UNAUDITED)
    _, heartbeat = reported(replace(RESTORED, audited=True), seen)
    assert (heartbeat.report.encoded, heartbeat.report.missed) == (v(10), None)


def test_replicas_that_differ_raise_an_alarm_with_every_report() -> None:
    _, actions = run(FRESH, HeartbeatDue(Observation(5, None, v(4), difference="ranks 0 and 2 differ")))
    assert actions[0] == RaiseAlarm("replicas", catalogue.REPLICA_MISMATCHED, "ranks 0 and 2 differ")


def test_what_was_not_carried_out_is_requested_again() -> None:
    """A disk was full, or the version is not here yet: no confirmation arrives."""
    answer = HeartbeatAnswered(101.0, ExchangeDecision(v(8), v(4)), lost=(2,))
    wanted = [CommitVersion(v(4)), SwitchExchange(answer.decision), DeclareLost((2,))]
    state, actions = run(FRESH, answer)
    assert actions == wanted
    state, actions = run(state, HeartbeatDue(Observation(5)), answer)
    assert actions[1:] == wanted
    state, actions = run(state, Committed(v(4)), Switched(answer.decision), Declared(), answer)
    assert actions == []


def test_the_first_commit_after_a_recovery_is_announced_by_the_first_node_alone() -> None:
    state, (alarm,) = run(RESTORED, Committed(v(10)))
    assert isinstance(alarm, RaiseAlarm) and alarm.kind is catalogue.PROTECTION_RESTORED
    assert "iteration 10" in alarm.words
    assert run(state, Committed(v(12, 2)))[1] == []
    assert run(replace(RESTORED, position=1), Committed(v(10)))[1] == []
    assert run(replace(FRESH, position=0), Committed(v(4)))[1] == [], "nothing was lost before"


def test_a_silent_coordinator_is_lost_after_the_detection_time_and_declared_once() -> None:
    state, actions = run(FRESH, HeartbeatUnanswered(100.0 + DETECT, "refused"))
    assert actions == []
    state, actions = run(state, HeartbeatUnanswered(100.1 + DETECT, "refused"))
    assert actions == [ReportSilence("refused"), DeclareLost((0,))]
    state, actions = run(state, HeartbeatUnanswered(100.2 + DETECT, "refused"))
    assert actions == [ReportSilence("refused"), DeclareLost((0,))], "as long as the agent was not notified"
    _, actions = run(state, Declared(), HeartbeatUnanswered(101.0 + DETECT, "refused"))
    assert actions == []


@pytest.mark.parametrize(
    ("nodes", "detect", "seconds"), [(2, 30.0, 0.05), (2, 0.1, 0.02), (2048, 30.0, 2.048), (2048, 5.0, 1.0)]
)
def test_heartbeats_come_several_times_within_the_detection_time(nodes: int, detect: float, seconds: float) -> None:
    state = replace(FRESH, epoch=ExchangeEpoch(1, None, nodes, 1), detect_seconds=detect)
    assert state.heartbeat_seconds == pytest.approx(seconds)


# ---- a whole job, of which nothing runs ----


@dataclass
class Simulated:
    """One node of 8 ranks: carries out actions in no time, on memory that always has what was captured."""

    state: NodeState
    captured: int = 0
    complete: bool = False
    down: bool = False
    declared: list[tuple[int, ...]] = field(default_factory=list)

    def observe(self) -> Observation:
        return Observation(self.captured, self.state.committed, self.state.sending, self.complete)

    def feed(self, event: Event) -> SendHeartbeat | None:
        heartbeat, events = None, [event]
        while events:
            self.state, actions = step(self.state, events.pop(0))
            for action in actions:
                match action:
                    case SendHeartbeat():
                        heartbeat = action
                    case CommitVersion(version):
                        events.append(Committed(version))
                    case SwitchExchange(decision):
                        self.complete = False
                        events.append(Switched(decision))
                    case StartExchange():
                        self.complete = True
                    case DeclareLost(positions):
                        self.declared.append(positions)
                        events.append(Declared())
        return heartbeat


class SimulatedJob:
    def __init__(self, nodes: int, base: Version | None = None) -> None:
        self.now = 100.0
        epoch = ExchangeEpoch(base.lineage + 1 if base else 1, base, nodes, 1)
        self.coordinator = Coordinator.start(epoch, DETECT, self.now)
        self.nodes = [
            Simulated(NodeState(epoch, position, False, DETECT, self.now), captured=base.iteration if base else 0)
            for position in range(nodes)
        ]

    def round(self) -> None:
        """All nodes that live send a heartbeat; the coordinator's decision after the last one reaches them all."""
        self.now += self.nodes[0].state.heartbeat_seconds
        living = [(position, node) for position, node in enumerate(self.nodes) if not node.down]
        reports = {}
        for position, node in living:
            heartbeat = node.feed(HeartbeatDue(node.observe()))
            assert heartbeat is not None
            reports[position] = heartbeat.report
        heard = {**self.coordinator.heard, **dict.fromkeys(reports, self.now)}
        self.coordinator = replace(self.coordinator, heard=heard, reports={**self.coordinator.reports, **reports})
        last = max(reports)
        self.coordinator = self.coordinator.receive(last, reports[last], self.now)
        lost = self.coordinator.lost(self.now)
        for _, node in living:
            node.feed(HeartbeatAnswered(self.now, self.coordinator.decision, lost))

    def train(self) -> None:
        """One iteration: every rank of every node seals it."""
        for node in self.nodes:
            node.captured += 1
            if node.state.awaited is not None and node.state.awaited.iteration <= node.captured:
                node.feed(SealChecked(True))

    def committed(self) -> set[Version | None]:
        return {node.state.committed for node in self.nodes if not node.down}


def test_4096_nodes_commit_version_after_version() -> None:
    job = SimulatedJob(4096)
    job.round()
    for iteration in range(1, 4):
        job.train()
        job.round()
        assert job.committed() == {v(iteration)}
    assert {node.state.awaited for node in job.nodes} == {v(4)}


def test_a_lost_node_of_1024_is_declared_by_all_others_once_and_nothing_is_committed_without_it() -> None:
    job = SimulatedJob(1024)
    job.round()
    job.train()
    job.nodes[77].down = True
    rounds = int(DETECT / job.nodes[0].state.heartbeat_seconds) + 3
    for _ in range(rounds):
        job.round()
    assert job.committed() == {None}
    assert all(node.declared == [(77,)] for node in job.nodes if not node.down)


def test_after_a_recovery_of_4096_nodes_the_restored_version_is_committed_first() -> None:
    job = SimulatedJob(4096, base=v(10))
    job.round()
    assert {node.state.awaited for node in job.nodes} == {v(10)}
    for node in job.nodes:
        node.feed(SealChecked(True))
    job.round()
    assert job.committed() == {v(10)}
    job.round()
    assert {node.state.awaited for node in job.nodes} == {v(11, 2)}


def test_a_coordinator_that_is_replaced_decides_the_same_from_reports_alone() -> None:
    job = SimulatedJob(8)
    job.round()
    job.train()
    job.round()
    before = job.coordinator.decision
    job.coordinator = Coordinator.start(job.coordinator.epoch, DETECT, job.now)
    job.round()
    assert job.coordinator.decision == before
    job.train()
    job.round()
    assert job.committed() == {v(2)}


def test_a_coordinator_that_is_replaced_while_ranks_capture_the_announced_version_keeps_it() -> None:
    """No node sends it yet, and it is too late to announce it: what the nodes wait for is in their reports."""
    job = SimulatedJob(8)
    job.round()
    epoch = job.coordinator.epoch
    job.coordinator = Coordinator.start(epoch, DETECT, job.now)
    job.nodes[0] = Simulated(NodeState(epoch, 0, False, DETECT, job.now))
    for node in job.nodes:
        node.captured = 1  # begun, not sealed
    job.round()
    assert job.coordinator.decision.exchange == v(1) and {node.state.awaited for node in job.nodes} == {v(1)}
    for node in job.nodes:
        node.feed(SealChecked(True))
    job.round()
    assert job.committed() == {v(1)}


def test_a_node_that_the_replaced_coordinator_hears_first_goes_on_waiting_for_the_announced_version() -> None:
    state, _ = run(FRESH, Switched(ExchangeDecision(v(4))))
    _, heartbeat = reported(state, Observation(3))
    assert heartbeat.report.exchange == v(4) and heartbeat.report.encoded is None
    decision = Coordinator.start(FRESH.epoch, DETECT, 100.0).receive(1, heartbeat.report, 101.0).decision
    state, actions = run(state, HeartbeatAnswered(101.0, decision))
    assert actions == [] and state.awaited == v(4)


def test_the_coordinator_sees_the_silent_and_refuses_unknown_positions() -> None:
    job = SimulatedJob(3)
    job.round()
    job.nodes[2].down = True
    while not job.coordinator.lost(job.now):
        job.round()
    assert job.coordinator.lost(job.now) == (2,) and job.now - job.coordinator.heard[2] > DETECT
    with pytest.raises(ProtocolError, match="position 3"):
        job.coordinator.receive(3, job.coordinator.reports[0], job.now)
