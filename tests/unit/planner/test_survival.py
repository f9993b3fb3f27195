"""Survival against REFT's figures, against exact arithmetic, and by the properties that any such model must have."""

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.planner.group_survival import log_group_survival
from ft_plugins.planner.survival import (
    Cluster,
    Scheme,
    days_until,
    log_survival,
    loss,
    mean_rate,
    plan_survival,
    survival,
)

PAPER = Cluster(nodes=3072, group_nodes=6, hw_rate=1e-4, sw_rate=1e-5, shape=1.3)
ROUNDING = 1e-11  # relative: some hundred roundings, of logarithms up to 700, in doubles


@st.composite
def clusters(draw, least=2):
    """Two nodes to tens of thousands, rates from a failure in 10^12 days to one a day."""
    group = draw(st.integers(least, 64))
    rate = st.floats(-12, 0).map(lambda exponent: 10**exponent)
    return Cluster(
        nodes=group * draw(st.integers(1, 1000)),
        group_nodes=group,
        hw_rate=draw(rate),
        sw_rate=draw(st.just(0.0) | rate),
        shape=draw(st.floats(0.5, 3)),
    )


spans = st.floats(1e-3, 1e4)


def exactly(nodes, losses, p):
    """At most `losses` of `nodes` fail, each of which survives with probability `p`."""
    return sum(
        (math.comb(nodes, j) * (1 - p) ** j * p ** (nodes - j) for j in range(losses + 1)),
        start=Fraction(0),
    )


# ------------------------------------------------------------------------------------------------ the paper


def test_the_papers_point_16_days_with_reft_and_a_day_part_without():
    assert round(days_until(PAPER, Scheme.RAIM5, 0.9), 1) == 16.2
    assert round(days_until(PAPER, Scheme.CHECKPOINT, 0.9), 2) == 0.41


def test_equations_2_and_3_as_they_are_printed():
    for days in (0.5, 3.0, 16.2, 40.0):
        p = math.exp(-1e-4 * days**1.3)
        raim5 = (p**6 + 6 * (1 - p) * p**5) ** (3072 / 6)
        checkpoint = math.exp(-3072 * (1e-4 + 1e-5) * days**1.3)
        # the plain formula loses digits of p near 1, 512 times over; that is why it is not what the planner computes
        assert survival(PAPER, Scheme.RAIM5, days) == pytest.approx(raim5, rel=1e-10)
        assert survival(PAPER, Scheme.CHECKPOINT, days) == pytest.approx(checkpoint, rel=ROUNDING)


# ------------------------------------------------------------------------------------------------ exact arithmetic


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 24), st.integers(0, 2), st.integers(1, 999), st.sampled_from([1, 10**3, 10**6, 10**9]))
def test_a_group_equals_the_binomial_sum_in_fractions(nodes, losses, few, scale):
    failed = Fraction(few, 1000 * scale)
    hazard = -math.log1p(-float(failed))
    survives = exactly(nodes, losses, 1 - failed)
    found = log_group_survival(nodes, losses, hazard)
    assert math.exp(found) == pytest.approx(float(survives), rel=ROUNDING)
    # nothing is lost of the small part either, which is all that matters to 10,000 nodes
    assert loss(found) == pytest.approx(float(1 - survives), rel=ROUNDING, abs=0)


@pytest.mark.parametrize(("scheme", "losses"), [(Scheme.RAIM5, 1), (Scheme.RAIM6, 2)])
def test_the_whole_job_equals_the_power_of_the_sum_in_fractions(scheme, losses):
    p = Fraction(97, 100)
    cluster = Cluster(nodes=48, group_nodes=6, hw_rate=-math.log(0.97), sw_rate=0.5)
    assert survival(cluster, scheme, 1.0) == pytest.approx(float(exactly(6, losses, p) ** 8), rel=ROUNDING)


def test_a_tiny_rate_in_a_big_job_keeps_its_digits():
    cluster = Cluster(nodes=49_152, group_nodes=8, hw_rate=1e-9, sw_rate=0.0)
    for scheme, losses in ((Scheme.RAIM5, 1), (Scheme.RAIM6, 2)):
        p = 1 - Fraction(1, 10**9) + Fraction(1, 2 * 10**18) - Fraction(1, 6 * 10**27)  # exp(-1e-9) to 36 digits
        expected = cluster.groups * float(1 - exactly(8, losses, p))
        assert loss(log_survival(cluster, scheme, 1.0)) == pytest.approx(expected, rel=ROUNDING, abs=0)


