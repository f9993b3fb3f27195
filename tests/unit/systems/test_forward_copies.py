"""Copies that forwards read get the bits of a cast, module by module, whatever their dtypes, sizes and pieces are."""

import pytest
import torch

from ft_plugins.errors import UnsupportedError
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.sync.links import Links
from ft_plugins.sync.rounds.modules import plan_groups, plan_modules
from ft_plugins.sync.rounds.outer import OuterRules
from ft_plugins.sync.rounds.synchronisation import Synchronisation, SynchronisationRules
from ft_plugins.systems.local_sgd.forward_copies import ForwardCopies

MODULES = {"a:main": "first", "b:main": "first", "c": "first", "d:main": "second"}


def item(name, elements, piece=None):
    role = Role.MAIN_PARAMETER if name.endswith(":main") else Role.PARAMETER
    return Item(name, "float32", (elements,), 4 * elements, role, (0,), piece=piece)


def built(copies):
    """A rank alone, which holds elements 2 to 5 of parameter b, and whose forward reads c itself. Buckets are small."""
    torch.manual_seed(1)
    live = {"a:main": torch.randn(5), "b:main": torch.randn(3), "c": torch.randn(4), "d:main": torch.randn(7)}
    pieces = {"b:main": (2, 5, 9)}
    inventory = Inventory.of(0, [item(name, len(one), pieces.get(name)) for name, one in live.items()])
    modules, links = plan_modules(inventory, MODULES, 16), Links(0, {}, None, torch.device("cpu"))
    plan = plan_groups([(0,)], [["first", "second"]]).of(0)
    one = Synchronisation(modules, plan, links, links, lambda: live, SynchronisationRules(OuterRules(0.8, 0.85), None))
    return ForwardCopies(modules, one, (0,), links, lambda: copies, 0), one, live


def test_each_module_is_derived_alone_and_a_rolled_back_one_from_the_last_synchronisation():
    copies = {"a": torch.zeros(5, dtype=torch.bfloat16), "b": torch.zeros(3, 3), "d": torch.zeros(7).half()}
    forward, one, live = built(copies)
    anchors = {name: value.clone() for name, value in live.items()}
    for value in live.values():
        value.add_(0.3)
    live["d:main"][0] = float("nan")  # of the only replica: its module goes back
    one.begin()
    trained = live["a:main"].clone()
    for name in ("first", "second"):
        forward.exchange(name)
    assert torch.equal(live["a:main"], trained) and not copies["a"].any(), "nothing is written in the background"
    forward.apply("first")
    assert not torch.equal(live["a:main"], trained) and torch.equal(copies["a"], live["a:main"].bfloat16())
    assert torch.equal(copies["b"].view(-1)[2:5], live["b:main"]) and copies["b"].count_nonzero() == 3
    assert not copies["d"].any()
    judgement = forward.apply("second")
    assert judgement is not None and judgement.rollback
    assert torch.equal(live["d:main"], anchors["d:main"]) and torch.equal(copies["d"], anchors["d:main"].half())


def test_a_module_of_which_a_rank_holds_nothing_is_exchanged_in_the_order_of_its_shard_group():
    held, shards = [("a", "b"), ("b", "c")] * 2, [(0, 1), (0, 1), (2, 3), (2, 3)]
    groups = plan_groups([(0, 2), (1, 3), (0, 2), (1, 3)], held, [("a", "b", "frozen", "c")] * 4, shards)
    orders = [(groups.of(rank).order, groups.of(rank).spanning) for rank in range(4)]
    assert orders == [(("a", "b", "c"), frozenset())] * 4
    assert set(shards) <= set(groups.all())


def test_a_parameter_whose_pieces_are_not_one_after_another_is_named():
    with pytest.raises(UnsupportedError, match="parameter 'b' is not contiguous"):
        built({"b": torch.zeros(3, 3).T[:, :2]})
