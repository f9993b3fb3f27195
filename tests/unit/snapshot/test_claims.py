"""Slots are claimed when capture needs them, and no version that a rank may need is overwritten meanwhile."""

import itertools
import os
from dataclasses import replace

import pytest

from ft_plugins.errors import BudgetError, FencedError, SegmentError
from ft_plugins.snapshot.segment import claims, segment_file
from ft_plugins.snapshot.segment.claims import CaptureOwner, SlotClaims, slot_to_rebuild
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.segment_file import slot_start
from ft_plugins.snapshot.segment.shape import PAGE, Shape
from ft_plugins.snapshot.segment.slots import (
    FIRST,
    SHARED,
    SLOTS,
    Pin,
    SlotState,
    Version,
    slots_for,
)

CLEAN, DIRTY, EMPTY, UNCLAIMED = SlotState.CLEAN, SlotState.DIRTY, SlotState.EMPTY, SlotState.UNCLAIMED
MOST = slots_for(Pin.NODE, Pin.SOURCE)


def v(iteration):
    return Version(1, iteration)


# ---- with a segment ----

SHAPE = Shape(3 * PAGE, 100, 1, 7, MOST, free=SLOTS, first=FIRST)


@pytest.fixture
def segment(segment_path):
    create(segment_path, SHAPE, 0, {})
    made = Segment(segment_path, populate=True)
    made.ranges = [(0, SHAPE.nbytes)]
    yield made
    made.close()


def write(segment, index, iteration):
    segment.dirty(index, v(iteration), 1)
    segment.data(index)[:] = iteration
    segment.seal(index, v(iteration), 1, b"", segment.digests(index).copy())


def test_of_slots_that_are_not_claimed_only_the_headers_take_memory(segment):
    assert SHAPE.total - SHAPE.first_total == (MOST - FIRST) * (SHAPE.slot_room - PAGE)
    assert segment.resident_bytes == segment.claimed_bytes == SHAPE.first_total
    assert segment.claimed == (0, 1) and [slot.state for slot in segment.slots()][2:] == [UNCLAIMED] * 3
    segment.claim_slot(2)
    assert segment.claimed == (0, 1, 2) and segment.slot(2).state is EMPTY
    assert segment.resident_bytes == segment.claimed_bytes == SHAPE.bytes_with(3)
    write(segment, 2, 5)
    assert Segment(segment.path).slot(2).version == v(5), "another process finds it"
    for index in range(3):
        write(segment, index, index + 1)
    segment.release([0, 3])
    assert segment.slot(3).state is UNCLAIMED
    segment.claim()
    assert segment.resident_bytes == SHAPE.bytes_with(3), "given back and claimed again: no more than before"


def test_whoever_dies_while_a_slot_is_claimed_leaves_it_as_it_was_or_empty(segment, dies_at):
    deaths = 0
    for at in itertools.count():
        died = dies_at(at, lambda: segment.claim_slot(2))
        slot = segment.slot(2)
        assert slot.state in (UNCLAIMED, EMPTY) and not slot.damaged
        if not died:
            break
        deaths += 1
        if slot.state is EMPTY:
            segment._slots[2]._words[0] = segment._slots[3]._words[0]  # unclaimed again
    assert deaths > 5 and segment.slot(2).state is EMPTY and segment.claimed_bytes == SHAPE.bytes_with(3)


def test_pages_are_mapped_in_pieces_so_that_training_does_not_wait_for_all_of_them(segment_path):
    """A thread that trains gets the interpreter between any two of them."""
    piece = segment_file._PIECE
    shape = replace(SHAPE, nbytes=3 * piece)
    create(segment_path, shape, 0, {})
    made, calls = Segment(segment_path), list[tuple[int, int]]()

    class Map:
        def madvise(self, option, start, nbytes):
            assert option == segment_file._POPULATE_WRITE and start % PAGE == nbytes % PAGE == 0
            calls.append((start, nbytes))

        def close(self): ...

    made._map = Map()
    made.claim_slot(2)
    start, ends = slot_start(shape, 2), [at + nbytes for at, nbytes in calls]
    assert [at for at, _ in calls] == [start, *ends[:-1]] and ends[-1] == start + shape.slot_room
    assert max(nbytes for _, nbytes in calls) == piece and len(calls) == 4


class Told(CaptureOwner):
    def __init__(self):
        self.told = []
        self.lacking = False

    def check_room(self, nbytes):
        assert nbytes == SHAPE.slot_room
        if self.lacking:
            raise BudgetError("no room")

    def slot_claimed(self, refused):
        self.told.append(refused)


@pytest.mark.parametrize("lacking", [False, True])
def test_who_was_superseded_while_memory_was_allocated_says_nothing_about_it(segment, lacking):
    """The incarnation that took over decides by what the segment says, and may be using that slot by now."""

    class Owner(CaptureOwner):
        def check_room(self, nbytes):
            segment.header.token = 2
            if lacking:
                raise BudgetError("no room")

    def permitted():
        if segment.header.token != 1:
            raise FencedError("superseded")

    segment.header.token = 1
    slots = SlotClaims(segment, Owner(), permitted=permitted)
    write(segment, 0, 1)
    write(segment, 1, 2)
    with pytest.raises(FencedError):
        slots.make_room(v(3))
    assert not segment.header.short and segment.slot(2).state is UNCLAIMED


def test_no_memory_is_claimed_in_a_segment_that_took_the_place_of_this_one(segment):
    """By a rank that does not know yet that the job has started again without it, maybe with another layout."""
    create(segment.path, replace(SHAPE, slots=FIRST, nbytes=PAGE), 0, {})
    new = Segment(segment.path)
    with pytest.raises(SegmentError, match="replaced"):
        segment.claim_slot(4)
    assert segment.slot(4).state is UNCLAIMED and segment.path.stat().st_size == new.shape.total
    segment.path.unlink()
    with pytest.raises(SegmentError, match="No such file"):
        segment.claim_slot(4)


