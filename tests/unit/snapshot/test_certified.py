"""Which version is certified and kept: random histories of ranks that live by the fence, are compared and killed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import SegmentError
from ft_plugins.snapshot.segment.slots import (
    SLOTS,
    Mark,
    Pin,
    Slot,
    Version,
    certified_slot,
    choose,
    marks_of,
    recovery_order,
    slots_for,
)

from .slot_histories import CLEAN, OTHERS, life

ALL = slots_for(*OTHERS, Pin.CERTIFIED)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_what_is_certified_on_all_ranks_is_kept_until_something_newer_is(seed, world, audit, pinned):
    """Whatever else is pinned; and `choose` always finds a slot, which is none of the two newest (see `begin`)."""
    job, lost = life(seed, world, audit, pinned, ALL if pinned else slots_for(Pin.CERTIFIED))
    assert lost == []
    for base, mark in job.restored:
        assert mark in (Mark.CERTIFIED, Mark.UNAUDITED, Mark.NONE)
        assert base is None or job.verdicts.get(base, Mark.NONE) is not Mark.MISMATCHED or mark is Mark.NONE


def test_such_lives_do_go_back_to_certified_versions_past_newer_ones():
    """The test above would be worth nothing if its jobs never came so far."""
    restored = [found for seed in range(40) for found in life(seed, 2, 3, False, 4)[0].restored]
    assert sum(mark is Mark.CERTIFIED for _, mark in restored) > 30


def test_with_a_slot_less_it_would_be_lost_or_capture_would_be_stuck():
    def fails(seed):
        try:
            return bool(life(seed, 2, 3, False, SLOTS)[1])
        except (SegmentError, AssertionError):
            return True

    assert any(fails(seed) for seed in range(50))


def held(index, iteration, mark=Mark.NONE, lineage=2):
    return Slot(index, CLEAN, Version(lineage, iteration), 1, Pin(0), mark)


def test_it_gives_way_only_when_every_rank_is_known_to_have_heard_of_the_next_one():
    slots = [held(0, 3, Mark.CERTIFIED), held(1, 4), held(2, 5), held(3, 6, Mark.CERTIFIED)]
    assert certified_slot(slots, Version(2, 7)) == 0, "another rank may be killed at the fence of 7, before 6 is sealed"
    assert choose(slots, Version(2, 7)) == 1
    slots[1] = held(1, 7)
    assert certified_slot(slots, Version(2, 8)) == 3
    assert choose(slots, Version(2, 8)) == 0
    assert certified_slot(slots, Version(3, 7)) == 3, "what was restored, or before it, all ranks have"
    assert certified_slot(slots) == 3, "and so it is when no capture runs"


def test_what_only_drifts_or_was_not_compared_is_not_kept():
    slots = [held(0, 3, Mark.DIVERGED), held(1, 4, Mark.UNAUDITED), held(2, 5, Mark.MISMATCHED)]
    assert certified_slot(slots) is None and choose(slots) == 0


def test_without_marks_nothing_changes():
    slots = [held(0, 3), held(1, 4), held(2, 5)]
    assert [choose(slots, Version(2, 6)), choose(slots)] == [0, 0]
    versions = [Version(1, 9), Version(2, 3), Version(2, 4)]
    assert recovery_order(versions, {}) == versions[::-1]
    assert recovery_order(versions, {Version(2, 3): Mark.DIVERGED}) == versions[::-1], "nothing compares"
    assert slots_for(Pin.CERTIFIED) == SLOTS + 1


@given(st.dictionaries(st.builds(Version, st.integers(0, 2), st.integers(1, 6)), st.sampled_from(Mark)))
def test_where_something_is_certified_what_is_known_to_be_good_goes_first(marks):
    order = recovery_order(marks, marks)
    assert sorted(order) == sorted(version for version in marks if marks[version] is not Mark.MISMATCHED)
    good = [version for version in order if marks[version] in (Mark.CERTIFIED, Mark.DIVERGED)]
    if Mark.CERTIFIED in marks.values():
        assert order[: len(good)] == good == sorted(good, reverse=True)
    else:
        assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("worse, better", [(Mark.MISMATCHED, Mark.CERTIFIED), (Mark.CERTIFIED, Mark.NONE)])
def test_one_rank_that_has_heard_speaks_for_all(worse, better):
    version = Version(1, 3)
    assert marks_of([(version, better), (version, worse), (None, Mark.NONE)]) == {version: worse}
    assert marks_of([(version, Mark.NONE)]) == {}
