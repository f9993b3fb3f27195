"""The intervals of a running job: the planner's, from measured seconds; bounded, monotone, and changed rarely."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.planner.intervals import Costs, plan_intervals
from ft_plugins.planner.job_intervals import (
    GROWTH,
    MOST_CAPTURED,
    MOST_STORED,
    WORTH,
    Measured,
    MeasuredJob,
    choose,
)
from ft_plugins.planner.survival import Cluster, Scheme

JOB = MeasuredJob(captured=True, stored=True, nodes=6, group_nodes=6, losses=1, hw_rate=1e-2, sw_rate=0.1)
MEASURED = Measured(iteration=2.0, fences=0.05, exchange=7.0, storage=60.0, job=3600.0, restarts=0)

seconds = st.floats(0, 1e5)
some_measured = st.builds(
    Measured, iteration=st.floats(1e-3, 1e3), fences=seconds, exchange=seconds, storage=seconds,
    job=st.floats(0, 1e8), restarts=st.integers(0, 1000),
)  # fmt: skip
rates = st.none() | st.floats(0, 100)
some_jobs = st.builds(
    MeasuredJob, captured=st.booleans(), stored=st.booleans(), nodes=st.integers(1, 3000),
    group_nodes=st.integers(4, 16), losses=st.integers(0, 2), exchange_interval=st.integers(1, 5),
    hw_rate=rates, sw_rate=rates,
)  # fmt: skip
captured, stored = st.integers(1, MOST_CAPTURED), st.integers(0, MOST_STORED)


def settled(job, measured, captured=1, stored=1):
    """What is chosen in the end, after as many choices as it takes to grow."""
    found = choose(job, measured, captured, stored)
    same = (found.captured, found.stored) == (captured, stored)
    return found if same else settled(job, measured, found.captured, found.stored)


def wanted(job, measured):
    return settled(job, measured).captured


@pytest.mark.parametrize("losses", [1, 2])
def test_they_are_those_of_the_planner_for_the_same_job(losses):
    state = 60.0  # GiB; the figures are the seconds that link and storage take for them
    costs = Costs(
        state, MEASURED.iteration, MEASURED.fences, losses * state / MEASURED.exchange, 6 * state / MEASURED.storage
    )
    scheme = Scheme.RAIM5 if losses == 1 else Scheme.RAIM6
    (plan,) = (one for one in plan_intervals(Cluster(6, 6, 1e-2, 0.1), costs).schemes if one.scheme is scheme)
    found = settled(replace(JOB, losses=losses), MEASURED)
    assert found.captured == plan.tiers[0].every and found.captured > 1
    assert found.stored == min(plan.tiers[-1].every or 0, MOST_STORED)


@given(some_jobs, some_measured, captured, stored)
def test_they_are_bounded_and_what_is_not_chosen_stays(job, measured, before, kept):
    found = choose(job, measured, before, kept)
    assert 1 <= found.captured <= MOST_CAPTURED and 0 <= found.stored <= MOST_STORED
    assert job.captured or found.captured == before
    assert (job.stored and measured.storage) or found.stored == kept, "how long a checkpoint takes is not known yet"


@given(some_jobs, some_measured, captured, stored)
def test_a_choice_is_final_until_what_is_measured_changes_a_lot(job, measured, before, kept):
    found = choose(job, measured, before, kept)
    assert found.captured <= GROWTH * before and (not kept or found.stored <= GROWTH * kept), "it grows step by step"
    end = settled(job, measured, before, kept)
    assert choose(job, measured, end.captured, end.stored) == end
    for was, now in ((before, found.captured), (kept, found.stored)):
        assert now == was or max(was, now) >= WORTH * min(was, now)


@given(some_jobs, some_measured, st.floats(1, 1e3), st.floats(1, 1e3))
def test_the_more_a_snapshot_costs_the_rarer_it_is(job, measured, waits, sends):
    dearer = replace(measured, fences=measured.fences * waits, exchange=measured.exchange * sends)
    assert wanted(job, dearer) >= wanted(job, measured)


@given(some_jobs, some_measured, st.floats(1, 1e3), st.integers(0, 1000))
def test_the_more_fails_the_more_often_snapshots_are_taken(job, measured, times, restarts):
    hw_rate, sw_rate = (rate if rate is None else min(100.0, rate * times) for rate in (job.hw_rate, job.sw_rate))
    worse = replace(job, hw_rate=hw_rate, sw_rate=sw_rate)
    failed = replace(measured, restarts=measured.restarts + restarts)
    assert wanted(worse, failed) <= wanted(job, measured)


def test_failures_are_observed_if_none_are_given_and_all_of_them_may_have_been_nodes():
    observed = replace(JOB, hw_rate=None, sw_rate=None, losses=0, nodes=1)
    day = replace(MEASURED, job=86400.0, restarts=3)
    given_rate = replace(observed, hw_rate=4.0)
    found, expected = settled(observed, day), settled(given_rate, day)
    assert (found.captured, found.stored) == (expected.captured, expected.stored)
    assert "as far as observed" in found.reason and "4 failures a day as given" in expected.reason
    assert choose(observed, replace(day, job=0.0), 1, 1).captured >= 1, "a job that has just begun"


def test_without_a_failure_to_expect_a_snapshot_costs_at_most_its_share_and_nothing_needs_a_checkpoint():
    quiet = replace(JOB, hw_rate=0.0, sw_rate=0.0)
    found = settled(quiet, replace(MEASURED, fences=0.2))
    assert found.captured == 10, "0.2 s are one percent of ten iterations of 2 s"
    assert found.stored == MOST_STORED
    assert choose(quiet, replace(MEASURED, fences=0.0), 1, 100).captured == 4, "as often as the exchange keeps up"
    assert choose(replace(quiet, exchange_interval=2), replace(MEASURED, fences=0.0), 1, 100).captured == 2
