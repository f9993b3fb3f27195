"""What a frame takes, told apart into latency and bytes; bounded whatever the frames were."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.bubbles.round_trips import LAST, RoundTrips, _fitted

frames = st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(1, 10**12)), min_size=1, max_size=50)


def test_nothing_is_known_before_the_first_frame():
    trips = RoundTrips()
    assert not trips and trips.latency == 0


def test_latency_and_bytes_are_told_apart_by_frames_of_different_sizes():
    trips = RoundTrips()
    for nbytes in (1000, 5000, 200, 3000):
        trips.add(nbytes, 10_000 + 20 * nbytes)
    # float sums of small integers, so all that is lost are a few last bits
    assert trips.per_byte == pytest.approx(20, rel=1e-9) and trips.latency == pytest.approx(10_000, rel=1e-6)
    assert trips.through(50_000) == pytest.approx(2000, rel=1e-6) and trips.through(9_999) == 0


def test_frames_of_one_size_tell_of_bytes_alone():
    trips = RoundTrips()
    for _ in range(5):
        trips.add(100, 1000)
    assert (trips.per_byte, trips.latency) == (10, 0)


def test_another_link_is_learnt_within_so_many_frames():
    trips, sizes = RoundTrips(), [1000 * (1 + at % 3) for at in range(LAST)]
    for per_byte in (1, 10):
        for at, nbytes in enumerate(sizes):
            trips.add(nbytes, per_byte * nbytes)
            if per_byte == 10 and at == LAST // 2:
                assert trips.per_byte > 3, "half of them know already"
    assert trips.per_byte == pytest.approx(10, rel=1e-9)


def test_frames_that_were_stuck_tell_nothing_as_long_as_they_are_no_more_than_a_quarter():
    trips, drawn = RoundTrips(), random.Random(3)
    for at in range(10 * LAST):
        nbytes = drawn.randint(1000, 100_000)
        trips.add(nbytes, 50_000 + 10 * nbytes + (10**8 * drawn.randint(1, 9) if at % 4 == 0 else 0))
        if at >= LAST:
            # float sums of integers, so all that is lost are a few last bits
            assert trips.per_byte == pytest.approx(10, rel=1e-6) and trips.latency == pytest.approx(50_000, rel=1e-3)


@given(frames)
def test_whatever_the_frames_were_a_byte_takes_between_half_of_and_all_of_the_mean(told):
    trips = RoundTrips()
    for nbytes, took in told:
        trips.add(nbytes, took)
    last = told[-LAST:]
    slowness = sorted(took / nbytes for nbytes, took in last)
    # of those that are counted, and these are three quarters of them at least
    assert 0.499 * slowness[0] <= trips.per_byte <= 1.001 * slowness[-1]
    assert 0 <= trips.latency <= 0.501 * max(took for _, took in last)
    size, time = (sum(column) / len(last) for column in zip(*last, strict=True))
    line = _fitted(last)  # through all of them: at the mean frame it takes as long as that
    assert line.latency + line.per_byte * size == pytest.approx(time, rel=1e-6)
    assert 0.499 * time / size <= line.per_byte <= 1.001 * time / size  # sums of floats in another order
    half, before = trips.through(0.5 * trips.latency), trips.per_byte
    trips.halve()
    assert half == 0 and trips.per_byte == (before / 2 if min(took for _, took in last) > 1 else trips.per_byte)
    for _ in range(1200):  # nothing could be sent for a thousand iterations
        trips.halve()
    assert trips.per_byte > 0 and trips.through(1e9) > 0


@given(frames, st.floats(0, 1e12), st.floats(0, 1e12))
def test_more_gets_through_in_more_time(told, one, other):
    trips = RoundTrips()
    for nbytes, took in told:
        trips.add(nbytes, took)
    low, high = sorted((one, other))
    assert 0 <= trips.through(low) <= trips.through(high)
