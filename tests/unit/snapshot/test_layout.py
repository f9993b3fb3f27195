"""The layout: shares cover a replica set once, nodes first; pieces give every item back; all ranks cut alike."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.model.inventory import Inventory, Item, IterationSpan, Role
from ft_plugins.snapshot.capture.layout import ALIGNMENT, layer_bytes, layout_digest, plan_layout, shares

SIZES = st.integers(0, 5) | st.integers(0, 300) | st.integers(0, 5000)


@st.composite
def node_maps(draw, world):
    """The node of each rank, in any arrangement; empty when all stand on one."""
    if draw(st.booleans()):
        return ()
    return tuple(draw(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=world, max_size=world)))


@st.composite
def jobs(draw):
    """Inventories of all ranks, nodes and a bucket size. Items belong to random replica sets."""
    world = draw(st.integers(1, 6))
    ranks = st.sets(st.integers(0, world - 1), min_size=1)
    items = draw(st.lists(st.tuples(ranks, SIZES, st.booleans()), max_size=10))
    held = [[] for _ in range(world)]
    for number, (replicas, nbytes, background) in enumerate(items):
        changed = frozenset({IterationSpan.UPDATE} if background else {IterationSpan.UPDATE, IterationSpan.FORWARD})
        for rank in replicas:
            held[rank].append(
                Item(f"i{number}", "uint8", (nbytes,), nbytes, Role.BUFFER, tuple(sorted(replicas)), None, changed)
            )
    inventories = [Inventory.of(rank, items) for rank, items in enumerate(held)]
    return inventories, draw(node_maps(world)), draw(st.integers(ALIGNMENT, 1000))


@given(st.data())
def test_shares_are_disjoint_cover_the_set_once_and_give_every_node_an_equal_part(data):
    world = data.draw(st.integers(1, 12))
    replicas = tuple(sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=1))))
    nodes = data.draw(node_maps(world))
    nbytes = data.draw(SIZES | st.integers(0, 100_000))

    found = shares(replicas, nodes, nbytes)

    assert [share.rank for share in found] == list(replicas)
    ranges = sorted((share.start, share.stop) for share in found if share.stop > share.start)
    assert all(left[1] == right[0] for left, right in zip(ranges, ranges[1:], strict=False))
    assert (ranges[0][0], ranges[-1][1]) == (0, nbytes) if nbytes else not ranges
    per_node = Counter({nodes[rank]: 0 for rank in replicas} if nodes else {"": 0})
    for share in found:
        per_node[nodes[share.rank] if nodes else ""] += share.stop - share.start
    assert max(per_node.values()) - min(per_node.values()) <= 2 * ALIGNMENT
    for node in per_node:
        sizes = [share.stop - share.start for share in found if not nodes or nodes[share.rank] == node]
        assert max(sizes) - min(sizes) <= 2 * ALIGNMENT


def test_a_node_with_one_rank_takes_as_much_as_a_node_with_three():
    found = shares((0, 1, 2, 3), ("a", "b", "b", "b"), 6 * ALIGNMENT)
    assert [share.stop - share.start for share in found] == [3 * ALIGNMENT, ALIGNMENT, ALIGNMENT, ALIGNMENT]


def test_fewer_bytes_than_ranks_leaves_some_with_an_empty_share():
    found = shares((0, 1, 2, 3), (), 10)
    assert sorted(share.stop - share.start for share in found) == [0, 0, 0, 10]


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_the_pieces_of_all_ranks_give_back_every_byte_of_every_item_once(job):
    inventories, nodes, bucket_bytes = job
    captured = Counter()
    for inventory in inventories:
        for bucket in plan_layout(inventory, nodes, bucket_bytes).buckets:
            for piece in bucket.pieces:
                captured.update((piece.item, at) for at in range(piece.item_offset, piece.item_offset + piece.nbytes))
    sizes = {item.name: item.nbytes for inventory in inventories for item in inventory.items}
    assert captured == Counter((name, at) for name, nbytes in sizes.items() for at in range(nbytes))


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_the_ranks_of_a_set_cut_it_alike(job):
    inventories, nodes, bucket_bytes = job
    layouts = [plan_layout(inventory, nodes, bucket_bytes) for inventory in inventories]
    seen = {}
    for layout in layouts:
        for stream in layout.streams:
            cuts = (stream.items, stream.offsets, stream.nbytes, stream.shares)
            assert seen.setdefault((stream.replicas, stream.background), cuts) == cuts
            assert layout.rank in stream.replicas


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_buckets_are_bounded_disjoint_in_order_and_lie_where_recovery_reads(job):
    inventories, nodes, bucket_bytes = job
    for inventory in inventories:
        layout = plan_layout(inventory, nodes, bucket_bytes)
        end = 0
        for bucket in layout.buckets:
            assert 0 < bucket.nbytes <= bucket_bytes and bucket.offset >= end
            assert bucket.offset == bucket.pieces[0].offset and bucket.offset % ALIGNMENT == 0
            end = bucket.offset + bucket.nbytes
            assert bucket.pieces[-1].offset + bucket.pieces[-1].nbytes == end
        assert end <= layout.nbytes
        for bucket in layout.buckets:
            for piece in bucket.pieces:
                (stream,) = [s for s in layout.streams if piece.item in {item.name for item in s.items}]
                start = stream.offsets[[item.name for item in stream.items].index(piece.item)]
                in_stream = start + piece.item_offset
                assert piece.offset == stream.slot_offset + in_stream - stream.share_of(layout.rank).start
                assert (bucket in layout.background) == stream.background


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_a_layout_is_the_same_each_time_it_is_computed(job):
    inventories, nodes, bucket_bytes = job
    for inventory in inventories:
        first = plan_layout(inventory, nodes, bucket_bytes)
        reversed_items = Inventory.of(inventory.rank, reversed(inventory.items))
        assert plan_layout(reversed_items, tuple(nodes), bucket_bytes) == first


def layout_of(*items, rank=0, nodes=(), bucket_bytes=256):
    return plan_layout(Inventory.of(rank, items), nodes, bucket_bytes)


def item(name, nbytes, replicas=(0,), *spans):
    return Item(
        name, "uint8", (nbytes,), nbytes, Role.MOMENT, replicas, None, frozenset(spans or {IterationSpan.UPDATE})
    )


def test_what_more_than_the_update_may_change_is_copied_at_the_version_point():
    layout = layout_of(
        item("m", 100),
        item("amax", 8, (0,), IterationSpan.FORWARD, IterationSpan.UPDATE),
        item("rng", 16, (0,), IterationSpan.BETWEEN),
    )
    assert [piece.item for bucket in layout.synchronous for piece in bucket.pieces] == ["amax", "rng"]
    assert [piece.item for bucket in layout.background for piece in bucket.pieces] == ["m"]
    assert layout.buckets == layout.synchronous + layout.background


def test_a_unique_item_is_captured_whole_by_its_holder_and_a_replicated_one_in_parts():
    layouts = [
        layout_of(item("shared", 640, (0, 1)), item(f"own{rank}", 200, (rank,)), rank=rank, nodes=("a", "b"))
        for rank in (0, 1)
    ]
    for rank, layout in enumerate(layouts):
        taken = Counter()
        for bucket in layout.buckets:
            for piece in bucket.pieces:
                taken[piece.item] += piece.nbytes
        assert taken == {"shared": 320, f"own{rank}": 200}


def test_an_item_larger_than_a_bucket_is_cut_and_small_ones_share_a_bucket():
    layout = layout_of(item("a", 1000), item("b", 10), item("c", 10), bucket_bytes=256)
    pieces = [(piece.item, piece.item_offset, piece.nbytes) for bucket in layout.buckets for piece in bucket.pieces]
    assert pieces == [("a", 0, 256), ("a", 256, 256), ("a", 512, 256), ("a", 768, 232), ("b", 0, 10), ("c", 0, 10)]
    assert len(layout.buckets) == math.ceil((1024 + 64 + 10) / 256)


def test_a_rank_with_nothing_to_capture_has_an_empty_layout():
    layout = layout_of(item("empty", 0))
    assert layout.nbytes == 0 and layout.buckets == ()


@pytest.mark.parametrize("ranks, nodes", [(4096, 512), (64, 1), (64, 64)])
def test_the_layout_of_a_large_job_balances_over_its_ranks(ranks, nodes):
    names = tuple(f"n{rank * nodes // ranks}" for rank in range(ranks))
    found = shares(tuple(range(ranks)), names, 10**9)
    sizes = [share.stop - share.start for share in found]
    assert sum(sizes) == 10**9 and max(sizes) - min(sizes) <= 4 * ALIGNMENT


def test_layers_of_a_slot_are_runs_of_items_of_one_layer_and_an_item_without_one_is_its_own():
    def item(name, nbytes, layer):
        return Item(name, "uint8", (nbytes,), nbytes, Role.PARAMETER, (0,), layer)

    items = [item("a", 100, None), item("b", 64, None), item("c", 10, 1), item("d", 70, 1), item("e", 5, 2)]
    layout = plan_layout(Inventory.of(0, items), (), 4096)
    assert layer_bytes(layout) == (128, 64, 64 + 128, 64), "in whole cache lines"
    assert layer_bytes(plan_layout(Inventory.of(0, []), (), 4096)) == ()


@settings(max_examples=60)
@given(jobs())
def test_layers_cover_a_slot_to_its_last_byte(job):
    inventories, nodes, bucket = job
    for inventory in inventories:
        layout = plan_layout(inventory, nodes, bucket)
        assert sum(layer_bytes(layout)) in (layout.nbytes, 0) and all(part > 0 for part in layer_bytes(layout))
        assert layer_bytes(layout) or not layout.buckets


@pytest.mark.parametrize(
    "names, expected",
    [
        ([("w's", 300), ("b", 7)], 2632329651874445572),
        ([("w", 300)], 16646527503811801506),
        ([], 15800390863317144798),
    ],
)
def test_the_digest_of_a_layout_never_changes(names, expected):
    """Segments and checkpoints written by earlier versions of this code hold it."""
    update = frozenset({IterationSpan.UPDATE})
    items = [Item(name, "float32", (n,), 4 * n, Role.PARAMETER, (0, 1), None, update) for name, n in names]
    inventory = Inventory.of(1, items)
    kinds = [(item.name, item.dtype, item.shape) for item in inventory.items]
    assert layout_digest(plan_layout(inventory, ("a", "b"), 512), 4, kinds) == expected
