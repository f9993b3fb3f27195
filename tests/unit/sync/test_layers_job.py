"""The schedule of a job: stages plan their own layers, the period is common, shared layers come first everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.sync.layers.layer_profile import LayerTimes
from ft_plugins.sync.layers.layers_job import (
    JobLayers,
    JobSchedule,
    costed,
    equal_schedule,
    job_layers,
    job_period,
    next_schedule,
    planned_schedule,
    profile_of,
)
from ft_plugins.sync.layers.layers_measured import ModuleSamples, over_ranks, over_replicas, row_of, times_of

GPT = job_layers([0, 0, 1, 1], [("embedding", "layer 1", "layer 2")] * 2 + [("layer 3", "head", "embedding")] * 2)


def profile(layers, averaging, compute=1.0):
    times = {name: LayerTimes(name, compute, 2 * compute, averaging, 4) for name in layers.names}
    return profile_of(layers, times, 2)


def test_a_layer_of_two_stages_is_shared_and_belongs_to_neither():
    assert GPT.stages == (("layer 1", "layer 2"), ("layer 3", "head"))
    assert GPT.shared == ("embedding",) and GPT.names == ("layer 1", "layer 2", "layer 3", "head", "embedding")


def test_layers_that_zero_divides_over_ranks_of_one_stage_are_one_list():
    layers = job_layers([0, 0], [("a", "b"), ("b", "c")])
    assert layers.stages == (("a", "b", "c"),) and layers.shared == ()


def test_shared_layers_are_averaged_in_the_first_iteration_of_all_stages_before_others():
    schedule = equal_schedule(GPT, 2)
    assert schedule.stages == ((("embedding", "layer 2"), ("layer 1",)), (("embedding", "head"), ("layer 3",)))


def test_a_stage_with_fewer_layers_than_the_period_averages_nothing_in_the_last_iterations():
    layers = JobLayers((("a", "b", "c"), ("d",)), ())
    assert equal_schedule(layers, 3).stages[1] == (("d",), (), ())
    assert planned_schedule(layers, profile(layers, 0.1), 3).period == 3


def test_a_period_longer_than_every_stage_is_refused_with_the_most_that_is_possible():
    with pytest.raises(
        ConfigError, match=r"--sync-h 3: expected at most 2, because no pipeline stage has more than 2 l"
    ):
        equal_schedule(GPT, 3)
    with pytest.raises(ConfigError, match=r"--sync-h 2: expected at most 1, .* more than 1 layer that"):
        equal_schedule(JobLayers((("a",),), ()), 2)


def test_an_automatic_period_is_that_of_the_stage_that_needs_most():
    layers = JobLayers((("a", "b", "c", "d"), ("e", "f", "g", "h")), ())
    slow = {name: LayerTimes(name, 1, 2, 4.0 if name in "abcd" else 0.1, 4) for name in layers.names}
    chosen = planned_schedule(layers, profile_of(layers, slow, 2), None)
    alone = planned_schedule(
        JobLayers((layers.stages[0],), ()), profile_of(JobLayers((layers.stages[0],), ()), slow, 2), None
    )
    assert chosen.period == alone.period > 1
    assert equal_schedule(layers, None).period == 4  # unplanned: 5, but there are 4 layers


def test_a_profile_of_another_model_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"profile of another model: expected .*layer 1.*, found .*'?a"):
        planned_schedule(GPT, profile(JobLayers((("a", "b", "c", "d", "e"),), ()), 1.0), 2)


def test_what_is_planned_is_of_the_slowest_stage():
    layers = JobLayers((("a", "b"), ("c", "d")), ())
    times = {name: LayerTimes(name, 1, 2, 5.0 if name in "ab" else 0.0, 4) for name in layers.names}
    schedule = planned_schedule(layers, profile_of(layers, times, 2), 2)
    # b after 2 + 2 s of 6, until 9: 3 exposed; a after 6 until 11: 5 exposed
    assert schedule.exposed == 8.0 and schedule.seconds == 12.0 + 8.0
    assert not schedule.falls_behind(8.0 + 0.1 * 20, 0.1) and schedule.falls_behind(8.0 + 0.1 * 20 + 0.01, 0.1)
    assert not equal_schedule(layers, 2).falls_behind(1e9, 0.1)


def test_layers_of_several_stages_take_link_time_in_the_first_iteration():
    """0.5 s of the embedding, before layers of 0.2 s; the backward of a stage takes 2 s."""
    layers = JobLayers((("a", "b", "c"), ("d", "e", "f")), ("embedding",))
    times = {name: LayerTimes(name, 0.5, 2 / 3, 0.2, 4) for name in layers.names} | {
        "embedding": LayerTimes("embedding", 0.1, 0.1, 1.5, 4)
    }
    schedule = planned_schedule(layers, profile_of(layers, times, 2), 3)
    assert [own[0][0] for own in schedule.stages] == ["embedding"] * 2
    assert [own[0][1:] for own in schedule.stages] == [("c",), ("f",)], "1.7 s behind what is left of 2 s"
    assert schedule.exposed == pytest.approx(2 / 3 + 1.7 - 2 + 0.2)  # and the first layer, behind nothing
    assert costed(layers, profile_of(layers, times, 2), schedule) == schedule


def test_a_schedule_changes_if_it_falls_behind_and_another_one_is_faster():
    layers = JobLayers((tuple("abc"),), ())

    def measured(**averaging):
        times = {name: LayerTimes(name, 1, 5, averaging.get(name, 0.1), 4) for name in layers.names}
        return profile_of(layers, times, 2)

    first = next_schedule(layers, measured(), 0.0, equal_schedule(layers, 2), 2, 0.1)
    assert first is not None and first[1] == "the first profile"
    present = planned_schedule(layers, measured(c=9.0, b=0.1), 2)
    together = JobSchedule(((("c", "b"), ("a",)),), present.exposed, present.seconds)
    slower = measured(c=9.0, b=3.0)  # c ends at 17 of 18, b after it at 20
    assert next_schedule(layers, slower, 0.1 * 36 + 0.1, together, 2, 0.1) is None, "within what is allowed"
    again = next_schedule(layers, slower, 4.0, together, 2, 0.1)
    assert again is not None and again[0].stages == ((("c",), ("b", "a")),)
    assert again[1] == "a period waited 4 s for averaging, 0.1 s were planned"
    assert next_schedule(layers, slower, 9.0, again[0], 2, 0.1) is None, "none is faster"


def test_idle_time_is_filled_up_to_the_bytes_of_the_largest_iteration():
    """All layers hide in any iteration, so memory alone bounds them."""
    layers = JobLayers((tuple("abcdefgh"),), ())
    times = {name: LayerTimes(name, 1, 2, 0.01, 100) for name in layers.names}
    schedule = planned_schedule(layers, profile_of(layers, times, 2), 4)
    nbytes = dict.fromkeys(layers.names, 100)
    unfilled = max(len(own) for own in equal_schedule(layers, 4).stages[0])
    assert schedule.exposed < 0.02 and schedule.most_bytes(0, nbytes) < 100 * len(nbytes)
    assert schedule.most_bytes(0, nbytes) >= 100 * unfilled


def test_the_period_that_is_not_given_is_five_or_as_many_as_there_are_layers():
    few, many = JobLayers((("a", "b"),), ()), JobLayers((tuple("abcdefgh"),), ())
    assert (job_period(few, None), job_period(many, None)) == (2, 5)
    assert (job_period(many, "auto"), job_period(few, 7)) == (None, 7)
    assert equal_schedule(JobLayers(((),), ("tied",)), None).stages == ((("tied",),),)


def test_a_schedule_survives_its_plain_values():
    schedule = planned_schedule(GPT, profile(GPT, 0.5), 2)
    assert JobSchedule.of(schedule.block()) == schedule


@given(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.floats(0, 10))
def test_each_layer_is_averaged_in_each_period_on_every_rank(period, sizes, averaging):
    names = iter(range(100))
    layers = JobLayers(tuple(tuple(f"layer {next(names)}" for _ in range(size)) for size in sizes), ("tied",))
    if period > max(layers.longest, 1):
        return
    for schedule in (equal_schedule(layers, period), planned_schedule(layers, profile(layers, averaging), period)):
        assert schedule.period == period
        for stage, own in enumerate(layers.stages):
            turns = [schedule.due(stage, number) for number in range(period)]
            assert {name for turn in turns for name in turn} == {*own, "tied"}
            assert turns[0][0] == "tied" and all("tied" not in turn for turn in turns[1:])
            assert all(len(set(turn)) == len(turn) for turn in turns)
            assert schedule.due(stage, 7 * period) == turns[0]


# ---- measured rows ----


def test_rows_are_merged_over_replicas_and_over_ranks():
    modules = ("a", "b")
    rows = [
        row_of(modules, {"a": ModuleSamples([1, 9, 3], [2], [5], 8)}, [0.5, 1.5], 4),
        row_of(modules, {"a": ModuleSamples([5], [4], [7], 8)}, [3.0], 4),
        row_of(modules, {"a": ModuleSamples([6], [6], [6], 8)}, [], 4),
    ]
    merged = over_replicas(np.stack(rows))
    assert merged[:4].tolist() == [5, 4, 5, 8]  # medians of computing, least averaging
    assert merged[-1] == 4.0  # per period of 4
    other = row_of(modules, {"b": ModuleSamples([1], [1], [], 16)}, [2.0], 4)
    times, waited = times_of(modules, over_ranks(np.stack([merged, other])))
    assert times["a"] == LayerTimes("a", 5, 4, 5, 8) and times["b"] == LayerTimes("b", 1, 1, 0, 16)
    assert waited == 8.0


def test_each_group_is_planned_by_its_slowest_link_and_a_layer_by_its_slowest_group():
    """Exchanges of a group end together: a member with a fast link, or that came early, has measured the slow one, too.
    Of two tensor-parallel ranks, each with a group of its own, one has a link with ten times the latency."""
    fast = [row_of(("a",), {"a": ModuleSamples([1], [1], [took], 8)}, [], 1) for took in (0.1, 0.1)]
    slow = [row_of(("a",), {"a": ModuleSamples([1], [1], [took], 8)}, [], 1) for took in (1.4, 1.0)]
    groups = [over_replicas(np.stack(rows)) for rows in (fast, slow)]
    for order in (groups, groups[::-1]):
        times, _ = times_of(("a",), over_ranks(np.stack(order)))
        assert times["a"].communication == 1.0


def test_what_no_rank_measured_takes_no_time(recwarn):
    empty = row_of(("a",), {}, [], 4)
    times, waited = times_of(("a",), over_ranks(over_replicas(np.stack([empty, empty]))[None]))
    assert times == {"a": LayerTimes("a", 0, 0, 0, 0)} and waited == 0.0
    assert not recwarn.list
