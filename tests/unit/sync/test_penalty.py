"""EDiT's penalty against the paper's equations in NumPy, and where the paper is silent or underflows."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.sync.rounds.penalty import (
    EPSILON,
    NO_PENALTY,
    RESOLUTION,
    Judgement,
    NormStatistics,
    PenaltyRules,
    clip_factor,
    judge,
)

NAN, INF = math.nan, math.inf
RULES = PenaltyRules(alpha=0.02, threshold=3.0, warmup=10, clip=10.0)
STEADY = NormStatistics(mean=1.0, deviation=0.1, count=100)  # anomalous above 1.3

norm = st.floats(0, 20)
any_norm = st.none() | norm | st.floats(0, 1e30) | st.sampled_from([NAN, INF, -INF, 0.0, 1e300])
some_statistics = st.builds(NormStatistics, st.floats(0, 1e30), st.floats(0, 1e30), st.integers(0, 100))
some_rules = st.builds(
    PenaltyRules,
    alpha=st.floats(0.001, 0.999),
    threshold=st.floats(0.1, 10) | st.just(INF),
    warmup=st.integers(0, 100),
    clip=st.just(RULES.clip),
    weighting=st.booleans(),
)


@st.composite
def groups(draw):
    members = draw(st.lists(st.tuples(any_norm, some_statistics), min_size=1, max_size=9))
    return [one[0] for one in members], [one[1] for one in members]


@st.composite
def jobs(draw):
    """Finite norms by synchronisation and member."""
    members = draw(st.integers(1, 5))
    hundredths = st.integers(0, 2000).map(lambda number: number / 100)
    return draw(st.lists(st.lists(hundredths, min_size=members, max_size=members), min_size=1, max_size=12))


def after(norms, alpha=RULES.alpha):
    """The statistics of a member with these norms."""
    statistics = NormStatistics()
    for one in norms:
        statistics = statistics.after(one, alpha)
    return statistics


class Paper:
    """Section 3.2 and Algorithm 2 as printed, for one module whose norms are small enough for exp(-G). Where no spread
    is known no member is anomalous; in a rollback the statistics take the norms."""

    def __init__(self, first, rules):
        self.mu, self.sigma, self.rules = first.copy(), np.zeros_like(first), rules
        self.count = np.zeros(len(first))
        self.closest = INF  # how near any z came to the threshold

    def synchronise(self, norms):
        alpha = self.rules.alpha
        known = (self.sigma > RESOLUTION * self.mu) & (self.count >= self.rules.warmup)
        z = np.divide(norms - self.mu, self.sigma, out=np.zeros_like(norms), where=known)
        self.closest = min(self.closest, *np.abs(z - self.rules.threshold))
        flagged = z > self.rules.threshold
        g = np.where(flagged, INF, norms)
        gamma = np.exp(-g).sum()
        weights = np.exp(-g) / gamma if gamma else np.zeros_like(g)
        taken = np.isfinite(g) if gamma else np.isfinite(norms)
        if self.count.any():
            mu = np.where(taken, alpha * norms + (1 - alpha) * self.mu, self.mu)
            sigma = np.sqrt((1 - alpha) * self.sigma**2 + alpha * (norms - mu) ** 2)
            self.mu, self.sigma = mu, np.where(taken, sigma, self.sigma)
        self.count += taken
        return flagged, weights


# ------------------------------------------------------------------------------------------------ as in the paper


@given(jobs(), st.floats(0.01, 0.5), st.floats(0.5, 5), st.integers(0, 4))
def test_anomalies_weights_and_statistics_are_those_of_the_paper(job, alpha, threshold, warmup):
    rules = replace(RULES, alpha=alpha, threshold=threshold, warmup=warmup)
    paper = Paper(np.array(job[0]), rules)
    statistics = [NormStatistics()] * len(job[0])
    for norms in job:
        flagged, weights = paper.synchronise(np.array(norms))
        assume(paper.closest > 1e-6)  # else rounding decides
        found = judge(norms, statistics, rules)
        statistics = found.statistics
        assert found.anomalous == tuple(flagged) and found.rollback == flagged.all()
        np.testing.assert_allclose(found.weights, weights, rtol=1e-9)
        np.testing.assert_allclose([one.mean for one in statistics], paper.mu, rtol=1e-9, atol=1e-12)
        assert [one.count for one in statistics] == paper.count.tolist()
        np.testing.assert_allclose([one.deviation for one in statistics], paper.sigma, rtol=1e-6, atol=1e-9)


def test_a_norm_three_deviations_above_the_mean_is_excluded_and_one_as_far_below_is_not():
    found = judge([1.29, 1.31, 0.01, 1.0], [STEADY] * 4, RULES)
    assert found.anomalous == (False, True, False, False) and not found.rollback
    noisy = NormStatistics(5.0, 2.0, 100)
    assert judge([5.0, 5.0], [STEADY, noisy], RULES).anomalous == (True, False), "each by its own history"
    assert found.weights[1] == 0 and found.weights[2] > found.weights[3] > found.weights[0] > 0
    assert found.statistics[1] == STEADY, "an anomalous norm does not raise the mean that it is compared with"
    assert all(found.statistics[member].count == 101 for member in (0, 2, 3))


def test_statistics_of_noise_tend_to_its_mean_and_deviation():
    found = after(np.random.default_rng(1).normal(7.0, 0.5, 5000).tolist())
    assert found.mean == pytest.approx(7.0, abs=0.2) and found.deviation == pytest.approx(0.5, rel=0.2)


@given(st.lists(norm, min_size=1, max_size=9), st.lists(st.integers(1, 10**6), min_size=9, max_size=9))
def test_a_further_factor_multiplies_the_weights(norms, tokens):
    tokens, fresh = tokens[: len(norms)], [NormStatistics()] * len(norms)
    expected = np.array(tokens) * np.exp(-np.array(norms))
    np.testing.assert_allclose(judge(norms, fresh, RULES, tokens).weights, expected / expected.sum(), rtol=1e-9)
    without = judge(norms, fresh, NO_PENALTY, tokens)
    assert without.weights == tuple(count / sum(tokens) for count in tokens)


def test_the_averaged_pseudo_gradient_is_clipped_to_a_norm_and_unless_finite_not_applied():
    assert clip_factor(20.0, 10.0) == 10 / (20 + EPSILON) and clip_factor(0.0, 1e-9) == 1e-9 / EPSILON
    assert clip_factor(5.0, 10.0) == clip_factor(0.0, 10.0) == 1.0, "exactly, so that an executor can leave it out"
    assert clip_factor(NAN, INF) == 1.0 and clip_factor(NAN, 10.0) == clip_factor(INF, 10.0) == 0.0


@given(st.floats(0, 1e30), st.floats(1e-6, 1e6))
def test_a_clipped_norm_is_never_above_the_clip(length, clip):
    assert 0 < clip_factor(length, clip) <= 1 and clip_factor(length, clip) * length <= clip * (1 + 1e-12)


# ------------------------------------------------------------------------------------------------ whatever is gathered


@settings(max_examples=300)
@given(groups(), some_rules)
def test_weights_sum_to_1_and_only_members_that_are_not_anomalous_have_one(group, rules):
    norms, statistics = group
    found = judge(norms, statistics, rules)
    assert len(found.weights) == len(found.anomalous) == len(found.statistics) == len(norms)
    sound = [one is not None and not flagged for one, flagged in zip(norms, found.anomalous, strict=True)]
    assert found.rollback == (not any(sound))
    assert sum(found.weights) == pytest.approx(0 if found.rollback else 1, rel=1e-12)
    for member, one in enumerate(norms):
        assert 0 <= found.weights[member] <= 1 and (sound[member] or found.weights[member] == 0)
        assert one is not None or not found.anomalous[member]
        finite = one is not None and math.isfinite(one)
        assert found.nonfinite[member] == (one is not None and not finite)
        assert finite or one is None or found.anomalous[member]
        grew = found.statistics[member].count - statistics[member].count
        assert grew == (finite and (sound[member] or found.rollback))
        assert grew or found.statistics[member] == statistics[member]
        assert all(math.isfinite(number) and number >= 0 for number in found.statistics[member].values())


@given(groups(), some_rules, st.randoms(use_true_random=False))
def test_a_permutation_of_members_permutes_the_result_bit_for_bit(group, rules, shuffle):
    norms, statistics = group
    tokens = [float(shuffle.randint(0, 3)) for _ in norms]
    order = list(range(len(norms)))
    shuffle.shuffle(order)
    found = judge(norms, statistics, rules, tokens)
    moved = judge([norms[m] for m in order], [statistics[m] for m in order], rules, [tokens[m] for m in order])
    assert moved == Judgement(
        tuple(found.anomalous[m] for m in order),
        tuple(found.weights[m] for m in order),
        found.rollback,
        tuple(found.statistics[m] for m in order),
        tuple(found.nonfinite[m] for m in order),
    )


def test_no_order_of_members_gives_other_weights():
    """The reason for exact sums: added one after another, some of these orders would round differently."""
    norms = [0.1 * k for k in range(6)]
    fresh = [NormStatistics()] * 6
    expected = dict(zip(norms, judge(norms, fresh, RULES).weights, strict=True))
    for order in itertools.permutations(norms):
        assert judge(order, fresh, RULES).weights == tuple(expected[one] for one in order)


@given(st.lists(norm, min_size=1, max_size=6), st.floats(1e3, 1e30))
def test_large_norms_neither_underflow_nor_roll_back(norms, offset):
    """Adding the same to all norms leaves the weights: those that exp(-G) alone would all make 0."""
    fresh = [NormStatistics()] * len(norms)
    far = [offset + one for one in norms]
    assert np.exp(-np.array(far)).sum() == 0 or offset < 1e4
    found = judge(far, fresh, RULES)
    assert not found.rollback
    near = judge([one - min(far) for one in far], fresh, RULES)
    assert found.weights == near.weights and math.fsum(found.weights) == pytest.approx(1)


def test_the_smallest_norm_is_that_of_a_member_with_a_weight():
    """Subtracting that of an anomalous member, or of one without tokens, would make all others underflow."""
    fresh = NormStatistics()
    without_tokens = judge([0.0, 1e4, 1e4], [fresh] * 3, RULES, [0, 1, 3])
    assert without_tokens.weights == (0, 0.25, 0.75)
    assert judge([1.0, 1.0], [fresh] * 2, RULES, [0, 0]).weights == (0.5, 0.5), "factors that are all 0 are ignored"
    low_but_anomalous = NormStatistics(1.0, 0.1, 100)
    found = judge([2.0, 1e4, 1e4], [low_but_anomalous, fresh, fresh], RULES)
    assert found.weights == (0, 0.5, 0.5)


@pytest.mark.parametrize("wild", [NAN, INF, -INF, -1.0])
@pytest.mark.parametrize("rules", [RULES, NO_PENALTY])
def test_what_is_no_finite_norm_is_never_averaged_not_even_in_the_warm_up_or_without_penalty(wild, rules):
    found = judge([wild, 1.0, 1.0], [NormStatistics(), NormStatistics(), STEADY], rules)
    assert found.anomalous == (True, False, False) and found.weights == (0, 0.5, 0.5)
    assert found.statistics[0] == NormStatistics(), "and does not advance the warm-up"


def test_a_module_is_rolled_back_only_if_every_member_present_is_anomalous():
    assert judge([9.0, NAN], [STEADY] * 2, RULES).rollback
    assert judge([9.0, None, NAN], [STEADY] * 3, RULES).rollback
    assert judge([None, None], [STEADY] * 2, RULES).rollback, "no value to go to but the anchor"
    assert not judge([9.0, 1.0, NAN], [STEADY] * 3, RULES).rollback
    assert judge([9.0, None], [STEADY] * 2, RULES).weights == (0, 0)


def test_an_absent_member_has_no_weight_and_is_not_anomalous():
    found = judge([None, 1.0, 1.0], [STEADY] * 3, RULES, [NAN, 1, 1])
    assert found.anomalous == (False,) * 3 and found.weights == (0, 0.5, 0.5) and found.statistics[0] == STEADY


def test_without_penalty_the_weights_are_those_of_the_plain_mean():
    found = judge([9.0, 1.0, None, 1e30], [STEADY] * 4, NO_PENALTY)
    assert found.weights == (1 / 3, 1 / 3, 0, 1 / 3) and not any(found.anomalous) and found.weights_are_equal
    assert not judge([1.0, 1.1], [STEADY] * 2, RULES).weights_are_equal
    assert not judge([NAN], [STEADY], RULES).weights_are_equal


# ------------------------------------------------------------------------------------------------ the statistics


@given(st.integers(0, 20), norm, st.floats(1e3, 1e30))
def test_no_finite_norm_is_anomalous_in_the_warm_up(warmup, usual, spike):
    rules = replace(RULES, warmup=warmup)
    before = after([usual + k % 2 for k in range(20)])
    found = judge([spike, usual], [before, before], rules)
    assert found.anomalous == (True, False)
    fewer = NormStatistics(before.mean, before.deviation, warmup - 1)
    assert warmup == 0 or not any(judge([spike, usual], [fewer, fewer], rules).anomalous)


@given(st.floats(1e-30, 1e30), st.integers(1, 200), st.floats(0, 1e30))
def test_norms_that_never_differed_accuse_none(usual, synchronisations, other):
    before = after([usual] * synchronisations)
    assert before == NormStatistics(usual, 0.0, synchronisations), "no rounding creeps in"
    found = judge([other], [before], replace(RULES, warmup=0))
    assert not found.anomalous[0]
    if other != usual:
        assert found.statistics[0].deviation > 0 or abs(other - usual) < 1e-15 * usual


def test_a_spread_that_is_only_rounding_is_none():
    before = after([1.0, 1.0 + 1e-12] * 50)
    assert 0 < before.deviation < RESOLUTION and before.score(1.0 + 1e-11) == 0
    assert not judge([1.0 + 1e-11], [before], RULES).anomalous[0]


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-20, 1e20])
def test_a_lasting_change_of_scale_is_not_rolled_back_for_ever(scale):
    """A frozen module that is trained from now on (norms of 0 before), or a learning rate raised a hundred times."""
    noise = np.random.default_rng(0).uniform(0.9, 1.1, (2, 400))
    before = [after((scale * row[:100]).tolist()) for row in noise]
    statistics = before
    rollbacks = []
    for both in 100 * (scale or 1) * noise.T[100:]:
        found = judge(both.tolist(), statistics, RULES)
        statistics = found.statistics
        rollbacks.append(found.rollback)
    assert 1 <= sum(rollbacks) < 10 and not any(rollbacks[10:])


def test_one_member_that_stays_far_off_stays_excluded():
    statistics = [STEADY, STEADY]
    for _ in range(200):
        found = judge([1.0, 5.0], statistics, RULES)
        statistics = found.statistics
        assert found.anomalous == (False, True) and statistics[1] == STEADY


def test_numbers_of_numpy_become_plain_ones():
    found = judge([np.float64(1.0)], [NormStatistics()], RULES).statistics
    assert all(type(number) is float for number in found[0].values())


@given(st.floats(0, 1e300), st.floats(0, 1e300), st.integers(0, 2**40))
def test_statistics_continue_exactly_from_plain_values(mean, deviation, count):
    before = NormStatistics(mean, deviation, count)
    assert NormStatistics.from_values(json.loads(json.dumps(before.values()))) == before
    row = np.array([before.values()], dtype=np.float64)[0]
    restored = NormStatistics.from_values(row)
    types = [type(number) for number in (restored.mean, restored.deviation, restored.count)]
    assert restored == before and types == [float, float, int]


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"alpha": 0.0}, "alpha of the penalty is 0.0"),
        ({"alpha": 1.0}, "between 0 and 1"),
        ({"alpha": NAN}, "alpha of the penalty is nan"),
        ({"threshold": 0.0}, "threshold of the penalty is 0.0: expected more than 0"),
        ({"threshold": NAN}, "threshold of the penalty is nan"),
        ({"warmup": -1}, "warm-up of -1 synchronisations: expected at least 0"),
        ({"clip": 0.0}, "clipped to 0.0: expected more than 0"),
        ({"clip": NAN}, "clipped to nan"),
    ],
)
def test_rules_out_of_range_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        replace(RULES, **wrong)


def test_lists_that_do_not_match_and_factors_that_are_none_are_refused():
    with pytest.raises(ValueError, match="2 norms, 1 statistics and no factors"):
        judge([1.0, 1.0], [STEADY], RULES)
    with pytest.raises(ValueError, match="1 norms, 1 statistics and 2 factors: expected one of each"):
        judge([1.0], [STEADY], RULES, [1, 1])
    for factor in (-1.0, NAN, INF):
        with pytest.raises(ValueError, match=f"member 1 has the factor {factor}"):
            judge([1.0, 1.0], [STEADY] * 2, RULES, [1, factor])
