"""Which version is certified and kept: random histories of ranks that live by the fence, are compared and killed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import SegmentError
from ft_plugins.snapshot.segment.slots import (
    SLOTS,
    Mark,
    Pin,
    Slot,
    SlotState,
    Version,
    certified_slot,
    choose,
    marks_of,
    pinnable_slot,
    recovery_order,
    slots_for,
    voided_slots,
)

CLEAN, DIRTY, EMPTY = SlotState.CLEAN, SlotState.DIRTY, SlotState.EMPTY
OTHERS = (Pin.NODE, Pin.SOURCE, Pin.STORAGE)


@dataclass
class Rank:
    """A rank's slots and where it stands, as in the story of a fence: captures are sealed and marked there."""

    slots: list[Slot]
    lineage: int = 0
    step: int = 0
    fenced: int = 0
    writing: int | None = None

    def versions(self) -> set[Version]:
        return {slot.version for slot in self.slots if slot.state is CLEAN and slot.version}

    def change(self, index: int, **values: object) -> None:
        self.slots[index] = replace(self.slots[index], **values)

    def begin(self) -> None:
        """The version point: a capture starts."""
        self.step += 1
        version = Version(self.lineage, self.step)
        before = sorted(self.versions())
        self.writing = choose(self.slots, version)
        assert self.slots[self.writing].version not in before[-2:], "one of the two newest is overwritten"
        assert not self.slots[self.writing].pins
        self.change(self.writing, state=DIRTY, version=version, mark=Mark.NONE)

    def seal(self) -> None:
        if self.writing is not None:
            self.change(self.writing, state=CLEAN)
            self.writing = None

    def fence(self, mark: Mark) -> None:
        """Before the update of iteration `step` + 1: what was captured last is sealed, and its verdict is here."""
        self.seal()
        self.mark(Version(self.lineage, self.step), mark)
        self.fenced = self.step + 1

    def mark(self, version: Version, mark: Mark) -> None:
        for slot in list(self.slots):
            if slot.version == version and slot.state is CLEAN:
                self.change(slot.index, mark=mark)

    def pin(self, purpose: Pin, draw: random.Random) -> None:
        """The SMP keeps another version for `purpose`, if it may, as `Segment.pin` does."""
        held = sorted(self.versions())
        found = pinnable_slot(self.slots, draw.choice(held)) if held else None
        if found is not None:
            for slot in list(self.slots):
                self.change(slot.index, pins=slot.pins | purpose if slot.index == found else slot.pins & ~purpose)


@dataclass
class Job:
    """Ranks in lock-step, but for the fence; `audit` is the interval between two verdicts."""

    draw: random.Random
    ranks: list[Rank]
    audit: int
    pinned: bool
    verdicts: dict[Version, Mark] = field(default_factory=dict)
    restored: list[tuple[Version | None, Mark]] = field(default_factory=list)

    def verdict(self, version: Version) -> Mark:
        """The same for all ranks."""
        if version not in self.verdicts:
            audited = version.iteration % self.audit == 0
            agreed = Mark.CERTIFIED if self.draw.random() < 0.8 else Mark.MISMATCHED
            self.verdicts[version] = agreed if audited else Mark.UNAUDITED
        return self.verdicts[version]

    def common(self) -> set[Version]:
        return set.intersection(*(rank.versions() for rank in self.ranks))

    def marks(self) -> dict[Version, Mark]:
        return marks_of((slot.version, slot.mark) for rank in self.ranks for slot in rank.slots)

    def newest(self, mark: Mark | None = None) -> Version | None:
        marks = self.marks()
        return max((v for v in self.common() if mark is None or marks.get(v) is mark), default=None)

    def step(self) -> None:
        rank = self.draw.choice(self.ranks)
        if self.pinned and self.draw.random() < 0.2:
            rank.pin(self.draw.choice(OTHERS), self.draw)
        if rank.writing is not None and self.draw.random() < 0.3:
            rank.seal()
        elif rank.fenced == rank.step:
            if all(other.step >= rank.step for other in self.ranks):  # a verdict takes the digests of all
                rank.fence(self.verdict(Version(rank.lineage, rank.step)) if rank.step else Mark.NONE)
        elif all(other.fenced >= rank.step for other in self.ranks):
            rank.begin()

    def recover(self) -> None:
        """All are killed wherever they stand; each opens a lineage in turn, and may be killed again over it."""
        for rank in self.ranks:
            rank.writing = None
            for slot in list(rank.slots):
                rank.change(slot.index, pins=Pin(0))
        marks = self.marks()
        base = next(iter(recovery_order(self.common(), marks)), None)
        self.restored.append((base, marks.get(base, Mark.NONE) if base else Mark.NONE))
        lineage = max(rank.lineage for rank in self.ranks) + 1
        for rank in self.ranks:
            if base is not None:
                rank.mark(base, marks.get(base, Mark.NONE))
            for index in voided_slots(rank.slots, base):
                rank.change(index, state=DIRTY, version=None, mark=Mark.NONE)
            rank.lineage, rank.step = lineage, base.iteration if base else 0
            rank.fenced = rank.step


