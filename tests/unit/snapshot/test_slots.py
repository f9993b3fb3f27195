"""Which slot is overwritten: against brute force, over random histories of several ranks that live by the fence."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import SegmentError
from ft_plugins.snapshot.slots import SLOTS, Slot, SlotState, Version, check_transition, choose, void

CLEAN, DIRTY, EMPTY = SlotState.CLEAN, SlotState.DIRTY, SlotState.EMPTY


@dataclass
class Rank:
    """A rank's slots and where it stands: captures of `step` begin at its end and are sealed at the next fence."""

    slots: list[Slot] = field(default_factory=lambda: [Slot(i, EMPTY, None) for i in range(SLOTS)])
    lineage: int = 0
    step: int = 0  # the last iteration whose version point was reached
    fenced: int = 0  # the last iteration whose fence was passed
    writing: int | None = None

    def versions(self) -> set[Version]:
        return {slot.version for slot in self.slots if slot.state is CLEAN and slot.version}

    def set(self, index: int, state: SlotState, version: Version | None) -> None:
        check_transition(self.slots[index].state, state)
        self.slots[index] = Slot(index, state, version)

    def begin(self) -> None:
        """The version point: a capture starts."""
        self.step += 1
        self.writing = choose(self.slots)
        self.set(self.writing, DIRTY, Version(self.lineage, self.step))

    def seal(self) -> None:
        assert self.writing is not None
        self.set(self.writing, CLEAN, self.slots[self.writing].version)
        self.writing = None

    def fence(self) -> None:
        """Before the update of iteration `step` + 1: the capture of `step` is sealed."""
        if self.writing is not None:
            self.seal()
        self.fenced = self.step + 1


def newest_common(ranks: list[Rank]) -> Version | None:
    return max(set.intersection(*(rank.versions() for rank in ranks)), default=None)


def recover(ranks: list[Rank], draw: random.Random) -> None:
    """All ranks are killed wherever they stand; a new lineage grows from the newest common version.

    Lineages are opened rank by rank: with a chance the job dies again in between.
    """
    for rank in ranks:
        rank.writing = None
    while True:
        base = newest_common(ranks)
        lineage = max(rank.lineage for rank in ranks) + 1
        order = draw.sample(ranks, len(ranks))
        opened = len(order) if draw.random() < 0.7 else draw.randrange(len(order))
        for rank in order[:opened]:
            for index in void(rank.slots, base):
                rank.set(index, DIRTY, None)
            rank.lineage = lineage
        assert newest_common(ranks) == base, "opening a lineage lost or gained a version"
        if opened == len(order):
            break
    for rank in ranks:
        rank.step = base.iteration if base else 0
        rank.fenced = rank.step
        newer = [version for version in rank.versions() if base is None or version > base]
        assert not newer, "a void version can still be restored"


def losses(world: int, seed: int, slots: int = SLOTS) -> list[Version]:
    """The newest common versions that a random history of `world` ranks lost.

    A rank ends iteration k+1 only when all have passed the fence of iteration k: it needs everybody's gradients.
    """
    draw = random.Random(seed)
    ranks = [Rank([Slot(i, EMPTY, None) for i in range(slots)]) for _ in range(world)]
    best: Version | None = None
    lost = []
    for _ in range(120):
        if draw.random() < 0.04:
            recover(ranks, draw)
            best = newest_common(ranks)
            continue
        rank = draw.choice(ranks)
        if rank.writing is not None and draw.random() < 0.3:
            rank.seal()  # the capture is done before the fence asks for it
        elif rank.fenced == rank.step:
            rank.fence()
        elif all(other.fenced >= rank.step for other in ranks):
            rank.begin()
        found = newest_common(ranks)
        if best is not None and (found is None or found < best):
            lost.append(best)
        best = found
    return lost


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_the_newest_version_that_all_ranks_have_is_never_overwritten(world: int, seed: int) -> None:
    assert losses(world, seed) == []


def test_with_two_slots_it_would_be_overwritten() -> None:
    """The rule is tight, and the model of histories finds what breaks it."""
    assert any(losses(2, seed, slots=2) for seed in range(50))


slots = st.tuples(
    *[
        st.builds(
            lambda state, lineage, iteration, index=index: Slot(
                index, state, None if state is EMPTY else Version(lineage, iteration)
            ),
            st.sampled_from(SlotState),
            st.integers(0, 3),
            st.integers(0, 5),
        )
        for index in range(SLOTS)
    ]
)


@given(slots)
def test_what_is_not_restorable_goes_first_and_then_the_oldest(found: tuple[Slot, ...]) -> None:
    chosen = found[choose(found)]
    if any(slot.state is not CLEAN for slot in found):
        assert chosen.state is not CLEAN
    else:
        assert chosen.version == min(slot.version for slot in found if slot.version)


@given(slots, st.none() | st.builds(Version, st.integers(0, 3), st.integers(0, 5)))
def test_a_new_lineage_voids_exactly_the_restorable_versions_newer_than_its_base(
    found: tuple[Slot, ...], base: Version | None
) -> None:
    voided = void(found, base)
    for slot in found:
        newer = slot.state is CLEAN and slot.version is not None and (base is None or slot.version > base)
        assert (slot.index in voided) == newer


def test_versions_are_ordered_by_lineage_first() -> None:
    assert Version(2, 3) > Version(1, 9) > Version(1, 8)
    assert str(Version(2, 3)) == "3 (lineage 2)"


@pytest.mark.parametrize("before", SlotState)
@pytest.mark.parametrize("after", SlotState)
def test_only_the_transitions_of_the_table_are_allowed(before: SlotState, after: SlotState) -> None:
    allowed = {(EMPTY, DIRTY), (DIRTY, DIRTY), (DIRTY, CLEAN), (CLEAN, DIRTY)}
    if (before, after) in allowed:
        check_transition(before, after)
    else:
        with pytest.raises(SegmentError, match=f"from {before.name} to {after.name}"):
            check_transition(before, after)
