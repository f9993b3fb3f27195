"""Commits that stand still are an alarm, slow ones are not; reports that cannot be are named and not used."""

from dataclasses import replace

import pytest

from ft_plugins.smp.tree.agreement import (
    AHEAD,
    Announcement,
    Bounds,
    ExchangeDecision,
    ExchangeEpoch,
    NodeReport,
    Summary,
    merge,
    summarize,
)
from ft_plugins.smp.tree.node_step import (
    Announced,
    Committed,
    EndStandstill,
    NodeState,
    Observation,
    ReportDue,
    ReportStandstill,
    SendReport,
    step,
)
from ft_plugins.smp.tree.standstill import Behind, Lack, Standing
from ft_plugins.snapshot.schedule import ChosenSchedule, Intervals
from ft_plugins.snapshot.segment.slots import Version

NODES = ("a", "b", "c")
DETECT = 10.0


def v(iteration, lineage=2):
    return Version(lineage, iteration)


RESTORED = ExchangeEpoch(2, v(100, 1), 3, 4)
FRESH = ExchangeEpoch(2, None, 3, 4)


# ---- commits that stand still ----


@pytest.mark.parametrize(
    ("standing", "still"),
    [
        (Standing(11, 30.0, 1, 1, DETECT), True),
        (Standing(10, 3000.0, 1, 1, DETECT), False),  # iterations are long
        (Standing(3000, 29.9, 1, 1, DETECT), False),  # iterations are short
        (Standing(1900, 3000.0, 200, 1, DETECT), False),  # a slow link: one in 200 iterations is usual
        (Standing(2001, 3000.0, 200, 1, DETECT), True),
        (Standing(200, 3000.0, 0, 20, DETECT), False),
        (Standing(201, 599.0, 0, 20, DETECT), False),  # the first one may take long: nothing is known of it
        (Standing(201, 600.0, 0, 20, DETECT), True),
        (Standing(10, 60.0), False),  # where neither a distance nor a detection time is given
        (Standing(11, 59.9), False),
        (Standing(11, 60.0), True),
    ],
)
def test_commits_stand_still_after_many_times_the_usual_distance_and_some_detection_times(standing, still):
    assert standing.still == still


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (Behind(Lack.REPORT, 1), "node b reports what cannot be"),
        (Behind(Lack.AHEAD, 1, 300), "the version that was announced is 300 iterations ahead of the ranks of node b"),
        (Behind(Lack.SNAPSHOT, 2), "node c has not captured the version that is due"),
        (Behind(Lack.TRANSFER, 1, 2), "what node b sends does not arrive at node c"),
        (Behind(Lack.PARTS, 0), "node a lacks parts of what others send"),
        (Behind(Lack.PARTS, 7), "node at position 7 lacks parts"),
    ],
)
def test_the_alarm_names_the_node_for_how_long_and_what_it_costs(behind, words):
    text = Standing(50, 61.0, 2, 1, DETECT).words(behind.words(NODES))
    assert words in text and text.startswith("no version was committed for 50 iterations and 61 s, usually one in 2: ")
    assert (
        Standing()
        .words("")
        .startswith(
            "no version was committed for 0 iterations and 0 s, no new one was committed since the last start: "
            "it is not known which node"
        )
    )


def observed(seconds, waits=0, **more):
    return ReportDue(Observation(20, standing=Standing(waits, seconds, 1, 1, DETECT), **more))


def behind_of(state, due):
    _, actions = step(state, due)
    (sent,) = [action.report for action in actions if isinstance(action, SendReport)]
    return sent.behind


def test_a_report_says_what_the_exchange_lacks_only_once_it_takes_long():
    state = NodeState(FRESH, 1, False, ExchangeDecision(v(20)))
    for early in (0.0, DETECT):
        assert behind_of(state, observed(early, sending=v(20), target=0)) is None, "no message more than before"
    late = DETECT + 0.1
    assert behind_of(state, observed(late)) == Behind(Lack.SNAPSHOT, 1)
    assert behind_of(state, observed(late, sending=v(20), target=0)) == Behind(Lack.TRANSFER, 1, 0)
    assert behind_of(state, observed(late, sending=v(20))) == Behind(Lack.PARTS, 1)
    assert behind_of(state, observed(late, sending=v(20), complete=True)) is None
    assert behind_of(state, observed(late, sending=v(20), target=0, corrupt=True)) == Behind(Lack.SNAPSHOT, 1)


def test_a_version_that_is_announced_far_ahead_is_not_said_to_be_missing_at_the_node_that_waits_for_it():
    def lack(announced):
        state = NodeState(RESTORED, 1, False, ExchangeDecision(v(announced)))
        return behind_of(state, ReportDue(Observation(200, standing=Standing(0, DETECT + 1, 1, 1, DETECT))))

    assert lack(258) == Behind(Lack.SNAPSHOT, 1), "missed versions are followed by one half as far ahead again"
    assert lack(500) == Behind(Lack.AHEAD, 1, 300)


