"""The node tier's state machine, without a process: one node by itself, and a job of thousands of nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from ft_plugins.events import catalogue
from ft_plugins.smp.tree.agreement import ExchangeDecision, ExchangeEpoch, Sealing, decide, summarize
from ft_plugins.smp.tree.node_step import (
    Action,
    Announced,
    Committed,
    CommitVersion,
    Declared,
    DeclareLost,
    Event,
    NodeState,
    Observation,
    RaiseAlarm,
    ReportDue,
    ReportSilence,
    SealChecked,
    SendReport,
    StartExchange,
    Switched,
    SwitchExchange,
    step,
)
from ft_plugins.smp.tree.tree import children_of
from ft_plugins.smp.tree.tree_state import TreeState
from ft_plugins.snapshot.segment.slots import Mark, Version

DETECT = 5.0


def v(iteration: int, lineage: int = 1) -> Version:
    return Version(lineage, iteration)


FRESH = NodeState(ExchangeEpoch(1, None, 3, 4), 1, False)
RESTORED = replace(FRESH, epoch=ExchangeEpoch(2, v(10), 3, 4), position=0)


def run(state: NodeState, *events: Event) -> tuple[NodeState, list[Action]]:
    actions: list[Action] = []
    for event in events:
        state, more = step(state, event)
        actions += more
    return state, actions


def reported(state: NodeState, seen: Observation) -> tuple[NodeState, SendReport]:
    state, actions = run(state, ReportDue(seen))
    assert isinstance(actions[-1], SendReport)
    return state, actions[-1]


def test_a_version_is_exchanged_once_its_ranks_have_sealed_it() -> None:
    decision = ExchangeDecision(v(4))
    state, actions = run(FRESH, Announced(decision))
    assert actions == [SwitchExchange(decision)] and state.awaited is None
    state, actions = run(state, Switched(decision), SealChecked(Sealing.PENDING), SealChecked(Sealing.PENDING))
    assert actions == [] and state.awaited == v(4)
    state, actions = run(state, SealChecked(Sealing.DONE), SealChecked(Sealing.DONE))
    assert actions == [StartExchange(v(4))] and state.awaited is None


def test_a_version_that_a_rank_has_passed_by_is_reported_as_missed_until_another_is_exchanged() -> None:
    state, actions = run(FRESH, Switched(ExchangeDecision(v(4))), SealChecked(Sealing.MISSED))
    assert actions == [] and state.awaited is None
    state, sent = reported(state, Observation(6))
    assert sent.report.missed == v(4)
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
    _, sent = reported(FRESH, seen)
    assert (sent.report.exchange, sent.report.encoded, sent.report.missed) == (v(4), encoded, missed)


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
    _, sent = reported(replace(FRESH, audited=True), seen)
    assert (sent.report.encoded, sent.report.missed) == (encoded, missed)


@pytest.mark.parametrize(
    ("mark", "missed"),
    [(Mark.NONE, None), (Mark.CERTIFIED, None), (Mark.UNAUDITED, v(4)), (Mark.MISMATCHED, v(4))],
)
def test_with_an_audit_a_version_that_never_counts_is_given_up_before_all_of_it_is_sent(
    mark: Mark, missed: Version | None
) -> None:
    """Otherwise no version is committed for as long as sending it takes, which may be many iterations."""
    seen = Observation(5, None, v(4), mark=mark)
    _, sent = reported(replace(FRESH, audited=True), seen)
    assert (sent.report.encoded, sent.report.missed) == (None, missed)


def test_the_restored_version_needs_no_audit() -> None:
    seen = Observation(10, None, v(10), complete=True, mark=Mark.UNAUDITED)
    _, sent = reported(replace(RESTORED, audited=True), seen)
    assert (sent.report.encoded, sent.report.missed) == (v(10), None)


def test_replicas_that_differ_raise_an_alarm_with_every_report() -> None:
    _, actions = run(FRESH, ReportDue(Observation(5, None, v(4), difference="ranks 0 and 2 differ")))
    assert actions[0] == RaiseAlarm("replicas", catalogue.REPLICA_MISMATCHED, "ranks 0 and 2 differ")


def test_what_was_not_carried_out_is_requested_again() -> None:
    """A disk was full, or the version is not here yet: no confirmation arrives."""
    answer = Announced(ExchangeDecision(v(8), v(4)), lost=(2,))
    wanted = [CommitVersion(v(4)), SwitchExchange(answer.decision), DeclareLost((2,))]
    state, actions = run(FRESH, answer)
    assert actions == wanted
    state, actions = run(state, ReportDue(Observation(5)), answer)
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


def test_lost_nodes_are_declared_once_and_why_the_first_one_is_presumed_lost_is_recorded() -> None:
    first = Announced(ExchangeDecision(), (0,), "refused")
    for _ in range(2):
        state, actions = run(FRESH, first)
        assert actions == [ReportSilence("refused"), DeclareLost((0,))], "as long as the agent was not notified"
    _, actions = run(state, Declared(), first, Announced(ExchangeDecision(), (0, 2)))
    assert actions == []
    assert run(FRESH, Announced(ExchangeDecision(), (2,)))[1] == [DeclareLost((2,))], "this node did not find it out"


def test_an_older_version_is_never_committed_in_place_of_a_newer_one() -> None:
    """A neighbour may not have heard yet what was committed here before the SMP was replaced."""
    state, _ = reported(FRESH, Observation(9, v(8)))
    assert run(state, Announced(ExchangeDecision(None, v(4))))[1] == []
    assert run(state, Announced(ExchangeDecision(None, v(12))))[1] == [CommitVersion(v(12))]


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

    def feed(self, event: Event) -> SendReport | None:
        sent, events = None, [event]
        while events:
            self.state, actions = step(self.state, events.pop(0))
            for action in actions:
                match action:
                    case SendReport():
                        sent = action
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
        return sent


class SimulatedJob:
    """The nodes, and the tree over which they agree: messages take no time."""

    def __init__(self, nodes: int, base: Version | None = None) -> None:
        self.now = 100.0
        self.epoch = ExchangeEpoch(base.lineage + 1 if base else 1, base, nodes, 1)
        self.nodes = [self.fresh(position, base.iteration if base else 0) for position in range(nodes)]
        self.trees = [self.placed(position) for position in range(nodes)]

    def fresh(self, position: int, captured: int) -> Simulated:
        return Simulated(NodeState(self.epoch, position, False), captured)

    def placed(self, position: int) -> TreeState:
        state = TreeState(self.epoch, position, DETECT, self.now)
        parent = state.advance(self.now).connect
        if parent is not None:
            state.joined(parent, self.now)
        return state

    def replace_first_smp(self) -> None:
        self.trees[0] = self.placed(0)
        self.nodes[0] = self.fresh(0, self.nodes[0].captured)
        for child in children_of(0, len(self.nodes)):
            self.trees[child].joined(0, self.now)

    def round(self) -> None:
        """All nodes that live report; the decision reaches them all."""
        self.now += self.trees[0].heartbeat_seconds
        living = [(position, node) for position, node in enumerate(self.nodes) if not node.down]
        for position, node in living:
            sent = node.feed(ReportDue(node.observe()))
            assert sent is not None
            self.trees[position].report(sent.report, self.now)
        for position, _ in [*reversed(living), *living]:  # up, then down
            outbox = self.trees[position].advance(self.now)
            parent = self.trees[position].parent
            if outbox.up is not None and parent is not None and not self.nodes[parent].down:
                self.trees[parent].hear_child(position, outbox.up, self.now)
            for child in outbox.down:
                self.trees[child].hear_parent(position, self.trees[position].announcement, self.now)
        for position, node in living:
            announcement = self.trees[position].announcement
            node.feed(Announced(announcement.decision, announcement.lost))

    @property
    def decision(self) -> ExchangeDecision:
        return self.trees[0].announcement.decision

    def train(self) -> None:
        """One iteration: every rank of every node seals it."""
        for node in self.nodes:
            node.captured += 1
            if node.state.awaited is not None and node.state.awaited.iteration <= node.captured:
                node.feed(SealChecked(Sealing.DONE))

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
    job.nodes[777].down = True  # no node is below it
    rounds = int(DETECT / job.trees[0].heartbeat_seconds) + 3
    for _ in range(rounds):
        job.round()
    assert job.committed() == {None}
    assert all(node.declared == [(777,)] for node in job.nodes if not node.down)


def test_after_a_recovery_of_4096_nodes_the_restored_version_is_committed_first() -> None:
    job = SimulatedJob(4096, base=v(10))
    job.round()
    assert {node.state.awaited for node in job.nodes} == {v(10)}
    for node in job.nodes:
        node.feed(SealChecked(Sealing.DONE))
    job.round()
    assert job.committed() == {v(10)}
    job.round()
    assert {node.state.awaited for node in job.nodes} == {v(11, 2)}


@pytest.mark.parametrize("nodes", [8, 40])
def test_a_first_smp_that_is_replaced_decides_the_same_from_reports_alone(nodes: int) -> None:
    job = SimulatedJob(nodes)
    job.round()
    job.train()
    job.round()
    before = job.decision
    assert before.committed == v(1)
    job.replace_first_smp()
    job.nodes[0].state = replace(job.nodes[0].state, committed=v(1))  # from its file
    assert job.decision == ExchangeDecision()
    job.round()
    assert job.decision == before
    job.train()
    job.round()
    assert job.committed() == {v(2)}


@pytest.mark.parametrize("nodes", [8, 40])
def test_a_first_smp_that_is_replaced_while_ranks_capture_the_announced_version_keeps_it(nodes: int) -> None:
    """No node sends it yet, and it is too late to announce it: what the nodes wait for is in their reports."""
    job = SimulatedJob(nodes)
    job.round()
    job.replace_first_smp()
    for node in job.nodes:
        node.captured = 1  # begun, not sealed
    job.round()
    assert job.decision.exchange == v(1) and {node.state.awaited for node in job.nodes} == {v(1)}
    for node in job.nodes:
        node.feed(SealChecked(Sealing.DONE))
    job.round()
    assert job.committed() == {v(1)}


def test_a_node_that_a_replaced_first_smp_hears_first_goes_on_waiting_for_the_announced_version() -> None:
    state, _ = run(FRESH, Switched(ExchangeDecision(v(4))))
    _, sent = reported(state, Observation(3))
    assert sent.report.exchange == v(4) and sent.report.encoded is None
    decision = decide(FRESH.epoch, ExchangeDecision(), summarize(1, sent.report))
    state, actions = run(state, Announced(decision))
    assert actions == [] and state.awaited == v(4)
