"""State restored at another data-parallel size: every byte of the new slots is the right one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ResumeError, SegmentError
from ft_plugins.model.inventory import Inventory, Item, IterationSpan, Role
from ft_plugins.recovery.resize.reshard import plan_moves
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.capture.manifest import OWN, REPLICATED, manifest_of

WIDTH = 4  # bytes of an element


def inventory(rank, size, whole, sharded, padding, instances=1):
    """`whole` elements by name. Sharded tensors lie in one flat buffer, padded to the size of an instance, cut in equal
    parts; each part is in all instances."""
    items = []
    flat = sum(whole[name] for name in sharded)
    members = size // instances
    step, part = -(-(flat + padding) // members), rank % members
    at = 0
    for name, elements in whole.items():
        if name in sharded:
            start = min(max(part * step - at, 0), elements)
            stop = min(max((part + 1) * step - at, 0), elements)
            at += elements
            if stop > start:
                items.append(
                    Item(name, "float32", (stop - start,), (stop - start) * WIDTH, Role.MOMENT,
                         tuple(range(part, size, members)), piece=(start, stop, elements))
                )  # fmt: skip
        else:
            items.append(Item(name, "float32", (elements,), elements * WIDTH, Role.PARAMETER, tuple(range(size))))
    items.append(Item("buffer", "uint8", (5,), 5, Role.BUFFER, (rank,), changed_by=frozenset(IterationSpan)))
    return Inventory.of(rank, items)


def slot(layout, tensors):
    """What capture would put there."""
    data = np.zeros(layout.nbytes, dtype=np.uint8)
    items = {item.name: item for stream in layout.streams for item in stream.items}
    for piece in (piece for bucket in layout.buckets for piece in bucket.pieces):
        whole = items[piece.item].piece
        first = (whole[0] if whole else 0) * WIDTH + piece.item_offset
        data[piece.offset : piece.offset + piece.nbytes] = tensors[piece.item][first : first + piece.nbytes]
    return data


def job(size, nodes, whole, sharded, padding, instances=1):
    names = [f"n{rank * nodes // size}" for rank in range(size)]
    inventories = [inventory(rank, size, whole, sharded, padding, instances) for rank in range(size)]
    layouts = [plan_layout(one, names, 256) for one in inventories]
    return [(layout, manifest.read(manifest.write(manifest_of(layout, size, (0, 0))))) for layout in layouts]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=6), st.data(), st.integers(1, 6), st.integers(1, 6),
    st.integers(0, 9), st.integers(0, 9),
)  # fmt: skip
def test_every_byte_of_a_slot_comes_from_where_it_was(elements, data, before, now, padding, other_padding):
    assume(before > 1 or now > 1)  # of one replica alone it is not known that it is one
    whole = {f"t{index}": count for index, count in enumerate(elements)}
    sharded = {name for name in whole if data.draw(st.booleans())}
    generator = np.random.default_rng(7)
    tensors = {name: generator.integers(0, 256, count * WIDTH, dtype=np.uint8) for name, count in whole.items()}
    tensors["buffer"] = generator.integers(0, 256, 5, dtype=np.uint8)
    instances = data.draw(st.sampled_from([one for one in range(1, before + 1) if before % one == now % one == 0]))
    previous = job(before, data.draw(st.integers(1, before)), whole, sharded, padding, instances)
    slots = {found.rank: slot(layout, tensors) for layout, found in previous}
    for layout, mine in job(now, data.draw(st.integers(1, now)), whole, sharded, other_padding, instances):
        made = np.zeros(layout.nbytes, dtype=np.uint8)
        moves = plan_moves([found for _, found in previous], mine)
        for move in moves:
            made[move.target : move.target + move.nbytes] = slots[move.rank][move.source : move.source + move.nbytes]
        assert np.array_equal(made, slot(layout, tensors))
        assert sum(move.nbytes for move in moves) == sum(held.stop - held.start for held in mine.tensors)


def test_neighbouring_moves_are_one():
    ((_, alone),) = job(1, 1, {"a": 64, "b": 64}, set(), 0)
    _, (_, second) = job(2, 2, {"a": 64, "b": 64}, set(), 0)
    assert [move.nbytes for move in plan_moves([alone], second) if move.nbytes > 5] == [256]


def test_a_buffer_is_that_of_the_first_previous_rank():
    whole = {"a": 8}
    previous = [found for _, found in job(2, 2, whole, set(), 0)]
    ((_, mine),) = job(1, 1, whole, set(), 0)
    assert {move.rank for move in plan_moves(previous, mine) if move.nbytes == 5} == {0}


def test_another_model_is_refused_by_name():
    previous = [found for _, found in job(2, 2, {"a": 8}, set(), 0)]
    ((_, mine),) = job(1, 1, {"a": 9}, set(), 0)
    with pytest.raises(ResumeError, match="'a' has 36 bytes of float32.*32 bytes"):
        plan_moves(previous, mine)
    ((_, mine),) = job(1, 1, {"b": 8}, set(), 0)
    with pytest.raises(ResumeError, match="no tensor of that name"):
        plan_moves(previous, mine)


def test_a_missing_rank_is_an_error():
    previous = [found for _, found in job(3, 3, {"a": 300}, {"a"}, 0)]
    ((_, mine),) = job(1, 1, {"a": 300}, {"a"}, 0)
    with pytest.raises(ResumeError, match="do not make up a whole"):
        plan_moves([previous[0], previous[2]], mine)
    with pytest.raises(ResumeError, match="are missing"):
        plan_moves(previous[:2], mine)


def own(found):
    """The same, but 'a' is each rank's own."""
    held = [replace(one, kind=OWN, start=0, stop=one.whole) if one.name == "a" else one for one in found.tensors]
    return replace(found, tensors=tuple(held))


