"""apex's optimizers in a loop of plain torch, where APEX_PATH names a checkout: a job that dies goes on bit for bit.

And without one: a class with the habits of apex's, which put state into groups, and lists beside them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ft_plugins.adapters import host_parts
from ft_plugins.adapters.planned_state import allocate, plan_state
from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config, LaunchContext
from ft_plugins.errors import UnsupportedError
from ft_plugins.model.digest import readable
from ft_plugins.session import attach
from ft_plugins.snapshot.capture import codec
from harness import apex_jobs

Node = Any  # the fixture's class lives in tests/unit/conftest.py
ITERATIONS = 6


class Loop:
    """A model in two groups, the first one with a single parameter, so that lists beside the groups are uneven."""

    def __init__(self, kind):
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        first, *others = self.model.parameters()
        groups = [{"params": [first], "weight_decay": 0.0}, {"params": others}]
        made = getattr(apex_jobs.optimizers(), kind)
        self.optimizer = made(groups, lr=0.05, **apex_jobs.KINDS[kind])

    def iterate(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 3)).square().mean().backward()
        self.optimizer.step()

    def described(self):
        return readable(self.model.state_dict()), readable(self.optimizer.state_dict())


class Gone(Exception):
    """The process has died."""


def _life(rank, world, run_dir, token, left_in, kind):
    """One incarnation, gone in iteration `left_in` before its update."""
    loop, done = Loop(kind), []
    context, config = LaunchContext(None, run_dir, token, None, 0, 0, 1, 1, 0, 0), {"reft": {}, "node_name": "n"}
    try:
        for step in attach(TorchHost(loop.model, loop.optimizer), Config.from_json(config), context).iterations(
            ITERATIONS
        ):
            done.append(step)
            if step == left_in:
                raise Gone
            loop.iterate()
    except Gone:
        pass
    return done, loop.described()


def _plain(rank, world, kind):
    loop = Loop(kind)
    for _ in range(ITERATIONS):
        loop.iterate()
    return loop.described()


@pytest.mark.skipif(not apex_jobs.available(), reason="set APEX_PATH")
@pytest.mark.parametrize("kind", apex_jobs.KINDS)
def test_a_loop_that_dies_goes_on_as_an_unprotected_one(node, ranks, kind):
    node.start()
    [(first, _)] = ranks(_life, 1, node.run_dir, node.fence(), 4, kind)
    [(second, described)] = ranks(_life, 1, node.run_dir, node.fence(), 0, kind)
    assert (first, second) == ([1, 2, 3, 4], [4, 5, 6])
    assert [described] == ranks(_plain, 1, kind)
    assert node.events("protection.lost") == []


# ---- habits of apex's ----


class Grouped(torch.optim.Optimizer):
    """As FusedNovoGrad, with a list of tensors in its groups, and as FusedAdam, with a list that has an entry for each
    group, and in it one for each parameter."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1})
        self.beside = [[None] * len(group["params"]) for group in self.param_groups]
        self.lamb_coeffs = []

    @torch.no_grad()
    def step(self, closure=None):
        for group, beside in zip(self.param_groups, self.beside, strict=True):
            pairs = list(zip(group["params"], beside, strict=False))
            norms = [one.grad.norm() for one, _ in pairs]
            group.setdefault("norms", [torch.stack(norms), torch.zeros(0)])
            assert group["norms"][0].numel() == len(pairs)
            group["norms"][0].mul_(0.9).add_(torch.stack(norms), alpha=0.1)
            for (one, _), norm in zip(pairs, group["norms"][0], strict=True):
                buffer = self.state[one].setdefault("moment", torch.zeros_like(one))
                buffer.lerp_(one.grad / (norm + 1), 0.5)
                one.sub_(buffer, alpha=group["lr"])
                self.lamb_coeffs.append(norm)


def made():
    torch.manual_seed(2)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3,), (2, 2), (4,))]
    return parameters, Grouped([{"params": parameters[:1]}, {"params": parameters[1:]}])


def moved(parameters, optimizer, steps):
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        for one in parameters:
            one.grad = torch.randn(one.shape, generator=generator)
        optimizer.step()
    return [one.detach().numpy().tobytes() for one in parameters]


def test_state_in_groups_is_captured_and_neither_made_nor_moved_early():
    parameters, optimizer = made()
    plan_state(optimizer)
    assert optimizer.lamb_coeffs == [] and all("norms" not in group for group in optimizer.param_groups)
    assert not optimizer.state
    moved(parameters, optimizer, 3)
    before = readable(optimizer.state_dict())
    plan_state(optimizer)  # again, as after a load
    assert readable(optimizer.state_dict()) == before, "stand-ins share no tensor of a group"
    saved = codec.decode(codec.encode(host_parts.groups(optimizer)))
    again, other = made()
    plan_state(other)
    for one in again:
        allocate(other, one, lambda key: False)
    host_parts.restore_groups(other, saved)
    for one, two in zip(again, parameters, strict=True):
        one.data.copy_(two.data)
        other.state[one]["moment"].copy_(optimizer.state[two]["moment"])
    kept = other.param_groups[0]["norms"][0]
    host_parts.restore_groups(other, saved)
    assert other.param_groups[0]["norms"][0] is kept, "in place"
    assert moved(again, other, 2) == moved(parameters, optimizer, 2)


def test_what_updates_put_into_groups_is_where_the_parameters_are():
    near = torch.empty(2, device="meta")
    found = host_parts._new([torch.ones(2), (torch.ones(()), None)], near)
    assert found[0].device.type == found[1][0].device.type == "meta" and found[1][1] is None
    between_updates = SimpleNamespace(param_groups=[{"params": []}])  # of ZeRO-3
    host_parts.restore_groups(between_updates, [{"norms": [torch.ones(2)]}], {0: near})
    assert between_updates.param_groups[0]["norms"][0].device.type == "meta"


def test_what_apex_amp_and_its_parallel_module_do_is_refused_by_name():
    parameters, optimizer = made()
    optimizer._amp_stash = object()
    with pytest.raises(UnsupportedError, match="Grouped was initialised by apex.amp"):
        plan_state(optimizer)
    wrapper = type("DistributedDataParallel", (nn.Module,), {"__module__": "apex.parallel.distributed"})()
    wrapper.module = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="apex.parallel.DistributedDataParallel"):
        TorchHost(wrapper, torch.optim.SGD(wrapper.parameters(), 0.1))
