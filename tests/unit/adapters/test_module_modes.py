"""What modules have besides tensors is what it was: modes, numbers, lists of numbers, extra state."""

import numpy as np
import pytest
import torch

from ft_plugins.adapters import module_modes
from ft_plugins.adapters.module_modes import ModuleNumbers, read_modes, require_encodable_modes, write_modes
from ft_plugins.adapters.module_parts import parts_of
from ft_plugins.errors import UnsupportedError
from ft_plugins.snapshot.capture import codec
from tests.unit.adapters.torch_small import Small, handed_over, take_over


class Counted(torch.nn.Module):
    """A module with extra state."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_layers_that_were_unfrozen_or_put_into_evaluation_in_training_are_so_again():
    trained, again = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), Counted()) for _ in range(2))
    for one in (trained, again):
        one[0].requires_grad_(False)  # as the script builds it
    trained[0].requires_grad_(True)
    trained[1].eval()
    trained[2].calls = 7
    write_modes(again, codec.decode(codec.encode(read_modes(parts_of(trained)))))
    assert all(one.requires_grad for one in again.parameters())
    assert again.training and not again[1].training and again[2].calls == 7


def test_a_number_of_a_module_that_changes_in_training_is_restored():
    trained, again = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1)) for _ in range(2))
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    assert numbers.captured() == {}
    trained[1].p, trained.tau = 0.05, 3
    trained.eval()
    assert numbers.captured() == {"": {"tau": 3}, "1": {"p": 0.05}}
    others.restore(codec.decode(codec.encode(numbers.captured())))
    assert again[1].p == 0.05 and again.tau == 3 and again.training
    assert others.captured() == numbers.captured()


def test_a_number_that_is_back_at_what_it_was_built_with_is_restored_too():
    """The script sets it right after the engine is built, as in its first start; in iteration 100 it set it back."""
    trained, again = (torch.nn.Sequential(torch.nn.Dropout(0.1)) for _ in range(2))
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    again[0].p = 0.5
    others.restore(numbers.captured())
    assert again[0].p == 0.1


def test_numbers_that_describe_a_cache_are_left_to_it():
    """As a module that makes a table for the longest sequence so far, and keeps its length."""
    trained, again = (torch.nn.Sequential(torch.nn.Identity()) for _ in range(2))
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    trained[0].table, trained[0].length = torch.zeros(8), 8
    assert numbers.captured() == {}
    again[0].table, again[0].length = torch.zeros(4), 4
    others.restore({"0": {"length": 8}})
    assert again[0].length == 4


def test_a_module_whose_extra_state_cannot_be_captured_is_named():
    module = torch.nn.Sequential(Counted())
    module[0].calls = {1, 2}
    with pytest.raises(UnsupportedError, match=r"rank 2: the extra state of '0' \(Counted\) cannot be captured"):
        require_encodable_modes(module, 2)


class Scheduled(torch.nn.Module):
    """A module with a curriculum of its own."""

    def __init__(self):
        super().__init__()
        self.rates, self.seen, self.window = [0.1, 0.2], {"easy": 0, "hard": [0, 0]}, (1, 2)
        self.history = []
        self.group = None


def trained_and_again():
    trained, again = Scheduled(), Scheduled()
    return trained, ModuleNumbers(trained), again, ModuleNumbers(again)


def test_numbers_in_lists_tuples_and_dicts_are_restored_where_the_script_has_them():
    trained, numbers, again, others = trained_and_again()
    hard, rates = again.seen["hard"], again.rates  # a script's variables
    trained.rates[1], trained.window, trained.history = 0.3, (3, 4), [1.5]
    trained.seen["hard"][0], trained.seen["new"] = 7, None
    others.restore(codec.decode(codec.encode(numbers.captured())))
    assert (again.rates, again.seen, again.window) == ([0.1, 0.3], {"easy": 0, "hard": [7, 0], "new": None}, (3, 4))
    assert again.history == [1.5] and again.rates is rates and again.seen["hard"] is hard
    assert others.captured() == numbers.captured()


def test_lists_that_are_back_at_what_they_were_built_with_are_restored_too():
    _, numbers, again, others = trained_and_again()
    again.rates[0], again.seen["more"] = 0.5, 2
    others.restore(numbers.captured())
    assert again.rates == [0.1, 0.2] and again.seen == {"easy": 0, "hard": [0, 0]}


def test_what_a_library_has_put_in_place_of_nothing_is_left_there():
    _, numbers, again, others = trained_and_again()
    again.group = group = object()
    others.restore(numbers.captured())
    assert again.group is group


def test_numbers_of_a_module_in_a_loop_of_plain_torch_are_restored():
    first, second = Small(), Small()
    for small, rate in ((first, 0.05), (second, 0.1)):
        small.model[0].rate, small.model[0].losses = rate, [rate]
    take_over(second.host, *handed_over(first.host))
    assert (second.model[0].rate, second.model[0].losses) == (0.05, [0.05])


def test_a_number_of_numpy_is_a_number_too():
    """As the temperature of a Gumbel softmax that a script anneals by `np.maximum`."""
    trained, again = (torch.nn.Sequential(torch.nn.Dropout(0.5)) for _ in range(2))
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    trained[0].p = np.maximum(trained[0].p * np.exp(-0.5), 0.1)
    trained[0].rates = [np.float32(0.25)]
    others.restore(codec.decode(codec.encode(numbers.captured())))
    assert again[0].p == trained[0].p != 0.5 and type(again[0].p) is np.float64
    assert again[0].rates == [np.float32(0.25)]


def test_modules_are_read_in_torchs_order_each_once():
    """Shared ones, absent ones and shared parameters too: snapshots name them by their place."""
    shared, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    other.weight = shared.weight
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(shared, torch.nn.ModuleList([other, shared])), "b": shared})
    model.register_module("none", None)
    model["deep"] = torch.nn.Sequential(torch.nn.Sequential(torch.nn.LayerNorm(2)))
    own = parts_of(model)
    assert own == list(model.named_modules())
    assert [*map(id, module_modes._parameters(own))] == [*map(id, model.parameters())]
