"""Goodput: against a job that is played out, by hand, and in its limits."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.planner.intervals import DAY, Costs, plan_intervals
from ft_plugins.planner.survival import Cluster, Scheme
from workloads.pipelines.goodput import GIB, ProtectionKind, plan_goodput, plan_growth, table
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.pipelines.simulate import Times, simulate

TIMELINES = simulate(Pipeline(PipelineSchedule.ONE_F_ONE_B, 4, 8), Times())
CLUSTER = Cluster(nodes=64, group_nodes=4, hw_rate=0.004, sw_rate=0.001)
COSTS = Costs(
    state_gib=10, iteration_seconds=10, snapshot_seconds=0.2, link_gib_per_second=5, storage_gib_per_second=20
)


def played_out(every, wait, lag, failures, down, useful):
    """Useful time over all time of a job that fails at random; in seconds, `failures` a second."""
    chance = random.Random(5)
    clock = done = since = 0.0  # all time; work that is done; work since the last save
    kept = [(0.0, 0.0)]  # (when it counts, work that is in it)
    fails = chance.expovariate(failures)
    while done < useful:
        step = min(every - since, fails - clock) if fails > clock else 0.0
        clock, done, since = clock + step, done + step, since + step
        if fails <= clock:
            usable = [work for counts, work in kept if counts <= clock]
            done, since = usable[-1], 0.0
            kept = [(0.0, done)]
            clock += down
            fails = clock + chance.expovariate(failures)
        elif since >= every * (1 - 1e-12):
            clock, since = clock + wait, 0.0
            kept = [*kept[-20:], (clock + lag, done)]
    return done / clock


@pytest.mark.parametrize(
    ("protection", "wait", "lag"),
    [
        (ProtectionKind.DISK, 32.0, 0.0),  # 640 GiB at 20 GiB/s
        (ProtectionKind.CHECKFREQ, 0.2, 31.8),
        (ProtectionKind.REPLICATION, 2.2, 0.0),  # 10 GiB at 5 GiB/s
        (ProtectionKind.REFT, 0.2, 2.0),
        (ProtectionKind.BAFT, 0.2, 20.0),  # two iterations
    ],
)
def test_goodput_is_that_of_a_job_played_out(protection, wait, lag):
    cluster = replace(CLUSTER, hw_rate=0.04, sw_rate=0.01)
    plan = plan_goodput(cluster, COSTS, TIMELINES, restart_seconds=120)
    found = plan.of(protection)
    assert plan.iterations_per_version == 2 and found.every is not None
    every = found.every * COSTS.iteration_seconds
    seen = played_out(every, wait, lag, plan.failures / DAY, found.restart_seconds, useful=4e7)
    # 1,500 failures at random, 2 %; and of second order up to 5 % for the longest interval, a twentieth of the time
    # between failures. What memory does not survive is in the formula alone: a thousandth of the failures
    assert 1 - found.goodput == pytest.approx(1 - seen, rel=0.06)


def test_a_checkpoint_in_storage_by_hand():
    found = plan_goodput(CLUSTER, COSTS, TIMELINES, restart_seconds=120).of(ProtectionKind.DISK)
    failures = 64 * 0.005
    best = math.sqrt(2 * 32 * DAY / failures)  # 640 GiB at 20 GiB/s
    assert found.every == math.ceil(best / 10) == 416
    assert found.save_share == pytest.approx(32 / 4160)
    assert found.lost_seconds == pytest.approx(2080)
    assert found.restart_seconds == pytest.approx(120 + 32)
    assert found.goodput == pytest.approx((1 - failures / DAY * (2080 + 152)) / (1 + 32 / 4160))


def test_checkfreq_by_hand():
    found = plan_goodput(CLUSTER, COSTS, TIMELINES).of(ProtectionKind.CHECKFREQ)
    assert found.every == math.ceil(math.sqrt(2 * 0.2 * DAY / 0.32) / 10) == 33
    assert found.lost_seconds == pytest.approx(165 + 31.8)  # half an interval, and what is left of the write
    slow = plan_goodput(CLUSTER, replace(COSTS, storage_gib_per_second=1), TIMELINES).of(ProtectionKind.CHECKFREQ)
    assert slow.every == 64  # no sooner than the one before is written
    waits = plan_goodput(CLUSTER, replace(COSTS, checkpoint_seconds=2.0), TIMELINES).of(ProtectionKind.CHECKFREQ)
    assert waits.save_share == pytest.approx(2.0 / (10 * math.ceil(math.sqrt(2 * 2.0 * DAY / 0.32) / 10)))


def test_baft_by_hand_with_a_planner_of_ones_own():
    asked = []

    def fit(timelines, nbytes, bandwidth):
        asked.append((nbytes, bandwidth))
        return 3

    cluster = replace(CLUSTER, hw_rate=0.0)  # memory survives everything
    plan = plan_goodput(cluster, replace(COSTS, snapshot_seconds=0), TIMELINES, 120, fit)
    # the timelines are 33 s long and stand for 10: as many bytes have to pass in the time of the timelines
    assert TIMELINES[0].seconds == 33
    assert asked == [(10 * GIB, pytest.approx(5 * GIB * 10 / 33))]
    found = plan.of(ProtectionKind.BAFT)
    assert plan.iterations_per_version == found.every == 3
    assert found.lost_seconds == 15 + 30  # half an interval, and the three iterations of sending
    assert found.restart_seconds == 120 + 10 / 5 and found.save_share == 0
    assert found.goodput == pytest.approx(1 - 64 * 0.001 / DAY * (45 + 122))


def test_without_shared_bubbles_baft_sends_at_the_links_rate():
    plan = plan_goodput(CLUSTER, COSTS, TIMELINES[:1])
    assert plan.iterations_per_version is None and plan.bubble_share == pytest.approx(3 / 11)
    baft, reft = plan.of(ProtectionKind.BAFT), plan.of(ProtectionKind.REFT)
    assert baft.every == reft.every and "share no bubbles" in table([plan])


@given(st.floats(0.01, 5), st.floats(1, 100), st.floats(1e-4, 1))
def test_goodput_and_intervals_name_one_interval_for_snapshots(wait, state, rate):
    cluster, costs = replace(CLUSTER, hw_rate=rate), replace(COSTS, snapshot_seconds=wait, state_gib=state)
    reft = plan_goodput(cluster, costs, TIMELINES).of(ProtectionKind.REFT)
    tiers = next(one for one in plan_intervals(cluster, costs).schemes if one.scheme is Scheme.RAIM5).tiers
    assert reft.every == tiers[0].every == tiers[1].every


def test_nothing_fails_nothing_is_saved():
    plan = plan_goodput(replace(CLUSTER, hw_rate=0, sw_rate=0), COSTS, TIMELINES)
    assert all(one.goodput == 1 and one.every is None and one.save_share == 0 for one in plan.upkeeps)
    assert "never" in table([plan])


rates = st.floats(1e-6, 1)


@given(rates, rates, st.floats(0.1, 1e3), st.floats(0.1, 1e3), st.floats(0, 5), st.floats(0, 5000))
def test_goodput_is_a_share_and_storage_at_once_is_never_better_than_behind(
    hardware, software, state, storage, snapshot, restart
):
    cluster = replace(CLUSTER, hw_rate=hardware, sw_rate=software)
    costs = replace(COSTS, state_gib=state, storage_gib_per_second=storage, snapshot_seconds=snapshot)
    plan = plan_goodput(cluster, costs, TIMELINES, restart)
    assert all(0 <= one.goodput <= 1 for one in plan.upkeeps)
    worse = plan_goodput(replace(cluster, hw_rate=2 * hardware, sw_rate=2 * software), costs, TIMELINES, restart)
    # twice the failures: whole iterations may round in favour of more of them, by an iteration in an interval
    slack = 2e-2
    assert all(b.goodput <= a.goodput + slack for a, b in zip(plan.upkeeps, worse.upkeeps, strict=True))


def test_more_replicas_have_less_to_send_each_and_fail_more_often():
    plans = plan_growth(CLUSTER, COSTS, TIMELINES)
    assert [plan.nodes for plan in plans] == [64, 256, 1024, 4096]
    assert [plan.failures for plan in plans] == pytest.approx([0.32, 1.28, 5.12, 20.48])
    numbers = [plan.iterations_per_version for plan in plans]
    assert numbers == sorted(numbers, reverse=True, key=lambda n: n or 0) and numbers[-1] == 1
    goodputs = [plan.of(ProtectionKind.BAFT).goodput for plan in plans]
    assert goodputs == sorted(goodputs, reverse=True)
    assert table(plans).count("BAFT") == 4


def test_what_is_no_time_is_refused():
    with pytest.raises(ConfigError, match="restart_seconds: expected a number from 0 to 1e9, found -1"):
        plan_goodput(CLUSTER, COSTS, TIMELINES, -1)
    with pytest.raises(ConfigError, match="timelines: expected an iteration longer than 0 s"):
        plan_goodput(CLUSTER, COSTS, ())
