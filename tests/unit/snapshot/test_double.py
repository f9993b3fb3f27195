"""Double capture: parity is the XOR of what other ranks capture, bit for bit, and lies where every SMP expects it.

All ranks of a job are here in one process, each with its segment and its capture.
"""

import operator

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.base import faults
from ft_plugins.errors import FencedError, InventoryError, StateChangedError
from ft_plugins.model.inventory import Inventory, Item, IterationSpan, Role
from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.redundancy.sections import Encoding, Extent
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.capture import Capture
from ft_plugins.snapshot.capture.double import replica_extents, replica_shares, with_parity
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.checkpoint import checkpoint
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.checkpoint.persist import read_rank, write_rank
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, SlotState, Version, voided_slots

BUCKET = 1024
LATE, EARLY = frozenset({IterationSpan.UPDATE}), frozenset({IterationSpan.UPDATE, IterationSpan.FORWARD})


def inventories(world, sets):
    return [
        Inventory.of(
            rank,
            [
                Item(name, "uint8", (nbytes,), nbytes, Role.PARAMETER, replicas, None, changed)
                for name, (replicas, changed, nbytes) in sets.items()
                if rank in replicas
            ],
        )
        for rank in range(world)
    ]


def layouts_of(nodes, groups, sets, losses=1):
    found = [plan_layout(inventory, tuple(nodes), BUCKET) for inventory in inventories(len(nodes), sets)]
    return [with_parity(layout, tuple(nodes), groups, losses, BUCKET) for layout in found]


