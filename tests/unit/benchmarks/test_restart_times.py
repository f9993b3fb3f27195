"""What a kill has cost, from the lines of a loss log."""

import pytest

from workloads.restart_times import (
    Kill,
    LogLine,
    kill_of,
    places,
    read_lines,
    seconds_of_iteration,
)

KILLED = 110.0


def lines(restart, first, last, began, each=1.0):
    return [LogLine(k, restart, began + each * number) for number, k in enumerate(range(first, last + 1))]


def test_iterations_since_the_checkpoint_are_lost_and_computed_again():
    found = kill_of(KILLED, 0, [*lines(0, 1, 9, 101.0), *lines(1, 5, 12, 130.0)])
    assert found == Kill(restart=20.0, redo=5.0, lost=5)  # 5 to 9 again, then 10, in which it was killed
    assert found.seconds == 25.0


def test_where_nothing_is_lost_the_next_iteration_is_the_killed_one():
    assert kill_of(KILLED, 0, [*lines(0, 1, 9, 101.0), *lines(1, 10, 11, 114.0)]) == Kill(4.0, 0.0, 0)


def test_an_iteration_logged_after_the_kill_by_those_who_live_on_is_of_the_old_start():
    before = [*lines(0, 1, 9, 101.0), LogLine(10, 0, KILLED + 0.1)]
    assert kill_of(KILLED, 0, before) is None
    assert kill_of(KILLED, 0, [*before, *lines(1, 10, 10, 114.0)]) is None  # the killed one is 11
    assert kill_of(KILLED, 0, [*before, *lines(1, 10, 11, 114.0)]) == Kill(4.0, 1.0, 1)


def test_a_second_kill_is_told_from_the_first_by_restarts():
    log = [*lines(0, 1, 9, 51.0), *lines(1, 10, 20, 70.0), *lines(2, 19, 21, 120.0)]
    assert kill_of(KILLED, 1, log) == Kill(10.0, 2.0, 2)


def test_an_iteration_takes_the_median_between_two_lines_of_one_start():
    log = [*lines(0, 1, 4, 0.0, 2.0), *lines(1, 3, 5, 500.0, 2.0)]
    assert seconds_of_iteration(log) == 2.0


def test_kills_come_in_the_middle_of_an_interval_on_average():
    every = 24
    found = places(3, every)
    assert sum(at % every for at in found) / 3 == every / 2
    assert all(later - earlier > every for earlier, later in zip(found, found[1:], strict=False))


def test_half_a_line_is_not_read(tmp_path):
    log = tmp_path / "loss.jsonl"
    assert read_lines(log) == []
    log.write_text('{"iteration": 3, "restart": 1, "time": 7.5, "loss": 2}\n{"iteration": 4')
    assert read_lines(log) == [LogLine(3, 1, 7.5)]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_there_are_as_many_places_as_kills(count):
    assert len(places(count, 24)) == count
