"""Which slot is overwritten: against brute force, over random histories of several ranks that live by the fence, and
case by case in `slots.txt`."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import SegmentError
from ft_plugins.snapshot.segment.slots import (
    FIRST,
    SLOTS,
    Mark,
    Pin,
    Slot,
    SlotState,
    Version,
    captured_after,
    certified_slot,
    check_transition,
    choose,
    choose_parity,
    free_of,
    free_slot,
    marks_of,
    needed_free,
    pinnable_slot,
    recovery_order,
    slot_given_up,
    slot_to_claim,
    slot_to_reuse,
    slots_for,
    voided_slots,
)
from tests import transcripts
from tests.transcripts import shown, value

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


# ---- case by case ----


class Rank:
    """The slots of a rank, `slots` first: a clean one by its version, or its iteration of lineage 1; `empty`, `dirty`,
    `unclaimed`; what it is pinned for, and the verdict on it, behind a slash."""

    def slots(self, *words):
        self.all = [self._slot(index, shown(word)) for index, word in enumerate(words)]

    def _slot(self, index, word):
        what, *more = word.split("/")
        state = SlotState[what.upper()] if what.isalpha() else CLEAN
        if state is DIRTY and more:
            what = more.pop(0)
        pinned = [Pin[one.upper()] for one in more if one in ("node", "source")]
        marks = [Mark[one.upper()] for one in more if one not in ("node", "source")]
        return Slot(
            index,
            state,
            None if what.isalpha() else _version(what),
            1,
            sum(pinned, Pin(0)),
            max(marks, default=Mark.NONE),
        )

    def choose(self, version=None):
        return shown(choose(self.all, *_given(version)))

    def parity(self, version):
        return shown(choose_parity(self.all, _version(version)))

    def free(self, version):
        return shown(free_slot(self.all, _version(version)))

    def pinnable(self, *versions, **more):
        found = [(version, pinnable_slot(self.all, _version(version), **more)) for version in versions]
        return {version: index for version, index in found if index is not None}

    def reuse(self, version, spare=2, given_up=True):
        return shown(slot_to_reuse(self.all, _version(version), spare, given_up))

    def certified(self, version=None):
        return shown(certified_slot(self.all, *_given(version)))

    def captured_after(self, lineage, iteration):
        return [version for _, version in captured_after(self.all, lineage, iteration)]

    def given_up(self):
        return shown(slot_given_up(self.all))

    def words(self):
        return [one.mark.word for one in self.all]

    def marks(self):
        return marks_of([(one.version, one.mark) for one in self.all])

    def order(self):
        return recovery_order(sorted({one.version for one in self.all}), self.marks())

    def slots_for(self, *purposes):
        return slots_for(*(Pin[one.upper()] for one in purposes))

    def free_of(self, slots, needed, *others, nodes=True):
        return free_of(slots, needed, nodes, [Pin[one.upper()] for one in others])

    def trains(self, iterations, exchange=0.0, late=0):
        """Versions are sealed at once, sent at once if none is, and count `exchange` iterations later, but for one that
        is `late`. How many slots are claimed in the end."""
        self.all = [Slot(at, EMPTY if at < FIRST else UNCLAIMED, None) for at in range(slots_for(Pin.NODE, Pin.SOURCE))]
        sent, counts_at = 0, 0.0
        for iteration in range(1, iterations):
            if sent and counts_at <= iteration:
                self._pin(sent, Pin.NODE)
                sent = 0
            index = slot_to_reuse(self.all, Version(1, iteration), SLOTS - 1, True)
            index = slot_to_claim(self.all) if index is None else index
            assert not self.all[index].pins, "a version that was pinned is overwritten"
            self.all[index] = clean(index, iteration)
            if not sent and iteration != late:
                self._pin(iteration, Pin.SOURCE)
                sent, counts_at = iteration, iteration + exchange
        return sum(slot.state is not UNCLAIMED for slot in self.all)

    def _pin(self, iteration, purpose):
        """In place of what was pinned before."""
        index = pinnable_slot(self.all, Version(1, iteration), SLOTS)
        assert index is not None
        others = [replace(one, pins=one.pins & ~(purpose | Pin.SOURCE)) for one in self.all]
        self.all = [replace(one, pins=one.pins | purpose) if one.index == index else one for one in others]


def _version(word):
    """Of lineage 1, if that is not said."""
    return value(word if ":" in word else f"1:{word}") if isinstance(word, str) else _version(shown(word))


def _given(version):
    return [] if version is None else [_version(version)]


test_slots = transcripts.of(__file__, Rank)
