"""Local SGD in a loop of plain torch whose state is more than its parameters: buffers, random numbers, unused layers.

A version at a synchronisation that is applied in the next forward is captured during that forward, which changes such
state. Jobs that continue from one are compared bit for bit with a job without a failure.
"""

from typing import Any

import pytest
import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config
from ft_plugins.errors import StateChangedError
from ft_plugins.session import attach

from .incarnation import context

Node = Any  # the fixture's class lives in conftest
TAU, LEFT_IN, LAST = 3, 8, 13
RESUMED = 6
SYNC = {"policy": "edit", "tau": TAU, "warmup": 1, "penalty_warmup": 2, "apply": "forward"}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)

    def forward(self, x):
        result = x + self.dropout(self.norm(torch.tanh(self.linear(x))))
        return result


class Net(torch.nn.Module):
    """Every forward changes buffers and draws random numbers. `unused` is a layer without a forward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(8, 4)
        self.unused = None

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = x if number == self.unused else layer(x)
        result = self.head(x)
        return result


class Job:
    """A rank's loop. In the iterations of `unused` layer 2 has no forward; in those of `skipped` there is no update; in
    those of `changed` the loop changes a parameter before its update."""

    unused = ()
    skipped = ()
    changed = ()

    def __init__(self, rank, world, cases):
        for name, those in cases.items():
            setattr(self, name, those)
        torch.manual_seed(3)
        self.net, self.rank = Net(), rank
        self.model = DistributedDataParallel(self.net, find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        torch.manual_seed(70 + rank)
        self.host = TorchHost(self.model, self.optimizer)

    def iterate(self, step):
        self.net.unused = 2 if step in self.unused else None
        made = torch.Generator().manual_seed(1000 * step + self.rank)
        self.model(torch.randn(6, 8, generator=made)).square().mean().backward()
        if step in self.changed:
            with torch.no_grad():
                self.net.head.weight.mul_(0.5)
        if step not in self.skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def digests(self):
        return {
            name: xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, tensor in self.host.tensors().items()
        }


def _life(rank, world, block, cases, run_dir=None, token=0, left_in=0):
    """One incarnation, which ends in iteration `left_in`, after its update. Digests of all tensors by iteration, at its
    end: within its body a layer that was not used may still have to be synchronised."""
    job = Job(rank, world, cases)
    session = attach(job.host, Config.from_json(block), context(rank, world, run_dir, token))
    digests = {}
    began = step = 0
    for step in session.iterations(LAST):
        began = began or step
        if step > began:
            digests[step - 1] = job.digests()
        job.iterate(step)
        if step == left_in:
            return digests
    digests[step] = job.digests()
    return digests


def continues_bit_for_bit(node, ranks, keys, cases):
    block = {"sync": {**SYNC, **keys}}
    whole = ranks(_life, 2, block, cases)
    node.start()
    protected = {**block, "reft": {}, "node_name": "n"}
    first = ranks(_life, 2, protected, cases, node.run_dir, node.fence(), LEFT_IN)
    second = ranks(_life, 2, protected, cases, node.run_dir, node.fence())
    for rank in range(2):
        assert min(second[rank]) == RESUMED + 1, "continued from the last synchronisation"
        for step, expected in whole[rank].items():
            for life in (first[rank], second[rank]):
                different = [name for name, one in life.get(step, expected).items() if one != expected[name]]
                assert not different, f"rank {rank}, iteration {step}"
    assert whole[0][LAST]["layers.0.norm.running_mean"] != whole[1][LAST]["layers.0.norm.running_mean"]


@pytest.mark.parametrize("keys", [{}, {"prefetch": False}, {"apply": "wait"}], ids=["prefetch", "no prefetch", "wait"])
def test_buffers_and_random_numbers_are_those_of_the_version_point(node, ranks, keys):
    """Killed after iteration 8 of a job that is synchronised after 3, 6, 9 and 12."""
    continues_bit_for_bit(node, ranks, keys, {})


@pytest.mark.parametrize("skipped", [(), (7,)], ids=["updated", "update skipped"])
def test_a_layer_without_a_forward_after_a_synchronisation_is_no_change_by_the_loop(node, ranks, skipped):
    """It is synchronised right before the update."""
    continues_bit_for_bit(node, ranks, {}, {"unused": (4, 7, 10), "skipped": skipped})


def _changed(rank, world, run_dir, token, step):
    block = {"sync": SYNC, "reft": {}, "node_name": "n"}
    try:
        _life(rank, world, block, {"changed": (step,)}, run_dir, token)
    except StateChangedError as error:
        return str(error)
    return ""


def test_a_change_by_the_loop_after_a_synchronisation_is_named(node, ranks):
    node.start()
    step = TAU + 1
    for rank, message in enumerate(ranks(_changed, 2, node.run_dir, node.fence(), step)):
        assert message.startswith(f"rank {rank}: iteration {step}: 'head.weight' was changed after the version point")


def _compiled(rank, world, sync, how):
    """The parameters at the end of a job whose model is compiled, by `how`."""
    torch._dynamo.config.disable = False  # tests run without
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    model = net if how == "eager" else torch.compile(net, backend="eager")
    if how == "called before":
        model(torch.randn(2, 8)).sum().backward()
        net.zero_grad()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    session = attach(TorchHost(parallel, optimizer), Config.from_json({"sync": sync}), context(rank, world))
    for step in session.iterations(LAST):
        made = torch.Generator().manual_seed(1000 * step + rank)
        parallel(torch.randn(6, 8, generator=made)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.flatten().tolist() for name, one in net.named_parameters()}


def _compiled_or_not(rank, world, sync):
    return {how: _compiled(rank, world, sync, how) for how in ("eager", "compiled", "called before")}


DREAMDDP = {"policy": "dreamddp", "h": 2, "schedule": "equal", "tau": 5}


@pytest.mark.parametrize(
    "sync",
    [
        pytest.param({"policy": "edit", "tau": 3, "apply": "forward"}, marks=pytest.mark.all_configurations),
        DREAMDDP,
    ],
    ids=["edit", "dreamddp"],
)
def test_a_compiled_model_is_synchronised_as_it_is_without(ranks, sync):
    """Hooks run outside of what is compiled, also where a model was compiled and called before it is attached."""
    for found in ranks(_compiled_or_not, 2, sync):
        assert found["compiled"] == found["called before"] == found["eager"]
