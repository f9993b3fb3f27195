"""Means, medians and trimmed means: equal values stay, wild ones are withstood, what is no number does not count."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.sync.averaging.aggregate import Aggregate, aggregate, cost, require_enough

NAN, INF = float("nan"), float("inf")
KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    st.integers(3, 9),
    st.sampled_from(KINDS),
    st.sampled_from(list(Aggregate)),
)
def test_what_all_replicas_agree_on_stays_bit_for_bit(values, replicas, kind, how):
    one = torch.tensor(values, dtype=kind)
    one = torch.where(torch.isfinite(one), one, 0.0)
    found = aggregate(one.repeat(replicas, 1), how)
    assert found.dtype is kind and torch.equal(found.view(torch.uint8), one.view(torch.uint8))


def test_a_third_of_three_equal_numbers_of_a_wide_type_would_round():
    """The reason for comparing them: without it a clean float64 run would change."""
    values = torch.tensor([[0.1], [0.1], [0.1]], dtype=torch.float64)
    assert values.sum(0).item() / 3 != 0.1
    assert aggregate(values, Aggregate.MEAN).item() == 0.1


@pytest.mark.parametrize(
    "how, replicas, expected",
    [
        (Aggregate.MEAN, [1.0, 2.0, 6.0], 3.0),
        (Aggregate.MEDIAN, [1.0, 6.0, 2.0], 2.0),
        (Aggregate.MEDIAN, [1.0, 6.0, 2.0, 4.0], 3.0),
        (Aggregate.MEDIAN, [1.0, 4.0], 2.5),
        (Aggregate.TRIMMED, [1.0, 1e30, 2.0, 4.0], 3.0),
        (Aggregate.TRIMMED, [-1e30, 5.0, 7.0], 5.0),
        (Aggregate.MEAN, [NAN, 2.0, 6.0], 4.0),
        (Aggregate.MEAN, [INF, 2.0, NAN], 2.0),
        (Aggregate.MEDIAN, [NAN, 2.0, 6.0, 7.0], 6.0),
        (Aggregate.TRIMMED, [NAN, 2.0, 6.0, 70.0], 6.0),
        (Aggregate.TRIMMED, [NAN, 2.0, 6.0], 4.0),
        (Aggregate.MEAN, [INF, NAN, NAN], INF),
    ],
)
def test_each_of_them_by_hand(how, replicas, expected):
    values = torch.tensor(replicas).view(-1, 1)
    beside = torch.arange(len(replicas), dtype=torch.float32).view(-1, 1)  # a coordinate that nothing is wrong with
    found = aggregate(torch.cat([values, beside], 1), how)
    assert found[0].item() == expected and found[1].item() == (len(replicas) - 1) / 2


@given(st.integers(3, 9), st.sampled_from([Aggregate.MEDIAN, Aggregate.TRIMMED]), st.floats(-1e30, 1e30))
def test_one_wild_replica_does_not_carry_the_others_away(replicas, how, wild):
    torch.manual_seed(replicas)
    values = torch.randn(replicas, 50)
    sound = values[1:]
    values[0] = wild
    found = aggregate(values, how)
    assert (found >= sound.min(0).values).all() and (found <= sound.max(0).values).all()


def test_the_order_of_sums_is_that_of_ranks_so_the_same_bits_come_out_again():
    values = torch.randn(5, 1000) * torch.logspace(-3, 3, 5).view(-1, 1)
    assert torch.equal(aggregate(values, Aggregate.MEAN), aggregate(values.clone(), Aggregate.MEAN))
    assert torch.allclose(aggregate(values, Aggregate.MEAN), values.mean(0), rtol=1e-4, atol=1e-4)


def test_too_few_replicas_to_trim_are_refused():
    with pytest.raises(ConfigError, match="1 lowest and 1 highest of 2 replicas .* at least 3 replicas; lower"):
        require_enough(Aggregate.TRIMMED, 2, 1)
    with pytest.raises(ConfigError, match="at least 5 replicas"):
        aggregate(torch.zeros(4, 1), Aggregate.TRIMMED, trim=2)
    require_enough(Aggregate.MEDIAN, 2, 1)


def test_what_each_costs_is_stated():
    mean, median = (cost(how, 1_000_000, 4, 4) for how in (Aggregate.MEAN, Aggregate.MEDIAN))
    assert mean.sent_bytes == median.sent_bytes == 2 * 3 * 250_000 * 4, "as a ring all-reduce"
    assert mean.comparisons == 0 and median.comparisons == 8 and "8 comparisons per coordinate" in str(median)
    assert median.work_bytes > mean.work_bytes