def life(seed: int, world: int, audit: int, pinned: bool, slots: int) -> tuple[Job, list[Version]]:
    """A job's history, and the certified versions that all ranks held and some lost before all had a newer one."""
    draw = random.Random(seed)
    job = Job(draw, [Rank([Slot(i, EMPTY, None) for i in range(slots)]) for _ in range(world)], audit, pinned)
    best: Version | None = None
    lost = []
    for _ in range(200):
        if draw.random() < 0.02:
            job.recover()
        else:
            job.step()
        found = job.newest(Mark.CERTIFIED)
        if best is not None and (found is None or found < best):
            lost.append(best)
        best = found
    return job, lost


ALL = slots_for(*OTHERS, Pin.CERTIFIED)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_what_is_certified_on_all_ranks_is_kept_until_something_newer_is(
    seed: int, world: int, audit: int, pinned: bool
) -> None:
    """Whatever else is pinned; and `choose` always finds a slot, which is none of the two newest (see `begin`)."""
    job, lost = life(seed, world, audit, pinned, ALL if pinned else slots_for(Pin.CERTIFIED))
    assert lost == []
    for base, mark in job.restored:
        assert mark in (Mark.CERTIFIED, Mark.UNAUDITED, Mark.NONE)
        assert base is None or job.verdicts.get(base, Mark.NONE) is not Mark.MISMATCHED or mark is Mark.NONE


def test_such_lives_do_go_back_to_certified_versions_past_newer_ones() -> None:
    """The test above would be worth nothing if its jobs never came so far."""
    restored = [found for seed in range(40) for found in life(seed, 2, 3, False, 4)[0].restored]
    assert sum(mark is Mark.CERTIFIED for _, mark in restored) > 30


def test_with_a_slot_less_it_would_be_lost_or_capture_would_be_stuck() -> None:
    def fails(seed: int) -> bool:
        try:
            return bool(life(seed, 2, 3, False, SLOTS)[1])
        except (SegmentError, AssertionError):
            return True

    assert any(fails(seed) for seed in range(50))


def held(index: int, iteration: int, mark: Mark = Mark.NONE, lineage: int = 2) -> Slot:
    return Slot(index, CLEAN, Version(lineage, iteration), 1, Pin(0), mark)


def test_it_gives_way_only_when_every_rank_is_known_to_have_heard_of_the_next_one() -> None:
    slots = [held(0, 3, Mark.CERTIFIED), held(1, 4), held(2, 5), held(3, 6, Mark.CERTIFIED)]
    assert certified_slot(slots, Version(2, 7)) == 0, "another rank may be killed at the fence of 7, before 6 is sealed"
    assert choose(slots, Version(2, 7)) == 1
    slots[1] = held(1, 7)
    assert certified_slot(slots, Version(2, 8)) == 3
    assert choose(slots, Version(2, 8)) == 0
    assert certified_slot(slots, Version(3, 7)) == 3, "what was restored, or before it, all ranks have"
    assert certified_slot(slots) == 3, "and so it is when no capture runs"


def test_what_only_drifts_or_was_not_compared_is_not_kept() -> None:
    slots = [held(0, 3, Mark.DIVERGED), held(1, 4, Mark.UNAUDITED), held(2, 5, Mark.MISMATCHED)]
    assert certified_slot(slots) is None and choose(slots) == 0


def test_without_marks_nothing_changes() -> None:
    slots = [held(0, 3), held(1, 4), held(2, 5)]
    assert [choose(slots, Version(2, 6)), choose(slots)] == [0, 0]
    versions = [Version(1, 9), Version(2, 3), Version(2, 4)]
    assert recovery_order(versions, {}) == versions[::-1]
    assert recovery_order(versions, {Version(2, 3): Mark.DIVERGED}) == versions[::-1], "nothing compares"
    assert slots_for(Pin.CERTIFIED) == SLOTS + 1


@given(st.dictionaries(st.builds(Version, st.integers(0, 2), st.integers(1, 6)), st.sampled_from(Mark)))
def test_where_something_is_certified_what_is_known_to_be_good_goes_first(marks: dict[Version, Mark]) -> None:
    order = recovery_order(marks, marks)
    assert sorted(order) == sorted(version for version in marks if marks[version] is not Mark.MISMATCHED)
    good = [version for version in order if marks[version] in (Mark.CERTIFIED, Mark.DIVERGED)]
    if Mark.CERTIFIED in marks.values():
        assert order[: len(good)] == good == sorted(good, reverse=True)
    else:
        assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("worse, better", [(Mark.MISMATCHED, Mark.CERTIFIED), (Mark.CERTIFIED, Mark.NONE)])
def test_one_rank_that_has_heard_speaks_for_all(worse: Mark, better: Mark) -> None:
    version = Version(1, 3)
    assert marks_of([(version, better), (version, worse), (None, Mark.NONE)]) == {version: worse}
    assert marks_of([(version, Mark.NONE)]) == {}
