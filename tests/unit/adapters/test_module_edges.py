"""The edges of modules: their order by content, in every kind of graph that a model may build; nothing else changes."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ft_plugins.adapters.module_edges import EdgeReporter, require_followable
from ft_plugins.errors import UnsupportedError
from tests.unit.adapters.edge_log import EdgeLog, backward, forward


def follow(**parts):
    """Follow each part under its name."""
    log = EdgeLog()
    reporter = EdgeReporter(log)
    for name, part in parts.items():
        reporter.follow(part, {name: list(part.parameters())})
    return log


def stack(layers=3):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def followed(model):
    return follow(**{f"m{at}": part for at, part in enumerate(model)})


def test_backwards_follow_each_other_in_reverse_order():
    """The output of a layer is the input of the next one: that one's end is reported before this one's begin."""
    model = stack()
    log = followed(model)
    loss = model(torch.ones(2, 4)).sum()
    assert log.taken() == forward("m0", "m1", "m2")
    loss.backward()
    assert log.taken() == backward("m2", "m1", "m0")


def test_gradients_of_a_module_are_there_when_its_backward_ends():
    model = stack()
    seen = {}

    class Looking(EdgeLog):
        def backward_begin(self, module):
            seen[f"begin {module}"] = [one.grad is not None for part in model for one in part.parameters()]

        def backward_end(self, module):
            seen[f"end {module}"] = [one.grad is not None for part in model for one in part.parameters()]

    reporter = EdgeReporter(Looking())
    for at, part in enumerate(model):
        reporter.follow(part, {f"m{at}": list(part.parameters())})
    for inputs in (torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)):
        seen.clear()
        model.zero_grad()
        model(inputs).sum().backward()
        for at in range(3):
            assert seen[f"begin m{at}"] == [False] * 2 * (at + 1) + [True] * 2 * (2 - at)
            assert seen[f"end m{at}"] == [False] * 2 * at + [True] * 2 * (3 - at)


def test_inner_edges_lie_inside_outer_ones():
    """The whole model gets and returns the tensors of its first and last layer; or it has the first one for itself."""
    model = stack(2)
    log = follow(all=model, m0=model[0], m1=model[1])
    x = torch.ones(2, 4, requires_grad=True) * 2
    model(x).sum().backward()
    assert log.taken() == ["f+ all", *forward("m0", "m1"), "f- all", "b+ all", *backward("m1", "m0"), "b- all"]
    model = stack(3)
    log = EdgeLog()
    reporter = EdgeReporter(log)
    reporter.follow(model, {"": list(model[0].parameters())})
    for at in (1, 2):
        reporter.follow(model[at], {f"m{at}": list(model[at].parameters())})
    model(torch.ones(2, 4)).sum().backward()
    assert log.taken() == ["f+ ", *forward("m1", "m2"), "f- ", "b+ ", *backward("m2", "m1"), "b- "]
    both = EdgeLog()
    EdgeReporter(both).follow(model, {"a": list(model[0].parameters()), "b": list(model[1].parameters())})
    model(x.detach().requires_grad_() * 2).sum().backward()
    assert both.taken() == ["f+ a", "f+ b", "f- b", "f- a", "b+ a", "b+ b", "b- b", "b- a"]


class Nested(nn.Module):
    """Takes and returns tensors within other values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, count, *, given):
        return {"count": count, "parts": [(None, self.linear(given["x"][0]))]}


def test_tensors_are_found_in_nested_values():
    first, second = Nested(), Nested()
    log = follow(first=first, second=second)
    between = first(1, given={"mask": torch.ones(1), "x": (torch.ones(4),)})["parts"][0][1] * 2
    second(2, given={"x": [between]})["parts"][0][1].sum().backward()
    assert log.taken() == [*forward("first", "second"), *backward("second", "first")]


def test_tensors_changed_in_place_are_followed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    log = follow(m0=model[0], m1=model[1], m2=model[2])
    model(torch.ones(2, 4)).sum().backward()
    assert log.taken() == [*forward("m0", "m1", "m2"), *backward("m2", "m1", "m0")]


def test_an_evaluation_has_forwards_only():
    model = stack(2)
    log = followed(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert model(torch.ones(2, 4)).grad_fn is None
        assert log.taken() == forward("m0", "m1")
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())


