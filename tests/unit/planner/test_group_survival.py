"""Survival of one redundancy group, counted out node by node; and the size that `auto` takes."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.planner.group_survival import (
    AUTO_DAYS,
    AUTO_FAILURES,
    AUTO_LEAST,
    AUTO_MOST,
    choose_group_nodes,
    log_group_survival,
    log_shared_survival,
)
from ft_plugins.planner.intervals import Costs, plan_intervals, rebuild_seconds, storage_rate
from ft_plugins.planner.survival import Cluster, Scheme, days_until, log_survival, loss, lost_per_day, plan_survival
from ft_plugins.redundancy.parity import LEAST_NODES

hazards = st.floats(0.01, 3)
COSTS = Costs(60, 10, 0.05, 20, 50)


def counted(members, losses, hazard, domain_hazard):
    """The chance by all outcomes of all nodes and domains."""
    domain_of = [domain for domain, count in enumerate(members) for _ in range(count)]
    total = 0.0
    for domains in itertools.product([False, True], repeat=len(members)):
        for nodes in itertools.product([False, True], repeat=len(domain_of)):
            lost = sum(failed or domains[domain] for failed, domain in zip(nodes, domain_of, strict=True))
            if lost <= losses:
                total += math.prod(
                    -math.expm1(-domain_hazard) if failed else math.exp(-domain_hazard) for failed in domains
                ) * (math.prod(-math.expm1(-hazard) if failed else math.exp(-hazard) for failed in nodes))
    return total


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.sampled_from([1, 2]), hazards, hazards)
def test_a_group_whose_domains_fail_survives_as_counted_out(members, losses, hazard, domain_hazard):
    found = math.exp(log_shared_survival(members, losses, hazard, domain_hazard))
    assert found == pytest.approx(counted(members, losses, hazard, domain_hazard), rel=1e-9)


def test_without_failures_of_domains_it_is_the_group_of_independent_nodes():
    assert log_shared_survival([3, 2], 1, 0.2, 0.0) == log_group_survival(5, 1, 0.2)
    alone = log_shared_survival([1] * 5, 1, 0.1, 0.1)
    assert alone == pytest.approx(log_group_survival(5, 1, 0.2), rel=1e-12), (
        "a node alone in its domain fails by either"
    )


def test_the_chance_of_a_loss_keeps_its_precision_and_certain_loss_is_no_error():
    tiny = loss(log_shared_survival([1] * 8, 1, 1e-10, 1e-10))
    assert tiny == pytest.approx(math.comb(8, 2) * 4e-20, rel=1e-6)
    assert log_shared_survival([4, 4], 1, 1000.0, 1000.0) == -math.inf


@pytest.mark.parametrize("losses", [1, 2])
def test_auto_takes_large_groups_in_small_jobs_and_smaller_ones_as_jobs_grow(losses):
    sizes = [choose_group_nodes(2**power, losses) for power in range(1, 18)]
    assert sizes[0] == AUTO_MOST and sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= AUTO_LEAST >= LEAST_NODES[losses]
    if losses == 1:
        assert sizes[-1] == AUTO_LEAST < choose_group_nodes(2048, 1) < choose_group_nodes(512, 1) == AUTO_MOST
    for nodes in (2048, 4096):
        cluster = Cluster(nodes, nodes, AUTO_FAILURES, 0.0, redundancy_nodes=choose_group_nodes(nodes, losses))
        # rebuilding takes as long as AUTO_NODE_SECONDS for each node of the group
        costs = replace(COSTS, replace_seconds=900, state_gib=30, link_gib_per_second=1)
        assert storage_rate(cluster, costs, Scheme.RAIM5 if losses == 1 else Scheme.RAIM6) < 1 / AUTO_DAYS


# ---- the planner, by redundancy groups ----


def test_small_groups_outlive_one_large_one_and_equal_ones_are_the_same_as_before():
    whole = Cluster(96, 48, 1e-3, 0.0)
    cut = Cluster(96, 48, 1e-3, 0.0, redundancy_nodes=8)
    assert log_survival(cut, Scheme.RAIM5, 7) == pytest.approx(log_survival(Cluster(96, 8, 1e-3, 0.0), Scheme.RAIM5, 7))
    assert days_until(cut, Scheme.RAIM5, 0.9) > 2 * days_until(whole, Scheme.RAIM5, 0.9)
    assert days_until(cut, Scheme.CHECKPOINT, 0.9) == days_until(whole, Scheme.CHECKPOINT, 0.9)
    assert rebuild_seconds(cut, COSTS) == rebuild_seconds(Cluster(96, 8, 1e-3, 0.0), COSTS)
    assert storage_rate(cut, COSTS, Scheme.RAIM5) < storage_rate(whole, COSTS, Scheme.RAIM5) / 7


def test_groups_of_two_sizes_are_both_counted():
    cluster = Cluster(9, 9, 0.01, 0.0, redundancy_nodes=8)
    assert dict(cluster.redundancy_groups(1)) == {(1,) * 5: 1, (1,) * 4: 1} and cluster.largest_group(1) == 5
    expected = log_group_survival(5, 1, 0.01) + log_group_survival(4, 1, 0.01)
    assert log_survival(cluster, Scheme.RAIM5, 1) == pytest.approx(expected)
    assert "RAIM5: each of them is cut into 2 redundancy groups of 4 or 5" in plan_survival(cluster, 0.9).table()


def test_a_domain_that_takes_two_of_a_group_is_fatal_and_one_that_takes_one_is_not():
    apart = Cluster(64, 64, 0.0, 0.0, redundancy_nodes=8, domain_nodes=8, domain_rate=1e-3)
    together = Cluster(64, 8, 0.0, 0.0, redundancy_nodes=8, domain_nodes=8, domain_rate=1e-3)
    assert storage_rate(apart, COSTS, Scheme.RAIM5) == 0 and storage_rate(together, COSTS, Scheme.RAIM5) == 8e-3
    assert lost_per_day(apart) == 8e-3
    assert days_until(apart, Scheme.RAIM5, 0.9) > 1.5 * days_until(together, Scheme.RAIM5, 0.9)
    assert log_survival(together, Scheme.RAIM5, 1) == pytest.approx(-8e-3)
    day = days_until(apart, Scheme.RAIM5, 0.9)
    assert math.exp(log_survival(apart, Scheme.RAIM5, day)) == pytest.approx(0.9)
    assert math.exp(log_survival(apart, Scheme.CHECKPOINT, days_until(apart, Scheme.CHECKPOINT, 0.9))) == pytest.approx(
        0.9
    )
    tiers = plan_intervals(apart, COSTS).schemes[1].tiers
    assert [tier.failures for tier in tiers] == [0, 8e-3, 0]
