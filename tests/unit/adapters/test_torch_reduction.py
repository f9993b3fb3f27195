"""Local SGD under a loop of plain torch: over which ranks gradients are averaged, and calls before modules.

Parameters, inputs and losses are small integers and ranks a power of 2, so that means are exact in any order.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.adapters.torch.torch_reduction import called_paths, module_of, modules_of, outermost
from ft_plugins.errors import UnsupportedError
from ft_plugins.model.reduction import ReducedOver, ReductionControl
from harness.gang import gang
from tests.unit.adapters.edge_log import EdgeLog, backward, forward

SECONDS = 280.0  # a bound; some seconds on idle cores
ALL, LOCAL = ReducedOver.ALL, ReducedOver.LOCAL


class Block(torch.nn.Module):
    """A layer with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, numbers):
        return self.linear(numbers) * self.scale


class Stack(torch.nn.Module):
    """An embedding, layers, a buffer, a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.embedding = torch.nn.Embedding(7, 4)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens):
        numbers = self.embedding(tokens)
        for layer in self.layers:
            numbers = layer(numbers)
        return self.head(numbers)


def stack():
    """The same small integers on every rank."""
    model, generator = Stack(), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randint(-1, 2, one.shape, generator=generator))
    return model


def tokens(rank, number):
    return torch.randint(7, (3,), generator=torch.Generator().manual_seed(100 * number + rank))


def expected(rank, numbers, members):
    """The mean over `members` ranks of the gradients of the batches `numbers`, which accumulate."""
    model = stack()
    for number in numbers:
        model(tokens(rank, number)).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    if members > 1:
        for one in gradients.values():
            dist.all_reduce(one)
            one /= members
    return gradients


def _reduced(rank, world):
    """Warm-up, local, local with accumulation, and back; the loop accumulates by no_sync, and as nanoGPT does."""
    parallel = DistributedDataParallel(stack())
    host = TorchHost(parallel, torch.optim.SGD(parallel.parameters(), 0.0))
    host.prepare_reduction()
    number = 0
    for over in (ALL, LOCAL, LOCAL, ALL, LOCAL, ALL):
        host.reduce_over(over)
        for accumulate in ("", "no_sync", "attribute"):
            parallel.zero_grad()
            parallel.module.seen.fill_(rank)
            first, second = number + 1, number + 2
            number += 2
            if accumulate == "no_sync":
                with parallel.no_sync():
                    parallel(tokens(rank, first)).sum().backward()
            elif accumulate == "attribute":
                parallel.require_backward_grad_sync = False
                parallel(tokens(rank, first)).sum().backward()
                parallel.require_backward_grad_sync = True
            parallel(tokens(rank, second)).sum().backward()
            numbers = (first, second) if accumulate else (second,)
            wanted = expected(rank, numbers, world if over is ALL else 1)
            for name, one in parallel.module.named_parameters():
                assert one.grad is not None and torch.equal(one.grad, wanted[name]), (over, accumulate, name)
            if over is LOCAL:
                assert int(parallel.module.seen) == rank, "buffers are not taken from rank 0 either"
            else:
                assert parallel.require_backward_grad_sync


def test_gradients_are_averaged_over_all_ranks_or_not_at_all():
    gang(_reduced, 2, seconds=SECONDS)


def _refused(rank, world):
    half = [dist.new_group([one]) for one in range(world)][rank]
    own = DistributedDataParallel(stack())
    own.require_backward_grad_sync = False
    models = [
        stack(),
        DistributedDataParallel(stack(), static_graph=True),
        DistributedDataParallel(stack(), process_group=half),
        own,
    ]
    words = []
    for model in models:
        host = TorchHost(model, torch.optim.SGD(model.parameters(), 0.1))
        assert isinstance(host, ReductionControl) and host.shard_group() == (rank,)
        with pytest.raises(UnsupportedError) as caught:
            host.prepare_reduction()
        words.append(str(caught.value))
    return words


def test_what_cannot_be_kept_local_is_refused_by_name():
    plain, static, half, own = gang(_refused, 2, seconds=SECONDS)[1]
    assert plain.startswith("rank 1: local SGD is not supported here: the loop reduces its gradients by itself; wrap")
    assert "static_graph" in static and "over 1 of 2 ranks" in half and "require_backward_grad_sync" in own


def host_of(model):
    return TorchHost(model, torch.optim.SGD(model.parameters(), 0.1))


def test_one_rank_has_nothing_to_reduce():
    host = host_of(stack())
    host.prepare_reduction()
    host.reduce_over(LOCAL)
    assert host.shard_group() == (0,)


# ---- modules ----


@pytest.mark.parametrize(
    "name, module",
    [
        ("embed.weight", ""),
        ("weight", ""),
        ("layers.3.mlp.weight", "layers.3"),
        ("model.h.12.experts.5.w", "model.h.12"),
        ("0.weight", "0"),
        ("prompts.0", ""),  # a ParameterList
        ("layers.1.prompts.0", "layers.1"),
    ],
)
def test_a_module_is_the_path_up_to_the_first_number(name, module):
    assert module_of(name) == module


def test_what_is_in_no_layer_comes_first():
    assert list(modules_of(["a.1.w", "w", "a.0.w", "b.w"]).items()) == [
        ("w", ""), ("b.w", ""), ("a.1.w", "a.1"), ("a.0.w", "a.0")
    ]  # fmt: skip
    assert outermost(["a.1", "a", "a.b.c", "ab"]) == ["a", "ab"] and outermost(["x", ""]) == [""]


def test_modules_of_a_host_are_of_its_parameters():
    host = host_of(stack())
    names = {item.name for item in host.inventory().items if item.role.value == "parameter"}
    assert set(host.modules()) == names
    assert list(dict.fromkeys(host.modules().values())) == ["", "layers.0", "layers.1"]


def test_calls_come_before_each_module_and_its_changes_are_used():
    model = stack()
    called = []
    host = host_of(model)

    def call(module):
        called.append(module)
        with torch.no_grad():
            for name, one in host.modules().items():
                if one == module:
                    host.tensors()[name].fill_(1.0)

    host.before_modules(call)
    found = model(tokens(0, 1))
    assert called == ["", "layers.0", "layers.1"]
    with torch.no_grad():
        for one in model.parameters():
            assert (one == 1.0).all()
    called.clear()
    assert torch.equal(found, model(tokens(0, 1)))
    called.clear()
    model.eval()
    model(tokens(0, 1))
    assert called == ["", "layers.0", "layers.1"], "an evaluation uses what was synchronised, too"


def test_calls_come_in_recomputations():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    called = []
    host_of(model).before_modules(called.append)
    checkpoint(model, torch.ones(1, 2), use_reentrant=False).sum().backward()
    assert called == ["0", "1", "0", "1"]


class Container(torch.nn.Module):
    """Layers that are containers, which have no forward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(2, 2), "down": torch.nn.Linear(2, 2)}) for _ in range(2)
        )
        self.shifts = torch.nn.ModuleList([torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(2))})])

    def forward(self, numbers):
        for layer in self.layers:
            numbers = layer["down"](layer["up"](numbers))
        return numbers + self.shifts[0]["a"]


