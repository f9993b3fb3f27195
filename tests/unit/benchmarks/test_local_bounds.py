"""What local SGD can gain at most: the model reproduces the table of the EDiT paper."""

import pytest

from workloads.local_bounds import (
    LinkLoad,
    Stragglers,
    laggard,
    lagging,
    next_link_rate,
    own_pace_gain,
    periodic_gain,
)

T = 4.75  # seconds of a plain iteration
PLAIN, PACED = 225.75, 237.45  # TFLOPS of plain and of A-EDiT, without lag (table 6)
COMPUTE = T * PLAIN / PACED


@pytest.mark.parametrize(("lag", "printed"), [(1.5, 230.12), (2.5, 227.58), (3.5, 225.08), (4.5, 223.07)])
def test_a_consistent_straggler_of_8_costs_own_paces_what_the_paper_prints(lag, printed):
    gain = own_pace_gain(COMPUTE, T, lag, [0.0] * 7 + [1.0])
    plain = PLAIN * T / (T + lag)
    assert gain * plain == pytest.approx(printed, rel=0.0035)


def test_the_work_of_the_straggler_caps_the_gain():
    assert own_pace_gain(1.0, 1.0, 0.95, [0.0] * 7 + [1.0]) == pytest.approx(1.83, abs=0.005)
    assert own_pace_gain(1.0, 1.0, 0.95, [0.0] * 3 + [1.0]) == pytest.approx(1.71, abs=0.01)


def test_periods_wait_for_the_replica_that_lagged_longest():
    consistent = [[0, 0, 8]]
    assert periodic_gain(1.0, 1.0, 0.5, consistent, 8, 0.0) == pytest.approx(1.0)
    even = [[1, 1, 0], [0, 2, 0]]
    assert periodic_gain(1.0, 1.1, 0.5, even, 2, 0.1) == pytest.approx(4 * 1.6 / (2 + 0.5 + 0.1 + 2 + 1.0 + 0.1))
    assert periodic_gain(1.0, 2.65, 0.5, [[0, 0, 0]], 4, 0.0) == pytest.approx(2.65), "no replica lags"


def test_a_stall_takes_its_share_of_own_paces():
    assert own_pace_gain(1.0, 2.65, 0.0, [0.0] * 8, 0.1) == pytest.approx(0.9 * 2.65)


def test_the_laggard_of_an_iteration_is_the_same_for_all_policies():
    drawn = [laggard(Stragglers.RANDOM, step, 8, 1) for step in range(1, 65)]
    assert drawn == [laggard(Stragglers.RANDOM, step, 8, 1) for step in range(1, 65)]
    assert drawn != [laggard(Stragglers.RANDOM, step, 8, 2) for step in range(1, 65)]
    assert set(drawn) == set(range(8))
    counts = lagging(Stragglers.RANDOM, range(1, 65), 8, 1)
    assert sum(counts) == 64 and counts[3] == drawn.count(3)
    assert lagging(Stragglers.CONSISTENT, range(5), 4, 1) == [0, 0, 0, 5]
    assert lagging(Stragglers.NONE, range(5), 4, 1) == [0, 0, 0, 0]


def test_only_the_first_module_is_waited_for_if_the_others_hide_behind_forwards():
    load = LinkLoad(modules=16, exchange=0.16, forward=0.2)
    assert load.layered_stall == pytest.approx(0.01) and load.stall_ratio == pytest.approx(1 / 16)


def test_what_is_longer_than_a_forward_is_waited_for():
    load = LinkLoad(modules=4, exchange=8.0, forward=4.0)  # 2 s and 1 s each
    assert load.layered_stall == pytest.approx(2 + 3 * 1)


def test_the_rate_of_a_link_is_found():
    def plain(rate):
        return 1.0 + 3.0 / rate

    rate = 1.0
    for _ in range(3):
        rate = next_link_rate(rate, plain(rate), 1.0, 1.05)
    assert plain(rate) == pytest.approx(1.05)
    assert next_link_rate(1.0, 100.0, 1.0, 1.05) == pytest.approx(8.0), "at most a factor"
    assert next_link_rate(8.0, 0.9, 1.0, 1.05) == pytest.approx(1.0), "already faster than wanted"
