"""Intervals: the smallest that link and bound allow, the cheapest by trying all; rates against a group played out."""

import heapq
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.planner.intervals import (
    DAY,
    Costs,
    cheapest_snapshots,
    exchange_seconds,
    failures_per_day,
    plan_intervals,
    rebuild_seconds,
    snapshot_interval,
    span,
    storage_rate,
    young,
)
from ft_plugins.planner.survival import Cluster, Scheme, mean_rate

CLUSTER = Cluster(nodes=96, group_nodes=6, hw_rate=1e-3, sw_rate=1e-2)
COSTS = Costs(
    state_gib=60,
    iteration_seconds=10,
    snapshot_seconds=0.05,
    link_gib_per_second=20,
    storage_gib_per_second=50,
)

sizes = st.floats(0.01, 1000)
some_costs = st.builds(
    Costs,
    state_gib=sizes,
    iteration_seconds=st.floats(0.1, 100),
    snapshot_seconds=st.floats(0, 5),
    link_gib_per_second=sizes,
    storage_gib_per_second=sizes,
    max_overhead=st.floats(0.001, 1),
)


def scheme_plan(scheme, cluster=CLUSTER, costs=COSTS):
    return next(plan for plan in plan_intervals(cluster, costs).schemes if plan.scheme is scheme)


# ------------------------------------------------------------------------------------------------ snapshots


@settings(max_examples=300, deadline=None)
@given(some_costs, st.integers(1, 2))
def test_the_snapshot_interval_keeps_both_bounds_and_one_less_would_break_one(costs, losses):
    def keeps(iterations, slack):
        seconds = iterations * costs.iteration_seconds * slack
        return costs.snapshot_seconds <= costs.max_overhead * seconds and exchange_seconds(costs, losses) <= seconds

    found = snapshot_interval(costs, losses)
    assert keeps(found, 1 + 1e-9)  # a quotient that is a whole number but for rounding counts as one
    assert found == 1 or not keeps(found - 1, 1 - 1e-9)


@pytest.mark.parametrize(
    ("snapshot", "state", "losses", "expected"),
    [
        (0.05, 60, 1, 1),  # 0.5 % of an iteration; 3 s of exchange
        (0.1, 60, 1, 1),  # just the bound
        (0.11, 60, 1, 2),
        (0.7, 60, 1, 7),
        (0.05, 300, 1, 2),  # 15 s of exchange
        (0.05, 300, 2, 3),  # 30 s: twice the parity
        (0.0, 1, 1, 1),
    ],
)
def test_snapshot_intervals_by_hand(snapshot, state, losses, expected):
    assert snapshot_interval(replace(COSTS, snapshot_seconds=snapshot, state_gib=state), losses) == expected


def test_an_interval_that_just_suffices_is_not_lost_to_rounding():
    costs = replace(COSTS, iteration_seconds=1, snapshot_seconds=0.07, state_gib=1)
    assert 0.07 / 0.01 > 7  # in doubles
    assert snapshot_interval(costs, 1) == 7


@settings(max_examples=200, deadline=None)
@given(some_costs, st.integers(1, 2))
def test_snapshots_are_taken_as_often_as_costs_least_within_the_limits(costs, losses):
    def cost(iterations):
        seconds = iterations * costs.iteration_seconds
        return DAY / seconds * costs.snapshot_seconds + seconds / 2 * 96 * 11e-3

    found, shortest = cheapest_snapshots(failures_per_day(CLUSTER), costs, losses), snapshot_interval(costs, losses)
    assert found >= shortest
    assert cost(found) <= cost(found + 1) * (1 + 1e-9)
    # Young's interval is rounded up: two fewer iterations never cost less
    assert found <= shortest + 1 or cost(found - 1) <= cost(found - 2) * (1 + 1e-9)


def test_where_nothing_fails_snapshots_are_as_frequent_as_the_limits_allow():
    quiet = replace(CLUSTER, hw_rate=0.0, sw_rate=0.0)
    assert cheapest_snapshots(failures_per_day(quiet), replace(COSTS, snapshot_seconds=0.7), 1) == 7


# ------------------------------------------------------------------------------------------------ rates


def test_without_reft_every_failure_is_for_storage():
    assert storage_rate(CLUSTER, COSTS, Scheme.CHECKPOINT) == pytest.approx(96 * (1e-3 + 1e-2))
    aged = replace(CLUSTER, shape=1.3)
    expected = 96 * (mean_rate(1e-3, 1.3) + mean_rate(1e-2, 1.3))
    assert storage_rate(aged, COSTS, Scheme.CHECKPOINT) == pytest.approx(expected)


