"""What a loop of plain torch changes between its version point and its update, its gradients with it."""

import copy

import pytest
import torch

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.errors import ConfigError, StateChangedError
from tests.unit.adapters.torch_small import Small, handed_over, network, session_of, take_over

# ---- changes before the update ----


def test_another_optimizer_over_the_model_is_refused_before_it_changes_anything():
    """As the two of a GAN, the other one stepping first."""
    generator, other = network(), network()
    optimizer = torch.optim.Adam(generator.parameters())
    second = torch.optim.Adam(other.parameters())
    host = TorchHost(torch.nn.ModuleList([generator, other]), optimizer)
    session_of(host).iteration_begin(1)
    before = copy.deepcopy(other.state_dict())
    for one in other.parameters():
        one.grad = torch.ones_like(one)
    with pytest.raises(ConfigError, match=r"another optimizer \(Adam\) updates '1.0.weight'.*\[optimizer, other_opt"):
        second.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    stranger = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
    stranger.step()


def test_parameters_that_the_optimizer_does_not_update_are_not_copied_in_the_background():
    """An average of the weights changes them anywhere."""
    model, average = network(), network().requires_grad_(False)
    host = TorchHost(torch.nn.ModuleList([model, average]), torch.optim.SGD(model.parameters(), 0.1))
    assert {item.name for item in host.inventory().items if not item.background} == {
        f"1.{name}" for name, _ in average.named_parameters()
    }


def _halve(small):
    with torch.no_grad():
        small.model[0].weight.mul_(0.5)


@pytest.mark.parametrize("skipped", [False, True])
def test_a_parameter_that_is_changed_before_the_update_is_named(skipped):
    small = Small()

    def body(step):
        if step == 3:
            _halve(small)
        small.backward()
        if step != 3 or not skipped:
            small.optimizer.step()
        small.optimizer.zero_grad()

    with pytest.raises(StateChangedError, match="rank 0: iteration 3: '0.weight' was changed after the version point"):
        small.run(body)
    assert small.session._fenced == 2, "the snapshot of iteration 2 is not sealed"


def test_a_parameter_may_be_changed_behind_the_update():
    small = Small()

    def body(step):
        small.backward()
        small.optimizer.step()
        small.optimizer.zero_grad()
        _halve(small)

    small.run(body)


# ---- gradients over a version point ----


@pytest.mark.parametrize("every", [1, 4])
def test_gradients_that_live_across_a_version_point_are_refused(every):
    """Accumulated over iterations; or never zeroed."""
    small = Small()

    def body(step):
        small.backward()
        if step % every == 0:
            small.optimizer.step()
            if every > 1:
                small.optimizer.zero_grad()

    with pytest.raises(StateChangedError, match="iteration 2: the gradient of '[01].*count one iteration per update"):
        small.run(body)


def test_a_gradient_that_is_used_twice_is_refused():
    small = Small()

    def body(step):
        if step == 1:
            small.backward()
        small.optimizer.step()

    with pytest.raises(StateChangedError, match="iteration 2: the gradient of '0.weight'"):
        small.run(body)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_zeroed_in_every_iteration_are_not(first, to_none):
    """Before the backward or behind the update, also where a GradScaler skips it; several batches in one iteration."""
    small = Small()

    def body(step):
        if first:
            small.optimizer.zero_grad(set_to_none=to_none)
        small.backward()
        small.backward()
        if step != 3:
            small.optimizer.step()
        if not first:
            small.optimizer.zero_grad(set_to_none=to_none)

    small.run(body)


def test_gradients_of_zero_are_there_again():
    """The optimizer passes over a parameter without one, and decays or averages one of 0."""

    def iterate(small, step):
        if step == 1:
            small.backward()
        else:
            small.model[1](torch.ones(2, 3)).sum().backward()
        small.optimizer.step()
        small.optimizer.zero_grad(set_to_none=False)

    golden = Small()
    golden.run(lambda step: iterate(golden, step), 3)
    first, second = Small(), Small()
    first.run(lambda step: iterate(first, step), 1)
    take_over(second.host, *handed_over(first.host))
    for step in second.session.iterations(3, 1):
        iterate(second, step)
    for name, tensor in golden.host.tensors().items():
        assert torch.equal(second.host.tensors()[name], tensor), name


@pytest.mark.parametrize("captured", [1, 3], ids=["every iteration", "every third"])
def test_what_is_applied_before_the_update_is_accepted_and_so_is_the_update(captured):
    """As a synchronisation that ends before an update: the host is notified, then the update changes the parameters."""
    small = Small()
    original = small.session.before_update

    def applied(step):
        original(step)
        _halve(small)
        small.host.derive()

    def body(step):
        small.backward()
        small.optimizer.step()
        small.optimizer.zero_grad()

    small.session.before_update = applied
    small.session.iteration_end = lambda step, ends: None if step % captured else small.host.small_state()
    for step in small.session.iterations(6):
        body(step)
