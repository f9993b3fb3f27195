"""Filling idle link time: no iteration grows, no layer is lost, and no other choice is better if all can be tried."""

from itertools import combinations
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.sync.layers import layers_filling
from ft_plugins.sync.layers.layer_profile import LayerProfile, LayerTimes
from ft_plugins.sync.layers.layers_filling import fill, fill_late, interval_in_effect
from ft_plugins.sync.layers.layers_schedule import LayerSchedule, equal_number, iteration_ns, period_ns, plan_layers


def profile_of(*times, unit=1):
    layers = [LayerTimes(f"h.{i}", *(1e-9 * unit * one for one in layer)) for i, layer in enumerate(times)]
    return LayerProfile(tuple(layers), 8)


@st.composite
def scheduled(draw, most=10, unit=1):
    """The best schedule of a profile, or one of equal numbers."""
    layer = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9))
    profile = profile_of(*draw(st.lists(layer, min_size=1, max_size=most)), unit=unit)
    period = draw(st.integers(1, min(5, len(profile))))
    return profile, draw(st.sampled_from([plan_layers(profile, period), equal_number(len(profile), period)]))


def lengths(profile, schedule):
    return [iteration_ns(profile, own) for own in schedule.iterations]


@given(scheduled() | scheduled(most=30, unit=1_234_567))
def test_filling_lengthens_no_iteration_and_loses_no_layer(case):
    """With large units, too: rooms of more than UNITS nanoseconds."""
    profile, schedule = case
    for filled in (fill_late(profile, schedule), fill(profile, schedule)):
        assert lengths(profile, filled) == lengths(profile, schedule)
        for before, after in zip(schedule.iterations, filled.iterations, strict=True):
            assert set(before) <= set(after)
        assert interval_in_effect(profile, filled) <= interval_in_effect(profile, schedule) <= schedule.period


@given(scheduled())
def test_late_layers_are_as_many_as_fit(case):
    """Eq. 12: the layers L to l for the smallest l that does not reach the set and lengthens nothing."""
    profile, schedule = case
    count = len(profile)
    for own, after in zip(schedule.iterations, fill_late(profile, schedule).iterations, strict=True):
        fitting = [
            late
            for late in range(max(own) + 1, count + 1)
            if iteration_ns(profile, {*own, *range(late, count)}) <= iteration_ns(profile, own)
        ]
        assert set(after) == {*own, *range(min(fitting), count)}


@given(scheduled())
def test_filling_with_any_layers_is_never_worse_than_with_late_ones(case):
    profile, schedule = case
    late, any_layers = fill_late(profile, schedule), fill(profile, schedule)
    assert interval_in_effect(profile, any_layers) <= interval_in_effect(profile, late)


def test_filling_with_any_layers_is_better_where_the_last_one_does_not_fit():
    profile = profile_of((0, 4, 0), (0, 4, 1), (0, 4, 1), (0, 4, 20))  # a large head stops Eq. 12 at once
    schedule = LayerSchedule(4, ((3,), (2,), (1, 0)))
    assert fill_late(profile, schedule) == schedule
    filled = fill(profile, schedule)
    assert filled.iterations[1] == (2, 1) and 2 in filled.iterations[2]
    assert interval_in_effect(profile, filled) < interval_in_effect(profile, schedule) == 3