def test_micro_batches_may_be_in_flight_together():
    model = stack(2)
    log = followed(model)
    losses = [model(torch.ones(2, 4)).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert log.taken() == forward("m0", "m1") * 2 + backward("m1", "m0") * 2


def test_a_module_called_twice_has_two_backwards():
    layer, first = nn.Linear(4, 4), nn.Linear(4, 4)
    log = follow(layer=layer)
    layer(layer(first(torch.ones(4)))).sum().backward()
    assert log.taken() == forward("layer", "layer") + backward("layer", "layer")


def test_an_embedding_ends_when_its_gradient_is_complete():
    """Also if the head uses its weight first; a frozen parameter is not waited for."""
    embedding, layer, head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
    head.weight = embedding.weight
    head.bias.requires_grad_(False)
    log = EdgeLog()
    reporter = EdgeReporter(log)
    reporter.follow(embedding, {"rest": [embedding.weight, head.bias]})
    reporter.follow(layer, {"layer": list(layer.parameters())})
    head(layer(embedding(torch.tensor([1, 2])))).sum().backward()
    assert log.taken() == forward("rest", "layer") + backward("layer", "rest")
    embedding.weight.requires_grad_(False)
    head(layer(embedding(torch.tensor([1, 2])))).sum().backward()
    assert log.taken() == forward("rest", "layer") + backward("layer")
    embedding.weight.requires_grad_(True)
    head(layer(embedding(torch.tensor([1, 2])))).sum().backward()
    assert log.taken() == forward("rest", "layer") + backward("layer", "rest")


def test_what_gets_no_gradient_ends_with_the_backward():
    used, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    log = EdgeLog()
    EdgeReporter(log).follow(used, {"both": [*used.parameters(), *unused.parameters()]})
    for _ in range(2):
        used(torch.ones(4)).sum().backward()
        assert log.taken() == forward("both") + backward("both")


def test_the_backward_of_a_frozen_module_is_reported_if_its_input_has_a_history():
    """Else nothing tells when it ends."""
    frozen, first = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    log = follow(frozen=frozen)
    frozen(torch.ones(4, requires_grad=True)).sum().backward()
    assert log.taken() == forward("frozen")
    frozen(first(torch.ones(4))).sum().backward()
    assert log.taken() == forward("frozen") + backward("frozen")


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("broken")


def test_a_backward_that_failed_is_over_at_the_next_forward():
    first, second, breaks = nn.Linear(4, 4), nn.Linear(4, 4), [True]

    class Breaking(nn.Module):
        def forward(self, x):
            return second(Broken.apply(x) if breaks.pop() else x)

    log = follow(first=first, second=(part := Breaking()))
    with pytest.raises(ArithmeticError):
        part(first(torch.ones(4))).sum().backward()
    assert log.words == [*forward("first", "second"), "b+ second"]
    breaks.append(False)
    part(first(torch.ones(4))).sum().backward()
    assert log.taken()[5:] == ["b- second", *forward("first", "second"), *backward("second", "first")]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputations_are_forwards_within_a_backward(reentrant):
    model = stack(4)
    log = followed(model)
    x = model[0](torch.ones(2, 4))
    x = checkpoint(model[1:3], x, use_reentrant=reentrant)
    model[3](x).sum().backward()
    words = log.taken()
    assert words[:8] == forward("m0", "m1", "m2", "m3") and words[8:10] == backward("m3")
    assert words[-2:] == backward("m0")
    # the part that is run again begins with its last module; or, if nothing is open, with the first one run again
    assert words[10:-2] == (
        ["b+ m1", *forward("m1", "m2"), *backward("m2"), "b- m1"]
        if reentrant
        else ["b+ m2", *forward("m1", "m2"), "b- m2", *backward("m1")]
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputations_lie_inside_of_the_model(reentrant):
    layers = stack(3)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layers = nn.Linear(4, 4), layers

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Model()
    log = EdgeLog()
    reporter = EdgeReporter(log)
    reporter.follow(model, {"all": list(model.first.parameters())})
    for at, layer in enumerate(layers):
        reporter.follow(layer, {f"m{at}": list(layer.parameters())})
    model(torch.ones(2, 4)).sum().backward()
    words = log.taken()
    assert words[:9] == ["f+ all", *forward("m0", "m1", "m2"), "f- all", "b+ all"] and words[21:] == ["b- all"]
    for at in range(3):
        name = f"m{2 - at}"
        again = [*forward(name), *backward(name)] if reentrant else [f"b+ {name}", *forward(name), f"b- {name}"]
        assert words[9 + 4 * at : 13 + 4 * at] == again


def test_functions_are_followed_too():
    log, layer, first = EdgeLog(), nn.Linear(4, 4), nn.Linear(4, 4)
    call = EdgeReporter(log).wrapped(lambda x: x @ layer.weight, {"tied": [layer.weight]})
    call(first(torch.ones(2, 4))).sum().backward()
    assert log.taken() == forward("tied") + backward("tied")
    with pytest.raises(RuntimeError):
        call(torch.ones(2, 5))
    assert log.taken() == forward("tied")


@pytest.mark.parametrize("kind", ["plain", "reentrant", "not reentrant"])
def test_training_is_the_same_bit_for_bit(kind):
    def run(follows):
        torch.manual_seed(5)
        embedding, head = nn.Embedding(7, 8), nn.Linear(8, 7)
        layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.LayerNorm(8)) for _ in range(3)
        )
        head.weight = embedding.weight
        model = nn.ModuleList([embedding, *layers, head])
        if follows:
            log = follow(**{f"m{at}": part for at, part in enumerate([embedding, *layers, head])})
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(4):
            x = embedding(torch.randint(7, (5,)))
            for layer in layers:
                again = {} if kind == "plain" else {"use_reentrant": kind == "reentrant"}
                x = x + (checkpoint(layer, x, **again) if again else layer(x))
            nn.functional.cross_entropy(head(x), torch.randint(7, (5,))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if follows:
                assert log.words and set(log.words) >= {f"b- m{at}" for at in range(5)}
                log.words.clear()
        return [*model.parameters(), torch.get_rng_state()]

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)


def test_a_graph_is_freed_with_its_last_tensor():
    """Nothing registered holds on to it: not even until the next collection of cycles."""
    model = stack(2)
    followed(model)
    freed = []

    class Noticed:
        def __del__(self):
            freed.append(True)

    gc.collect()
    gc.disable()
    try:
        loss = model(torch.ones(2, 4)).sum()
        node = loss.grad_fn.next_functions[0][0]
        node.metadata["noticed"] = Noticed()
        del node, loss
        assert freed == [True]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "part, words",
    [
        (lambda: torch.jit.script(nn.Linear(2, 2)), "rank 3: forward and backward of 'x' cannot .* is a ScriptModule"),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), "rank 3: forward and backward of 'x' cannot .* in a ModuleList"),
    ],
)
def test_what_runs_no_hooks_is_refused(part, words):
    with pytest.raises(UnsupportedError, match=words):
        require_followable(3, part(), {"x": []})
