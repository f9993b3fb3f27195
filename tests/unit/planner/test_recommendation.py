"""The planner leads with one configuration, whose reasons are the figures of its tables."""

from dataclasses import replace

import pytest

from ft_plugins.config import Config
from ft_plugins.planner.group_sizes import plan_group_sizes
from ft_plugins.planner.intervals import DAY, Costs, plan_intervals
from ft_plugins.planner.recommendation import recommend
from ft_plugins.planner.survival import Cluster, Scheme, plan_survival

CLUSTER = Cluster(nodes=96, group_nodes=6, hw_rate=1e-3, sw_rate=1e-2)
COSTS = Costs(
    state_gib=60, iteration_seconds=10, snapshot_seconds=0.05, link_gib_per_second=20, storage_gib_per_second=50
)


def advice(cluster=CLUSTER, costs=COSTS):
    intervals = plan_intervals(cluster, costs) if costs is not None else None
    return recommend(plan_survival(cluster, 0.9), plan_group_sizes(cluster, 0.9), intervals)


def test_its_flags_are_those_of_a_job():
    for found in (advice(), advice(costs=None), advice(replace(CLUSTER, redundancy_nodes=4))):
        config, rest = Config.from_flags(" ".join(found.flags).split())
        assert not rest and config.reft is not None and config.reft.redundancy == found.scheme.value
        assert config.reft.group_nodes == found.group_nodes
        if found.interval is not None:
            assert config.reft.interval == found.interval
            assert config.reft.checkpoint_interval == found.checkpoint_interval


def test_raim5_is_enough_unless_raim6_saves_a_thousandth_of_the_day():
    assert advice().scheme is Scheme.RAIM5
    hard = replace(CLUSTER, hw_rate=1.0)
    costs = replace(COSTS, storage_gib_per_second=1, replace_seconds=3600)
    plans = {plan.scheme: plan for plan in plan_intervals(hard, costs).schemes}
    assert plans[Scheme.RAIM5].cost - plans[Scheme.RAIM6].cost > DAY / 1000
    found = advice(hard, costs)
    assert found.scheme is Scheme.RAIM6 and any("RAIM6 saves " in reason for reason in found.reasons)
    small = advice(Cluster(nodes=6, group_nodes=2, hw_rate=1.0, sw_rate=0.1), costs)
    assert small.scheme is Scheme.RAIM5 and any("would need groups of at least 4" in one for one in small.reasons)


def test_without_costs_it_recommends_what_survives_a_day_and_no_interval():
    found = advice(costs=None)
    assert (found.scheme, found.interval, found.checkpoint_interval) == (Scheme.RAIM5, None, None)
    assert "give --state-gib" in found.reasons[0]
    often = advice(replace(CLUSTER, hw_rate=0.1), None)
    assert often.scheme is Scheme.RAIM6 and "with RAIM5 memory would not survive 1 day with that" in often.reasons[2]


@pytest.mark.parametrize(
    ("costs", "interval", "said"),
    [
        (COSTS, 10, "every 10 iterations (100 s) costs least: training waits 0.05% of the time for them, and a failure "
         "costs 50 s of work on average; every iteration would be possible"),
        (replace(COSTS, snapshot_seconds=30.0), 300, "as often as waiting allows (at most 1.00% of the time)"),
        (replace(COSTS, state_gib=3000), 15, "as often as sending a version takes (2.5 min)"),
    ],
    ids=["cheapest", "waiting", "sending"],
)  # fmt: skip
def test_it_says_what_limits_the_interval(costs, interval, said):
    found = advice(costs=costs)
    assert found.interval == interval and said in found.reasons[0]


def test_where_nothing_fails_checkpoints_are_still_advised():
    found = advice(replace(CLUSTER, hw_rate=0.0, sw_rate=0.0))
    assert (found.interval, found.checkpoint_interval) == (1, None)
    assert any("no failure of this model needs them" in reason for reason in found.reasons)
    assert "memory survives any time with a probability of 0.9" in found.reasons[1]