def test_unique_state_without_a_rule_is_not_restored():
    """Two ranks hold different things under one name: neither is the whole. And one rank's is not for two."""
    two, one = ([found for _, found in job(size, size, {"a": 64}, set(), 0)] for size in (2, 1))
    with pytest.raises(ResumeError, match="do not make up a whole"):
        plan_moves([own(found) for found in two], one[0])
    kinds = [{held.kind for held in found.tensors if held.name == "a"} for found in (two[0], one[0])]
    assert kinds == [{REPLICATED}, {OWN}]
    assert plan_moves(one, two[1]), "of one replica it is not known that it is one, of two it is"
    with pytest.raises(ResumeError, match="'a' is each rank's own"):
        plan_moves(one, own(two[1]))


def test_bytes_that_are_no_manifest_are_refused():
    for wrong in (b"", b"nothing", manifest.write(job(1, 1, {"a": 1}, set(), 0)[0][1])[:-9]):
        with pytest.raises(SegmentError):
            manifest.read(wrong)
    with pytest.raises(SegmentError):
        manifest.split(b"\x01")
    assert manifest.split(manifest.join(b"a", b"b")) == (b"a", b"b")


# local SGD: replicas differ


def replica_job(replicas, ranks, nodes, whole, padding):
    """Parameters ("p...") and outer momentum are equal on all replicas; of moments ("m...") each replica has
    its own. A replica divides all of them over its ranks, in one flat buffer that is padded."""
    size = replicas * ranks
    names = [f"n{rank * nodes // size}" for rank in range(size)]
    found = []
    for rank in range(size):
        sharded = inventory(rank, size, whole, set(whole), padding, replicas)
        items = [replace(item, replicas=(rank,)) if item.name.startswith("m") else item for item in sharded.items]
        layout = plan_layout(Inventory.of(rank, items), names, 256)
        found.append((layout, manifest.read(manifest.write(manifest_of(layout, size, (0, 0))))))
    return found


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=6), st.data(), st.integers(1, 4), st.integers(1, 4),
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 9),
)  # fmt: skip
def test_each_replica_takes_over_its_own_and_what_all_have_in_common(
    elements, data, before, now, ranks_before, ranks_now, padding
):
    whole = {f"{'pm'[index % 2]}{index}": count for index, count in enumerate(elements)}
    generator = np.random.default_rng(7)

    def random(names):
        return {name: generator.integers(0, 256, whole[name] * WIDTH, dtype=np.uint8) for name in names}

    common = random([name for name in whole if name.startswith("p")])
    own = [
        {
            **common, **random([name for name in whole if name.startswith("m")]),
            "buffer": generator.integers(0, 256, 5, dtype=np.uint8),
        }
        for _ in range(before)
    ]  # fmt: skip
    previous = replica_job(before, ranks_before, data.draw(st.integers(1, before * ranks_before)), whole, padding)
    slots = {found.rank: slot(layout, own[found.rank // ranks_before]) for layout, found in previous}
    for layout, mine in replica_job(now, ranks_now, data.draw(st.integers(1, now * ranks_now)), whole, 0):
        source = mine.rank // ranks_now % before
        inherited = range(source * ranks_before, (source + 1) * ranks_before)
        made = np.zeros(layout.nbytes, dtype=np.uint8)
        for move in plan_moves([found for _, found in previous], mine, inherited):
            made[move.target : move.target + move.nbytes] = slots[move.rank][move.source : move.source + move.nbytes]
        assert np.array_equal(made, slot(layout, own[source]))


def test_a_tensor_that_a_replica_has_only_in_part_is_not_made_up_from_others():
    previous = [found for _, found in replica_job(2, 2, 4, {"m0": 64}, 0)]
    (_, mine), *_ = replica_job(1, 1, 1, {"m0": 64}, 0)
    assert {move.rank for move in plan_moves(previous, mine, (2, 3)) if move.nbytes > 5} == {2, 3}
    with pytest.raises(ResumeError, match="do not make up a whole"):
        plan_moves(previous, mine, (2,))
    with pytest.raises(ResumeError, match="do not make up a whole"):
        plan_moves(previous, mine)


def test_a_tensor_that_one_rank_of_a_replica_holds_whole_is_taken_over_only_if_it_is_known_whose():
    """Moments without ZeRO: each replica's own, and of one replica alone it is not known that it is one."""
    two, one = ([own(found) for _, found in job(size, size, {"a": 64}, set(), 0)] for size in (2, 1))
    assert {move.rank for move in plan_moves(two, one[0], (1,)) if move.nbytes > 5} == {1}
    assert {move.rank for move in plan_moves(one, two[1], (0,)) if move.nbytes > 5} == {0}
    with pytest.raises(ResumeError, match="each rank's own"):
        plan_moves(one, two[1])
