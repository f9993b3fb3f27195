"""Several optimizers over one module, as those of a GAN, as one update: exact, or refused by name."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config, LaunchContext
from ft_plugins.errors import ConfigError, FtError, InventoryError, ResumeError, StateChangedError, UnsupportedError
from ft_plugins.model.digest import readable
from ft_plugins.session import attach
from tests.unit.adapters.torch_small import handed_over, session_of, take_over

Node = Any  # the fixture's class lives in tests/unit/conftest.py
ITERATIONS = 7


class Gan:
    """A generator and a discriminator, which learns `critics` times in each iteration; the generator learns in every
    `every`-th one."""

    def __init__(self, critics=1, every=1):
        torch.manual_seed(11)
        self.critics, self.every = critics, every
        parts = {"g": nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
                 "d": nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))}  # fmt: skip
        self.model = nn.ModuleDict(parts)
        self.g, self.d = parts["g"], parts["d"]
        self.opt_g = torch.optim.Adam(self.g.parameters(), 0.02)
        self.opt_d = torch.optim.SGD(self.d.parameters(), 0.05, momentum=0.9)
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (self.opt_g, self.opt_d)]
        self.average = torch.optim.swa_utils.AveragedModel(self.g)
        torch.manual_seed(12)

    def host(self, **given):
        given = {"get_state": self.average.state_dict, "set_state": self.average.load_state_dict, **given}
        return TorchHost(self.model, {"g": self.opt_g, "d": self.opt_d}, self.schedulers, **given)

    def learn_d(self):
        fake = self.g(torch.randn(5, 2)).detach()
        loss = self.d(fake).square().mean() - self.d(torch.randn(5, 3)).mean()
        loss.backward()
        self.opt_d.step()

    def iterate(self, step, between=lambda: None):
        for _ in range(self.critics):
            self.opt_d.zero_grad()
            self.learn_d()
        between()
        if step % self.every == 0:
            self.opt_g.zero_grad()
            (-self.d(self.g(torch.randn(5, 2))).mean()).backward()  # adds to the discriminator's gradients, too
            self.opt_g.step()
            self.average.update_parameters(self.g)
        for scheduler in self.schedulers:
            scheduler.step()

    def described(self):
        return [
            readable(one.state_dict()) for one in (self.model, self.opt_g, self.opt_d, *self.schedulers, self.average)
        ]


def _plain(*made):
    gan = Gan(*made)
    for step in range(1, ITERATIONS + 1):
        gan.iterate(step)
    return gan.described()


def _life(rank, world, run_dir, token, left_in, *made):
    """One incarnation, gone in iteration `left_in` between the steps of its two optimizers."""
    gan, done = Gan(*made), []

    class Gone(Exception):
        pass

    def leave():
        raise Gone

    context, config = LaunchContext(None, run_dir, token, None, 0, 0, 1, 1, 0, 0), {"reft": {}, "node_name": "n"}
    try:
        for step in attach(gan.host(), Config.from_json(config), context).iterations(ITERATIONS):
            done.append(step)
            gan.iterate(step, leave if step == left_in else lambda: None)
    except Gone:
        pass
    return done, gan.described()


def test_a_gan_that_dies_between_its_two_steps_ends_bit_for_bit_as_an_unprotected_one(node, ranks):
    """Its discriminator learns three times in each iteration, its generator in every second one."""
    node.start()
    [(first, _)] = ranks(_life, 1, node.run_dir, node.fence(), 5, 3, 2)
    [(second, described)] = ranks(_life, 1, node.run_dir, node.fence(), 0, 3, 2)
    assert (first, second) == ([1, 2, 3, 4, 5], [5, 6, 7])
    assert described == _plain(3, 2)
    assert node.events("protection.lost") == []
    assert node.events("resume.differed") == [], "the generator's last gradients are not of the discriminator's step"


def test_the_state_of_each_has_a_name_of_its_own_also_of_a_parameter_that_both_update():
    gan = Gan()
    both = torch.optim.Adam(gan.model.parameters(), 0.1)
    host = TorchHost(gan.model, [gan.opt_d, both], gan.schedulers[1])
    items = {item.name for item in host.inventory().items}
    assert {"d.0.weight:0:momentum_buffer", "d.0.weight:1:exp_avg", "g.0.weight:1:exp_avg"} < items
    small = host.small_state()
    assert "group 0 of optimizer 1" in small["caller"]["members"]
    assert small["caller"]["scalars"] == {}, "no update has made any"


def test_the_order_of_optimizers_is_compared_at_a_restart():
    gan, other = Gan(), Gan()
    small = TorchHost(gan.model, [gan.opt_g, gan.opt_d], gan.schedulers).small_state()
    swapped = TorchHost(other.model, [other.opt_d, other.opt_g], other.schedulers)
    words = "parameter 'd.0.weight' is in group 0 of optimizer 0 now, was in group 0 of optimizer 1"
    assert swapped.regrouped(small).startswith(words)
    with pytest.raises(ResumeError, match=r"schedulers \['a', 'b'\], the captured job had \['0', '1'\]"):
        named = {"a": other.schedulers[0], "b": other.schedulers[1]}
        TorchHost(other.model, [other.opt_g, other.opt_d], named).restore(small)


# ---- gradients ----


@pytest.fixture
def gan():
    return Gan()


def steps(gan, host):
    """Iterations with a version point each."""
    session = session_of(host)
    session.iteration_end = lambda step, ends: host.small_state() and None
    return session.iterations(ITERATIONS)


@pytest.mark.parametrize(
    "optimizer, words",
    [
        ("opt_d", r"iteration 2: the gradient of 'd\..*' still held that of the previous iteration"),
        ("opt_g", r"iteration 2: the gradient of 'g\..*' still held that of the previous iteration"),
    ],
)
def test_gradients_that_live_across_a_version_point_are_refused_of_each(gan, optimizer, words):
    """Also of the generator, whose backward comes after the fence."""
    getattr(gan, optimizer).zero_grad = lambda: None
    with pytest.raises(StateChangedError, match=words):
        for step in steps(gan, gan.host()):
            gan.iterate(step)


def test_a_gradient_that_is_used_twice_is_refused_of_each(gan):
    with pytest.raises(StateChangedError, match="iteration 2: the gradient of 'g.0.weight'"):
        for step in steps(gan, gan.host()):
            if step == 1:
                gan.iterate(step)
            else:
                gan.opt_d.zero_grad()
                gan.learn_d()
                gan.opt_g.step()


def test_clipping_over_both_with_a_gradient_of_the_previous_iteration_is_refused(gan):
    """The norm of the discriminator's gradients would have the generator's last ones in it, which no snapshot has."""
    step = gan.opt_d.step
    gan.opt_d.step = lambda: (nn.utils.clip_grad_norm_(gan.model.parameters(), 0.1), step())[1]
    with pytest.raises(StateChangedError, match="iteration 2: the gradient of 'g.0.weight'"):
        for iteration in steps(gan, gan.host()):
            gan.iterate(iteration)


def test_a_parameter_that_is_changed_before_the_first_step_is_named(gan):
    with pytest.raises(StateChangedError, match="iteration 2: 'g.0.weight' was changed after the version point"):
        for step in steps(gan, gan.host()):
            if step == 2:
                with torch.no_grad():
                    gan.g[0].weight.mul_(0.5)
            gan.iterate(step)


# ---- what is refused ----


def test_a_third_optimizer_is_refused_with_the_line_to_write(gan):
    third = torch.optim.SGD(gan.d.parameters(), 0.1)
    next(steps(gan, gan.host()))
    gan.d[0].weight.grad = torch.ones(4, 3)
    with pytest.raises(ConfigError, match=r"pass all .*: TorchHost\(model, \[\.\.\., other_optimizer\], \.\.\.\)"):
        third.step()


def test_a_step_outside_of_an_iteration_is_refused(gan):
    session_of(gan.host())
    with pytest.raises(ConfigError, match="outside of an iteration"):
        gan.learn_d()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (lambda gan: ([],), "found no optimizer in the list"),
        (lambda gan: ([gan.opt_g, gan.d],), "found a Sequential as the optimizer"),
        (lambda gan: ([gan.opt_g, gan.opt_g],), "found the same optimizer twice"),
        (lambda gan: ([gan.opt_g, gan.opt_d], [gan.schedulers[0], 3]), "found a int as the scheduler"),
    ],
)
def test_what_is_no_list_of_optimizers_is_refused(gan, arguments, words):
    with pytest.raises(FtError, match=words):
        TorchHost(gan.model, *arguments(gan))


def test_a_scheduler_that_is_missing_in_the_list_is_refused(gan):
    host = TorchHost(gan.model, [gan.opt_g, gan.opt_d], gan.schedulers[:1])
    with pytest.raises(StateChangedError, match="a ExponentialLR whose name was not found"):
        for step in steps(gan, host):
            gan.iterate(step)


SYSTEMS = [
    ({"paft": {"mode": "audit"}}, "--paft"),
    ({"paft": {"mode": "dyn"}}, "--paft"),
    ({"sync": {"policy": "edit", "tau": 2}}, "--sync-policy"),
    ({"sync": {"policy": "dreamddp", "h": 2, "tau": 4}}, "--sync-policy"),
]


def test_systems_that_follow_one_optimizer_refuse_two_by_name(ranks):
    for refusals in ranks(_refused, 2):
        for said, (_, words) in zip(refusals, SYSTEMS, strict=True):
            assert "TorchHost was given 2 optimizers (g Adam, d SGD)" in said and words in said, said


def _refused(rank, world):
    context = LaunchContext(None, None, 0, None, rank, rank, world, world, 0, 0)
    said = []
    for system, _ in SYSTEMS:
        with pytest.raises(UnsupportedError) as refusal:
            attach(Gan().host(), Config.from_json(system), context)
        said.append(str(refusal.value))
    return said


# ---- other state ----


def test_an_average_of_the_weights_goes_along_as_the_module_returns_it(gan):
    for step in steps(gan, host := gan.host()):
        gan.iterate(step)
        if step == 2:
            break
    saved, expected = handed_over(host), copy.deepcopy(gan.average.state_dict())
    found = []
    take_over(Gan().host(set_state=found.append), *saved)
    assert type(found[0]) is OrderedDict and found[0]._metadata == expected._metadata
    assert readable(found[0]) == readable(expected)


def test_other_state_that_cannot_be_captured_is_named_before_training(gan):
    host = gan.host(get_state=lambda: {"ema": [1.0, {"seen": {1, 2}}]})
    with pytest.raises(InventoryError, match=r"rank 0: what get_state returns.*state\['ema'\]\[1\]\['seen'\]: a "):
        host.small_state()
