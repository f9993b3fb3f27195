"""The ranks of a replica set hold the same items, or the job does not start; what they send is short in a large set."""

import pytest

from ft_plugins.errors import InventoryError
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.systems.reft.reft_plan import check_replicas

ALL = tuple(range(64))


class Gathered:
    """All ranks as one of them sees them: a first pass collects what each sends."""

    def __init__(self):
        self.sent = []
        self.received = None

    def gather(self, payload):
        if self.received is None:
            self.sent.append(payload)
            raise StopIteration
        return self.received


def check(inventories):
    """What each rank raises, '' for nothing."""
    collective = Gathered()
    for inventory in inventories:
        with pytest.raises(StopIteration):
            check_replicas(inventory, collective)
    collective.received = collective.sent
    assert max(map(len, collective.sent)) < 100
    raised = []
    for inventory in inventories:
        try:
            check_replicas(inventory, collective)
            raised.append("")
        except InventoryError as error:
            raised.append(str(error))
    return raised


def weights(rank, replicas=ALL, width=8):
    items = [Item("w", "uint8", (width,), width, Role.PARAMETER, replicas)]
    return Inventory.of(rank, [*items, Item("own", "uint8", (rank,), rank, Role.MOMENT, (rank,))])


def test_equal_replicas_start():
    assert check([weights(rank) for rank in ALL]) == [""] * 64


def test_a_rank_with_other_items_is_named_on_all_ranks_of_its_set():
    raised = check([weights(rank, width=9 if rank == 7 else 8) for rank in ALL])
    assert all(f"rank {rank}: expected rank {0 if rank == 7 else 7} to hold" in one for rank, one in enumerate(raised))


def test_a_rank_that_knows_of_fewer_replicas_is_named():
    raised = check([weights(rank, tuple(range(1, 64)) if rank == 5 else ALL) for rank in ALL])
    assert all("rank 5 to hold" in raised[rank] for rank in ALL if rank != 5) and "rank 1 to hold" in raised[5]
