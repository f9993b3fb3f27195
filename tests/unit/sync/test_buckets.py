"""What replicas have in common is in buckets once, cut alike by all of them; what they have not is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError, UnsupportedError
from ft_plugins.model.inventory import Inventory, Item, IterationSpan, Role
from ft_plugins.sync.buckets import plan_buckets, require_replicas

WIDTH = {"float32": 4, "bfloat16": 2, "int64": 8}


def item(name, elements, dtype="float32", role=Role.PARAMETER, **more):
    given_ = {"replicas": (0, 1), "layer": 0, **more}
    return Item(name, dtype, (elements,), elements * WIDTH[dtype], role, **given_)


items = st.lists(
    st.builds(
        item,
        st.uuids().map(str),
        st.integers(0, 50),
        st.sampled_from(list(WIDTH)),
        st.sampled_from(list(Role)),
        layer=st.sampled_from([None, 0, 1]),
        replicas=st.sampled_from([(0, 1), (0, 1, 2)]),
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)


@given(items, st.integers(8, 200))
def test_every_element_is_in_one_bucket_and_no_bucket_is_too_full_or_of_two_kinds(those, room):
    found = plan_buckets(Inventory.of(0, those), room)
    known = {one.name: one for one in those}
    taken = {name: [] for name in known}
    for number, bucket in enumerate(found.all):
        assert bucket.number == number and 0 < bucket.nbytes <= room
        kinds = {(known[p.item].layer, known[p.item].role, known[p.item].replicas) for p in bucket.pieces}
        assert kinds == {(bucket.layer, bucket.role, bucket.replicas)}
        assert bucket.nbytes == bucket.elements * WIDTH[bucket.dtype]
        for piece in bucket.pieces:
            taken[piece.item].append((piece.start, piece.stop))
    for name, spans in taken.items():
        at = 0
        for start, stop in sorted(spans):
            assert start == at
            at = stop
        assert at == known[name].shape[0]


@given(items, st.integers(8, 200))
def test_the_ranks_of_a_set_cut_alike_whatever_else_each_of_them_has(those, room):
    alone = item("own", 7, replicas=(1,))
    first = plan_buckets(Inventory.of(0, those), room)
    second = plan_buckets(Inventory.of(1, [*those, alone]), room)
    assert [(b.replicas, b.pieces) for b in first.all] == [(b.replicas, b.pieces) for b in second.all]
    assert [name for name, _ in second.left_out] == ["own"]


def test_what_one_rank_alone_holds_or_the_forward_changes_is_left_out_with_its_reason():
    shard = item("shard", 4, replicas=(0,), piece=(0, 4, 8), role=Role.MAIN_PARAMETER)
    running = item("bn.running_mean", 4, role=Role.BUFFER, changed_by=frozenset({IterationSpan.FORWARD}))
    found = plan_buckets(Inventory.of(0, [item("w", 4), shard, running]), 1024)
    assert [bucket.pieces[0].item for bucket in found.all] == ["w"]
    reasons = dict(found.left_out)
    assert "an error in it reaches all replicas in the same way" in reasons["shard"]
    assert reasons["bn.running_mean"] == "changed by more than the update"
    assert "not compared" in found.table() and "bn.running_mean" in found.table()


def test_parameters_are_averaged_moments_on_request_and_integers_never():
    those = [
        item("w", 4), item("m", 4, role=Role.MOMENT), item("main", 4, role=Role.MAIN_PARAMETER),
        item("count", 1, "int64", Role.MOMENT),
    ]  # fmt: skip
    found = plan_buckets(Inventory.of(0, those), 1024)
    assert {b.pieces[0].item for b in found.averaged(optimizer_state=False)} == {"w", "main"}
    assert {b.pieces[0].item for b in found.averaged(optimizer_state=True)} == {"w", "main", "m"}


def test_a_bucket_without_room_for_an_element_is_refused():
    with pytest.raises(ConfigError, match="buckets of 4 bytes hold no element: expected at least 8"):
        plan_buckets(Inventory.of(0, [item("w", 4)]), 4)


def test_what_is_frozen_is_compared_but_is_no_reason_to_average():
    shard = item("shard", 4, replicas=(0,), piece=(0, 4, 8), role=Role.MAIN_PARAMETER)
    frozen, copy = item("embedding", 4, changed_by=frozenset()), item("w", 4, role=Role.COPY)
    found = plan_buckets(Inventory.of(0, [shard, frozen]), 1024)
    assert [(bucket.pieces[0].item, bucket.trained) for bucket in found.all] == [("embedding", False)]
    with pytest.raises(UnsupportedError, match="each trained parameter is held by one of 2 replicas only"):
        require_replicas(found, "frame", 2, averaging=True)
    require_replicas(plan_buckets(Inventory.of(0, [shard, frozen, copy]), 1024), "frame", 2, averaging=False)
    with_one = plan_buckets(Inventory.of(0, [item("v", 4), frozen]), 1024)
    assert [bucket.trained for bucket in with_one.all] == [False, True]  # not in one bucket with it
    require_replicas(with_one, "frame", 2, averaging=True)
