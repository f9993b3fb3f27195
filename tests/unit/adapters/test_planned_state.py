"""What an optimizer will keep is known before its first update, and training is the same as without the look."""

import random
from functools import partial

import pytest
import torch
from torch import optim

from ft_plugins.adapters.planned_state import allocate, as_updated, items_of, plan_state, set_numbers
from ft_plugins.errors import UnsupportedError
from ft_plugins.model.digest import readable

from .torch_small import Small, handed_over, take_over

FOLLOWED = [
    (optim.Adam, {}),
    (optim.Adam, {"lr": torch.tensor(0.01), "capturable": False}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.AdamW, {"lr": 0.0}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    (optim.SGD, {"lr": 0.0, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (optim.Adadelta, {}),
    (optim.Adafactor, {}),
    (optim.Adamax, {}),
    (optim.ASGD, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
]


class Lion(optim.Optimizer):
    """As people write one: state by parameter, made in the first update; `seen` is kept where nothing follows it."""

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
                        state["kept"] = self.keeps()
                state["step"] += 1
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.add_(torch.sign(state["exp_avg"].lerp(one.grad, 0.1)), alpha=-group["lr"])
                state["exp_avg"].lerp_(one.grad, 0.01)


class BySize(optim.Optimizer):
    """Keeps another state of large tensors: a copy of a few elements would not show it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            state = self.state[one]
            if not state:
                state["m"] = torch.zeros_like(one)
                if one.numel() >= 100:
                    state["t"], state["row"] = torch.zeros(()), torch.zeros(one.shape[:1])
            state["m"].lerp_(one.grad, 0.1)
            if "t" in state:
                state["t"] += 1
                state["row"] += one.grad.flatten(1).sum(1)
            one.sub_(state["m"] / (1 - 0.9 ** float(state.get("t", 1))), alpha=0.1)


class Compiled(Lion):
    """One that frees its compiled part, which a copy of it would free as well."""

    def __del__(self): ...


def jagged():
    """A tensor that stands for others, as those of quantized optimizers."""
    return torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)


KINDS = [*FOLLOWED, (Lion, {}), (Lion, {"fused": True}), (BySize, {})]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def trained(model, optimizer, updates=range(5)):
    """Updates; a ReLU makes gradients of -0.0 as well. Parameters and state, zeros with their signs."""
    for number in updates:
        generator = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    found = list(model.parameters())
    found += [torch.as_tensor(optimizer.state[one][key]) for one in found for key in sorted(optimizer.state[one])]
    return [one.detach().numpy().tobytes() for one in found]


def layouts(items):
    return {key: (one.dtype, one.shape, one.stride()) for key, one in items.items()}


@pytest.mark.parametrize("kind, settings", KINDS)
def test_it_is_known_and_the_optimizer_is_untouched(kind, settings):
    plain, seen = network(), network()
    golden = trained(plain, kind(plain.parameters(), **settings))
    optimizer = kind(seen.parameters(), **settings)
    before = [one.detach().clone() for one in seen.parameters()]
    scheduler = optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    generators = torch.get_rng_state(), random.getstate()
    steps = []
    optimizer.register_step_pre_hook(lambda *args: steps.append(args))
    groups = [dict(group) for group in optimizer.param_groups]
    had = {one: dict(state) for one, state in optimizer.state.items()}  # Adagrad makes its own when it is built
    plan_state(optimizer)
    planned = [items_of(optimizer, one) for one in seen.parameters()]

    assert {one: dict(state) for one, state in optimizer.state.items()} == had
    assert all(one.is_meta for own, each in zip(planned, seen.parameters(), strict=True) for key, one in own.items()
               if key not in had.get(each, {}))  # fmt: skip
    assert steps == [] and scheduler.last_epoch == 0 and not getattr(optimizer, "_opt_called", False)
    assert all(torch.equal(one, two) and two.grad is None for one, two in zip(before, seen.parameters(), strict=True))
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert trained(seen, optimizer) == golden
    for own, each in zip(planned, seen.parameters(), strict=True):
        live = {key: one for key, one in optimizer.state[each].items() if torch.is_tensor(one) and one.dim()}
        assert layouts(own) == layouts(live)
        assert all(items_of(optimizer, each)[key] is one for key, one in live.items())


@pytest.mark.parametrize("kind, settings", KINDS)
def test_what_was_captured_is_handed_to_an_optimizer_that_has_made_no_update(kind, settings):
    whole, resumed = network(), network()
    first = kind(whole.parameters(), **settings)
    trained(whole, first, range(3))
    second = kind(resumed.parameters(), **settings)
    plan_state(second)
    with torch.no_grad():
        for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
            ours.copy_(theirs)
            allocate(second, ours, lambda key: False)
            made, state = items_of(second, ours), first.state[theirs]
            numbers = {key: value for key, value in state.items() if key not in made}
            for key, one in made.items():
                one.copy_(state[key])
            set_numbers(second, ours, numbers)
    second.param_groups[0].update({key: one for key, one in first.param_groups[0].items() if key != "params"})
    assert trained(resumed, second, range(3, 8)) == trained(whole, first, range(3, 8))


@pytest.mark.parametrize(
    "kind, settings, words",
    [
        (optim.LBFGS, {}, "LBFGS keeps tensors in '_params'"),
        (optim.SparseAdam, {}, r"SparseAdam is not supported: what it keeps of a parameter of shape \(16, 8\)"),
        (Lion, {"counts": True}, "Lion keeps counters in attributes"),
        (Lion, {"keeps": list}, "Lion keeps a list as 'kept'"),
        (Lion, {"keeps": jagged}, "Lion keeps a NestedTensor as 'kept'"),
        (Compiled, {}, "Compiled has a compiled part"),
    ],
)
def test_what_cannot_be_known_or_captured_is_refused_by_name(kind, settings, words):
    model = network()
    optimizer = kind(model.parameters(), **settings)
    with pytest.raises(UnsupportedError, match=words):
        plan_state(optimizer)
    assert not optimizer.state and all(one.grad is None for one in model.parameters())


def test_values_of_parameters_and_containers_of_the_optimizer_do_not_matter():
    """A large value, that a step of the usual size does not move; buffers in which updates keep numbers."""

    class Buffered(optim.SGD):
        def step(self, closure=None):
            self.buffer[0][0] = self.param_groups[0]["lr"]
            return super().step(closure)

    large = torch.nn.Parameter(torch.full((3,), -1e6))
    optimizer = Buffered(
        [{"params": [large]}, {"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.cfloat))]}], 0.1
    )
    optimizer.buffer = [[None], [None], [None]]
    plan_state(optimizer)
    assert optimizer.buffer == [[None], [None], [None]]
    plan_state(optim.AdamW([torch.nn.Parameter(torch.full((2,), -10.0, dtype=torch.bfloat16))]))
    made = optim.Adam([torch.nn.Parameter(torch.ones(3, dtype=torch.cfloat))])
    plan_state(made)
    allocate(made, made.param_groups[0]["params"][0], lambda key: False)
    kept = made.state[made.param_groups[0]["params"][0]]
    assert kept["exp_avg"].dtype == torch.cfloat and not kept["exp_avg"].any(), "zeros, for what belongs to no item"


def test_what_is_absent_in_a_version_has_no_memory_after_its_restore():
    model = network()
    optimizer = optim.Adam(model.parameters(), amsgrad=True)
    plan_state(optimizer)
    trained(model, optimizer)
    one, other, *rest = model.parameters()
    kept = optimizer.state[other]["exp_avg"]
    allocate(optimizer, one, lambda key: True)
    allocate(optimizer, other, partial(str.__eq__, "exp_avg_sq"))
    assert one not in optimizer.state and all(tensor.is_meta for tensor in items_of(optimizer, one).values())
    assert {key: tensor.is_meta for key, tensor in items_of(optimizer, other).items()} == {
        "exp_avg": False, "exp_avg_sq": True, "max_exp_avg_sq": False
    }  # fmt: skip
    assert optimizer.state[other]["exp_avg"] is kept and len(optimizer.state) == 1 + len(rest)


def test_parameters_that_an_optimizer_lists_only_in_its_update_are_known():
    """As with ZeRO-3, which fills the groups of torch's optimizer during a step only."""
    model = network()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    groups, optimizer.param_groups[0]["params"] = [dict(optimizer.param_groups[0])], []
    plan_state(optimizer, groups)
    assert all(layouts(items_of(optimizer, one)) == layouts({"momentum_buffer": one}) for one in model.parameters())


def test_code_that_describes_the_optimizer_sees_what_updates_will_make_and_leaves_nothing():
    model = network()
    optimizer = optim.Adam(model.parameters())
    plan_state(optimizer)
    with as_updated(optimizer):
        kept = optimizer.state_dict()["state"]
        assert [set(state) for state in kept.values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 4
    assert not optimizer.state
    trained(model, optimizer)
    first = optimizer.state[next(model.parameters())]["exp_avg"]
    with as_updated(optimizer):
        assert optimizer.state[next(model.parameters())]["exp_avg"] is first
    assert len(optimizer.state) == 4


def test_a_group_of_single_elements_is_one_as_any_other():
    """As a Trainer makes of a model whose only parameter without weight decay is the bias of one output."""
    bias = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [bias]}, {"params": [torch.nn.Parameter(torch.ones(1, 4))]}], lr=0.1)
    plan_state(optimizer)
    assert bias.item() == 1.0


def test_a_version_before_the_first_update_of_some_parameters_is_gone_on_from():
    """An update that is skipped, as by a GradScaler; then one layer without a gradient, as an expert without tokens."""

    def body(small, step):
        small.backward()
        if step < 5:
            small.model[0].weight.grad = small.model[0].bias.grad = None
        if step > 1:
            small.optimizer.step()
        small.optimizer.zero_grad()

    whole, found = Small(), {}
    whole.run(lambda step: (found.update({step - 1: handed_over(whole.host)}) if step > 1 else 0, body(whole, step)))
    assert [len(tensors) for _, tensors in found.values()] == [4, 8, 8, 8, 12], "moments that are there"
    for done, saved in found.items():
        again = Small()
        take_over(again.host, *saved)
        again.run(lambda step, done=done, again=again: body(again, step + done), 6 - done)
        ends = [
            (readable(dict(one.model.state_dict())), readable(one.optimizer.state_dict())) for one in (whole, again)
        ]
        assert ends[0] == ends[1], done