def test_merged_reports_name_the_first_cause():
    lacks = [None, Behind(Lack.PARTS, 0), Behind(Lack.TRANSFER, 2, 0), Behind(Lack.TRANSFER, 1, 0)]
    parts = [summarize(at, NodeReport(3, behind=behind)) for at, behind in enumerate(lacks)]
    assert merge(parts).behind == merge([merge(parts[:2]), *parts[1:]]).behind == Behind(Lack.TRANSFER, 1, 0)
    assert merge(parts[:1]).behind is None


def test_a_standstill_is_reported_once_with_the_node_that_position_0_names_and_the_next_commit_ends_it():
    for position in (0, 1):
        state = NodeState(FRESH, position, False, ExchangeDecision(v(20)))
        state, _ = step(state, Announced(ExchangeDecision(v(20)), behind=Behind(Lack.SNAPSHOT, 2)))
        state, actions = step(state, observed(30.0, waits=11))
        (reported,) = [action for action in actions if isinstance(action, ReportStandstill)]
        assert reported.behind == Behind(Lack.SNAPSHOT, 2)
        assert reported.aloud == (position == 0), "all nodes know it; one has it printed"
        state, actions = step(state, observed(31.0, waits=12))
        assert not [action for action in actions if isinstance(action, ReportStandstill)]
        state, actions = step(state, Committed(v(20)))
        assert actions == (EndStandstill(v(20), position == 0),) and not state.still and state.behind is None
        assert step(state, Committed(v(24)))[1] == ()


def test_a_node_that_alone_does_not_commit_what_the_others_do_speaks_for_itself():
    state = NodeState(FRESH, 2, False, ExchangeDecision(v(24), v(20)))
    _, actions = step(state, observed(30.0, waits=11, committed=v(4)))
    (reported,) = [action for action in actions if isinstance(action, ReportStandstill)]
    assert reported.aloud


# ---- reports that cannot be ----


def bounds(begun=200, committed=None, epoch=RESTORED):
    return Bounds.of(epoch, begun, committed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"begun": 10**6},
        {"exchange": v(10**6)},
        {"exchange": v(4, 3)},
        {"exchange": v(10**6, 1)},
        {"missed": v(10**6)},
        {"late": v(10**6)},
        {"newest_encoded": v(10**6)},
        {"least_encoded": v(200, 3)},
        {"newest_committed": v(10**6)},
        {"newest_committed": v(204)},  # this node has not begun it, so it has not sent it
        {"exchange": v(1200)},
        {"begun": 800},
        {"newest_committed": v(1, 3)},
        {"least_committed": v(10**6)},
    ],
    ids=str,
)
def test_whatever_a_report_exceeds_none_of_its_versions_is_used_and_its_sender_lives_on(wrong):
    right = Summary(6, 204, v(204), v(200), v(196), v(200), v(192), v(196), (0,), v(200))
    assert bounds().summary(1, right) == (right, "")
    usable, reason = bounds().summary(1, replace(right, **wrong))
    assert usable == Summary(6, lost=(0,), behind=Behind(Lack.REPORT, 1))
    assert "expected lineage 2 and at most iteration" in reason and reason.startswith(
        next(iter(wrong)).removeprefix("newest_").removeprefix("least_")
    )


def test_what_may_be_is_used_however_far_ranks_are_apart_by_right():
    apart = Summary(2, 200 + AHEAD, v(200 + AHEAD + AHEAD // 2), newest_committed=v(100, 1))
    assert bounds().summary(1, apart)[1] == ""
    restored = Summary(2, 0, v(100, 1), None, v(100, 1), v(100, 1), v(90, 1), v(100, 1))
    assert bounds(0).summary(1, restored) == (restored, "")
    assert bounds(0, epoch=FRESH).summary(1, Summary(2, 0, v(4)))[1] == ""
    chosen = ChosenSchedule(0, Intervals(250, 0), Intervals(250, 0), 0)
    longer = Summary(2, 200, v(200 + AHEAD + 1000))  # other ranks have chosen an interval of 1000 just now
    known = replace(RESTORED, interval=1, chosen=chosen)
    assert bounds(epoch=known).summary(1, longer)[1] == ""
    assert bounds(epoch=replace(known, chosen=None)).summary(1, longer)[1] != ""


@pytest.mark.parametrize("wrong", [v(10**6), v(4, 3)], ids=str)
def test_of_an_announcement_the_part_that_cannot_be_is_not_used(wrong):
    lost, decision = (2,), ExchangeDecision(wrong, v(196))
    usable, reason = bounds().announcement(Announcement(decision, lost))
    assert usable == Announcement(ExchangeDecision(None, v(196)), lost) and reason.startswith("exchange: ")
    usable, reason = bounds().announcement(Announcement(ExchangeDecision(v(204), wrong), lost))
    assert usable == Announcement(ExchangeDecision(v(204), None), lost) and reason.startswith("committed: ")
