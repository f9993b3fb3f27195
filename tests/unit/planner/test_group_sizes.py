"""Smaller redundancy groups survive longer and take more parity."""

import json
import math
from dataclasses import replace

import pytest

from ft_plugins.planner.group_sizes import plan_group_sizes
from ft_plugins.planner.group_survival import choose_group_nodes
from ft_plugins.planner.survival import Cluster, Scheme, days_until, log_survival, loss

LARGE = Cluster(2048, 512, 0.004, 0.002, redundancy_nodes=8)


def test_each_size_is_what_the_cluster_would_be_with_it():
    found = plan_group_sizes(LARGE, 0.9)
    assert [one.nodes for one in found.of(Scheme.RAIM5)] == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [one.nodes for one in found.of(Scheme.RAIM6)] == [4, 8, 16, 32, 64, 128, 256, 512]
    for one in found.sizes:
        cluster = replace(LARGE, redundancy_nodes=one.nodes)
        assert one.days == days_until(cluster, one.scheme, 0.9)
        assert one.lost == loss(log_survival(cluster, one.scheme, 30))
        assert one.groups == 2048 // one.nodes
        assert one.parity == pytest.approx(one.scheme.losses / (one.nodes - one.scheme.losses))


@pytest.mark.parametrize("scheme", [Scheme.RAIM5, Scheme.RAIM6])
def test_the_smaller_the_groups_the_longer_they_survive_and_the_more_they_take(scheme):
    found = plan_group_sizes(LARGE, 0.9).of(scheme)
    assert [one.days for one in found] == sorted((one.days for one in found), reverse=True)
    assert [one.parity for one in found] == sorted((one.parity for one in found), reverse=True)
    assert found[0].days > 10 * found[-1].days


def test_the_table_marks_the_size_of_the_plan_and_names_the_automatic_one():
    lines = plan_group_sizes(LARGE, 0.9).table().splitlines()
    assert lines[0].endswith(f"--reft-group-nodes auto would choose {choose_group_nodes(2048, 1)}")
    assert "RAIM5: parity" in lines[1] and "RAIM6: lost within 30 d" in lines[1]
    assert [line.split()[:2] for line in lines if " * " in line and line.split()[0] != "*"] == [["8", "*"]]
    assert "14.3%" in lines[4] and "33.3%" in lines[4], "parity of 1/7 and 2/6"
    assert lines[2].split()[0] == "2" and "100.0%" in lines[2]


def test_one_size_is_no_comparison():
    assert plan_group_sizes(Cluster(4, 2, 0.1, 0.1), 0.9).table() == ""


def test_what_never_fails_is_no_error_and_is_none_in_json():
    still = plan_group_sizes(Cluster(64, 64, 0.0, 0.0), 0.9)
    assert all(math.isinf(one.days) for one in still.sizes) and "always" in still.table()
    assert {one["days"] for one in json.loads(json.dumps(still.block(), allow_nan=False))} == {None}


def test_racks_cost_days_and_keep_groups_small():
    racks = plan_group_sizes(replace(LARGE, domain_nodes=16, domain_rate=1e-3), 0.9).of(Scheme.RAIM5)
    alone = plan_group_sizes(LARGE, 0.9).of(Scheme.RAIM5)
    assert all(one.days < other.days for one, other in zip(racks[:5], alone[:5], strict=True))
    assert {(one.groups, one.days) for one in racks[4:]} == {(64, racks[4].days)}, "16 of a rack are in 16 groups"