def test_the_rate_that_memory_does_not_survive_is_of_the_known_order():
    hazard = 1e-3 * rebuild_seconds(CLUSTER, COSTS) / DAY
    assert rebuild_seconds(CLUSTER, COSTS) == pytest.approx(600 + 6 * 60 / 20)
    first = 96 * 1e-3 * 5 * hazard, 96 * 1e-3 * 10 * hazard**2  # C(5, m) of the others, in the time of one rebuild
    # what follows the first term is of relative size 5 x hazard = 4e-5
    assert storage_rate(CLUSTER, COSTS, Scheme.RAIM5) == pytest.approx(first[0], rel=1e-4)
    assert storage_rate(CLUSTER, COSTS, Scheme.RAIM6) == pytest.approx(first[1], rel=1e-4)


def played_out(nodes, losses, rate, down, days):
    """Per day, how often more than `losses` of a group are down at once, each for `down` days; played at random."""
    chance, now, lost = random.Random(7), 0.0, 0
    returns = []
    while now < days:
        now += chance.expovariate(nodes * rate)
        while returns and returns[0] <= now:
            heapq.heappop(returns)
        if chance.random() * nodes < len(returns):
            continue  # it would have struck a node that is down
        heapq.heappush(returns, now + down)
        if len(returns) > losses:
            lost, returns = lost + 1, []  # from storage, all of them
    return lost / days


@pytest.mark.parametrize(("scheme", "days"), [(Scheme.RAIM5, 10_000), (Scheme.RAIM6, 200_000)])
def test_the_rate_that_memory_does_not_survive_equals_that_of_a_group_played_out(scheme, days):
    cluster = Cluster(nodes=6, group_nodes=6, hw_rate=1.0, sw_rate=0.0)
    costs = replace(COSTS, replace_seconds=0.01 * DAY - 6 * 60 / 20)
    assert rebuild_seconds(cluster, costs) == pytest.approx(0.01 * DAY)
    found = played_out(6, scheme.losses, 1.0, 0.01, days)
    # a thousand events or more: 3 % of chance; nodes that are down already: n x 0.01 = 6 %; a wrong factor would be 2
    assert storage_rate(cluster, costs, scheme) == pytest.approx(found, rel=0.12)


def test_hardware_failures_are_shared_out_between_memory_and_storage():
    for scheme in (Scheme.RAIM5, Scheme.RAIM6):
        process, node, storage = scheme_plan(scheme).tiers
        assert (process.name, node.name, storage.name) == ("process", "node", "storage")
        assert process.failures == pytest.approx(96 * 1e-2)
        assert node.failures + storage.failures == pytest.approx(96 * 1e-3)
        assert 0 < storage.failures < 1e-4 * node.failures


# ------------------------------------------------------------------------------------------------ checkpoints


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 100), st.floats(0.01, 10))
def test_youngs_interval_is_the_cheapest_of_all(cost, rate):
    def total(seconds):
        return DAY / seconds * cost + seconds / 2 * rate

    best = young(cost, rate)
    assert all(total(best) <= total(best * factor) for factor in (0.2, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 5))


def test_the_checkpoint_interval_is_the_cheapest_whole_number_of_iterations():
    costs = replace(COSTS, storage_gib_per_second=1000)
    write, rate = 96 * 60 / 1000, 96 * 11e-3

    def total(iterations):
        return DAY / (10 * iterations) * write + 10 * iterations / 2 * rate

    cheapest = min(range(1, 2000), key=total)
    (storage,) = scheme_plan(Scheme.CHECKPOINT, costs=costs).tiers
    assert storage.every in (cheapest, cheapest + 1)  # rounded up, never below the optimum
    assert storage.save_seconds + storage.lost_seconds == pytest.approx(total(storage.every or 0))


@settings(max_examples=200, deadline=None)
@given(some_costs)
def test_no_checkpoint_is_asked_for_faster_than_storage_takes_it_nor_between_snapshots(costs):
    write = 96 * costs.state_gib / costs.storage_gib_per_second
    for plan in plan_intervals(CLUSTER, costs).schemes:
        storage = plan.tiers[-1]
        assert storage.every is not None
        assert storage.every * costs.iteration_seconds >= write * (1 - 1e-9)
        assert all(tier.every is not None and storage.every % tier.every == 0 for tier in plan.tiers)


def test_slow_storage_bounds_the_interval():
    slow = replace(COSTS, storage_gib_per_second=0.01)
    (storage,) = scheme_plan(Scheme.CHECKPOINT, costs=replace(slow, checkpoint_seconds=1.0)).tiers
    assert storage.every == math.ceil(96 * 60 / 0.01 / 10)


