"""Which slot is overwritten: against brute force, over random histories of several ranks that live by the fence."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError, SegmentError
from ft_plugins.snapshot.segment.slots import (
    SLOTS,
    Mark,
    Pin,
    Slot,
    SlotState,
    Version,
    captured_after,
    check_transition,
    choose,
    choose_parity,
    free_of,
    free_slot,
    marks_of,
    needed_free,
    pinnable_slot,
    recovery_order,
    slot_to_reuse,
    slots_for,
    voided_slots,
)

from .slot_histories import CLEAN, DIRTY, EMPTY, life

UNCLAIMED = SlotState.UNCLAIMED


def losses(world, seed, slots=SLOTS, interval=1):
    """The newest common versions that a random history of `world` ranks lost."""
    return life(seed, world, slots=slots, interval=interval)[1]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_the_newest_version_that_all_ranks_have_is_never_overwritten(world, seed):
    assert losses(world, seed) == []


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), st.integers(1, 5))
def test_of_versions_that_are_iterations_apart_two_slots_are_enough(world, seed, interval):
    assert losses(world, seed, needed_free(interval), interval) == []
    assert needed_free(interval) == (2 if interval > 1 else 3) and needed_free(interval, aligned=False) == 3


def test_with_one_slot_it_would_be_overwritten_however_far_apart_versions_are():
    assert any(losses(3, seed, 1, 4) for seed in range(50))


@pytest.mark.parametrize(
    ("slots", "needed", "others", "free"),
    [(5, 3, [Pin.STORAGE, Pin.CERTIFIED], 3), (4, 2, [Pin.STORAGE], 2), (4, 3, [], 2), (3, 3, [], 1), (2, 2, [], 0)],
)
def test_as_many_slots_are_free_as_are_left_by_the_node_tier(slots, needed, others, free):
    assert free_of(slots, needed, True, others) == free
    assert slots_for(Pin.NODE, Pin.SOURCE, *others, free=free) == slots + len(others)


@pytest.mark.parametrize(
    ("slots", "needed", "nodes", "others", "match"),
    [
        (4, 3, True, [Pin.STORAGE], "at least 5 where checkpoints"),
        (3, 2, True, [Pin.CERTIFIED], "at least 4 where checkpoints"),
        (3, 3, False, [], "has no effect: nodes do not protect each other"),
    ],
)
def test_fewer_slots_than_a_purpose_needs_are_refused(slots, needed, nodes, others, match):
    with pytest.raises(ConfigError, match=match):
        free_of(slots, needed, nodes, others)


def test_what_may_be_pinned_shrinks_with_the_slots_of_capture():
    slots = [clean(0, 7), clean(1, 8), clean(2, 9), clean(3, 3, Pin.NODE)]
    for free, spared in {3: [3, 8, 9], 2: [3, 9], 1: [3], 0: [3]}.items():
        assert [i for i in (3, 7, 8, 9) if pinnable_slot(slots, Version(1, i), free) is not None] == spared


def test_a_capture_for_which_all_are_pinned_finds_none_and_parity_goes_over_what_is_not_committed():
    both = [clean(0, 1, Pin.NODE), clean(1, 2, Pin.SOURCE)]
    assert free_slot(both, Version(1, 3)) is None
    assert free_slot([both[0], clean(1, 2)], Version(1, 3)) == 1
    assert choose_parity(both, Version(1, 3)) is None
    assert choose_parity([both[0], clean(1, 2)], Version(1, 3)) == 1
    assert choose_parity(both, Version(1, 1)) == 0, "what it holds of that version is damaged"


def test_with_two_slots_it_would_be_overwritten():
    """The rule is tight, and the model of histories finds what breaks it."""
    assert any(losses(2, seed, slots=2) for seed in range(50))


slots = st.tuples(
    *[
        st.builds(
            lambda state, lineage, iteration, index=index: Slot(
                index, state, None if state is EMPTY else Version(lineage, iteration)
            ),
            st.sampled_from([EMPTY, DIRTY, CLEAN]),
            st.integers(0, 3),
            st.integers(0, 5),
        )
        for index in range(SLOTS)
    ]
)


@given(slots)
def test_what_is_not_restorable_goes_first_and_then_the_oldest(found):
    chosen = found[choose(found)]
    if any(slot.state is not CLEAN for slot in found):
        assert chosen.state is not CLEAN
    else:
        assert chosen.version == min(slot.version for slot in found if slot.version)


@given(slots, st.none() | st.builds(Version, st.integers(0, 3), st.integers(0, 5)))
def test_a_new_lineage_voids_exactly_the_restorable_versions_newer_than_its_base(found, base):
    voided = voided_slots(found, base)
    for slot in found:
        newer = slot.state is CLEAN and slot.version is not None and (base is None or slot.version > base)
        assert (slot.index in voided) == newer


def test_versions_are_ordered_by_lineage_first():
    assert Version(2, 3) > Version(1, 9) > Version(1, 8)
    assert str(Version(2, 3)) == "3 (lineage 2)"


@pytest.mark.parametrize("before", SlotState)
@pytest.mark.parametrize("after", SlotState)
def test_only_the_transitions_of_the_table_are_allowed(before, after):
    allowed = {(EMPTY, DIRTY), (DIRTY, DIRTY), (DIRTY, CLEAN), (CLEAN, DIRTY), (UNCLAIMED, EMPTY)}
    if (before, after) in allowed:
        check_transition(before, after)
    else:
        with pytest.raises(SegmentError, match=f"from {before.name} to {after.name}"):
            check_transition(before, after)


NONE = Pin(0)


def clean(index, iteration, pins=NONE):
    return Slot(index, CLEAN, Version(1, iteration), 1, pins)


def test_each_purpose_of_a_pin_has_a_slot_beyond_those_of_capture():
    assert slots_for() == SLOTS
    assert slots_for(Pin.NODE, Pin.SOURCE) == SLOTS + 2
    assert slots_for(Pin.NODE, Pin.NODE) == SLOTS + 1


def test_a_pinned_slot_is_never_overwritten_however_old():
    slots = [clean(0, 1, Pin.NODE), clean(1, 2, Pin.SOURCE), clean(2, 9), clean(3, 8), clean(4, 7)]
    assert choose(slots) == 4
    with pytest.raises(SegmentError, match="pinned"):
        choose([clean(0, 1, Pin.NODE), clean(1, 2, Pin.NODE), clean(2, 3, Pin.SOURCE)])


def test_only_a_version_that_no_capture_can_be_about_to_overwrite_is_pinned():
    slots = [clean(0, 7), clean(1, 8), clean(2, 9)]
    assert pinnable_slot(slots, Version(1, 9)) == 2
    assert pinnable_slot(slots, Version(1, 8)) == 1
    assert pinnable_slot(slots, Version(1, 7)) is None, "the oldest one: a capture may have chosen it before the pin"
    assert pinnable_slot([clean(0, 7, Pin.NODE), *slots[1:]], Version(1, 7)) == 0, "a pinned one stays"
    assert pinnable_slot(slots, Version(2, 8)) is None and pinnable_slot(slots, Version(1, 6)) is None


def test_the_newest_certified_version_is_pinned_however_old_and_no_older_one():
    agreed = [replace(clean(index, iteration), mark=Mark.CERTIFIED) for index, iteration in ((0, 3), (1, 5))]
    slots = [*agreed, clean(2, 7), clean(3, 8), clean(4, 9)]
    assert pinnable_slot(slots, Version(1, 5)) == 1
    assert pinnable_slot(slots, Version(1, 3)) is None, "the capture that chooses next need not keep it"


def test_only_restorable_versions_count_whatever_the_header_of_an_unfinished_one_names():
    unfinished = replace(clean(3, 99, Pin.SOURCE), state=DIRTY)
    slots = [clean(0, 7), clean(1, 8), clean(2, 9), unfinished]
    assert pinnable_slot(slots, Version(1, 8)) == 1 and pinnable_slot(slots, Version(1, 99)) is None
    assert pinnable_slot(slots, Version(1, 7), free=5) == 0, "more free slots than versions: none is overwritten soon"
    assert slot_to_reuse(slots, Version(1, 100), 2, False) == 0, "all ranks have 8"
    assert slot_to_reuse(slots, Version(1, 100), 3, False) is None, "7 may be all that they have"
    assert captured_after([*slots, Slot(4, CLEAN, Version(2, 9)), Slot(5, CLEAN, None)], 1, 7) == [
        (slots[1], Version(1, 8)),
        (slots[2], Version(1, 9)),
    ]


def test_the_highest_mark_of_a_version_holds_and_preferred_ones_come_first_only_if_any_is_certified():
    versions = [Version(1, iteration) for iteration in range(5)]
    reported = [
        (versions[0], Mark.NONE),
        (versions[1], Mark.CERTIFIED),
        (versions[1], Mark.UNAUDITED),
        (versions[2], Mark.DIVERGED),
        (versions[3], Mark.UNAUDITED),
        (versions[4], Mark.MISMATCHED),
        (None, Mark.CERTIFIED),
    ]
    marks = marks_of(reported)
    highest = [Mark.CERTIFIED, Mark.DIVERGED, Mark.UNAUDITED, Mark.MISMATCHED]
    assert marks == dict(zip(versions[1:], highest, strict=True))
    assert [version.iteration for version in recovery_order(versions, marks)] == [2, 1, 3, 0]
    assert [version.iteration for version in recovery_order(versions, marks_of(reported[3:-1]))] == [3, 2, 1, 0]
    assert [mark.word for mark in Mark] == ["", "unaudited", "diverged", "certified", "mismatched"]


@given(seed=st.integers(0, 10_000))
def test_with_a_slot_for_each_purpose_capture_keeps_its_three_whatever_is_pinned(seed):
    """Pins come and go at any moment between two captures; the two newest versions and the pinned ones stay."""
    rng = random.Random(seed)
    slots = [Slot(i, EMPTY, None) for i in range(slots_for(Pin.NODE, Pin.SOURCE))]
    pinned = {}
    for iteration in range(1, 40):
        index = choose(slots)
        before = sorted(s.version for s in slots if s.state is CLEAN and s.version)
        slots[index] = clean(index, iteration)
        left = {s.version for s in slots if s.state is CLEAN}
        assert set(before[-2:]) <= left and set(pinned.values()) <= left
        for purpose in (Pin.NODE, Pin.SOURCE):
            if rng.random() < 0.3:
                wanted = Version(1, rng.randint(max(1, iteration - 4), iteration))
                found = pinnable_slot(slots, wanted)
                if found is not None:
                    slots = [replace(s, pins=s.pins & ~purpose) for s in slots]
                    slots[found] = replace(slots[found], pins=slots[found].pins | purpose)
                    pinned[purpose] = wanted
