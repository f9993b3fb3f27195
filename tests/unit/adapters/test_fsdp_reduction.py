"""Local SGD under fully_shard: over which ranks gradients are averaged, and calls before parameters are gathered.

Four ranks are two replicas of two shards. Parameters, inputs and losses are small integers, so that means over 2 or 4
ranks are exact in any order.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ft_plugins.adapters.torch import fsdp
from ft_plugins.adapters.torch.fsdp import FsdpHost
from ft_plugins.config import Config, LaunchContext
from ft_plugins.errors import ConfigError, UnsupportedError
from ft_plugins.model.reduction import ReducedOver, ReductionControl
from ft_plugins.session import Session, attach
from harness.gang import gang
from tests.unit.adapters.edge_log import EdgeLog, backward, forward

SECONDS = 280.0  # a bound; some seconds on idle cores
ALL, LOCAL = ReducedOver.ALL, ReducedOver.LOCAL


class Net(torch.nn.Module):
    """An embedding tied to the head, layers, a parameter of the root that is smaller than the number of shards."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 3)
        self.shift = torch.nn.Parameter(torch.ones(1))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
        self.layers[1].bias.requires_grad_(False)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        numbers = self.embedding(tokens) + self.shift
        for layer in self.layers:
            numbers = layer(numbers)
        return self.head(numbers)


def whole():
    """The same small integers on every rank."""
    model, generator = Net(), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randint(-1, 2, one.shape, generator=generator))
    return model


