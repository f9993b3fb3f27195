"""The recovery plan, against brute force over random survivors."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ResumeError
from ft_plugins.recovery.plan import RankFacts, choose_source, plan_recovery
from ft_plugins.snapshot.slots import SLOTS, Slot, SlotState, Version, void

versions = st.builds(Version, st.integers(0, 2), st.integers(1, 5))


@st.composite
def survivors(draw: st.DrawFn) -> list[RankFacts]:
    """What the segments of a job's ranks may say: any states, any versions (a version once per rank)."""
    facts = []
    for rank in range(draw(st.integers(1, 5))):
        held = draw(st.lists(versions, min_size=SLOTS, max_size=SLOTS, unique=True))
        states = draw(st.lists(st.sampled_from(SlotState), min_size=SLOTS, max_size=SLOTS))
        slots = tuple(
            Slot(index, state, None if state is SlotState.EMPTY else version)
            for index, (state, version) in enumerate(zip(states, held, strict=True))
        )
        facts.append(RankFacts(rank, slots, draw(st.integers(0, 4)), draw(st.integers(0, 9))))
    return facts


def has(rank: RankFacts, version: Version) -> bool:
    return any(slot.state is SlotState.CLEAN and slot.version == version for slot in rank.slots)


@given(survivors(), st.sets(st.tuples(st.integers(0, 4), versions), max_size=6), st.sets(versions, max_size=2))
def test_the_newest_version_that_every_rank_holds_whole_is_taken(
    facts: list[RankFacts], corrupt: set[tuple[int, Version]], banned: set[Version]
) -> None:
    every = [Version(lineage, iteration) for lineage, iteration in itertools.product(range(3), range(1, 6))]
    common = [
        version
        for version in every
        if version not in banned
        and all(has(rank, version) and (rank.rank, version) not in corrupt for rank in facts)
    ]

    plan = plan_recovery(facts, corrupt, banned=banned)

    assert plan.version == (common[-1] if common else None)
    assert plan.lineage == max(rank.lineage for rank in facts) + 1
    # a rank whose segment was made just now has completed nothing, and says nothing about the others
    assert plan.completed == min((rank.completed for rank in facts if rank.lineage or rank.completed), default=0)
    assert plan.lost == max(0, plan.completed - (plan.version.iteration if plan.version else 0))
    assert plan.tier == ("process" if plan.version else "none") and plan.reason
    again = plan_recovery(list(reversed(facts)), frozenset(corrupt), banned=banned)
    assert plan == again, "whoever computes it, it is the same"


@given(survivors())
def test_a_second_recovery_right_after_takes_the_same_version_again(facts: list[RankFacts]) -> None:
    """Given a plan carried out on any of the ranks, when the job dies again before it captured anything."""
    plan = plan_recovery(facts)
    for opened in range(len(facts) + 1):
        again = []
        for rank in facts:
            if rank.rank >= opened:
                again.append(rank)
                continue
            voided = void(rank.slots, plan.version)
            slots = tuple(Slot(s.index, SlotState.DIRTY, None) if s.index in voided else s for s in rank.slots)
            again.append(RankFacts(rank.rank, slots, plan.lineage, plan.version.iteration if plan.version else 0))
        second = plan_recovery(again)
        assert second.version == plan.version
        assert second.lineage == plan.lineage + (1 if opened else 0)


def rank(number: int, *iterations: int, completed: int = 0, lineage: int = 1) -> RankFacts:
    slots = tuple(Slot(i, SlotState.CLEAN, Version(lineage, iteration)) for i, iteration in enumerate(iterations))
    return RankFacts(number, slots, lineage, completed)


def test_killed_in_iteration_9_restores_8_and_loses_none_or_7_and_loses_one() -> None:
    whole = plan_recovery([rank(0, 6, 7, 8, completed=8), rank(1, 6, 7, 8, completed=8)])
    assert (whole.version, whole.completed, whole.lost) == (Version(1, 8), 8, 0)
    struck = plan_recovery([rank(0, 6, 7, 8, completed=8), rank(1, 6, 7, completed=8)])
    assert (struck.version, struck.completed, struck.lost) == (Version(1, 7), 8, 1)
    assert struck.table() == (
        "recovery: iteration 7 of lineage 1 from the process tier; 8 were completed, 1 lost; lineage 2"
    )