def test_capture_claims_a_slot_before_it_would_overwrite_what_a_rank_may_need(segment):
    owner, used = Told(), list[int]()
    told = owner.told
    slots = SlotClaims(segment, owner, used.append)
    for iteration in (1, 2):
        index = slots.slot_for(v(iteration))
        assert index == iteration - 1
        write(segment, index, iteration)
    segment.pin(v(2), Pin.NODE)
    slots.make_room(v(3))
    assert (slots.slot_for(v(3)), told) == (0, []), "version 2 is committed: version 1 is needed no longer"
    write(segment, 0, 3)
    segment.pin(v(3), Pin.SOURCE)
    slots.make_room(v(4))
    assert (segment.claimed, used, told) == ((0, 1, 2), [2], [None])
    assert slots.slot_for(v(4)) == 2
    write(segment, 2, 4)
    assert slots.slot_for(v(5)) == 3 and len(told) == 2, "in time, even if no room was made before"


def test_where_memory_is_lacking_a_version_is_left_out_and_then_slots_are_overwritten_as_with_fewer(
    segment, monkeypatch
):
    owner = Told()
    owner.lacking, told = True, owner.told
    now = [1000.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    slots = SlotClaims(segment, owner)
    write(segment, 0, 1)
    write(segment, 1, 2)
    assert segment.free == SLOTS and segment.pinnable(segment.slots(), v(2)) == 1
    assert slots.slot_for(v(3)) is None and segment.header.short and [str(error) for error in told] == ["no room"]
    assert segment.free == FIRST - SHARED and segment.pinnable(segment.slots(), v(2)) is None, "it may go next"
    now[0] += 5
    slots.make_room(v(4))
    assert slots.slot_for(v(4)) == 0 and len(told) == 1
    write(segment, 0, 4)
    assert Segment(segment.path).header.short, "the SMP reads it, and a trainer that starts again"
    owner.lacking = False
    slots.make_room(v(5))
    assert segment.header.short, "not tried at each iteration"
    now[0] += 100
    slots.make_room(v(5))
    assert not segment.header.short and told[1:] == [None] and segment.claimed == (0, 1, 2)
    assert slots.slot_for(v(5)) == 2 and segment.free == SLOTS


def test_the_version_that_first_lacks_memory_is_left_out_whenever_that_is_found(segment):
    """The SMP may be about to pin what capture overwrites from now on: it has an iteration to read that it may not."""

    owner = Told()
    owner.lacking = True
    slots = SlotClaims(segment, owner)
    write(segment, 0, 1)
    write(segment, 1, 2)
    slots.make_room(v(3))
    assert segment.header.short and [slots.slot_for(v(iteration)) for iteration in (3, 4)] == [None, 0]


def test_what_other_ranks_of_a_node_have_claimed_already_they_lack_no_longer(segment, segment_path, tmp_path):
    """All ranks of a node claim a slot at about the same time. The last one needs room for its own alone."""
    another = SHAPE.slot_room - PAGE  # its header has memory
    paths = [segment_path, *(segment_path.with_name(f"{segment_path.name}{rank}") for rank in (1, 2))]
    try:
        for path in paths[1:]:
            create(path, SHAPE, 0, {})
        assert claims.missing(paths, 3) == 3 * another
        Segment(paths[1]).claim_slot(2)
        assert claims.missing(paths, 3) == 2 * another
        descriptor = os.open(paths[2], os.O_RDWR)
        os.posix_fallocate(descriptor, slot_start(SHAPE, 2), 2 * PAGE)
        os.close(descriptor)
        assert claims.missing(paths, 3) == 2 * another - PAGE, "it is being allocated"
        Segment(paths[1]).claim_slot(3)
        assert claims.missing(paths, 3) == 2 * another - PAGE, "what is more than that helps no other rank"
        assert claims.missing([*paths, tmp_path / "none"], MOST + 1) == 3 * (MOST - 2) * another - 2 * another - PAGE
    finally:
        for path in paths[1:]:
            path.unlink(missing_ok=True)


def test_a_version_that_others_have_is_restored_without_overwriting_one_that_is_here(segment, monkeypatch):
    assert slot_to_rebuild(segment) == 0
    write(segment, 0, 1)
    assert slot_to_rebuild(segment) == 1 and segment.claimed == (0, 1)
    write(segment, 1, 2)
    assert slot_to_rebuild(segment) == 2 and segment.claimed == (0, 1, 2), "another one is claimed"
    write(segment, 2, 3)

    def refuse(*args):
        raise BudgetError("no room")

    monkeypatch.setattr("ft_plugins.snapshot.segment.claims.check_room", refuse)
    assert slot_to_rebuild(segment) == 0 and segment.claimed == (0, 1, 2), "the oldest has to go"


def test_ranks_that_restore_a_version_together_claim_a_slot_each_or_overwrite_one(segment, segment_path, monkeypatch):
    """Each of them alone would find room for one: a control group that is exceeded ends the job."""
    other = segment_path.with_name(f"{segment_path.name.rpartition('-r')[0]}-r1")
    create(other, SHAPE, 1, {})
    asked = list[int]()
    try:
        monkeypatch.setattr(claims, "check_room", lambda nbytes, *others: asked.append(nbytes))
        for each in (segment, Segment(other)):
            for index in range(FIRST):
                write(each, index, index + 1)
            assert slot_to_rebuild(each) == FIRST
        assert asked == [2 * (SHAPE.slot_room - PAGE), SHAPE.slot_room]
    finally:
        other.unlink()
