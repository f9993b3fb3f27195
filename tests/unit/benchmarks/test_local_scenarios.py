"""Blocks of the comparison of local SGD: what is measured, and on which link."""

import dataclasses
import json

import pytest

from ft_plugins.config import Config
from workloads.local_blocks import PLAIN, StepLog
from workloads.local_bounds import Stragglers
from workloads.local_scenarios import (
    A_EDIT,
    EDIT,
    FULL,
    POLICIES,
    QUICK,
    REPLICAS,
    TABLE_6,
    TRAFFIC,
    LinkSetting,
    sync_block,
)

RANDOM = next(one for one in FULL if one.name == "random")


def as_if_run(scenario, policy, lengths):
    """Iterations of one second, except `lengths`."""
    block, begins = scenario.block(policy, 0.0, 1), [0.0]
    for step in range(block.first, block.last + 1):
        begins.append(begins[-1] + lengths.get(step, 1.0))
    return [StepLog(block.first, tuple(begins[:-1]), begins[-1])] * REPLICAS


@pytest.mark.parametrize("scenario", [*FULL, *TABLE_6, *QUICK], ids=lambda one: one.name)
def test_the_window_has_a_whole_number_of_periods(scenario):
    """Something that takes 1 s in every iteration and 1 s more around each synchronisation, wherever it waits."""
    tau = scenario.tau
    for late in (0, 1):
        slow = {step + late: 2.0 for step in range(tau, 1000, tau)}
        logs = as_if_run(scenario, EDIT, slow)
        assert scenario.seconds(EDIT, logs) == pytest.approx((tau + 1) / tau)
    assert scenario.seconds(PLAIN, as_if_run(scenario, PLAIN, {})) == pytest.approx(1.0)
    assert scenario.seconds(A_EDIT, as_if_run(scenario, A_EDIT, {})) == pytest.approx(1.0)


def test_at_their_own_pace_replicas_meet_the_stragglers_of_the_same_iterations():
    block, counts = RANDOM.block(A_EDIT, 0.0, 1), RANDOM.lagging(1)
    assert (block.first, block.last) == (RANDOM.tau + 1, RANDOM.tau * (RANDOM.periods + 1))
    assert [sum(each) for each in counts] == [RANDOM.tau] * RANDOM.periods
    assert RANDOM.block(EDIT, 0.0, 1).stragglers is Stragglers.RANDOM


def test_later_rounds_have_only_what_they_are_to_have():
    scenario = dataclasses.replace(RANDOM, later=(PLAIN, A_EDIT))
    assert scenario.chosen(0) == RANDOM.policies and scenario.chosen(1) == (PLAIN, A_EDIT)
    assert RANDOM.chosen(1) == RANDOM.policies


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in (PLAIN, A_EDIT)])
def test_every_policy_is_one_of_the_package(policy):
    config = Config.from_json({"sync": sync_block(policy, 5, 0.2)})
    assert config.sync is not None and config.sync.tau == 5
    assert json.loads(RANDOM.block(policy, 0.0, 1).config)["tau"] == RANDOM.tau
    assert RANDOM.block(PLAIN, 0.0, 1).config == ""


def test_by_the_clock_a_period_is_the_compute_of_as_many_iterations():
    assert sync_block(A_EDIT, 10, 0.2)["seconds"] == pytest.approx(2.0) and "tau" not in sync_block(A_EDIT, 10, 0.2)


def test_links_are_calibrated_to_the_ratios_of_the_paper():
    normal, slow = LinkSetting(0.2, 1.0), LinkSetting(0.2, TRAFFIC[40])
    assert normal.target / 0.2 == pytest.approx(1.052, abs=0.001)
    assert slow.target / normal.target == pytest.approx(2.65, abs=0.001)
    assert normal.floor == pytest.approx(0.2) and slow.floor < 0.2
    assert slow.first_rate < normal.first_rate
    assert normal.block(8).config == ""