def test_an_iteration_of_a_void_lineage_is_never_combined_with_the_same_iteration_of_a_newer_one() -> None:
    plan = plan_recovery([rank(0, 7, 8, lineage=1), rank(1, 7, 8, lineage=2)])
    assert plan.version is None and plan.reason == "no version is held by all ranks" and plan.lineage == 3


@pytest.mark.parametrize(
    "facts, corrupt, reason",
    [
        ([rank(0), rank(1)], [], "no version was captured before"),
        ([rank(0, 1), rank(1)], [], "rank 1 holds no version"),
        ([rank(0, 1), rank(1, 2)], [], "no version is held by all ranks"),
        ([rank(0, 1), rank(1, 1)], [(1, Version(1, 1))], "every version that all ranks hold is corrupt"),
        (
            [rank(0, 1, 2), rank(1, 1, 2)],
            [(0, Version(1, 1)), (1, Version(1, 2))],
            "every version that all ranks hold is corrupt",
        ),
    ],
)
def test_from_the_beginning_says_why(facts: list[RankFacts], corrupt: list[tuple[int, Version]], reason: str) -> None:
    plan = plan_recovery(facts, corrupt)
    assert plan.version is None and plan.reason == reason
    assert plan.table() == f"recovery: from the beginning ({reason}); lineage {plan.lineage}"


def test_thousands_of_ranks_are_planned_for() -> None:
    facts = [rank(number, 6, 7, *([8] if number != 4000 else []), completed=8) for number in range(4096)]
    assert plan_recovery(facts).version == Version(1, 7)


ALL_HOLD = [rank(0, 6, 7, completed=7), rank(1, 6, 7, completed=7)]
ONE_IS_EMPTY = [rank(0, 6, 7, completed=7), rank(1, completed=0)]
YOUNG = [rank(0, 1, completed=1), rank(1, completed=0)]


@pytest.mark.parametrize(
    ("facts", "mode", "loaded", "tier"),
    [
        (ALL_HOLD, "auto", 0, "process"),
        (ALL_HOLD, "auto", 7, "process"),
        (ALL_HOLD, "auto", 8, "storage"),
        (ALL_HOLD, "memory", 0, "process"),
        (ALL_HOLD, "storage", 3, "storage"),
        (ALL_HOLD, "fresh", 0, "none"),
        (ONE_IS_EMPTY, "auto", 5, "storage"),
        (ONE_IS_EMPTY, "fresh", 0, "none"),
        (YOUNG, "auto", 0, "none"),
    ],
)
def test_the_source_is_the_larger_iteration_or_what_was_asked_for(
    facts: list[RankFacts], mode: str, loaded: int, tier: str
) -> None:
    plan = choose_source(plan_recovery(facts), mode, loaded)
    assert plan.tier == tier
    assert (plan.version is not None) == (tier == "process")
    assert plan.loaded == (loaded if tier == "storage" else 0)


@pytest.mark.parametrize(
    ("facts", "corrupt", "mode", "said"),
    [
        (ONE_IS_EMPTY, (), "auto", "rank 1 holds no version"),
        (ALL_HOLD, ((0, Version(1, 6)), (1, Version(1, 7))), "auto", "corrupt"),
        (ONE_IS_EMPTY, (), "memory", "--ftp-resume auto"),
        (ALL_HOLD, (), "storage", "--load"),
    ],
)
def test_what_cannot_be_had_is_refused_instead_of_starting_from_the_beginning(
    facts: list[RankFacts], corrupt: tuple[tuple[int, Version], ...], mode: str, said: str
) -> None:
    with pytest.raises(ResumeError, match=said):
        choose_source(plan_recovery(facts, corrupt), mode, 0)
