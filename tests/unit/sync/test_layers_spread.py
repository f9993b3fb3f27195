"""Sets of layers that need not be contiguous, against all possible ones, the contiguous ones and the bound."""

import statistics
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.sync.layers import layers_schedule
from ft_plugins.sync.layers.layer_profile import LayerProfile, LayerTimes
from ft_plugins.sync.layers.layers_filling import fill, interval_in_effect
from ft_plugins.sync.layers.layers_schedule import (
    exposed_ns,
    iteration_ns,
    plan_layers,
    spread_layers,
)
from workloads.schedule_references import least_exposed_ns, partitions


def profile_of(*times, unit=1e-9):
    """Backward and communication of each layer."""
    layers = [LayerTimes(f"h.{i}", 0, unit * layer[0], unit * layer[1]) for i, layer in enumerate(times)]
    return LayerProfile(tuple(layers), 8)


@st.composite
def planned(draw, most=14, longest=6):
    layer = st.tuples(st.integers(0, 6), st.integers(0, 20))
    profile = profile_of(*draw(st.lists(layer, min_size=1, max_size=most)))
    return profile, draw(st.integers(1, min(longest, len(profile))))


def like_a_model(source, layers, ratio):
    """Layers of similar size, all together with `ratio` times as much communication as backward."""
    times = [(source.uniform(0.5, 1.5), source.uniform(0.5, 1.5)) for _ in range(layers)]
    scale = ratio * sum(backward for backward, _ in times) / sum(seconds for _, seconds in times)
    return profile_of(*((backward, scale * seconds) for backward, seconds in times), unit=1e-3)


@given(planned())
def test_spread_layers_are_never_worse_than_contiguous_ones_nor_below_the_bound(case):
    profile, period = case
    schedule = spread_layers(profile, period)
    assert schedule.period == period
    assert sorted(layer for own in schedule.iterations for layer in own) == list(range(len(profile)))
    found = exposed_ns(profile, schedule)
    assert least_exposed_ns(profile, period) <= found <= exposed_ns(profile, plan_layers(profile, period))


@given(planned(most=6, longest=3))
@settings(max_examples=60)
def test_no_schedule_is_better_where_the_bound_is_reached(case):
    profile, period = case
    found = exposed_ns(profile, spread_layers(profile, period))
    best = min(exposed_ns(profile, other) for other in partitions(len(profile), period))
    assert best <= found
    if found == least_exposed_ns(profile, period):
        assert best == found


def test_most_spread_schedules_of_few_layers_are_the_best_there_are():
    source = Random(7)
    lost = []
    for _ in range(60):
        profile, period = like_a_model(source, source.randint(3, 6), source.uniform(1, 4)), source.choice([2, 3])
        best = min(exposed_ns(profile, other) for other in partitions(len(profile), period))
        lost.append((exposed_ns(profile, spread_layers(profile, period)) - best) / (period * profile.compute_ns))
    assert sum(not one for one in lost) >= 54 and statistics.mean(lost) < 0.001  # 57 of 60 and 0.01 % are usual


@pytest.mark.parametrize(("layers", "period", "ratio"), [(60, 10, 5), (200, 20, 10), (200, 20, 15)])
def test_where_the_link_is_busy_spread_layers_hide_several_times_as_much_of_the_rest(layers, period, ratio):
    for seed in range(3):
        profile = like_a_model(Random(seed), layers, ratio)
        spread = exposed_ns(profile, spread_layers(profile, period))
        assert spread == least_exposed_ns(profile, period)  # none is better
        assert 1.5 * spread < exposed_ns(profile, plan_layers(profile, period))


def test_two_iterations_by_hand():
    """Contiguous sets expose 2 in each iteration. Layer 2 hides in an iteration of its own, layers 3 and 1 before layer
    0 is launched, which would expose 2 even alone."""
    profile = profile_of((2, 2), (2, 2), (2, 4), (2, 4))  # backward ends at 8, 6, 4, 2
    contiguous, schedule = plan_layers(profile, 2), spread_layers(profile, 2)
    assert [iteration_ns(profile, own) for own in contiguous.iterations] == [10, 10]
    assert schedule.iterations == ((3, 1, 0), (2,))
    assert [iteration_ns(profile, own) for own in schedule.iterations] == [10, 8]
    assert exposed_ns(profile, schedule) == least_exposed_ns(profile, 2) == 2


def test_where_greed_is_worse_than_contiguous_sets_those_are_kept():
    profile = profile_of((2, 0), (5, 8), (4, 6), (0, 11))
    attempts = [layers_schedule._filled_greedily(profile, 2, fullest) for fullest in (True, False)]
    assert min(exposed_ns(profile, schedule) for schedule in attempts) == 8
    assert spread_layers(profile, 2) == plan_layers(profile, 2) and exposed_ns(profile, plan_layers(profile, 2)) == 7


@given(planned(most=9))
@settings(max_examples=50)
def test_spread_schedules_are_filled_without_becoming_longer(case):
    profile, period = case
    schedule = spread_layers(profile, period)
    filled = fill(profile, schedule)
    assert exposed_ns(profile, filled) == exposed_ns(profile, schedule)
    assert interval_in_effect(profile, filled) <= period


@given(planned())
def test_ranks_spread_the_same_way(case):
    profile, period = case
    assert spread_layers(profile, period) == spread_layers(LayerProfile(profile.layers, 2), period)


def test_a_period_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="H = 3 with 2 layers: expected 1 to 2 iterations"):
        spread_layers(profile_of((1, 1), (1, 1)), 3)