def test_a_checkpoint_that_training_does_not_wait_for_costs_less_but_lags_behind():
    (waited,) = scheme_plan(Scheme.CHECKPOINT).tiers
    (behind,) = scheme_plan(Scheme.CHECKPOINT, costs=replace(COSTS, checkpoint_seconds=1.0)).tiers
    assert behind.every is not None and waited.every is not None and behind.every < waited.every
    seconds, write = behind.every * 10, 96 * 60 / 50
    assert behind.save_seconds == pytest.approx(DAY / seconds)
    assert behind.lost_seconds == pytest.approx((seconds / 2 + write - 1.0) * 96 * 11e-3)


def test_the_cost_of_reft_is_the_sum_by_hand():
    process, node, storage = scheme_plan(Scheme.RAIM5).tiers
    assert process.every == node.every == math.ceil(math.sqrt(2 * 0.05 * DAY / (96 * 0.011)) / 10) == 10
    assert process.save_seconds == pytest.approx(DAY / 100 * 0.05) and node.save_seconds == 0
    assert process.lost_seconds == pytest.approx(100 / 2 * 0.96)
    assert node.lost_seconds == pytest.approx((100 / 2 + 60 / 20) * node.failures)
    assert storage.every == 10 * math.ceil(math.ceil(math.sqrt(2 * 0.05 * DAY / storage.failures) / 10) / 10)
    plan = scheme_plan(Scheme.RAIM5)
    parts = [tier.save_seconds + tier.lost_seconds for tier in plan.tiers]
    assert plan.cost == pytest.approx(sum(parts))
    assert plan.cost < scheme_plan(Scheme.CHECKPOINT).cost / 2


def test_where_nothing_fails_nothing_is_written_and_nothing_lost():
    quiet = Cluster(nodes=12, group_nodes=6, hw_rate=0.0, sw_rate=0.0)
    plan = plan_intervals(quiet, COSTS)
    assert [one.tiers[-1].every for one in plan.schemes] == [None] * 3
    assert [tier.lost_seconds for one in plan.schemes for tier in one.tiers] == [0.0] * 7
    assert "never" in plan.table() and "hardware none" in plan.table() and "-0" not in plan.table()


# ------------------------------------------------------------------------------------------------ input and output


def test_costs_are_given_whole_or_not_at_all():
    assert Costs.from_options({"state_gib": None, "max_overhead": None}) is None
    whole = {"state_gib": 60, "iteration_seconds": 10, "snapshot_seconds": 0.05, "link_gib_per_second": 20}
    with pytest.raises(ConfigError, match="no effect without storage_gib_per_second; give it too$"):
        Costs.from_options(whole)
    with pytest.raises(ConfigError, match="^max_overhead: no effect without state_gib, iteration_s.*; give them too$"):
        Costs.from_options({"max_overhead": 0.02})
    assert Costs.from_options({**whole, "storage_gib_per_second": 50, "replace_seconds": None}) == COSTS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state_gib": 0.0}, "state_gib: expected a number from 1e-6 to 1e9, found 0.0"),
        ({"iteration_seconds": -1.0}, "iteration_seconds: expected a number from 1e-6 to 1e9, found -1.0"),
        ({"link_gib_per_second": math.inf}, "link_gib_per_second: expected a number from 1e-6 to 1e9, found inf"),
        ({"snapshot_seconds": -0.1}, "snapshot_seconds: expected a number from 0 to 1e9, found -0.1"),
        ({"checkpoint_seconds": math.nan}, "checkpoint_seconds: expected a number from 0 to 1e9, found nan"),
        ({"max_overhead": 1.5}, "max_overhead: expected a number from 1e-6 to 1, found 1.5"),
    ],
)
def test_costs_that_make_no_sense_are_refused(change, said):
    with pytest.raises(ConfigError) as refused:
        replace(COSTS, **change)
    assert str(refused.value) == said


def test_the_table_shows_every_tier_and_the_share_of_the_day():
    lines = plan_intervals(CLUSTER, COSTS).table().splitlines()
    assert "hardware one in 1000 days, software one in 100 days" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == ["checkpoints", "total"]
    assert sum("total" in line for line in lines) == 3 and "10 iterations " in lines[4]
    share = scheme_plan(Scheme.RAIM5).cost / DAY
    assert f"{share:.2%}" in lines[7]
    hopeless = plan_intervals(Cluster(9600, 6, 1.0, 1.0), COSTS).table()
    assert "no progress" in hopeless


def test_the_block_is_json_of_its_standard():
    block = json.loads(json.dumps(plan_intervals(CLUSTER, COSTS).block(), allow_nan=False))
    assert block["costs"]["state_gib"] == 60
    assert block["schemes"]["raim5"]["tiers"]["process"]["every"] == 10
    assert block["schemes"]["raim5"]["cost_seconds_per_day"] == scheme_plan(Scheme.RAIM5).cost


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0 s"), (119.0, "119 s"), (150.0, "2.5 min"), (9000, "2.5 h"), (216_000, "2.5 d")]
)
def test_a_time_for_people(seconds, shown):
    assert span(seconds) == shown