def shard(mesh, model=None, layers=True, **settings):
    model = model or whole()
    for layer in model.layers if layers else ():
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def meshes(shape):
    """The whole mesh, and the one for fully_shard."""
    names = ("sync", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh, mesh["shard"] if len(shape) == 2 else mesh


def host_of(model, mesh):
    host = FsdpHost(model, torch.optim.SGD(model.parameters(), 1.0), mesh=mesh)
    assert isinstance(host, ReductionControl)
    return host


def tokens(rank, number):
    return torch.randint(7, (3,), generator=torch.Generator().manual_seed(100 * number + rank))


def expected(rank, numbers, group):
    """The mean over `group` of the gradients of the batches `numbers`, which accumulate."""
    model = whole()
    for number in numbers:
        model(tokens(rank, number)).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for one in gradients.values():
        dist.all_reduce(one, group=group)
        one /= dist.get_world_size(group)
    return gradients


def _reduced(rank, world, shape, reduce_dtype):
    """Warm-up, local, and back; batches are accumulated after reducing each, or before reducing once."""
    mesh, inner = meshes(shape)
    model = shard(inner, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    host = host_of(model, mesh)
    host.prepare_reduction()
    number = 0
    for over in (ALL, LOCAL, LOCAL, ALL, LOCAL, ALL):
        host.reduce_over(over)
        for accumulate in ("", "reduced", "unreduced"):
            model.zero_grad()
            numbers = (number + 1, number + 2) if accumulate else (number + 2,)
            number += 2
            for one in numbers:
                model.set_requires_gradient_sync(accumulate != "unreduced" or one == number)
                model(tokens(rank, one)).sum().backward()
            wanted = expected(rank, numbers, None if over is ALL else inner.get_group())
            found = {name: one.grad.full_tensor() for name, one in model.named_parameters() if one.grad is not None}
            assert found.keys() == wanted.keys() and "layers.1.bias" not in found
            for name, one in wanted.items():
                assert torch.equal(found[name], one), (over, accumulate, name, found[name], one)
    assert ALL != LOCAL and number == 36
    return host.shard_group()


@pytest.mark.parametrize(
    "shape, reduce_dtype", [((2, 2), None), ((4, 1), None), ((1, 4), None), ((4,), None), ((2, 2), torch.float64)]
)
def test_gradients_are_averaged_over_all_ranks_or_over_the_shards(shape, reduce_dtype):
    found = gang(_reduced, 4, shape, reduce_dtype, seconds=SECONDS)
    width = shape[-1]
    assert found == [tuple(range(rank - rank % width, rank - rank % width + width)) for rank in range(4)]


def _without_api(model, mesh):
    api = FSDPModule.set_all_reduce_hook
    del FSDPModule.set_all_reduce_hook
    try:
        host_of(model, mesh).prepare_reduction()
    finally:
        FSDPModule.set_all_reduce_hook = api


def _refused(rank, world):
    mesh, inner = meshes((2, 2))
    own = shard(inner)
    own.layers[2].set_all_reduce_hook(lambda reduced: None)
    part = whole()
    for layer in part.layers:
        fully_shard(layer, mesh=inner)
    cases = {
        "hybrid": lambda: host_of(shard(mesh), mesh).prepare_reduction(),
        "own hook": lambda: host_of(own, mesh).prepare_reduction(),
        "part": lambda: host_of(part, mesh).prepare_reduction(),
        "old torch": lambda: _without_api(shard(inner), mesh),
    }
    words = {}
    for name, run in cases.items():
        with pytest.raises(UnsupportedError) as caught:
            run()
        words[name] = str(caught.value)
    return words


def test_what_cannot_be_kept_local_is_refused_by_name():
    for rank, words in enumerate(gang(_refused, 4, seconds=SECONDS)):
        assert all(one.startswith(f"rank {rank}: local SGD is not supported here: ") for one in words.values())
        assert "(HSDP)" in words["hybrid"] and "fully_shard(..., mesh=mesh['shard'])" in words["hybrid"]
        assert "'layers.2' has an all-reduce hook of the training script" in words["own hook"]
        assert "'shift' is not sharded by fully_shard" in words["part"]
        assert f"torch {torch.__version__} has no FSDPModule.set_all_reduce_hook" in words["old torch"]


def _apart(rank, world):
    """What a host says when it is installed in a job that takes snapshots, without local SGD."""
    mesh, inner = meshes((2, 2))
    own = shard(inner)
    for one in (*own.layers, own):
        one.set_all_reduce_hook(lambda reduced: None)
    held = host_of(shard(inner), mesh)
    held.prepare_reduction()
    sharded = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    hosts = {
        "apart": host_of(shard(inner), mesh), "hybrid": host_of(shard(mesh), mesh), "own hook": host_of(own, mesh),
        "local sgd": held, "one replica": host_of(shard(sharded), sharded),
    }  # fmt: skip
    context = LaunchContext(Config.from_json({"reft": {}}), None, 0, None, rank, rank, world, world, 0, 0)
    words = {}
    for name, host in hosts.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp, "launch_context", lambda: context)
            try:
                host.install(Session(host, Config(), context))
                words[name] = ""
            except ConfigError as error:
                words[name] = str(error)
    return words


def test_replicas_that_nothing_keeps_together_are_refused_where_they_would_share_a_snapshot():
    for rank, words in enumerate(gang(_apart, 4, seconds=SECONDS)):
        refusal = words.pop("apart")
        assert f"rank {rank}: fully_shard was given one dimension of the mesh" in refusal
        assert f"on ranks {[rank % 2, rank % 2 + 2]}" in refusal and "--sync-policy" in refusal
        assert set(words.values()) == {""}, words


# ---- calls before modules ----


def _of_root(model, mesh):
    fully_shard(model, mesh=mesh)


def _by_layer(model, mesh):
    shard(mesh, model)


def _in_two_units(model, mesh):
    fully_shard([model.layers[0], model.layers[1]], mesh=mesh)
    fully_shard(model, mesh=mesh)


def _root_without(model, mesh):
    """Nothing is left for the root; the embedding and the head, which are tied, are one unit."""
    model.shift.requires_grad_(False)
    fully_shard([model.embedding, model.head], mesh=mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.shift})


def _prefetching(model, mesh):
    shard(mesh, model)
    model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])


LAYERS = ["layers.0", "layers.1", "layers.2"]
CALLED = {
    _by_layer: ["", *LAYERS],
    _of_root: ["", *LAYERS],
    _in_two_units: ["", "layers.2", "layers.0", "layers.1", "layers.0", "layers.1"],  # the last one is in the root's
    _root_without: ["", *LAYERS],
    _prefetching: ["", "layers.0", "layers.1", "layers.0", "layers.2", "layers.1", "layers.2"],
}


