"""When replicas are averaged next: within the bounds, alike on all ranks, with an answer for every odd measurement."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.sync.averaging.averaging_times import NoiseDriven, NoiseMeasurement, Periodic, Turn
from ft_plugins.sync.averaging.policy import PaftPolicy


def measured(signal, noise, nonfinite=(), dimension=1):
    """`noise`: the length of that in one step."""
    return NoiseMeasurement(1.0, None if noise is None else noise / dimension**0.5, signal, dimension, 1.0, nonfinite)


def test_every_h_iterations_counted_from_the_first_of_the_job():
    schedule = Periodic(10)
    assert schedule.first(0).at == 10 and schedule.first(9).at == 10 and schedule.first(10).at == 20
    assert schedule.following(Turn(20, 10), None).at == 30
    with pytest.raises(ConfigError, match="every 0 iterations: expected at least 1"):
        Periodic(0)


@pytest.mark.parametrize(
    "signal, sigma, interval, said",
    [
        (2.0, 0.1, 20, "= 20"),
        (2.0, 0.0101, 198, "= 198"),
        (2.0, 10.0, 5, "clipped to h_min"),
        (2.0, 1e-9, 500, "clipped to h_max"),
        (2.0, 0.0, 500, "no noise: h_max"),
        (0.0, 0.0, 500, "no noise: h_max"),
        (0.0, 0.1, 5, "clipped to h_min"),
        (math.nan, 0.1, 5, "non-finite noise: h_min"),
        (2.0, math.inf, 5, "non-finite noise: h_min"),
        (math.inf, 0.0, 5, "non-finite noise: h_min"),
        (2.0, None, 7, "interval unchanged"),
    ],
)
def test_the_next_interval_is_the_signal_to_noise_ratio_within_its_bounds(signal, sigma, interval, said):
    found = NoiseDriven(7, 5, 500).following(Turn(100, 7), measured(signal, sigma))
    assert (found.at, found.interval) == (100 + interval, interval) and said in found.reason


@given(st.integers(1, 10**12))
def test_a_model_of_any_size_is_given_the_interval_of_its_signal_to_noise_ratio(dimension):
    found = NoiseDriven(7, 5, 500).following(Turn(100, 7), measured(2.0, 0.0101, dimension=dimension))
    assert found.interval == 198


def test_a_rank_without_finite_state_has_the_next_turn_come_as_soon_as_may_be():
    found = NoiseDriven(7, 5, 500).following(Turn(100, 7), measured(2.0, None, nonfinite=(3,)))
    assert found.interval == 5 and "non-finite parameters on ranks 3" in found.reason


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(numbers, st.none() | numbers, st.integers(1, 50), st.integers(0, 50), st.integers(1, 200))
def test_no_interval_is_out_of_bounds(signal, sigma, low, more, h):
    schedule = NoiseDriven(h, low, low + more)
    turn = schedule.first(3)
    assert low <= turn.interval <= low + more
    following = schedule.following(turn, measured(signal, sigma))
    assert low <= following.interval <= low + more and following.at == turn.at + following.interval


@pytest.mark.parametrize("low, high", [(6, 5), (0, 5)])
def test_bounds_that_contradict_each_other_are_refused(low, high):
    with pytest.raises(ConfigError, match=f"h_min {low} and h_max {high}: expected 1 <= h_min <= h_max"):
        NoiseDriven(5, low, high)


# ------------------------------------------------------------------------------------------------ the policy


def test_a_policy_says_what_is_done_around_each_update():
    policy = PaftPolicy(Periodic(4), waits=False, audit_interval=3)
    turn = Periodic(4).first(0)
    assert [step for step in range(1, 7) if policy.averages(step, turn)] == [4]
    assert [step for step in range(1, 7) if policy.audits(step)] == [3, 6]
    neither = PaftPolicy(None, waits=False)
    assert not neither.averages(4, None) and not neither.audits(4)


def test_replicas_differ_where_digests_say_so_and_else_where_the_last_measurement_suggests_it():
    policy = PaftPolicy(Periodic(4), waits=True, audit_interval=3)
    after = Turn(8, 4)  # the turn of iteration 4 is over
    assert not policy.differ(3, after, compared=False, diverged=True)
    assert policy.differ(3, after, compared=True, diverged=False)
    assert not policy.differ(5, after, compared=None, diverged=False)
    assert policy.differ(5, after, compared=None, diverged=True)
    assert not policy.differ(4, after, compared=None, diverged=True), "averaged just now"
    later = PaftPolicy(Periodic(4), waits=False)
    assert later.differ(4, after, compared=None, diverged=True), "not applied yet"
