"""Modules and groups of local SGD: derived from reports, for jobs of thousands of ranks, without a deadlock."""

from itertools import combinations

import pytest

from ft_plugins.errors import ConfigError, UnsupportedError
from ft_plugins.model.inventory import Inventory, Item, IterationSpan, Role
from ft_plugins.model.topology import Topology
from ft_plugins.sync.rounds.modules import (
    plan_groups,
    plan_modules,
    require_replicas,
    require_shard_ranks,
    sync_group,
    synchronised,
)
from harness.operations import doubling


def item(name, replicas=(0, 4), role=Role.PARAMETER, **fields):
    return Item(name, "float32", (6,), 24, role, replicas, **fields)


def modules_of(stage, stages, tied):
    names = [f"layer {number}" for number in (2 * stage + 1, 2 * stage + 2)]
    first, last = stage == 0, stage == stages - 1
    return (*["embedding"] * first, *names, *["head"] * last, *["embedding"] * (last and tied and not first))


def job(topology, tied=True):
    ranks = range(topology.world_size)
    stages = [topology.coords(rank).pp for rank in ranks]
    return [topology.replicas(rank) for rank in ranks], [modules_of(stage, topology.pp, tied) for stage in stages]


def test_a_replica_is_a_whole_copy_of_the_model_and_holders_are_its_ranks_with_a_part_of_a_module():
    groups = plan_groups(*job(Topology(tp=2, pp=2, dp=2)))  # order tp-dp-pp: stages are 0..3 and 4..7
    first, last = groups.of(0), groups.of(7)
    assert first.replica == (0, 1, 4, 5) and last.replica == (2, 3, 6, 7)
    assert first.holders["layer 1"] == (0, 1) and first.holders["embedding"] == (0, 1, 4, 5)
    assert last.holders["head"] == (6, 7)
    assert first.modules == ("embedding", "head", "layer 1", "layer 2", "layer 3", "layer 4")


def test_a_module_on_two_stages_is_exchanged_first_on_both():
    groups = plan_groups(*job(Topology(tp=2, pp=2, dp=2)))
    assert groups.of(0).order == ("embedding", "layer 1", "layer 2")
    assert groups.of(7).order == ("embedding", "layer 3", "layer 4", "head")
    assert groups.of(7).spanning == {"embedding"}
    assert plan_groups(*job(Topology(tp=2, pp=2, dp=2), tied=False)).of(7).spanning == frozenset()


def test_ranks_exchange_what_they_have_in_common_in_one_order():
    """Else one would wait for the other's part of a module while that one waits for its part of another module."""
    sync = [(rank, rank + 3) for rank in range(3)] + [(rank - 3, rank) for rank in range(3, 6)]
    modules = [("a", "x", "b"), ("b", "y", "c"), ("c", "z", "a")] * 2  # each shares one module with each other one
    groups = plan_groups(sync, modules)
    orders = [groups.of(rank).order for rank in range(6)]
    ready = [0] * 3
    for _ in range(20):  # play the exchanges of one replica: a module advances when all its holders are at it
        for name, holders in groups.holders[0].items():
            at = [rank for rank in holders if ready[rank] < len(orders[rank]) and orders[rank][ready[rank]] == name]
            if at == list(holders):
                for rank in holders:
                    ready[rank] += 1
    assert ready == [3, 3, 3]


def test_groups_of_thousands_of_ranks_partition_the_job_in_steps_of_their_number():
    reports = {dp: job(Topology(tp=8, pp=16, dp=dp)) for dp in (4, 8)}
    assert doubling(lambda dp: plan_groups(*reports[dp]).of(0), 4) < 2.2
    topology = Topology(tp=8, pp=16, dp=32)
    groups = plan_groups(*job(topology))
    one = groups.of(4095)
    assert len(one.replica) == 8 * 16 and one.holders["layer 32"] == topology.group("tp", 4095)
    assert sorted(rank for replica in groups.replicas for rank in replica) == list(range(4096))
    for group in groups.all():
        assert len(group) in (8, 16, 32, 128) and len(group) < topology.world_size


def test_what_the_update_changes_is_synchronised_and_nothing_else():
    anywhere = frozenset(IterationSpan)
    items = (
        item("a"),
        item("frozen", changed_by=frozenset()),
        item("m", role=Role.MOMENT),
        item("b", role=Role.MAIN_PARAMETER),
    )
    assert [one.name for one in synchronised(Inventory.of(0, items))] == ["a", "b"]
    with pytest.raises(UnsupportedError, match="'w' may change at any time"):
        synchronised(Inventory.of(0, [item("w", changed_by=anywhere)]))
    with pytest.raises(UnsupportedError, match="'w' is int8"):
        synchronised(Inventory.of(0, [Item("w", "int8", (6,), 6, Role.PARAMETER, (0, 4))]))


def test_replicas_must_be_the_same_for_all_parameters_and_more_than_one():
    assert sync_group([item("a"), item("b")], 0, "torch") == (0, 4)
    with pytest.raises(UnsupportedError, match="different replicas"):
        sync_group([item("a"), item("expert", (0, 2, 4, 6))], 0, "torch")
    with pytest.raises(UnsupportedError, match="no other replica"):
        require_replicas(sync_group([item("a", (0,))], 0, "torch"), 0, "torch")
    with pytest.raises(UnsupportedError, match="sync groups of one size"):
        plan_groups([(0, 1), (0, 1), (2, 3, 4)], [(), (), ()])


def test_a_number_of_shard_ranks_that_is_not_that_of_the_framework_is_refused():
    for configured in (None, 2):
        require_shard_ranks(3, (2, 3), configured)
    with pytest.raises(ConfigError, match=r"--sync-shard-ranks 4: expected 2, because rank 3 .* ranks \[2, 3\]"):
        require_shard_ranks(3, (2, 3), 4)


def test_a_module_has_its_items_in_buckets_of_bounded_size_in_the_order_of_the_forward():
    names = {"w.2": "layer 2", "w.1": "layer 1", "v.1": "layer 1", "other": "nothing here"}
    plans = plan_modules(Inventory.of(0, [item("w.1"), item("w.2"), item("v.1")]), names, 16)
    assert [plan.name for plan in plans] == ["layer 2", "layer 1"]
    for plan in plans:
        pieces = [piece for bucket in plan.buckets for piece in bucket.pieces]
        assert sum(piece.stop - piece.start for piece in pieces) == 6 * len(plan.items)
        assert not any(one == other for one, other in combinations(pieces, 2))
        assert plan.nbytes == 24 * len(plan.items) and all(bucket.nbytes <= 16 for bucket in plan.buckets)