def _called(rank, world, wrap):
    """Each call adds to the shards of a module; the forward computes with the sum, whatever was gathered before."""
    mesh, inner = meshes((2, 2))
    model = whole()
    wrap(model, inner)
    host = host_of(model, mesh)
    modules, called, stepped = host.modules(), [], set()
    assert list(dict.fromkeys(modules.values())) == ["", *LAYERS]

    def call(module):
        called.append(module)
        if module not in stepped:  # a synchronisation is applied once
            stepped.add(module)
            with torch.no_grad():
                for name, tensor in host.tensors().items():
                    if modules[name] == module:
                        tensor += 1

    host.before_modules(call)
    session = attach(host, Config(), LaunchContext(None, None, 0, None, rank, rank, world, world, 0, 0))
    reference = whole()
    for step in session.iterations(5):
        if step == 2:  # gathers before the forward
            for one in (model, model.layers[2]):
                if isinstance(one, FSDPModule):
                    one.unshard()
        if step == 4:
            for one in (model, model.layers[1]):
                if isinstance(one, FSDPModule):
                    one.unshard(async_op=True)
        called.clear()
        stepped.clear()
        scores = model(tokens(rank, step))
        assert called == CALLED[wrap], called
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter += 1
        assert torch.equal(scores, reference(tokens(rank, step))), step
        called.clear()
        model.eval()
        with torch.no_grad():  # the root stays gathered
            assert torch.equal(model(tokens(rank, step)), scores)
        model.train()
        assert set(called) == set(CALLED[wrap]), "an evaluation uses what was synchronised, too"


@pytest.mark.parametrize("wrap", CALLED)
def test_calls_come_before_parameters_are_gathered(wrap):
    gang(_called, 4, wrap, seconds=SECONDS)


def _outside(rank, world):
    """The host has a part of what is sharded; its last layer gathers one that comes after it."""
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    for layer in whole:
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    whole[1].set_modules_to_forward_prefetch([whole[2]])
    called = []
    host_of(whole[:2], mesh).before_modules(called.append)
    whole(torch.ones(1, 4)).sum().backward()
    return called


def test_a_layer_may_gather_one_that_the_host_does_not_have():
    assert gang(_outside, 2, seconds=SECONDS) == [["0", "1"]] * 2


def _trained(rank, world):
    """With calls that do nothing, and gradients over all replicas, training is that without the package."""
    mesh, inner = meshes((2, 2))
    states = []
    for controlled in (False, True):
        model = shard(inner if controlled else mesh)  # HSDP, and what stands for it
        optimizer = torch.optim.SGD(model.parameters(), 0.125, momentum=0.5)
        if controlled:
            host = FsdpHost(model, optimizer, mesh=mesh)
            host.prepare_reduction()
            host.before_modules(lambda module: None)
        for step in range(4):
            (model(tokens(rank, step)).sum() / 64).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append([one.full_tensor() for one in model.parameters()])
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)  # sums of two replicas and of two shards do not depend on the order


def test_training_over_all_replicas_is_that_of_hsdp():
    gang(_trained, 4, seconds=SECONDS)


# ---- edges ----


def _followed(rank, world, wrap):
    """Batches are accumulated, before and after reducing. The embedding ends when its reduced gradient is there, or,
    if it is not reduced yet, with the backward."""
    mesh, inner = meshes((2, 2))
    states = []
    for follows in (False, True):
        model = whole()
        wrap(model, inner)
        optimizer, log = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9), EdgeLog()
        host = FsdpHost(model, optimizer, mesh=mesh)
        host.prepare_reduction()
        if follows:
            host.follow_modules(log)
        for step, over in enumerate((ALL, LOCAL, LOCAL, ALL)):
            host.reduce_over(over)
            for synced in (False, True, True):
                model.set_requires_gradient_sync(synced)
                model(tokens(rank, 3 * step)).square().mean().backward()
                expected = ["f+ ", *forward(*LAYERS), "f- ", "b+ ", *backward(*reversed(LAYERS)), "b- "]
                assert log.taken() == (expected if follows else [])
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(tokens(rank, step))
            assert log.taken() == (["f+ ", *forward(*LAYERS), "f- "] if follows else [])
        states.append([one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()])
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wrap", CALLED)
def test_edges_are_those_of_the_whole_model_and_change_nothing(wrap):
    gang(_followed, 4, wrap, seconds=SECONDS)
