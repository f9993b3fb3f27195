"""The node tier's state machine, without a process: one node by itself, and a job of thousands of nodes."""

from dataclasses import replace

import pytest

from ft_plugins.events import catalogue
from ft_plugins.smp.tree.agreement import ExchangeDecision, ExchangeEpoch, Sealing, decide, summarize
from ft_plugins.smp.tree.node_step import (
    Announced,
    Committed,
    CommitVersion,
    Declared,
    DeclareLost,
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
from ft_plugins.snapshot.segment.slots import Mark, Version

DETECT = 5.0


def v(iteration, lineage=1):
    return Version(lineage, iteration)


FRESH = NodeState(ExchangeEpoch(1, None, 3, 4), 1, False)
RESTORED = replace(FRESH, epoch=ExchangeEpoch(2, v(10), 3, 4), position=0)


def run(state, *events):
    actions = []
    for event in events:
        state, more = step(state, event)
        actions += more
    return state, actions


def reported(state, seen):
    state, actions = run(state, ReportDue(seen))
    assert isinstance(actions[-1], SendReport)
    return state, actions[-1]


def test_a_version_is_exchanged_once_its_ranks_have_sealed_it():
    decision = ExchangeDecision(v(4))
    state, actions = run(FRESH, Announced(decision))
    assert actions == [SwitchExchange(decision)] and state.awaited is None
    state, actions = run(state, Switched(decision), SealChecked(Sealing.PENDING), SealChecked(Sealing.PENDING))
    assert actions == [] and state.awaited == v(4)
    state, actions = run(state, SealChecked(Sealing.DONE), SealChecked(Sealing.DONE))
    assert actions == [StartExchange(v(4))] and state.awaited is None


def test_a_version_that_a_rank_has_passed_by_is_reported_as_missed_until_another_is_exchanged():
    state, actions = run(FRESH, Switched(ExchangeDecision(v(4))), SealChecked(Sealing.MISSED))
    assert actions == [] and state.awaited is None
    state, sent = reported(state, Observation(6))
    assert sent.report.missed == sent.report.late == v(4)
    state, _ = run(state, Switched(ExchangeDecision(v(8))))
    after = reported(state, Observation(6))[1].report
    assert state.awaited == v(8) and after.missed is after.late is None


@pytest.mark.parametrize(
    ("seen", "encoded", "missed"),
    [
        (Observation(5, None, v(4)), None, None),
        (Observation(5, None, v(4), complete=True), v(4), None),
        (Observation(5, None, v(4), corrupt=True), None, v(4)),
        (Observation(5, None, v(4), complete=True, difference="ranks 0 and 2"), v(4), v(4)),
    ],
)
def test_a_report_says_what_is_complete_and_what_never_will_be(seen, encoded, missed):
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
def test_with_an_audit_a_version_is_complete_once_its_replicas_agree(mark, encoded, missed):
    seen = Observation(5, None, v(4), complete=True, mark=mark)
    _, sent = reported(replace(FRESH, audited=True), seen)
    assert (sent.report.encoded, sent.report.missed) == (encoded, missed)


@pytest.mark.parametrize(
    ("mark", "missed"),
    [(Mark.NONE, None), (Mark.CERTIFIED, None), (Mark.UNAUDITED, v(4)), (Mark.MISMATCHED, v(4))],
)
def test_with_an_audit_a_version_that_never_counts_is_given_up_before_all_of_it_is_sent(mark, missed):
    """Otherwise no version is committed for as long as sending it takes, which may be many iterations."""
    seen = Observation(5, None, v(4), mark=mark)
    _, sent = reported(replace(FRESH, audited=True), seen)
    assert (sent.report.encoded, sent.report.missed) == (None, missed)


def test_the_restored_version_needs_no_audit():
    seen = Observation(10, None, v(10), complete=True, mark=Mark.UNAUDITED)
    _, sent = reported(replace(RESTORED, audited=True), seen)
    assert (sent.report.encoded, sent.report.missed) == (v(10), None)


def test_replicas_that_differ_raise_an_alarm_with_every_report():
    _, actions = run(FRESH, ReportDue(Observation(5, None, v(4), difference="ranks 0 and 2 differ")))
    assert actions[0] == RaiseAlarm("replicas", catalogue.REPLICA_MISMATCHED, "ranks 0 and 2 differ")


def test_what_was_not_carried_out_is_requested_again():
    """A disk was full, or the version is not here yet: no confirmation arrives."""
    answer = Announced(ExchangeDecision(v(8), v(4)), lost=(2,))
    wanted = [CommitVersion(v(4)), SwitchExchange(answer.decision), DeclareLost((2,))]
    state, actions = run(FRESH, answer)
    assert actions == wanted
    state, actions = run(state, ReportDue(Observation(5)), answer)
    assert actions[1:] == wanted
    state, actions = run(state, Committed(v(4)), Switched(answer.decision), Declared(), answer)
    assert actions == []


def test_the_first_commit_after_a_recovery_is_announced_by_the_first_node_alone():
    state, (alarm,) = run(RESTORED, Committed(v(10)))
    assert isinstance(alarm, RaiseAlarm) and alarm.kind is catalogue.PROTECTION_RESTORED
    assert "iteration 10" in alarm.words
    assert run(state, Committed(v(12, 2)))[1] == []
    assert run(replace(RESTORED, position=1), Committed(v(10)))[1] == []
    assert run(replace(FRESH, position=0), Committed(v(4)))[1] == [], "nothing was lost before"


def test_lost_nodes_are_declared_once_and_why_the_first_one_is_presumed_lost_is_recorded():
    first = Announced(ExchangeDecision(), (0,), "refused")
    for _ in range(2):
        state, actions = run(FRESH, first)
        assert actions == [ReportSilence("refused"), DeclareLost((0,))], "as long as the agent was not notified"
    _, actions = run(state, Declared(), first, Announced(ExchangeDecision(), (0, 2)))
    assert actions == []
    assert run(FRESH, Announced(ExchangeDecision(), (2,)))[1] == [DeclareLost((2,))], "this node did not find it out"


def test_an_older_version_is_never_committed_in_place_of_a_newer_one():
    """A neighbour may not have heard yet what was committed here before the SMP was replaced."""
    state, _ = reported(FRESH, Observation(9, v(8)))
    assert run(state, Announced(ExchangeDecision(None, v(4))))[1] == []
    assert run(state, Announced(ExchangeDecision(None, v(12))))[1] == [CommitVersion(v(12))]


# ---- a whole job, of which nothing runs ----


def test_a_node_that_a_replaced_first_smp_hears_first_goes_on_waiting_for_the_announced_version():
    state, _ = run(FRESH, Switched(ExchangeDecision(v(4))))
    _, sent = reported(state, Observation(3))
    assert sent.report.exchange == v(4) and sent.report.encoded is None
    decision = decide(FRESH.epoch, ExchangeDecision(), summarize(1, sent.report))
    state, actions = run(state, Announced(decision))
    assert actions == [] and state.awaited == v(4)
