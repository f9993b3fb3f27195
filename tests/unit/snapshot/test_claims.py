"""Slots are claimed when capture needs them, and no version that a rank may need is overwritten meanwhile."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    Slot,
    SlotState,
    Version,
    free_slot,
    pinnable_slot,
    slot_to_claim,
    slot_to_reuse,
    slots_for,
)

CLEAN, DIRTY, EMPTY, UNCLAIMED = SlotState.CLEAN, SlotState.DIRTY, SlotState.EMPTY, SlotState.UNCLAIMED
MOST = slots_for(Pin.NODE, Pin.SOURCE)


def v(iteration):
    return Version(1, iteration)


NONE = Pin(0)


def clean(index, iteration, pins=NONE):
    return Slot(index, CLEAN, v(iteration), 1, pins)


def unclaimed(*indices):
    return [Slot(index, UNCLAIMED, None) for index in indices]


@pytest.mark.parametrize(
    ("held", "index"),
    [
        ([], 0),
        ([clean(0, 1)], 1),
        ([clean(0, 1), clean(1, 2)], None),
        ([clean(0, 1, Pin.NODE), clean(1, 2, Pin.SOURCE)], None),
        ([clean(0, 1), clean(1, 2, Pin.NODE)], 0),
        ([clean(0, 2, Pin.NODE), clean(1, 3, Pin.SOURCE), clean(2, 1)], 2),
        ([clean(0, 1, Pin.NODE), clean(1, 2, Pin.SOURCE), clean(2, 3)], None),
        ([clean(0, 1, Pin.NODE), clean(1, 2, Pin.SOURCE), clean(2, 3), clean(3, 4)], None),
        ([clean(0, 1, Pin.NODE), Slot(1, DIRTY, v(9)), clean(2, 3)], 1),
    ],
    ids=str,
)
def test_a_slot_is_reused_if_all_ranks_have_a_newer_version_than_it_holds(held, index):
    slots = held + [Slot(at, EMPTY, None) for at in range(len(held), 2)]
    slots += unclaimed(*range(len(slots), MOST))
    assert slot_to_reuse(slots, v(10), SLOTS - 1, True) == index


def test_what_checkpoints_or_verdicts_may_need_stays_although_a_newer_one_is_committed():
    slots = [clean(0, 1), clean(1, 2, Pin.NODE), *unclaimed(2, 3, 4, 5)]
    assert slot_to_reuse(slots, v(3), 2, True) == 0 and slot_to_reuse(slots, v(3), 2, False) is None
    assert slot_to_reuse([clean(0, 1), clean(1, 2), *unclaimed(2)], v(4), 1, True) == 0, "versions further apart"


@dataclass
class Rank:
    """The slots of a rank, where its trainer stands, and what it is about to overwrite."""

    slots: list[Slot] = field(
        default_factory=lambda: [Slot(i, EMPTY if i < FIRST else UNCLAIMED, None) for i in range(MOST)]
    )
    limit: int = MOST  # slots for which there is memory
    short: bool = False
    step: int = 0
    fenced: int = 0
    chosen: int | None = None  # by a capture that has not made it DIRTY yet
    writing: int | None = None

    def versions(self):
        return {slot.version for slot in self.slots if slot.state is CLEAN and slot.version}

    def choose(self):
        """The version point: a capture chooses its slot."""
        self.step += 1
        if self.short or slot_to_claim(self.slots) is None:
            self.chosen = free_slot(self.slots, v(self.step))
            return
        self.chosen = slot_to_reuse(self.slots, v(self.step), SLOTS - 1, True)
        if self.chosen is None:
            another = slot_to_claim(self.slots)
            assert another is not None
            if another < self.limit:
                self.slots[another] = Slot(another, EMPTY, None)
                self.chosen = another
            else:
                self.short = True

    def overwrite(self):
        assert self.chosen is not None
        assert not self.slots[self.chosen].pins, "a version that was pinned is overwritten"
        self.slots[self.chosen] = Slot(self.chosen, DIRTY, v(self.step))
        self.writing, self.chosen = self.chosen, None

    def seal(self):
        assert self.writing is not None
        self.slots[self.writing] = replace(self.slots[self.writing], state=CLEAN)
        self.writing = None

    def fence(self):
        if self.writing is not None:
            self.seal()
        self.fenced = self.step + 1

    def pin(self, version, purpose):
        """What the SMP does, as `Segment.pin`."""
        lacking = len([slot for slot in self.slots if slot.state is UNCLAIMED])
        index = pinnable_slot(self.slots, version, SLOTS - (lacking if self.short else 0))
        if index is not None:
            self.slots[index] = replace(self.slots[index], pins=self.slots[index].pins | purpose)
        return index is not None

    def unpin(self, purpose, but):
        self.slots = [slot if slot.version == but else replace(slot, pins=slot.pins & ~purpose) for slot in self.slots]


class Job:
    """Ranks that train, and their SMPs, which exchange one version at a time: any step may come next."""

    def __init__(self, world, seed, exchange, limit=MOST):
        """`exchange`: how often a step is one of the SMPs."""
        self.draw = random.Random(seed)
        self.ranks = [Rank(limit=limit if rank == 0 else MOST) for rank in range(world)]
        self.exchange = exchange
        self.sent = None
        self.pinned = set()
        self.committed = None
        self.lost = []

    def common(self):
        return max(set.intersection(*(rank.versions() for rank in self.ranks)), default=None)

    def run(self, steps):
        best = None
        for _ in range(steps):
            self.smp() if self.draw.random() < self.exchange else self.train()
            found = self.common()
            if best is not None and (found is None or found < best):
                self.lost.append(best)
            best = found

    def train(self):
        rank = self.draw.choice(self.ranks)
        if rank.chosen is not None:
            rank.overwrite()
        elif rank.writing is not None and self.draw.random() < 0.3:
            rank.seal()
        elif rank.fenced == rank.step:
            rank.fence()
        elif all(other.fenced >= rank.step for other in self.ranks):
            rank.choose()

    def smp(self):
        """Name a version to send, pin it on a rank, let it count on all that have it pinned, or give it up."""
        if self.sent is None:
            found = self.common()
            if found is not None and (self.committed is None or found > self.committed):
                self.sent, self.pinned = found, set()
            return
        waiting = [index for index in range(len(self.ranks)) if index not in self.pinned]
        if waiting:
            index = self.draw.choice(waiting)
            if self.ranks[index].pin(self.sent, Pin.SOURCE):
                self.pinned.add(index)
                return
            for rank in self.ranks:
                rank.unpin(Pin.SOURCE, None)
            self.sent = None
            return
        for rank in self.ranks:
            assert rank.pin(self.sent, Pin.NODE), "a version that is pinned for sending can be pinned"
            rank.unpin(Pin.NODE, self.sent)
            rank.unpin(Pin.SOURCE, None)
        self.committed, self.sent = self.sent, None


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), st.sampled_from([0.02, 0.2, 0.5]))
def test_the_newest_version_that_all_ranks_have_stays_while_slots_are_claimed(world, seed, exchange):
    job = Job(world, seed, exchange)
    job.run(250)
    assert job.lost == []


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), st.integers(FIRST, MOST - 1), st.sampled_from([0.05, 0.3]))
def test_where_memory_is_lacking_what_counts_and_what_is_sent_stay(world, seed, limit, exchange):
    job = Job(world, seed, exchange, limit)
    for _ in range(50):
        job.run(5)
        assert job.committed is None or all(job.committed in rank.versions() for rank in job.ranks)
        assert all(job.sent in job.ranks[index].versions() for index in job.pinned if job.sent)


def test_without_the_versions_that_are_spared_one_would_be_lost():
    """The model finds what breaks the rule: the newest one of a rank may not be on all of them yet."""

    class Careless(Rank):
        def choose(self):
            self.step += 1
            self.chosen = slot_to_reuse(self.slots, v(self.step), 1, True)
            another = slot_to_claim(self.slots)
            if self.chosen is None and another is not None:
                self.slots[another] = Slot(another, EMPTY, None)
                self.chosen = another

    def loses(seed):
        job = Job(3, seed, 0.2)
        job.ranks = [Careless() for _ in job.ranks]
        try:
            job.run(250)
        except AssertionError:
            return True
        return bool(job.lost)

    assert any(loses(seed) for seed in range(30))


@pytest.mark.parametrize(("exchange", "slots"), [(0.5, 2), (1.5, 4), (2.5, 4), (7.5, 5)])
def test_as_many_slots_are_claimed_as_the_exchange_takes_iterations(exchange, slots):
    """One rank; a version is sealed at once, sent at once if none is, and counts `exchange` iterations later."""
    rank, sent, counts_at = Rank(), 0, 0.0
    for iteration in range(1, 60):
        if sent and counts_at <= iteration:
            assert rank.pin(v(sent), Pin.NODE)
            rank.unpin(Pin.NODE, v(sent))
            rank.unpin(Pin.SOURCE, None)
            sent = 0
        rank.choose()
        rank.overwrite()
        rank.seal()
        if not sent:
            assert rank.pin(v(iteration), Pin.SOURCE)
            sent, counts_at = iteration, iteration + exchange
    assert len([slot for slot in rank.slots if slot.state is not UNCLAIMED]) == slots


def test_a_version_that_is_late_once_takes_one_slot_more():
    rank = Rank()
    for iteration in range(1, 40):
        rank.choose()
        rank.overwrite()
        rank.seal()
        if iteration != 20:
            assert rank.pin(v(iteration), Pin.NODE)
            rank.unpin(Pin.NODE, v(iteration))
    assert len([slot for slot in rank.slots if slot.state is not UNCLAIMED]) == 3


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
