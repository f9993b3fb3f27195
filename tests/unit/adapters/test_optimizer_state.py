"""Optimizer state that is created before the first update gives the numbers of an optimizer that never had any."""

import random

import pytest
import torch
from torch import optim

from ft_plugins.adapters.optimizer_state import create_state
from ft_plugins.errors import UnsupportedError

EXACT = [
    (optim.Adam, {}),
    (optim.Adam, {"lr": torch.tensor(0.01), "capturable": False}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.0, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
]
REFUSED = [
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1}, "SGD is not supported"),
    (optim.Rprop, {}, "Rprop is not supported"),
    (optim.ASGD, {}, "ASGD is not supported"),
    (optim.LBFGS, {}, "LBFGS keeps tensors in '_params'"),
    (optim.SparseAdam, {}, "SparseAdam is not supported"),
]


class Lion(optim.Optimizer):
    """As people write one: state by parameter, created in the first update; `seen` is kept where nothing follows it."""

    def __init__(self, parameters, lr=0.01, counts=False, keeps=None, fused=False):
        if fused:  # as those of apex and DeepSpeed, whose kernels write to it
            self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        self.seen, self.counts, self.keeps = 0, counts, keeps
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.seen += self.counts
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(one)
                    if self.keeps is not None:
                        state["kept"] = self.keeps
                state["step"] += 1
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.add_(torch.sign(state["exp_avg"].lerp(one.grad, 0.1)), alpha=-group["lr"])
                state["exp_avg"].lerp_(one.grad, 0.01)


class Compiled(Lion):
    """One that frees its compiled part, which a copy of it would free as well."""

    def __del__(self): ...


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def trained(model, optimizer):
    """Five updates; a ReLU makes gradients of -0.0 as well. Parameters and state, zeros with their signs."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    found = list(model.parameters())
    found += [torch.as_tensor(state[key]) for state in optimizer.state.values() for key in sorted(state)]
    return [one.detach().numpy().tobytes() for one in found]


@pytest.mark.parametrize("kind, settings", [*EXACT, (Lion, {}), (Lion, {"fused": True})])
def test_it_is_what_the_first_update_would_create(kind, settings):
    plain, early = network(), network()
    golden = trained(plain, kind(plain.parameters(), **settings))
    optimizer = kind(early.parameters(), **settings)
    before = [one.detach().clone() for one in early.parameters()]
    scheduler = optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    generators = torch.get_rng_state(), random.getstate()
    steps = []
    optimizer.register_step_pre_hook(lambda *args: steps.append(args))
    groups = [dict(group) for group in optimizer.param_groups]
    create_state(optimizer)
    created = {key for state in optimizer.state.values() for key in state}
    create_state(optimizer)

    assert steps == [] and scheduler.last_epoch == 0 and not getattr(optimizer, "_opt_called", False)
    assert all(torch.equal(one, two) and two.grad is None for one, two in zip(before, early.parameters(), strict=True))
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert trained(early, optimizer) == golden
    assert {key for state in optimizer.state.values() for key in state} == created


@pytest.mark.parametrize(
    "kind, settings, words",
    [
        *REFUSED,
        (Lion, {"counts": True}, "Lion keeps counters in attributes"),
        (Lion, {"keeps": ["a"]}, "Lion keeps a list as 'kept'"),
        (Compiled, {}, "Compiled has a compiled part"),
    ],
)
def test_what_cannot_be_created_exactly_is_refused_by_name(kind, settings, words):
    model = network()
    optimizer = kind(model.parameters(), **settings)
    with pytest.raises(UnsupportedError, match=words):
        create_state(optimizer)
    assert not optimizer.state and all(one.grad is None for one in model.parameters())


def test_state_that_is_there_stays():
    model = network()
    optimizer = optim.Adam(model.parameters())
    trained(model, optimizer)
    before = {id(one): {key: (id(value), value.clone()) for key, value in optimizer.state[one].items()}
              for one in model.parameters()}  # fmt: skip
    create_state(optimizer)
    for one in model.parameters():
        for key, value in optimizer.state[one].items():
            known, copied = before[id(one)][key]
            assert id(value) == known and torch.equal(value, copied)


def test_parameters_that_an_optimizer_lists_only_in_its_update_get_their_state():
    """As with ZeRO-3, which fills the groups of torch's optimizer during a step only."""
    model = network()
    golden = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    create_state(golden)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    groups, optimizer.param_groups[0]["params"] = [dict(optimizer.param_groups[0])], []
    create_state(optimizer, groups)
    assert {one: set(state) for one, state in optimizer.state.items()} == {
        one: set(state) for one, state in golden.state.items()
    }
    assert len(optimizer.state) == len(list(model.parameters()))


def test_a_group_of_single_elements_is_one_as_any_other():
    """As a Trainer makes of a model whose only parameter without weight decay is the bias of one output."""
    bias = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [bias]}, {"params": [torch.nn.Parameter(torch.ones(1, 4))]}], lr=0.1)
    create_state(optimizer)
    assert bias.item() == 1.0
