"""The update as two spans: until all agree, and what is then updated."""

import torch

from ft_plugins.adapters.script.script_hooks import around
from ft_plugins.adapters.update_spans import span, update_spans
from ft_plugins.model.timeline import Kind


class Heard:
    """What was told, in order."""

    def __init__(self):
        self.edges = []

    def begin(self, kind, microbatch=-1, chunk=0):
        self.edges.append(("begin", kind.value))

    def end(self, kind, microbatch=-1, chunk=0):
        self.edges.append(("end", kind.value))


def optimizers():
    return [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1) for _ in range(2)]


AGREED = [("begin", "reduce"), ("end", "reduce")]
UPDATED = [("begin", "update"), ("end", "update")]


def test_the_update_begins_with_the_first_optimizer_that_steps():
    heard, inner = Heard(), optimizers()

    def step(closure, *, told):
        assert closure is None
        heard.edges.append(("norm", ""))
        for optimizer in inner:
            optimizer.step()
        return told

    wrapped = around(update_spans(inner, heard))(step)
    for _ in range(2):
        assert wrapped(None, told=7) == 7
    once = [AGREED[0], ("norm", ""), AGREED[1], *UPDATED]
    assert heard.edges == once * 2


def test_a_skipped_update_is_none():
    heard, inner = Heard(), optimizers()
    around(update_spans(inner, heard))(lambda: None)()
    assert heard.edges == AGREED
    inner[0].step()
    assert heard.edges == AGREED, "a step elsewhere is no update of training"


def test_what_is_around_something_hands_through_what_it_is_given_and_gives():
    heard = Heard()
    assert span(Kind.SEND, heard)(lambda one, *, other: one + other, 1, other=2) == 3
    assert heard.edges == [("begin", "send"), ("end", "send")]