def test_groups_of_thousands_neither_overflow_nor_stall():
    poisson = math.log(1 + 50 + 50**2 / 2) - 50  # 50,000 x 1e-3 failures; differs from the binomial by 1e-3 here
    assert log_group_survival(50_000, 2, 1e-3) == pytest.approx(poisson, abs=0.01)
    tail = -(5e-8**3) / 6  # its first term, C(n,3) q^3; n^3 for n(n-1)(n-2) is 6e-5 off
    assert log_group_survival(50_000, 2, 1e-12) == pytest.approx(tail, rel=1e-3, abs=0)
    assert log_group_survival(6, 1, math.inf) == -math.inf and log_group_survival(6, 1, 0.0) == 0.0


# ------------------------------------------------------------------------------------------------ properties


@settings(max_examples=300, deadline=None)
@given(clusters(), spans)
def test_more_redundancy_never_survives_less(cluster, days):
    logs = [log_survival(cluster, scheme, days) for scheme in cluster.schemes]
    assert all(log <= 0 for log in logs) and all(0 <= math.exp(log) <= 1 for log in logs)
    for less, more in zip(logs, logs[1:], strict=False):
        assert more >= less * (1 + ROUNDING)
    assert len(logs) == (3 if cluster.group_nodes >= 4 else 2)


@settings(max_examples=300, deadline=None)
@given(clusters(), spans, st.floats(1.001, 100))
def test_survival_falls_with_time_and_begins_at_one(cluster, days, later):
    for scheme in cluster.schemes:
        assert survival(cluster, scheme, 0.0) == 1.0
        early, late = log_survival(cluster, scheme, days), log_survival(cluster, scheme, days * later)
        assert late < early or early == late == -math.inf or (early == late and early > -1e-300)


@settings(max_examples=300, deadline=None)
@given(clusters(), st.floats(1e-6, 1 - 1e-6))
def test_days_until_a_threshold_invert_survival(cluster, threshold):
    for scheme in cluster.schemes:
        days = days_until(cluster, scheme, threshold)
        # log survival goes with t^(c (m+1)), at most t^9: the rounding of days counts nine times, that of x^(1/c) too
        assert log_survival(cluster, scheme, days) == pytest.approx(math.log(threshold), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(clusters(), st.floats(0.01, 0.98))
def test_a_lower_threshold_lasts_longer(cluster, threshold):
    for scheme in cluster.schemes:
        assert days_until(cluster, scheme, threshold) > days_until(cluster, scheme, threshold + 0.01)


def test_software_failures_end_checkpoints_only():
    quiet, noisy = (Cluster(48, 6, 1e-3, rate, 1.2) for rate in (0.0, 0.1))
    assert survival(quiet, Scheme.RAIM5, 5.0) == survival(noisy, Scheme.RAIM5, 5.0)
    assert survival(quiet, Scheme.CHECKPOINT, 5.0) > survival(noisy, Scheme.CHECKPOINT, 5.0)


def test_a_mirror_of_two_is_lost_when_both_are():
    cluster = Cluster(nodes=2, group_nodes=2, hw_rate=0.3, sw_rate=0.0)
    assert survival(cluster, Scheme.RAIM5, 1.0) == pytest.approx(1 - (1 - math.exp(-0.3)) ** 2, rel=ROUNDING)


def test_without_failures_state_lasts_for_ever():
    cluster = Cluster(nodes=12, group_nodes=6, hw_rate=0.0, sw_rate=0.0, shape=1.3)
    assert [days_until(cluster, scheme, 0.9) for scheme in Scheme] == [math.inf] * 3
    assert [survival(cluster, scheme, 1e9) for scheme in Scheme] == [1.0] * 3


def test_times_beyond_the_range_of_numbers_are_never_and_not_a_crash():
    assert days_until(Cluster(12, 6, 1e-300, 0.0, 0.1), Scheme.RAIM5, 0.9) == math.inf
    assert survival(Cluster(12, 6, 1.0, 0.0, 10.0), Scheme.RAIM5, 1e300) == 0.0


# ------------------------------------------------------------------------------------------------ mean rate


def test_the_mean_rate_is_one_over_the_mean_of_the_distribution():
    assert mean_rate(1e-4, 1.0) == pytest.approx(1e-4, rel=ROUNDING) and mean_rate(0.0, 1.3) == 0.0
    step = 0.5  # days; the mean is the integral of exp(-l t^c), by the midpoint rule over 5,000 days: 8 lives
    mean = step * math.fsum(math.exp(-1e-3 * ((i + 0.5) * step) ** 1.3) for i in range(10_000))
    assert 1 / mean_rate(1e-3, 1.3) == pytest.approx(mean, rel=1e-5)


# ------------------------------------------------------------------------------------------------ input and output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": 0}, "nodes: expected an integer >= 1, found 0"),
        ({"nodes": 12.0}, "nodes: expected an integer >= 1, found 12.0"),
        ({"nodes": 13}, "nodes: expected a multiple of group_nodes (6), found 13"),
        ({"group_nodes": 1}, "group_nodes: expected an integer >= 2, found 1; a node alone in its group"),
        ({"hw_rate": -1e-4}, "hw_rate: expected a number from 0 to 100, found -0.0001"),
        ({"sw_rate": math.nan}, "sw_rate: expected a number from 0 to 100, found nan"),
        ({"shape": 0.0}, "shape: expected a number from 0.1 to 10, found 0.0"),
        ({"shape": math.inf}, "shape: expected a number from 0.1 to 10, found inf"),
    ],
)
def test_input_that_makes_no_sense_is_refused_with_what_was_expected(change, said):
    given = {"nodes": 12, "group_nodes": 6, "hw_rate": 1e-4, "sw_rate": 1e-5, "shape": 1.3}
    with pytest.raises(ConfigError) as refused:
        Cluster(**(given | change))
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.5, 2.0, math.nan])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    with pytest.raises(ConfigError, match="threshold: expected a number above 0 and below 1"):
        plan_survival(PAPER, threshold)