@st.composite
def rooms(draw, largest):
    """A profile, the layers of an iteration, and what each other layer is worth in it."""
    backward, seconds = st.integers(0, largest), st.integers(0, largest // 2)
    times = draw(st.lists(st.tuples(st.just(0), backward, seconds), min_size=1, max_size=8))
    own = draw(st.sets(st.integers(0, len(times) - 1), max_size=2))
    return profile_of(*times), own, {layer: draw(st.integers(0, 9)) for layer in range(len(times)) if layer not in own}


def fitting(profile, own, others, reserve):
    """All sets of other layers that, with what is averaged after each, end by the reserve before the iteration of
    `own`: each is launched after those with larger numbers."""
    limit, others = iteration_ns(profile, own) - round(reserve * profile.compute_ns), list(others)
    sets = (set(extra) for number in range(len(others) + 1) for extra in combinations(others, number))

    def ends(layer, both):
        return profile.backward_ends_ns[layer] + sum(profile.communication_ns[one] for one in both if one <= layer)

    return [
        extra
        for extra in sets
        if all(ends(layer, own | extra) <= limit for layer in own | extra if any(one <= layer for one in extra))
    ]


@given(rooms(largest=20), st.sampled_from([0.0, 0.1, 0.3]))
def test_no_other_choice_for_one_iteration_is_better(case, reserve):
    """The knapsack against all sets of layers, where a unit is a nanosecond."""
    profile, own, worth = case
    chosen = layers_filling._most_useful(profile, own, worth, reserve)
    possible = fitting(profile, own, worth, reserve)
    assert chosen in possible and iteration_ns(profile, own | chosen) == iteration_ns(profile, own)
    assert sum(worth[layer] for layer in chosen) == max(sum(worth[layer] for layer in extra) for extra in possible)


@given(rooms(largest=20) | rooms(largest=10**9), st.integers(1, 12))
def test_rounding_to_units_lengthens_no_iteration(case, units):
    profile, own, worth = case
    with patch.object(layers_filling, "UNITS", units):
        chosen = layers_filling._most_useful(profile, own, worth)
    assert iteration_ns(profile, own | chosen) == iteration_ns(profile, own) and not own & chosen


@given(scheduled(), st.integers(1, 4))
def test_with_the_coarsest_units_filling_is_never_worse_than_with_late_layers(case, units):
    profile, schedule = case
    with patch.object(layers_filling, "UNITS", units):
        filled = fill(profile, schedule)
    assert interval_in_effect(profile, filled) <= interval_in_effect(profile, fill_late(profile, schedule))
    assert lengths(profile, filled) == lengths(profile, schedule)


@given(scheduled(most=7), st.data())
def test_the_worth_of_an_averaging_is_what_it_takes_from_the_interval(case, data):
    profile, schedule = case
    schedule = fill_late(profile, schedule)
    number = data.draw(st.integers(0, schedule.period - 1))
    own = schedule.iterations[number]
    total = sum(profile.communication_ns)
    for layer, worth in layers_filling._worth(profile, schedule, number, own).items():
        iterations = list(schedule.iterations)
        iterations[number] = tuple(sorted({*own, layer}, reverse=True))
        changed = LayerSchedule(schedule.layers, tuple(iterations))
        taken = interval_in_effect(profile, schedule) - interval_in_effect(profile, changed)
        if total:
            assert taken == pytest.approx(worth / (total * schedule.period), abs=1e-12)  # rounding of two quotients


def test_the_interval_in_effect_by_hand():
    profile = profile_of((0, 1, 3), (0, 1, 1))
    assert interval_in_effect(profile, LayerSchedule(2, ((1,), (0,), (), ()))) == 4
    twice = LayerSchedule(2, ((1,), (1, 0), (), ()))  # gaps of layer 1: 1 and 3
    assert interval_in_effect(profile, twice) == (3 * 16 + 1 * (1 + 9)) / (4 * 4)
    assert interval_in_effect(profile, LayerSchedule(2, ((1, 0),) * 4)) == 1


@given(st.integers(1, 12))
def test_without_communication_nothing_is_filled(count):
    profile = profile_of(*[(1, 1, 0)] * count)
    schedule = plan_layers(profile, count)
    filled = fill(profile, schedule)
    assert interval_in_effect(profile, filled) <= interval_in_effect(profile, schedule) == count
    assert period_ns(profile, filled) == period_ns(profile, schedule)


@given(scheduled(most=20, unit=3_000_017))
@settings(max_examples=50)
def test_ranks_fill_the_same_way(case):
    profile, schedule = case
    again = LayerProfile(tuple(profile.layers), profile.replicas)
    assert fill(profile, schedule) == fill(again, schedule)
