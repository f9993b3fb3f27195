"""Modules that are updated in the backward get the bits of one step of all; what contradicts it is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ft_plugins.adapters.torch import early_update
from ft_plugins.adapters.torch.early_update import EarlyUpdate, early_refusal
from ft_plugins.adapters.torch.fsdp import FsdpHost
from ft_plugins.errors import StateChangedError, UnsupportedError
from ft_plugins.systems.local_sgd.layered import LayeredAveraging

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))


class Loop:
    """A loop with early updates, as TorchHost does."""

    def __init__(self, kind, wanted):
        self.model, self.calls = model(), []
        layers = [self.model[0], self.model[2], self.model[3]]
        self.optimizer = OPTIMIZERS[kind](
            [{"params": layers[0].parameters()}, {"params": [*layers[1].parameters(), *layers[2].parameters()]}]
        )
        members = {f"layer {number}": list(layer.parameters()) for number, layer in enumerate(layers)}
        self.iteration = 1
        fence, iteration = (lambda: self.calls.append("fence")), (lambda: self.iteration)
        self.early = EarlyUpdate(3, self.optimizer, members, fence, iteration)
        self.early.install(lambda: wanted, self.calls.append)
        self.optimizer.register_step_pre_hook(lambda *_: self.early.before_step() if self.early.begun else None)
        self.optimizer.register_step_post_hook(lambda *_: self.early.after_step())

    def backward(self, seed):
        torch.manual_seed(seed)
        self.model(torch.randn(5, 4)).square().sum().backward()

    def train(self, iterations):
        for step in range(iterations):
            self.backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("wanted", [{"layer 2"}, {"layer 0", "layer 2"}, {"layer 0", "layer 1", "layer 2"}], ids=len)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_early_updates_have_the_bits_of_one_step(kind, wanted):
    plain, early = Loop(kind, set()), Loop(kind, wanted)
    for loop in (plain, early):
        loop.train(4)
    expected, found = plain.model.state_dict(), early.model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    states = (plain.optimizer.state_dict()["state"], early.optimizer.state_dict()["state"])
    assert states[0].keys() == states[1].keys()
    assert all(
        torch.equal(one, states[1][key][name])
        for key, state in states[0].items()
        for name, one in state.items()
        if torch.is_tensor(one)
    )
    assert early.calls == ["fence", *sorted(wanted, reverse=True)] * 4  # in the order of the backward
    assert [len(group["params"]) for group in early.optimizer.param_groups] == [2, 4]


def test_a_module_is_updated_in_the_backward_before_the_others():
    loop = Loop("sgd", {"layer 2"})
    before = copy.deepcopy(loop.model.state_dict())
    loop.backward(0)
    changed = {name for name, one in loop.model.state_dict().items() if not torch.equal(one, before[name])}
    assert changed == {"3.weight", "3.bias"}


def test_the_layers_of_a_model_may_lie_on_two_devices_and_so_may_the_parameters_of_one():
    with FakeTensorMode():  # devices that are not there
        gradients = [torch.ones(2, device=f"cuda:{number}") for number in range(2)]
        within = early_update._sums(gradients)
        apart = early_update._together([early_update._sums([one]) for one in gradients])
    assert (within.shape, within.device.index) == ((2,), 0) and (apart.shape, apart.device.index) == ((2, 2), 0)


def _clip(loop):
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def _clamp_data(loop):
    for parameter in loop.model.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def _replace_gradient(loop):
    loop.model[3].bias.grad = loop.model[3].bias.grad * 2


def _set_rate(loop):
    loop.optimizer.param_groups[1]["lr"] = 0.2


def _decay(loop):
    with torch.no_grad():
        loop.model[3].weight.mul_(0.9)


def _unscale(loop):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(loop.optimizer)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_clip, "had its gradient changed between"),
        (_clamp_data, "had its gradient changed between"),
        (_unscale, "had its gradient changed between"),
        (_replace_gradient, "had its gradient replaced between"),
        (_set_rate, "was updated before the loop set the learning rate"),
        (_decay, "had a parameter changed between"),
    ],
)
def test_what_the_early_update_lacks_is_refused_before_the_others_are_updated(change, what):
    loop = Loop("sgd", {"layer 2"})
    loop.backward(0)
    before = copy.deepcopy(loop.model[0].state_dict())
    change(loop)
    with pytest.raises(StateChangedError, match=rf"rank 3: module 'layer 2' {what}.*average_first"):
        loop.optimizer.step()
    assert all(torch.equal(one, before[name]) for name, one in loop.model[0].state_dict().items())


def test_a_closure_is_refused_by_name():
    loop = Loop("sgd", {"layer 2"})
    with pytest.raises(StateChangedError, match=r"rank 3: optimizer.step\(closure\) computes gradients within"):
        loop.optimizer.step(lambda: 0.0)


def test_a_second_backward_is_refused():
    loop = Loop("sgd", {"layer 2"})
    loop.backward(0)
    with pytest.raises(StateChangedError, match=r"module 'layer 2' had a second backward after its update"):
        loop.backward(1)


def test_a_step_that_does_not_follow_is_found():
    loop = Loop("sgd", {"layer 2"})
    loop.early.require_ended()
    loop.backward(0)
    with pytest.raises(StateChangedError, match=r"optimizer.step\(\) did not follow"):
        loop.early.require_ended()
    loop.iteration = 2  # without a snapshot it is found in the next backward
    with pytest.raises(StateChangedError, match=r"optimizer.step\(\) did not follow"):
        loop.backward(1)


def test_a_module_without_a_gradient_is_left_to_the_loop():
    loop = Loop("sgd", {"layer 2", "layer 0"})
    loop.model[0].bias.requires_grad_(False)
    loop.backward(0)
    assert loop.calls == ["fence", "layer 2", "layer 0"]
    loop.optimizer.step()
    assert not loop.early.begun


def test_optimizers_that_look_at_all_parameters_are_refused():
    class Own(torch.optim.SGD):
        pass

    parameters = list(model().parameters())
    assert early_refusal(torch.optim.SGD(parameters, lr=1)) == ""
    assert early_refusal(torch.optim.LBFGS(parameters)).startswith("LBFGS may update a parameter by more than")
    assert early_refusal(Own(parameters, lr=1)).startswith("Own may update")


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (SimpleNamespace(framework="DeepSpeed 0.19.8"), "DeepSpeed 0.19.8 updates all layers together, after the"),
        (FsdpHost.__new__(FsdpHost), "fully_shard completes the gradients of shards at the end of the backward"),
    ],
    ids=["engine", "fsdp"],
)
def test_where_modules_cannot_be_updated_early_that_order_is_refused(host, why):
    averaging = LayeredAveraging.__new__(LayeredAveraging)
    averaging._config = SimpleNamespace(order="update_first")
    with pytest.raises(UnsupportedError, match=f"--sync-order update_first: {why}.*; choose average_first"):
        averaging._order(host)
