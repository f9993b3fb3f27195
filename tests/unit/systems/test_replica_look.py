"""Ranks that are taken for replicas: a difference in any byte that is sampled, or in what is there, is named."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from ft_plugins.errors import StateChangedError
from ft_plugins.events import Events, catalogue
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.systems.reft.replica_look import ReplicaLook


class Gather:
    """Of two ranks; each gets what both have sent."""

    refused, seconds = False, 60.0

    def __init__(self):
        self._parts, self._over = [b"", b""], Event()

    def send(self, rank, payload):
        self._parts[rank] = payload
        if all(self._parts):
            self._over.set()
        return self

    def waits(self, seconds):
        return not self._over.wait(seconds)

    def result(self):
        return self._parts


class OneRank:
    world_size = 2

    def __init__(self, rank, gathers):
        self.rank, self._gathers, self._sent = rank, gathers, 0

    def start_gather(self, payload):
        self._sent += 1
        return self._gathers[self._sent].send(self.rank, payload)

    def announced(self, word):
        return False


class Ranks:
    def __init__(self, *tensors):
        self.gathers, self.events = defaultdict(Gather), Events("n", 0)
        self.looks = [
            ReplicaLook(_host(rank, one), OneRank(rank, self.gathers), self.events) for rank, one in enumerate(tensors)
        ]

    def look(self, iteration):
        """The error of each rank, '' for none."""
        for one in self.looks:
            one.begin(iteration)
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(_told, self.looks))


def _told(look):
    try:
        look.fence("gone")
    except StateChangedError as error:
        return str(error)
    return ""


def _host(rank, tensors):
    items = [
        Item(name, str(one.dtype).removeprefix("torch."), tuple(one.shape), one.nbytes, Role.PARAMETER, (0, 1))
        for name, one in tensors.items()
    ]

    class Host:
        def inventory(self):
            return Inventory.of(rank, items)

        def tensors(self):
            return tensors

    return Host()


def state(**changed):
    torch.manual_seed(1)
    return {"a": torch.randn(300), "b": torch.randn(40, 70), "c": torch.ones(3)} | changed


def shifted(tensor):
    """The same values, at another alignment."""
    held = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    held[1:] = tensor.flatten()
    return held[1:].view(tensor.shape)


@pytest.mark.parametrize("since", [0, 5000])
def test_equal_replicas_pass_wherever_their_memory_lies(since):
    one = state()
    ranks = Ranks(one, {name: shifted(each) for name, each in one.items()})
    for look in ranks.looks:
        look.begun = since
    assert ranks.look(since + 2) == ["", ""]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (state(c=torch.tensor([1.0, 1.0, 2.0])), "iteration 2: 'c' of rank 1 differs from rank 0's (1 tensors do)"),
        (state(b=torch.ones(40, 70), a=torch.ones(300)), "iteration 2: 'a' of rank 1 differs from rank 0's (2 "),
        (state(b=torch.empty(40, 70, device="meta")), "iteration 2: 'b' of rank 1 differs from rank 0's (1 "),
    ],
    ids=["a value", "two tensors", "not made yet"],
)
def test_a_difference_is_named_on_all_ranks(other, words):
    said = Ranks(state(), other).look(2)
    assert all(words in one for one in said), said


def test_a_late_difference_is_an_alarm():
    ranks, found = Ranks(state(), state(c=torch.zeros(3))), []
    ranks.events.subscribe(found.append)
    assert ranks.look(16) == ["", ""] and {event.type for event in found} == {catalogue.AUDIT_FAILED}
    assert "'c' of rank 1 differs" in found[0].fields["reason"] and found[0].fields["ranks"] == [0, 1]


def test_between_two_looks_nothing_is_sent():
    ranks = Ranks(state(), state(c=torch.zeros(3)))
    for iteration in (1, 3, 5, 6, 7, 9):
        ranks.look(iteration)
    assert not ranks.gathers