def test_containers_are_followed_by_their_parts():
    model = Container()
    called = []
    host_of(model).before_modules(called.append)
    model(torch.ones(1, 2))
    assert called == ["shifts.0", "layers.0", "layers.0", "layers.1", "layers.1"]
    assert called_paths(model, "layers.1", ["layers.1.up.weight", "layers.1.down.bias"]) == [
        "layers.1.up", "layers.1.down"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2))), "'0' .*is a ScriptModule"),
        (lambda: torch.nn.ModuleList([torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(2))})]),
         "'0.a' is in no module that has a forward"),
    ],
)  # fmt: skip
def test_forwards_that_cannot_be_followed_are_refused(build, words):
    with pytest.raises(UnsupportedError, match=words):
        host_of(build()).before_modules(lambda module: None)
    with pytest.raises(UnsupportedError, match=words):
        host_of(build()).follow_modules(EdgeLog())


# ---- edges ----


def test_edges_of_layers_lie_inside_those_of_the_model():
    """Those of the rest, whose embedding comes last in the backward."""
    model, log = stack(), EdgeLog()
    host_of(model).follow_modules(log)
    for _ in range(2):
        model(tokens(0, 1)).sum().backward()
        assert log.taken() == [
            "f+ ", *forward("layers.0", "layers.1"), "f- ", "b+ ", *backward("layers.1", "layers.0"), "b- ",
        ]  # fmt: skip
    with torch.no_grad():
        model(tokens(0, 1))
    assert log.taken() == ["f+ ", *forward("layers.0", "layers.1"), "f- "]


def test_a_container_has_the_edges_of_its_parts():
    model, log = Container(), EdgeLog()
    host_of(model).follow_modules(log)
    model(torch.ones(1, 2)).sum().backward()
    layers = ["layers.0", "layers.0", "layers.1", "layers.1"]
    assert log.words[:10] == ["f+ shifts.0", *forward(*layers), "f- shifts.0"]
    assert log.words[10] == "b+ shifts.0"
    # the shift is added last: all of the gradients of its module are there before those of layers
    assert log.words[11:] == ["b- shifts.0", *backward(*reversed(layers))]


def _followed(rank, world):
    """Reduced and local iterations, batches accumulated; buckets are small, so that several are reduced."""
    states = []
    for follows in (False, True):
        log, parallel = EdgeLog(), DistributedDataParallel(stack(), bucket_cap_mb=1e-5)
        optimizer = torch.optim.SGD(parallel.parameters(), 0.001, momentum=0.9)
        host = TorchHost(parallel, optimizer)
        host.prepare_reduction()
        if follows:
            host.follow_modules(log)
        for step, over in enumerate((ALL, LOCAL, LOCAL, ALL)):
            host.reduce_over(over)
            with parallel.no_sync():
                parallel(tokens(rank, step)).square().mean().backward()
            parallel(tokens(rank, step + 100)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            one = ["f+ ", *forward("layers.0", "layers.1"), "f- ", "b+ ", *backward("layers.1", "layers.0"), "b- "]
            assert log.taken() == (one * 2 if follows else [])
        states.append([one.detach() for one in parallel.parameters()])
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


def test_a_followed_training_is_the_same_bit_for_bit():
    gang(_followed, 2, seconds=SECONDS)
