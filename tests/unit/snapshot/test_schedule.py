"""One schedule: whatever is done with versions is done at iterations at which they are captured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.snapshot.schedule import ChosenSchedule, Intervals, SnapshotSchedule, due_from, is_turn, next_due

INTERVALS = st.integers(1, 50)
CHOSEN = st.builds(
    ChosenSchedule, st.integers(0, 200), st.builds(Intervals, INTERVALS, INTERVALS),
    st.builds(Intervals, INTERVALS, INTERVALS), st.just(0),
)  # fmt: skip


@given(INTERVALS, st.integers(1, 5), st.integers(0, 30))
def test_what_is_exchanged_or_compared_is_captured(interval, exchange_interval, audits):
    schedule = SnapshotSchedule.of(interval, exchange_interval, audits)
    captured = [iteration for iteration in range(5 * schedule.exchanged) if schedule.captures(iteration)]
    assert captured == list(range(interval, 5 * schedule.exchanged, interval)), "the start is no version"
    assert schedule.exchanged % (interval * exchange_interval) == 0
    assert schedule.compared % interval == 0 and bool(schedule.compared) == bool(audits)
    if audits:
        assert schedule.exchanged % schedule.compared == schedule.compared % audits == 0, "an audit certifies it"


def test_no_iteration_is_left_out_that_serves_all():
    assert SnapshotSchedule.of(4, 3, 0) == SnapshotSchedule(4, 12, 0)
    assert SnapshotSchedule.of(4, 3, 6) == SnapshotSchedule(4, 12, 12)
    assert SnapshotSchedule.of(2, 1, 3) == SnapshotSchedule(2, 6, 6)


@pytest.mark.parametrize(("at", "following", "from_there"), [(0, 4, 0), (1, 4, 4), (3, 4, 4), (4, 8, 4), (5, 8, 8)])
def test_what_is_due_next_is_later_and_what_is_due_from_somewhere_may_be_there(at, following, from_there):
    assert (next_due(at, 4), due_from(at, 4)) == (following, from_there)


@given(INTERVALS, INTERVALS)
def test_each_multiple_of_the_interval_has_one_turn(interval, step):
    versions = range(step, 20 * interval * step, step)
    turns = [iteration for iteration in versions if is_turn(iteration, interval, step)]
    expected = {due_from(at, step) for at in range(0, 20 * interval * step, interval)} - {0}
    assert turns == sorted(expected & set(versions)) and not is_turn(step, 0, step)


@given(CHOSEN, st.integers(0, 300), st.integers(1, 4))
def test_what_is_due_is_captured_by_the_intervals_that_hold_then(chosen, after, every):
    schedule = replace(SnapshotSchedule.of(every, 1, 0), chosen=chosen)
    due = chosen.due(after, every)
    assert due > after and schedule.captures(due)
    missed = [i for i in range(after + 1, due) if schedule.captures(i)]
    assert not missed, "it is the first"


@given(CHOSEN, st.integers(0, 100), st.builds(Intervals, INTERVALS, INTERVALS))
def test_a_change_leaves_what_is_past_as_it_was(chosen, later, now):
    since = chosen.since + later
    changed = replace(SnapshotSchedule.of(1, 1, 0), chosen=chosen.changed(since, now))
    before = replace(changed, chosen=chosen)
    for iteration in range(chosen.since, since + 100):
        expected = before.captures(iteration) if iteration < since else iteration > 0 and iteration % now.captured == 0
        assert changed.captures(iteration) == expected
