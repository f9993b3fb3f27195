"""What a loop of plain torch goes on from beside tensors: modes, extra state, a learning rate that is a tensor."""

import pytest
import torch

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.errors import StateChangedError, UnsupportedError
from tests.unit.adapters.torch_small import Small, handed_over, network, session_of, take_over


def test_which_parameters_are_trained_and_the_mode_of_modules_are_handed_over():
    first, second = Small(), Small()
    first.model[0].requires_grad_(False)
    first.model[1].eval()
    take_over(second.host, *handed_over(first.host))
    assert [one.requires_grad for one in second.model.parameters()] == [False, False, True, True]
    assert [one.training for one in second.model.modules()] == [True, True, False]


@pytest.mark.parametrize("of_a_library", [True, False])
def test_what_a_librarys_loop_has_changed_since_a_restore_is_set_again_before_the_first_iteration(of_a_library):
    """A callback of it may be called when training begins, again in each start."""
    first, second = Small(), Small()
    if of_a_library:
        second.host.of_a_library("what callbacks keep", lambda lost: "")
    small, tensors = handed_over(first.host)
    take_over(second.host, small, tensors)
    second.optimizer.param_groups[0]["lr"] *= 0.5
    second.model[0].requires_grad_(False)
    second.host.restore_position(small)
    assert second.optimizer.param_groups[0]["lr"] == (0.1 if of_a_library else 0.05)
    assert next(second.model.parameters()).requires_grad, "modes are set there in any case"


class Counting(torch.nn.Linear):
    """Keeps what is no tensor."""

    kept = 0

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def test_extra_state_of_modules_is_handed_over():
    hosts = []
    for kept in (7, 0):
        model = torch.nn.Sequential(Counting(2, 2))
        model[0].kept = kept
        hosts.append((model, TorchHost(model, torch.optim.SGD(model.parameters(), 0.1))))
    take_over(hosts[1][1], *handed_over(hosts[0][1]))
    assert hosts[1][0][0].kept == 7


def test_extra_state_that_cannot_be_captured_is_refused_by_name():
    model = torch.nn.Sequential(Counting(2, 2))
    model[0].kept = {object()}
    with pytest.raises(UnsupportedError, match="extra state of '0' .*plain values"):
        TorchHost(model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_learning_rate_that_is_a_tensor_stays_the_one_that_the_loop_fills():
    rates = [torch.tensor(0.5), torch.tensor(0.1)]
    hosts = []
    for rate in rates:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), rate)
        hosts.append((optimizer, TorchHost(model, optimizer)))
    take_over(hosts[1][1], *handed_over(hosts[0][1]))
    assert hosts[1][0].param_groups[0]["lr"] is rates[1] and rates[1] == 0.5


@pytest.mark.parametrize("given", [True, False])
def test_a_scheduler_that_was_not_given_is_refused_at_the_first_version_point(given):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    host = TorchHost(model, optimizer, plateau if given else None)
    session_of(host).iteration_begin(1)
    if given:
        host.small_state()
        return
    with pytest.raises(StateChangedError, match=r"'plateau' \(ReduceLROnPlateau, a variable"):
        host.small_state()


def test_schedulers_inside_of_the_given_one_are_not():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = [
        torch.optim.lr_scheduler.ConstantLR(optimizer),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    host = TorchHost(model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2]))
    session_of(host).iteration_begin(1)
    host.small_state()
