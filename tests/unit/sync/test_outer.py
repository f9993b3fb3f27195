"""The outer optimizer has the bits of torch.optim.SGD, and with learning rate 1 and no momentum is a plain mean."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.sync.rounds.outer import OuterRules, outer_step

PLAIN = OuterRules(lr=1.0, momentum=0.0)


def replicas(members, seed, dtype=torch.float32):
    """An anchor, and the parameters of members that have moved from it."""
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randn(257, generator=generator, dtype=dtype)
    return anchor, anchor + 0.01 * torch.randn(members, 257, generator=generator, dtype=dtype)


@settings(max_examples=60)
@given(
    st.integers(0, 2**31),
    st.floats(0.01, 2),
    st.sampled_from([0.0, 0.5, 0.85, 0.99]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_steps_have_the_bits_of_torchs_sgd(seed, lr, momentum, dtype):
    rules = OuterRules(lr, momentum)
    anchor, targets = replicas(5, seed, dtype)
    reference = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([reference], lr=lr, momentum=momentum, nesterov=momentum > 0)
    buffer = torch.zeros_like(anchor)
    for target in targets:
        reference.grad = -(target - reference.detach())
        sgd.step()
        outer_step(anchor, target, buffer, rules)
        if not rules.takes_target:
            assert torch.equal(anchor, reference.detach())
        if momentum:
            assert torch.equal(buffer, sgd.state[reference]["momentum_buffer"])


def test_two_steps_by_hand_with_nesterov_momentum():
    """The pseudo-gradient is 1 both times. Buffer: -1, then -1.5; steps: 1 + 0.5, then 1 + 0.5 * 1.5."""
    rules = OuterRules(lr=0.5, momentum=0.5)
    anchor, buffer = torch.tensor([10.0]), torch.zeros(1)
    outer_step(anchor, anchor + 1, buffer, rules)
    assert anchor.item() == 10.75 and buffer.item() == -1
    outer_step(anchor, anchor + 1, buffer, rules)
    assert anchor.item() == 11.625 and buffer.item() == -1.5


def test_steps_are_those_of_the_paper_in_numpy():
    """Nesterov momentum on the gradient -Delta, in float64."""
    anchor, targets = replicas(6, seed=3, dtype=torch.float64)
    theta, velocity = anchor.numpy().copy(), np.zeros(len(anchor))
    buffer = torch.zeros_like(anchor)
    for target in targets:
        gradient = -(target.numpy() - theta)
        velocity = 0.85 * velocity + gradient
        theta = theta - 0.8 * (gradient + 0.85 * velocity)
        outer_step(anchor, target, buffer, OuterRules())
        np.testing.assert_allclose(anchor.numpy(), theta, rtol=1e-12)


@given(st.integers(0, 2**31), st.integers(2, 7))
def test_learning_rate_1_without_momentum_gives_the_mean_bit_for_bit(seed, members):
    """Post Local SGD: an anchor that is updated by the pseudo-gradient would round."""
    anchor, theta = replicas(members, seed)
    mean = theta.mean(0)
    outer_step(anchor, mean, None, PLAIN)
    assert torch.equal(anchor.view(torch.int32), mean.view(torch.int32))


def test_the_anchor_plus_the_pseudo_gradient_would_round():
    """The reason for passing the target."""
    anchor, theta = replicas(3, seed=0)
    anchor *= 100
    mean = theta.mean(0)
    assert not torch.equal(anchor + (mean - anchor), mean)


@given(st.floats(0.01, 0.99), st.floats(0.01, 10))
def test_a_step_goes_downhill_towards_the_target(lr, distance):
    anchor = torch.zeros(1, dtype=torch.float64)
    outer_step(anchor, torch.full_like(anchor, distance), None, OuterRules(lr, momentum=0.0))
    assert 0 < anchor.item() < distance


def test_what_is_passed_stays_where_it_is_and_the_target_as_it_is():
    anchor, targets = replicas(1, seed=1)
    target, buffer = targets[0], torch.zeros_like(anchor)
    places, before = (anchor.data_ptr(), buffer.data_ptr()), target.clone()
    outer_step(anchor, target, buffer, OuterRules())
    assert (anchor.data_ptr(), buffer.data_ptr()) == places and torch.equal(target, before)


def test_shards_are_stepped_as_the_whole_would_be():
    anchor, targets = replicas(3, seed=2)
    shards, buffer = anchor.clone(), torch.zeros_like(anchor)
    of_shards = torch.zeros_like(anchor)
    for target in targets:
        outer_step(anchor, target, buffer, OuterRules())
        for part in (slice(0, 100), slice(100, None)):
            outer_step(shards[part], target[part], of_shards[part], OuterRules())
    assert torch.equal(shards, anchor) and torch.equal(of_shards, buffer)


def test_a_parameter_can_be_stepped_outside_of_no_grad():
    parameter = torch.nn.Parameter(torch.zeros(3))
    outer_step(parameter, torch.ones(3), torch.zeros(3), OuterRules())
    assert parameter.requires_grad and parameter.grad_fn is None and (parameter > 0).all()


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"lr": 0.0}, "outer learning rate is 0.0: expected a finite number above 0"),
        ({"lr": math.inf}, "outer learning rate is inf"),
        ({"lr": math.nan}, "outer learning rate is nan"),
        ({"momentum": 1.0}, "outer momentum is 1.0: expected at least 0 and less than 1"),
        ({"momentum": -0.1}, "outer momentum is -0.1"),
        ({"momentum": math.nan}, "outer momentum is nan"),
    ],
)
def test_rules_out_of_range_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        OuterRules(**wrong)


def test_tensors_that_do_not_match_are_refused_before_anything_changes():
    anchor = torch.zeros(3)
    with pytest.raises(ValueError, match=r"target does not match the anchor: expected \(3,\), .* found \(1,\)"):
        outer_step(anchor, torch.ones(1), None, PLAIN)
    with pytest.raises(ValueError, match="target does not match .* found .*float64"):
        outer_step(anchor, torch.ones(3, dtype=torch.float64), torch.zeros(3), OuterRules())
    with pytest.raises(ValueError, match="momentum buffer does not match"):
        outer_step(anchor, torch.ones(3), torch.zeros(1), OuterRules())
    with pytest.raises(ValueError, match="an outer momentum of 0.85 needs a buffer"):
        outer_step(anchor, torch.ones(3), None, OuterRules())
    assert not anchor.any()
