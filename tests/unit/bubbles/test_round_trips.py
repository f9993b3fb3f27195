"""What a frame takes, told apart into latency and bytes; bounded whatever the frames were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.bubbles.round_trips import RoundTrips

frames = st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(1, 10**12)), min_size=1, max_size=50)


def test_nothing_is_known_before_the_first_frame() -> None:
    trips = RoundTrips()
    assert not trips and trips.latency == 0


def test_latency_and_bytes_are_told_apart_by_frames_of_different_sizes() -> None:
    trips = RoundTrips()
    for nbytes in (1000, 5000, 200, 3000):
        trips.add(nbytes, 10_000 + 20 * nbytes)
    # float sums of small integers, so all that is lost are a few last bits
    assert trips.per_byte == pytest.approx(20, rel=1e-9) and trips.latency == pytest.approx(10_000, rel=1e-6)
    assert trips.through(50_000) == pytest.approx(2000, rel=1e-6) and trips.through(9_999) == 0


def test_frames_of_one_size_tell_of_bytes_alone() -> None:
    trips = RoundTrips()
    for _ in range(5):
        trips.add(100, 1000)
    assert (trips.per_byte, trips.latency) == (10, 0)


def test_another_link_is_learnt_within_some_frames() -> None:
    trips = RoundTrips()
    for per_byte in (1, 10):
        for at in range(60):
            nbytes = 1000 * (1 + at % 3)
            trips.add(nbytes, per_byte * nbytes)
    assert trips.per_byte == pytest.approx(10, rel=0.02)  # 0.9 ** 60 of what was before is left


@given(frames)
def test_whatever_the_frames_were_a_byte_takes_between_half_of_and_all_of_the_mean(told: list[tuple[int, int]]) -> None:
    trips = RoundTrips()
    for nbytes, took in told:
        trips.add(nbytes, took)
    weights = [0.9 ** (len(told) - 1 - at) for at in range(len(told))]
    size = sum(w * nbytes for w, (nbytes, _) in zip(weights, told, strict=True))
    time = sum(w * took for w, (_, took) in zip(weights, told, strict=True))
    assert 0.499 * time / size <= trips.per_byte <= 1.001 * time / size  # sums of floats in another order
    count = sum(weights)
    assert 0 <= trips.latency <= 0.501 * time / count
    assert trips.latency + trips.per_byte * size / count == pytest.approx(time / count, rel=1e-6)
    half = trips.through(0.5 * trips.latency)
    trips.halve()
    assert half == 0 and trips.per_byte <= 0.501 * time / size


@given(frames, st.floats(0, 1e12), st.floats(0, 1e12))
def test_more_gets_through_in_more_time(told: list[tuple[int, int]], one: float, other: float) -> None:
    trips = RoundTrips()
    for nbytes, took in told:
        trips.add(nbytes, took)
    low, high = sorted((one, other))
    assert 0 <= trips.through(low) <= trips.through(high)