def test_a_scheme_that_the_groups_cannot_have_is_refused_and_left_out_of_the_table():
    cluster = Cluster(nodes=12, group_nodes=3, hw_rate=1e-4, sw_rate=0.0)
    for ask in (survival, days_until):
        with pytest.raises(ConfigError, match="RAIM6: expected groups of at least 4 nodes, found 3"):
            ask(cluster, Scheme.RAIM6, 0.5)
    with pytest.raises(ConfigError, match="days: expected a number >= 0, found -1"):
        survival(cluster, Scheme.RAIM5, -1)
    text = plan_survival(cluster, 0.9).table()
    assert "REFT, RAIM6" not in text and "RAIM6 needs groups of at least 4 nodes" in text


def test_the_table_shows_days_and_what_is_missing_to_certainty():
    lines = plan_survival(PAPER, 0.9).table().splitlines()
    assert "3072 nodes in 512 groups of 6" in lines[0] and "per node and day^1.3" in lines[0]
    assert lines[1].split("  ")[-1].strip() == "after 30 d" and "days above 0.9" in lines[1]
    rows = {line.split("  ")[1]: line.split() for line in lines[2:5]}
    assert rows["checkpoints only"][2:] == ["0", "0.408", "0.7133", "0.0144", "6.1e-13"]
    assert rows["REFT, RAIM5"][2:] == ["1", "16.2", "1", "-", "7.7e-05", "0.9880", "0.5967"]
    assert len({len(line) for line in lines[1:5]}) == 1  # columns stand below each other


def test_the_block_is_json_of_its_standard():
    block = json.loads(json.dumps(plan_survival(PAPER, 0.9).block(), allow_nan=False))
    assert block["cluster"]["nodes"] == 3072 and block["threshold"] == 0.9
    assert block["schemes"]["raim5"]["days"] == days_until(PAPER, Scheme.RAIM5, 0.9)
    assert block["schemes"]["raim6"]["after_days"]["1"]["loss"] == pytest.approx(1.0236e-8, rel=1e-4)
    still = plan_survival(Cluster(12, 6, 0.0, 0.0), 0.9).block()
    assert json.loads(json.dumps(still, allow_nan=False))["schemes"]["raim5"]["days"] is None