def plan_of(nodes, groups, layouts):
    """As the SMPs compute it from what ranks have told."""
    replicated = replica_extents([replica_shares(layout) for layout in layouts])
    return plan_exchange(tuple(nodes), groups, [layout.nbytes for layout in layouts], 1, replicated)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_trainers_and_smps_find_the_same_parity_made_of_the_same_bytes(data):
    world = data.draw(st.integers(2, 6))
    nodes = "".join(data.draw(st.lists(st.sampled_from("abc"), min_size=world, max_size=world)))
    if len(set(nodes)) < 2:
        nodes = "x" + nodes[1:]
    ranks = st.sets(st.integers(0, world - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    kinds = st.tuples(ranks, st.sampled_from([LATE, LATE, EARLY]), st.integers(0, 5000))
    sets = {f"i{number}": kind for number, kind in enumerate(data.draw(st.lists(kinds, max_size=8)))}
    groups = [tuple(range(world))]
    layouts = layouts_of(nodes, groups, sets)
    plan = plan_of(nodes, groups, layouts)
    for layout in layouts:
        parts = plan.parts[layout.rank]
        assert layout.parity_nbytes == sum(part.stop - part.start for part in parts)
        assert [bucket.offset for bucket in layout.parity] == [
            at for part in parts for at in range(part.offset, part.offset + part.stop - part.start, BUCKET)
        ]
        checks = list(plan.checks(layout.rank, layout.ranges))
        sources = [source for bucket in layout.parity for source in bucket.sources]
        count = layout.source_digest_count
        assert count == len(checks) and [c.source.rank for c in checks] == [s.rank for s in sources]
        assert [check.entry for check in checks] == list(range(len(layout.ranges), len(layout.ranges) + count))
        for check, source in zip(checks, sources, strict=True):
            there = {
                (piece.item, piece.item_offset + at - piece.offset): at
                for bucket in layouts[source.rank].buckets
                for piece in bucket.pieces
                for at in range(piece.offset, piece.offset + piece.nbytes)
            }
            for piece in source.pieces:  # the same bytes of the same items, in the slot of the rank that captures them
                for at in range(0, piece.nbytes, 64):
                    in_slot = check.source.offset + piece.offset - source.at + at
                    assert there[piece.item, piece.item_offset + at] == in_slot
    synchronous = {name for name, (_, changed, _) in sets.items() if changed is EARLY}
    made_from = {p.item for layout in layouts for b in layout.parity for s in b.sources for p in s.pieces}
    assert not made_from & synchronous


def small_of(layout):
    return manifest.join(manifest.write(manifest.manifest_of(layout, 1, (0, 0))), b"small")


class World:
    """The ranks of a job, each with a segment; replicas of an item hold equal bytes."""

    def __init__(self, folder, job, nodes, groups, sets):
        self.nodes, self.job, self.folder = nodes, job, folder
        self.layouts = layouts_of(nodes, groups, sets)
        self.plan = plan_of(nodes, groups, self.layouts)
        self.inventories = inventories(len(nodes), sets)
        self.tensors = [
            {item.name: torch.zeros(item.nbytes, dtype=torch.uint8) for item in inventory.items}
            for inventory in self.inventories
        ]
        self.segments = []
        for rank, layout in enumerate(self.layouts):
            path = path_of(job, nodes[rank], rank)
            shape = Shape(
                layout.nbytes + layout.parity_nbytes,
                10_000,
                len(layout.ranges),
                7,
                4,
                layout.parity_nbytes,
                layout.source_digest_count,
            )
            create(path, shape, rank, {})
            self.segments.append(Segment(path))
            self.segments[rank].ranges = layout.ranges
            self.segments[rank].header.token = 1
        self.captures = [self._capture(rank) for rank in range(len(nodes))]

    def _capture(self, rank):
        return Capture(self.segments[rank], self.layouts[rank], lambda: self.tensors[rank], 1)

    def train(self, iteration):
        """Equal bytes in all replicas, others than before."""
        for inventory, tensors in zip(self.inventories, self.tensors, strict=True):
            for item in inventory.items:
                seed = [iteration, *item.name.encode(), *item.replicas]
                drawn = np.random.default_rng(seed).integers(0, 256, item.nbytes, dtype=np.uint8)
                tensors[item.name].copy_(torch.from_numpy(drawn))

    def capture(self, iteration, awaited=True):
        """All ranks capture an iteration; `awaited`: their SMPs have said that it is exchanged next."""
        for capture, segment, layout in zip(self.captures, self.segments, self.layouts, strict=True):
            if awaited:
                segment.header.await_version(Version(1, iteration))
            capture.start(Version(1, iteration), small_of(layout))
        for capture in self.captures:
            capture.wait()

    def slot(self, rank, iteration):
        (found,) = [
            slot.index
            for slot in self.segments[rank].slots()
            if slot.state is SlotState.CLEAN and slot.version == Version(1, iteration)
        ]
        return found

    def data(self, rank, iteration):
        return self.segments[rank].data(self.slot(rank, iteration))

    def parity(self, rank, iteration):
        """The parity slot of an iteration."""
        found = self.segments[rank].parity_of(Version(1, iteration))
        assert found is not None
        return found

    def parity_is_right(self, rank, iteration):
        """The parity is the XOR of what the others have captured."""
        parity, start = self.segments[rank].data(self.parity(rank, iteration)), self.layouts[rank].nbytes
        for part in self.plan.parts[rank]:
            expected = np.zeros(part.stop - part.start, dtype=np.uint8)
            for _, at, e in self.plan.sections[part.section].sources(part.stripe, part.start, part.stop):
                expected[at : at + e.nbytes] ^= self.data(e.rank, iteration)[e.offset : e.offset + e.nbytes]
            found = parity[part.offset - start : part.offset - start + part.stop - part.start]
            assert (found == expected).all()

    def mismatched(self, iteration):
        """(keeper, bucket, rank) of the checks that find other bytes."""
        found = []
        for rank, segment in enumerate(self.segments):
            table = segment.digests(self.parity(rank, iteration))
            for check in self.plan.checks(rank, segment.ranges):
                source = check.source
                there = self.data(source.rank, iteration)[source.offset : source.offset + source.nbytes]
                if xxhash.xxh3_64_intdigest(there.tobytes()) != int(table[check.entry]):
                    found.append((check.keeper, check.bucket, source.rank))
        return found

    def end(self):
        for capture in self.captures:
            capture.close()
        for segment in self.segments:
            segment.close()
        for node in set(self.nodes):
            remove(self.job, node)


def everyone(world):
    """Odd sizes, so that items straddle shares, blocks, buckets; some state of one rank alone, some changed early."""
    ranks = tuple(range(world))
    sets = {f"w{number}": (ranks, LATE, 700 * number + 13) for number in range(1, 8)}
    sets |= {f"own{rank}": ((rank,), LATE, 500 + rank) for rank in ranks}
    return sets | {"amax": (ranks, EARLY, 333), "even": (ranks[::2], LATE, 5001)}


NODES = {"2 nodes": "ab", "3 nodes": "abc", "2+1+1": "aabc", "4 nodes, 2 groups": "abcdabcd"}


@pytest.fixture
def world(tmp_path, job):
    made = []

    def make(name):
        nodes = NODES[name]
        groups = [tuple(range(len(nodes)))] if "groups" not in name else [(0, 1, 2, 3), (4, 5, 6, 7)]
        made.append(World(tmp_path, job, nodes, groups, everyone(len(nodes))))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("name", NODES)
def test_parity_is_the_xor_of_what_the_others_capture_and_replicas_are_found_equal(world, name):
    job = world(name)
    assert all(layout.parity and layout.source_digest_count for layout in job.layouts)
    for iteration in (1, 2, 3, 4, 5):  # slots are used again: nothing of the version before is left in them
        job.train(iteration)
        job.capture(iteration)
    for iteration in (4, 5):
        for rank in range(len(job.nodes)):
            job.segments[rank].verify(job.slot(rank, iteration))
            job.segments[rank].verify(job.parity(rank, iteration))
            job.parity_is_right(rank, iteration)
        assert job.mismatched(iteration) == []


def test_parity_is_computed_of_what_is_exchanged_next_alone_and_never_over_what_is_committed(world):
    job = world("3 nodes")
    for iteration in range(1, 10):
        job.train(iteration)
        job.capture(iteration, awaited=iteration in (2, 5, 8))
        if iteration == 2:
            for segment in job.segments:
                segment.keep_parity(Version(1, 2))
        if iteration == 8:  # that of 5 was missed, and overwritten
            for rank, segment in enumerate(job.segments):
                held = {slot.version: slot.pins for slot in segment.parity_slots()}
                assert held == {Version(1, 2): Pin.NODE, Version(1, 8): Pin(0)}
                segment.keep_parity(Version(1, 8))
                assert {slot.version for slot in segment.parity_slots() if slot.pins} == {Version(1, 8)}
                job.parity_is_right(rank, 8)
    assert all(segment.shape.parity_indices == range(4, 6) for segment in job.segments)
    assert not any(segment.has_parity(Version(1, 9)) for segment in job.segments)


def test_a_version_of_another_lineage_with_the_same_iteration_is_not_what_is_awaited(world):
    job = world("2 nodes")
    job.train(3)
    for segment in job.segments:
        segment.header.await_version(Version(2, 3))
    job.capture(3, awaited=False)
    assert all(segment.parity_of(Version(1, 3)) is None for segment in job.segments)
    assert all(not segment.has_parity(Version(1, 3)) for segment in job.segments)


def test_with_both_parity_slots_pinned_a_version_is_captured_without_parity(world):
    job = world("2 nodes")
    for iteration in (1, 2):
        job.train(iteration)
        job.capture(iteration)
        for segment in job.segments:
            segment._slots[segment.parity_of(Version(1, iteration)) or 0].pins = Pin.NODE
    job.train(3)
    job.capture(3)
    for rank, segment in enumerate(job.segments):
        segment.verify(job.slot(rank, 3))
        assert not segment.has_parity(Version(1, 3))
        assert {slot.version for slot in segment.parity_slots()} == {Version(1, 1), Version(1, 2)}


def test_a_new_lineage_voids_the_parity_of_newer_versions_than_its_base(world):
    job = world("2 nodes")
    for iteration in (1, 2):
        job.train(iteration)
        job.capture(iteration)
    for segment in job.segments:
        segment.open_lineage(2, Version(1, 1), voided_slots(segment.slots(), Version(1, 1)))
        assert segment.has_parity(Version(1, 1)) and not segment.has_parity(Version(1, 2))


def test_parity_takes_its_part_of_the_nodes_share(world):
    job = world("3 nodes")
    (section, *_) = job.plan.encoded(Encoding.LOCAL)
    share = max(section.placement.sizes)
    assert share / 2 <= section.placement.block <= share / 2 + 64


@pytest.mark.parametrize("where", ["captured", "made into parity", "neither"])
def test_a_flipped_bit_in_one_replica_is_found_with_the_ranks_and_the_bucket(world, where):
    """Of three replicas of a byte two are read, one by each of two nodes: in the third one a flip changes nothing."""
    job = world("3 nodes")
    job.train(1)
    job.capture(1)
    job.train(2)
    layout = job.layouts[1]
    number, bucket = next((n, b) for n, b in enumerate(layout.parity) if len(b.sources) == 2)
    source = bucket.sources[1]
    rank = {"captured": source.rank, "made into parity": 1, "neither": 3 - 1 - source.rank}[where]
    job.tensors[rank][source.pieces[0].item][source.pieces[0].item_offset] ^= 4
    job.capture(2)
    assert job.mismatched(1) == []
    found = [] if where == "neither" else [(1, len(layout.buckets) + number, source.rank)]
    assert job.mismatched(2) == found


def test_a_version_whose_parity_is_not_written_to_its_end_is_never_sealed(world):
    job = world("2 nodes")
    job.train(1)
    job.capture(1)
    last = len(job.layouts[0].ranges) - 1
    assert last >= len(job.layouts[0].buckets)
    faults.arm(f"capture.bucket.end@bucket={last}:raise")
    job.segments[0].header.await_version(Version(1, 2))
    job.captures[0].start(Version(1, 2), b"small")
    with pytest.raises(RuntimeError, match="capture.bucket.end"):
        job.captures[0].wait()
    segment = job.segments[0]
    both = (*segment.slots(), *segment.parity_slots())
    assert [s.version for s in both if s.state is SlotState.CLEAN] == [Version(1, 1), Version(1, 1)]


def test_a_superseded_writer_stops_at_the_edge_of_a_parity_bucket(world):
    job = world("2 nodes")
    job.train(1)
    real = job.captures[0]._encoder.encode

    def encode(index, number, private=False):
        job.segments[0].header.token = 2
        return real(index, number, private)

    job.captures[0]._encoder.encode = encode
    job.segments[0].header.await_version(Version(1, 1))
    job.captures[0].start(Version(1, 1), b"small")
    with pytest.raises(FencedError):
        job.captures[0].wait()
    both = (*job.segments[0].slots(), *job.segments[0].parity_slots())
    assert all(slot.state is not SlotState.CLEAN for slot in both)


def test_a_late_write_into_a_parity_bucket_does_not_become_part_of_it(world):
    """A writer was stopped in a parity bucket and wakes while the next incarnation computes that one again."""
    job = world("2 nodes")
    job.train(1)
    number = len(job.layouts[0].buckets)
    segment = job.segments[0]
    index = segment.shape.parity_indices[0]
    segment.dirty(index, Version(1, 1), 1)
    segment.set_cursor(index, number)
    job.captures[0].close()
    job.captures[0] = capture = job._capture(0)
    bucket, bring = job.layouts[0].parity[0], capture._encoder._copy

    def late(copies, source, part):
        bring(copies, source, part)
        if segment.cursor(index) == number:
            start = bucket.offset - job.layouts[0].nbytes
            segment.data(index)[start : start + bucket.nbytes] = 0xEE

    capture._encoder._copy = late
    assert capture._suspect == {(index, number)}
    job.capture(1)
    assert job.parity(0, 1) == index
    job.parity_is_right(0, 1)
    segment.verify(index)


def test_parity_of_what_is_restored_is_computed_once_tensors_are_loaded_and_its_slot_stays_as_it_is(world):
    """Also where damage is found in the parity that is here: from that nothing could be decoded."""
    job = world("3 nodes")
    job.train(1)
    job.capture(1, awaited=False)
    origin = Origin("job", 3, {})
    for rank, segment in enumerate(job.segments):
        record = write_rank(checkpoint.partial_of(job.folder, Version(1, 1)), segment, Version(1, 1), origin)
        assert record.data_nbytes == job.layouts[rank].nbytes and record.buckets == len(job.layouts[rank].buckets)
    folder = checkpoint.commit(job.folder, Version(1, 1), origin)
    for rank, segment in enumerate(job.segments):
        read_rank(folder, segment, Version(1, 1), 1)
        for _ in range(2):
            job.captures[rank].add_parity(Version(1, 1))
            assert segment.slot(job.slot(rank, 1)).state is SlotState.CLEAN
            job.captures[rank].wait()
            segment.verify(job.slot(rank, 1))
            segment.verify(job.parity(rank, 1))
            segment.keep_parity(Version(1, 1))
            segment.data(job.parity(rank, 1))[5] ^= 1
        segment.data(job.parity(rank, 1))[5] ^= 1
    for rank in range(3):
        job.parity_is_right(rank, 1)
    assert job.mismatched(1) == []


def test_parity_of_a_frozen_item_that_was_changed_meanwhile_is_not_sealed(tmp_path, job, monkeypatch):
    sets = {"frozen": ((0, 1, 2), frozenset(), 5000), "w": ((0, 1, 2), LATE, 5000)}
    made = World(tmp_path, job, "abc", [(0, 1, 2)], sets)
    try:
        made.capture(1)
        made.parity_is_right(1, 1)
        encode = made.captures[1]._encoder.encode
        monkeypatch.setattr(
            made.captures[1]._encoder, "encode",
            lambda *where, **how: (made.tensors[1]["frozen"].add_(1), encode(*where, **how))[1],
        )  # fmt: skip
        with pytest.raises(StateChangedError, match=r"rank 1: 'frozen', which requires no gradient, was changed after"):
            made.capture(2)
        assert made.segments[1].parity_of(Version(1, 2)) is None
        made.parity_is_right(1, 1)
    finally:
        made.end()


def test_against_two_losses_and_without_other_nodes_nothing_is_added():
    for nodes, losses in (("abcd", 2), ("aaaa", 1), ("abcd", 0)):
        layouts = layouts_of(nodes, [(0, 1, 2, 3)], everyone(4), losses)
        assert not any(layout.parity for layout in layouts)


def replica_extents_by_lists(layouts):
    """The reference: each rank names all ranks of its sets."""
    sets = {}
    for layout in layouts:
        for stream in layout.streams:
            if stream.background and len(stream.replicas) > 1:
                own = stream.share_of(layout.rank)
                extent = Extent(layout.rank, stream.slot_offset, own.stop - own.start)
                sets.setdefault(stream.replicas, []).append((own.start, own.stop, extent))
    order = operator.itemgetter(0, 1)
    return tuple(
        tuple(extent for *_, extent in sorted(sets[key], key=lambda one: (*order(one), one[2].rank)))
        for key in sorted(sets)
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(2, 12))
def test_sets_that_are_named_by_digests_are_those_that_are_named_by_their_ranks(data, world):
    ranks = st.sets(st.integers(0, world - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    kinds = st.tuples(ranks, st.sampled_from([LATE, EARLY]), st.integers(0, 5000))
    sets = {f"i{number}": kind for number, kind in enumerate(data.draw(st.lists(kinds, max_size=8)))}
    layouts = [plan_layout(inventory, ("a", "b") * world, BUCKET) for inventory in inventories(world, sets)]
    assert replica_extents([replica_shares(layout) for layout in layouts]) == replica_extents_by_lists(layouts)


def test_a_set_that_one_of_its_ranks_does_not_name_is_refused():
    layouts = [plan_layout(one, tuple("abc"), BUCKET) for one in inventories(3, {"x": ((0, 1, 2), LATE, 300)})]
    shares = [replica_shares(layout) for layout in layouts]
    for altered in ([shares[0], shares[1], []], [shares[0], [], shares[2]]):
        with pytest.raises(InventoryError, match="not all of its ranks"):
            replica_extents(altered)
