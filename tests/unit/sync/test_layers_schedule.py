"""Schedules of layers against brute force, the paper's search and the paper's own equations."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.sync.layers.layer_profile import MOST_LAYERS, MOST_SECONDS, LayerProfile, LayerTimes
from ft_plugins.sync.layers.layers_schedule import (
    LayerSchedule,
    choose_period,
    equal_number,
    exposed_ns,
    iteration_ns,
    period_ns,
    plan_layers,
    unavoidable_ns,
    unhidden_period_ns,
)
from workloads.schedule_references import contiguous, least_exposed_ns, partitions, search


def profile_of(*times, unit=1e-9):
    """Forward, backward and communication of each layer, in nanoseconds unless `unit` says otherwise."""
    layers = [LayerTimes(f"h.{i}", *(unit * one for one in layer)) for i, layer in enumerate(times)]
    return LayerProfile(tuple(layers), 8)


def profiles(most, least=1):
    """Few different numbers, so that ties and exact fits are common, and communication from nothing to far too much."""
    small, large = st.integers(0, 6), st.integers(0, 30)
    layer = st.tuples(small, small, st.one_of(small, large))
    return st.lists(layer, min_size=least, max_size=most).map(lambda times: profile_of(*times))


@st.composite
def planned(draw, most=12, longest=5):
    profile = draw(profiles(most))
    return profile, draw(st.integers(1, min(longest, len(profile))))


some_layers = st.sets(st.integers(0, 11))


def cost_as_printed(profile, layers):
    """Forwards, and a summand of Eq. 8 with the recursion of Eq. 7 for timestamps; `layers` in backward order."""
    backward = [b - a for a, b in pairwise([profile.forward_ns, *reversed(profile.backward_ends_ns)])]
    order = list(reversed(range(len(profile))))
    before = sum(backward[: order.index(layers[0])])
    first = backward[order.index(layers[0])]
    starts = []  # tau, from the begin of the backward
    for number, layer in enumerate(layers):
        ended = sum(backward[: order.index(layer) + 1])
        starts.append(max(ended, starts[-1] + profile.communication_ns[layers[number - 1]]) if starts else ended)
    communication = starts[-1] + profile.communication_ns[layers[-1]] - starts[0]
    rest = sum(backward) - before - first
    return profile.forward_ns + before + first + max(rest, communication)


# ------------------------------------------------------------------------------------------------ cost


@given(profiles(12), some_layers.filter(bool))
def test_the_cost_is_that_of_the_papers_equations(profile, layers):
    own = sorted({min(layer, len(profile) - 1) for layer in layers}, reverse=True)
    assert iteration_ns(profile, own) == cost_as_printed(profile, own)


def test_an_iteration_by_hand():
    profile = profile_of((1, 2, 3), (1, 2, 1), (1, 2, 4))  # backward ends at 9, 7, 5
    assert profile.backward_ends_ns == (9, 7, 5) and profile.compute_ns == 9
    assert iteration_ns(profile, (2, 0)) == 12, "2 from 5 to 9, then 0"
    assert iteration_ns(profile, (2, 1)) == 10 and iteration_ns(profile, (1,)) == iteration_ns(profile, ()) == 9
    assert unhidden_period_ns(profile, 4) == 4 * 9 + 8 and unavoidable_ns(profile) == 3


@given(profiles(8), some_layers, some_layers)
def test_sets_together_expose_no_less_than_apart(profile, one, other):
    own = {layer for layer in one if layer < len(profile)}
    rest = {layer for layer in other if layer < len(profile)} - own
    together = iteration_ns(profile, own | rest)
    assert together + profile.compute_ns >= iteration_ns(profile, own) + iteration_ns(profile, rest)


# ------------------------------------------------------------------------------------------------ the program


@given(planned())
def test_no_schedule_of_contiguous_sets_is_shorter(case):
    profile, period = case
    schedule = plan_layers(profile, period)
    best = min(period_ns(profile, other) for other in contiguous(len(profile), period, empty=True))
    assert period_ns(profile, schedule) == best
    assert schedule.period == period and all(schedule.iterations)  # none is empty, and that costs nothing


@given(planned())
def test_of_the_shortest_schedules_the_one_with_the_largest_sets_first_is_chosen(case):
    profile, period = case
    every = list(contiguous(len(profile), period))
    best = min(period_ns(profile, other) for other in every)
    sizes = [[len(own) for own in other.iterations] for other in every if period_ns(profile, other) == best]
    assert [len(own) for own in plan_layers(profile, period).iterations] == max(sizes)


@given(planned(most=16, longest=8))
def test_the_papers_search_finds_the_same_cost(case):
    profile, period = case
    result = search(profile, period)
    best = exposed_ns(profile, plan_layers(profile, period))
    assert best == result.expected == exposed_ns(profile, result.schedule)
    assert 1 <= result.solutions <= 2 ** (period - 1)


@given(planned(most=16, longest=8))
def test_the_papers_search_with_its_simplified_cost_is_never_better(case):
    profile, period = case
    result = search(profile, period, simplified=True)
    assert exposed_ns(profile, plan_layers(profile, period)) <= exposed_ns(profile, result.schedule)
    assert result.expected <= exposed_ns(profile, result.schedule)


def test_the_papers_search_with_its_simplified_cost_is_sometimes_worse():
    """It expects that layer 2, whose backward ends late, is averaged earlier than it can be."""
    profile = profile_of((0, 3, 2), (0, 0, 2), (0, 3, 3), (0, 2, 0))
    result = search(profile, 2, simplified=True)
    assert result.schedule.iterations == ((3, 2, 1, 0), ())
    assert (result.expected, exposed_ns(profile, result.schedule)) == (1, 4)
    assert plan_layers(profile, 2).iterations == ((3, 2), (1, 0)) and exposed_ns(profile, plan_layers(profile, 2)) == 2


@given(planned())
def test_baselines_are_never_better(case):
    profile, period = case
    count, best = len(profile), period_ns(profile, plan_layers(profile, period))
    assert best <= period_ns(profile, equal_number(count, period))
    at_the_end = LayerSchedule(count, ((),) * (period - 1) + (tuple(reversed(range(count))),))
    assert best <= period_ns(profile, at_the_end) <= unhidden_period_ns(profile, period)


@given(planned(most=6, longest=4))
@settings(max_examples=60)
def test_no_schedule_at_all_exposes_less_than_the_bound(case):
    profile, period = case
    least = min(exposed_ns(profile, other) for other in partitions(len(profile), period))
    assert least_exposed_ns(profile, period) <= least <= exposed_ns(profile, plan_layers(profile, period))


@given(profiles(12))
def test_with_a_period_of_one_iteration_all_layers_are_synchronised_in_it(profile):
    schedule = plan_layers(profile, 1)
    assert schedule == equal_number(len(profile), 1)
    assert schedule.due(1) == schedule.due(7) == tuple(reversed(range(len(profile))))


@given(profiles(12))
def test_with_as_many_iterations_as_layers_each_layer_has_its_own(profile):
    count = len(profile)
    schedule = plan_layers(profile, count)
    assert schedule.iterations == tuple((layer,) for layer in reversed(range(count)))
    assert exposed_ns(profile, schedule) == unavoidable_ns(profile) == least_exposed_ns(profile, count)


@given(profiles(12, least=2))
def test_a_longer_period_exposes_no_more(profile):
    exposed = [exposed_ns(profile, plan_layers(profile, period)) for period in range(1, len(profile) + 1)]
    assert exposed == sorted(exposed, reverse=True)


@given(planned(), st.integers(1, 40), st.integers(1, 40))
def test_a_faster_link_never_makes_a_period_longer(case, one, other):
    profile, period = case
    sized = LayerProfile(tuple(replace(layer, nbytes=i % 5 * 7) for i, layer in enumerate(profile.layers, 1)), 4)
    slow, fast = (sized.at_link(1e9 * speed) for speed in sorted((one, other)))
    assert period_ns(fast, plan_layers(fast, period)) <= period_ns(slow, plan_layers(slow, period))


@given(st.lists(st.tuples(*[st.floats(0, 1e-3)] * 3), min_size=1, max_size=40), st.integers(1, 9))
def test_ranks_with_one_profile_have_one_schedule(times, period):
    """Also where times differ by less than is measured."""
    profile, again = profile_of(*times, unit=1.0), profile_of(*times, unit=1.0)
    noisy = profile_of(*((a + 1e-13, b, c) for a, b, c in times), unit=1.0)
    period = min(period, len(profile))
    assert plan_layers(profile, period) == plan_layers(again, period)
    if noisy.backward_ends_ns == profile.backward_ends_ns:
        assert plan_layers(noisy, period) == plan_layers(profile, period)


def test_the_largest_times_do_not_overflow():
    profile = profile_of(*[(MOST_SECONDS,) * 3] * 300, unit=1.0)
    schedule = plan_layers(profile, 7)
    assert exposed_ns(profile, schedule) >= least_exposed_ns(profile, 7) > 0
    assert sum(profile.communication_ns) * MOST_LAYERS // 300 * 3 < 1 << 60


# ------------------------------------------------------------------------------------------------ the period


@given(profiles(12), st.sampled_from([0.0, 0.01, 0.3]))
def test_the_chosen_period_is_the_shortest_that_hides_everything(profile, tolerance):
    chosen = choose_period(profile, tolerance=tolerance)
    found = chosen.period
    assert chosen == plan_layers(profile, found)
    for period in range(1, found + 1):
        beyond = exposed_ns(profile, plan_layers(profile, period)) - unavoidable_ns(profile)
        assert (beyond <= tolerance * period * profile.compute_ns) == (period == found)


def test_what_hides_at_once_needs_no_longer_period():
    assert choose_period(profile_of((1, 9, 0), (1, 9, 8), (1, 9, 5))).period == 1


def test_where_no_allowed_period_hides_everything_the_longest_is_chosen():
    profile = profile_of(*[(0, 10, 50)] * 6)
    chosen = choose_period(profile, most=3, tolerance=0.0)
    assert chosen == plan_layers(profile, 3) and exposed_ns(profile, chosen) > unavoidable_ns(profile)
    per_iteration = [exposed_ns(profile, plan_layers(profile, h)) / h for h in (1, 2, 3)]
    assert per_iteration == sorted(per_iteration, reverse=True)
    assert choose_period(profile, most=100).period <= 6


@given(st.tuples(*[st.integers(0, 9)] * 3))
def test_one_layer_is_averaged_in_every_iteration(times):
    profile = profile_of(times)
    assert plan_layers(profile, 1).iterations == choose_period(profile).iterations == ((0,),)
    assert period_ns(profile, plan_layers(profile, 1)) == sum(times)  # nothing follows its backward
    with pytest.raises(ConfigError, match="H = 2 with 1 layer: expected 1 to 1 iterations"):
        plan_layers(profile, 2)


# ------------------------------------------------------------------------------------------------ refused


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 300
    return text


@pytest.mark.parametrize("period", [0, -1, 4, 10**9])
def test_a_period_that_does_not_fit_the_layers_is_refused(period):
    profile = profile_of(*[(1, 1, 1)] * 3)
    calls = [lambda: plan_layers(profile, period), lambda: equal_number(3, period), lambda: search(profile, period)]
    for call in calls:
        with pytest.raises(ConfigError) as error:
            call()
        assert f"H = {period} with 3 layers: expected 1 to 3 iterations" in one_line(error)
    if period < 1:
        with pytest.raises(ConfigError):
            choose_period(profile, most=period)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf, MOST_SECONDS * 1.01])
def test_a_time_that_is_none_is_refused(place, value):
    times = [1.0, 1.0, 1.0]
    times[place] = value
    with pytest.raises(ConfigError) as error:
        profile_of((1, 1, 1), (times[0], times[1], times[2]), unit=1.0)
    assert one_line(error).startswith("profile of layers: layer 1 ('h.1'): ")
    assert ("forward", "backward", "communication")[place] in one_line(error)


def test_no_layers_too_many_and_layers_of_one_name_are_refused():
    layer = LayerTimes("h", 0, 0, 0)
    for layers, said in (
        ((), "found 0"),
        ((layer,) * (MOST_LAYERS + 1), "found 4097"),
        ((layer,) * 2, "layer 1 ('h')"),
    ):
        with pytest.raises(ConfigError) as error:
            LayerProfile(layers, 8)
        assert said in one_line(error)
    with pytest.raises(ConfigError, match="at least 2 replicas, found 1"):
        LayerProfile((layer,), 1)
    with pytest.raises(ConfigError, match="expected bytes of at least 0, found -1"):
        LayerProfile((replace(layer, nbytes=-1),), 2)


@pytest.mark.parametrize(
    ("layers", "iterations"),
    [(2, ((0,),)), (2, ((0, 1),)), (2, ((1, 1, 0),)), (1, ((0,), (1,))), (0, ()), (0, ((),)), (1, ()), (1, ((), ()))],
)
def test_a_schedule_without_some_layer_or_out_of_order_is_refused(layers, iterations):
    with pytest.raises(ConfigError, match="schedule of layers"):
        LayerSchedule(layers, iterations)


def test_equal_numbers_differ_by_one_at_most():
    assert [len(own) for own in equal_number(10, 4).iterations] == [3, 3, 2, 2]
    assert equal_number(4, 2).iterations == ((3, 2), (1, 0))
