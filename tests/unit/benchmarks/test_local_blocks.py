"""Iteration times, stalls and gains from step logs."""

import itertools

import pytest

from workloads.local_blocks import (
    PLAIN,
    LaneSpan,
    StepLog,
    gains,
    job_begins,
    seconds_at_own_pace,
    seconds_in_step,
    stalls,
    window_of_synchronisation,
)
from workloads.sync_blocks import PolicyFigure


def log(first, lengths, start=0.0):
    *begins, ended = itertools.accumulate(lengths, initial=start)
    return StepLog(first, tuple(begins), ended)


def test_an_iteration_of_the_job_begins_with_its_last_replica():
    logs = [log(3, [1.0, 1.0, 1.0]), log(3, [2.0, 0.5, 0.5], 0.1)]
    assert job_begins(logs) == pytest.approx({3: 0.1, 4: 2.1, 5: 2.6})
    assert seconds_in_step(logs, 3, 5) == pytest.approx(2.5 / 2)


@pytest.mark.parametrize(("at", "after"), [(0.3, 0.0), (0.0, 0.3), (0.1, 0.2)], ids=["wait", "forward", "both"])
def test_a_stall_is_found_wherever_training_waits(at, after):
    local = [1.0, 1.0, 1.0 + at, 1.0 + after]
    logs = [log(3, [*local, 1.0, 1.0, 1.0, 1.0 + at, 1.0 + after, 1.0])] * 2
    assert stalls(logs, 5) == pytest.approx([0.3, 0.3])


def test_a_replica_that_waits_for_a_slower_one_is_not_stalled():
    slow = log(3, [1.0, 1.2, 1.0, 1.0, 1.0, 1.0])
    quick = log(3, [1.0, 1.0, 1.2, 1.0, 1.0, 1.0])
    assert stalls([slow, quick], 5) == pytest.approx([0.0])


def test_the_work_of_all_replicas_counts_at_their_own_pace():
    logs = [log(1, [1.0] * 10), log(1, [2.0] * 5)]
    assert seconds_at_own_pace(logs) == pytest.approx(10 * 2 / 15)


def test_gains_are_of_one_round():
    rounds = [{PLAIN: 2.0, "edit": 1.0}, {PLAIN: 4.0, "edit": 2.0}, {PLAIN: 1.0}]
    assert gains(rounds, "edit") == [2.0, 2.0]
    assert PolicyFigure.of(gains(rounds, "edit")) == PolicyFigure(2.0, 2.0, 2.0)


def test_the_timeline_shows_the_second_synchronisation():
    spans = tuple(LaneSpan("exchange", "layer", begin, begin + 0.1) for begin in (1.9, 2.0, 2.1, 5.9, 6.0, 6.1))
    one = StepLog(1, tuple(float(begin) for begin in range(10)), 10.0, spans)
    assert window_of_synchronisation(one, "exchange") == (5.0, 7.0)
    assert window_of_synchronisation(StepLog(1, one.begins, 10.0), "exchange") == (1.0, 3.0)
