"""What of a model's forwards is read for the ledger: each batch of training once, by its content."""

import copy
import pickle

import numpy as np
import pytest
import torch

from ft_plugins.adapters.data.observed_inputs import (
    SAMPLED,
    ObservedForwards,
    digest_of_gradients,
    digest_of_inputs,
    plain_number,
)


class Reader:
    def __init__(self):
        self.digests = []

    def read(self, digest):
        self.digests.append(digest)

    def graded(self, digest):
        raise AssertionError

    def computed(self, loss=None, norm=None):
        raise AssertionError


def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


def test_each_forward_in_training_is_read_once_and_evaluations_are_not():
    reader, net = Reader(), model()
    outer = torch.nn.Sequential(net)
    ObservedForwards([outer, net], reader)
    batch = torch.randn(2, 4)
    outer(batch)
    net(batch)
    with torch.no_grad():
        outer(batch)
    outer.eval()
    outer(batch)
    assert reader.digests == [digest_of_inputs(((batch,), {}))] * 2


def test_a_forward_that_raises_does_not_hide_the_next_one():
    reader, net = Reader(), model()
    ObservedForwards([net], reader)
    with pytest.raises(RuntimeError):
        net(torch.randn(2, 3))
    net(torch.randn(2, 4))
    assert len(reader.digests) == 2


def test_a_copied_or_pickled_model_takes_no_reader_along():
    reader, net = Reader(), model()
    ObservedForwards([net], reader)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # noqa: S301 - its own
        other(torch.randn(2, 4))
    assert reader.digests == []


DIFFERENT = [
    (torch.zeros(3), torch.ones(3)),
    (torch.zeros(3), torch.zeros(4)),
    (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    ({"a": torch.zeros(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.zeros(2)}),
    ([torch.zeros(2), 1], [torch.zeros(2), 2]),
    (np.arange(3), np.arange(1, 4)),
    (torch.zeros(SAMPLED), torch.cat([torch.ones(1), torch.zeros(SAMPLED - 1)])),  # at the begin of a large one
    (torch.arange(2 * SAMPLED), torch.arange(2 * SAMPLED) + 1),
    (torch.arange(2 * SAMPLED).view(2, -1).T, torch.arange(2 * SAMPLED).view(2, -1).T + 1),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_inputs_that_differ_have_other_digests_and_copies_the_same(one, other):
    assert digest_of_inputs(one) == digest_of_inputs(copy.deepcopy(one)) is not None
    assert digest_of_inputs(one) != digest_of_inputs(other)


def test_what_holds_no_tensor_is_no_batch():
    deep = torch.zeros(2)
    for _ in range(20):
        deep = [deep]
    for inputs in ((), {"training": True, "step": 3}, "text", torch.empty(0), deep, torch.zeros(2, device="meta")):
        assert digest_of_inputs(inputs) is None


def test_gradients_are_sampled_over_all_parameters():
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
    assert digest_of_gradients(net.parameters()) is None
    net(torch.ones(2, 64)).sum().backward()
    before = digest_of_gradients(net.parameters())
    assert before is not None and before == digest_of_gradients(net.parameters())
    for one in net.parameters():
        assert one.grad is not None
        one.grad.mul_(1.001)
    assert digest_of_gradients(net.parameters()) != before


def test_a_number_is_taken_from_what_is_on_the_cpu_alone():
    assert plain_number(torch.tensor(1.5)) == plain_number(1.5) == 1.5
    for value in (None, "x", torch.zeros(2), torch.zeros((), device="meta")):
        assert plain_number(value) is None
