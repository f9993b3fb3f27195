"""Which version is certified and kept: random histories of ranks that live by the fence, are compared and killed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import SegmentError
from ft_plugins.snapshot.segment.slots import (
    SLOTS,
    Mark,
    Pin,
    Version,
    recovery_order,
    slots_for,
)

from .slot_histories import OTHERS, life

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


@given(st.dictionaries(st.builds(Version, st.integers(0, 2), st.integers(1, 6)), st.sampled_from(Mark)))
def test_where_something_is_certified_what_is_known_to_be_good_goes_first(marks):
    order = recovery_order(marks, marks)
    assert sorted(order) == sorted(version for version in marks if marks[version] is not Mark.MISMATCHED)
    good = [version for version in order if marks[version] in (Mark.CERTIFIED, Mark.DIVERGED)]
    if Mark.CERTIFIED in marks.values():
        assert order[: len(good)] == good == sorted(good, reverse=True)
    else:
        assert order == sorted(order, reverse=True)
