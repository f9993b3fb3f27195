"""The recovery plan, against brute force over random survivors."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ResumeError
from ft_plugins.recovery.facts import NodeFacts, RankFacts, trust_of
from ft_plugins.recovery.recovery_plan import Source, Way, newest_committed, plan_recovery
from ft_plugins.recovery.source_choice import choose_source, iteration_bound
from ft_plugins.redundancy.exchange_plan import ExchangePlan, plan_exchange
from ft_plugins.snapshot.segment.slots import SLOTS, Mark, Slot, SlotState, Version, voided_slots

versions = st.builds(Version, st.integers(0, 2), st.integers(1, 5))


@st.composite
def survivors(draw):
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


def has(rank, version):
    return any(slot.state is SlotState.CLEAN and slot.version == version for slot in rank.slots)


def belongs(rank, lineage):
    """Whether what a rank has completed is of that lineage: it has opened it, or holds a version of it not newer."""
    newest = max(rank.restorable(), default=Version(0, 0))
    return rank.lineage == lineage or newest.lineage == lineage and (rank.completed or 0) >= newest.iteration


@given(survivors(), st.sets(st.tuples(st.integers(0, 4), versions), max_size=6), st.sets(versions, max_size=2))
def test_the_newest_version_that_every_rank_holds_whole_is_taken(facts, corrupt, banned):
    every = [Version(lineage, iteration) for lineage, iteration in itertools.product(range(3), range(1, 6))]
    common = [
        version
        for version in every
        if version not in banned and all(has(rank, version) and (rank.rank, version) not in corrupt for rank in facts)
    ]

    plan = plan_recovery(facts, corrupt, banned=banned)

    assert plan.version == (common[-1] if common else None)
    # above any version, whatever it is good for: one that was taken over is of a lineage that no rank has opened
    sealed = [version for version in every for rank in facts if has(rank, version)]
    assert plan.lineage == 1 + max([*(rank.lineage for rank in facts), *(version.lineage for version in sealed)])
    # a rank whose segment was made just now has completed nothing, and says nothing about the others
    restored = plan.version.iteration if plan.version else 0
    newest = [rank for rank in facts if belongs(rank, plan.lineage - 1)]
    known = [rank.completed for rank in newest if rank.completed or (rank.lineage and not rank.restorable())]
    assert plan.at_least == (not known) and plan.completed == min(known, default=restored)
    assert plan.lost == max(0, plan.completed - restored)
    assert plan.tier == ("process" if plan.version else "none") and plan.reason
    again = plan_recovery(list(reversed(facts)), frozenset(corrupt), banned=banned)
    assert plan == again, "whoever computes it, it is the same"


@given(survivors())
def test_a_second_recovery_right_after_takes_the_same_version_again(facts):
    """Given a plan carried out on any of the ranks, when the job dies again before it captured anything."""
    plan = plan_recovery(facts)
    for opened in range(len(facts) + 1):
        again = []
        for rank in facts:
            if rank.rank >= opened:
                again.append(rank)
                continue
            voided = voided_slots(rank.slots, plan.version)
            slots = tuple(Slot(s.index, SlotState.DIRTY, None) if s.index in voided else s for s in rank.slots)
            again.append(RankFacts(rank.rank, slots, plan.lineage, plan.version.iteration if plan.version else 0))
        second = plan_recovery(again)
        assert second.version == plan.version
        assert second.lineage == plan.lineage + (1 if opened else 0)


def rank(number, *iterations, completed=0, lineage=1):
    slots = tuple(Slot(i, SlotState.CLEAN, Version(lineage, iteration)) for i, iteration in enumerate(iterations))
    return RankFacts(number, slots, lineage, completed)


def test_killed_in_iteration_9_restores_8_and_loses_none_or_7_and_loses_one():
    whole = plan_recovery([rank(0, 6, 7, 8, completed=8), rank(1, 6, 7, 8, completed=8)])
    assert (whole.version, whole.completed, whole.lost) == (Version(1, 8), 8, 0)
    struck = plan_recovery([rank(0, 6, 7, 8, completed=8), rank(1, 6, 7, completed=8)])
    assert (struck.version, struck.completed, struck.lost) == (Version(1, 7), 8, 1)
    assert struck.table() == (
        "recovery: iteration 7 of lineage 1 from the process tier; every rank had completed 8, 1 lost; "
        "iteration 8 is computed next, again if it was logged before; lineage 2"
    )


def test_an_iteration_that_was_logged_but_not_completed_by_every_rank_is_said_to_be_computed_again():
    """A framework logs an iteration before its end: iteration 5 stands in the log, 4 were completed."""
    table = plan_recovery([rank(0, 3, 4, completed=5), rank(1, 3, 4, completed=4)]).table()
    assert "every rank had completed 4, 0 lost; iteration 5 is computed next, again if it was logged before" in table


def test_what_was_completed_is_said_by_the_memory_of_the_newest_lineage_alone():
    """Given a node that was left out in lineage 2, and is back after the job went on in lineage 3."""
    stale, living = rank(0, 53, 54, completed=54, lineage=2), rank(1, 70, 71, completed=71, lineage=3)
    for facts, known in (([stale, living], {}), ([rank(0, lineage=0), living], {0: 54})):
        plan = plan_recovery(facts, (), [NodeFacts({}, completed=known, lineage=2)])
        assert (plan.completed, plan.at_least, plan.lineage) == (71, False, 4)
    rebuilt = replace(stale, slots=rank(0, 70, 71, lineage=3).slots)
    assert plan_recovery([rebuilt, living]).lost == 0, "its record is still that of lineage 2"
    alone = plan_recovery([stale, rank(1, lineage=0)], (), [NodeFacts({}, frozenset({Version(3, 70)}))])
    assert (alone.completed, alone.at_least) == (0, True)
    own = choose_source(alone, "storage", 60).table()
    assert "every rank had completed at least 60, at least 0 lost; iteration 61" in own


def test_an_iteration_of_a_void_lineage_is_never_combined_with_the_same_iteration_of_a_newer_one():
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
def test_from_the_beginning_says_why(facts, corrupt, reason):
    plan = plan_recovery(facts, corrupt)
    assert plan.version is None and plan.reason == reason
    assert plan.table() == f"training starts from the beginning ({reason}); lineage {plan.lineage}"
    lost = plan_recovery([replace(each, completed=2) for each in facts], corrupt)
    assert lost.table() == f"recovery: from the beginning ({reason}), 2 lost; lineage {plan.lineage}"


def test_a_start_at_which_nothing_is_lost_is_not_called_a_recovery():
    first = plan_recovery([rank(0), rank(1)])
    assert first.fresh and not first.table().startswith("recovery")
    again = plan_recovery([rank(0, completed=7), rank(1, completed=7)])
    assert not again.fresh, "seven iterations are lost"
    assert again.table() == "recovery: from the beginning (no version was captured before), 7 lost; lineage 2"


def test_thousands_of_ranks_are_planned_for():
    facts = [rank(number, 6, 7, *([8] if number != 4000 else []), completed=8) for number in range(4096)]
    assert plan_recovery(facts).version == Version(1, 7)


def test_a_slot_put_back_together_does_not_make_its_rank_one_that_had_completed_nothing():
    plan = plan_recovery([rank(0, 4, 8, completed=10), rank(1, 8)])
    assert (plan.version, plan.completed, plan.lost) == (Version(1, 8), 10, 2)


ALL_HOLD = [rank(0, 6, 7, completed=7), rank(1, 6, 7, completed=7)]
ONE_IS_EMPTY = [rank(0, 6, 7, completed=7), rank(1, completed=0)]
YOUNG = [replace(rank(0, 1, completed=1), from_nothing=True), replace(rank(1, completed=0), from_nothing=True)]


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
def test_the_source_is_the_larger_iteration_or_what_was_asked_for(facts, mode, loaded, tier):
    plan = choose_source(plan_recovery(facts), mode, loaded)
    assert plan.tier == tier
    assert (plan.version is not None) == (tier == "process")
    assert plan.loaded == (loaded if tier == "storage" else 0)


@given(survivors(), st.integers(1, 7))
def test_before_an_iteration_the_plan_is_that_of_a_job_that_never_had_the_versions_from_there_on(facts, before):
    older = [
        replace(rank, slots=tuple(slot for slot in rank.slots if (slot.version or Version(0, 0)).iteration < before))
        for rank in facts
    ]
    plan = plan_recovery(facts, before=before)
    assert plan.version == plan_recovery(older).version
    assert plan.version is None or plan.version.iteration < before
    assert plan.lineage == plan_recovery(facts).lineage, "above all that were ever there"


@pytest.mark.parametrize(
    ("mode", "loaded", "expected"),
    [
        ("before:8", 0, ("process", 7)),
        ("before:7", 0, ("process", 6)),
        ("before:7", 5, ("process", 6)),
        ("before:6", 5, ("storage", 5)),  # the framework's own
    ],
)
def test_the_newest_older_version_is_restored_wherever_it_is(mode, loaded, expected):
    plan = choose_source(plan_recovery(ALL_HOLD, before=iteration_bound(mode)), mode, loaded)
    assert (plan.tier, plan.version.iteration if plan.version else plan.loaded) == expected
    assert plan.reason == f"--ftp-resume {mode}"


@pytest.mark.parametrize(
    ("facts", "corrupt", "mode", "said"),
    [
        (ONE_IS_EMPTY, (), "auto", "rank 1 holds no version"),
        (ALL_HOLD, ((0, Version(1, 6)), (1, Version(1, 7))), "auto", "corrupt"),
        (ONE_IS_EMPTY, (), "memory", "--ftp-resume auto"),
        (ALL_HOLD, (), "storage", "--load"),
    ],
)
def test_what_cannot_be_had_is_refused_instead_of_starting_from_the_beginning(facts, corrupt, mode, said):
    with pytest.raises(ResumeError, match=said):
        choose_source(plan_recovery(facts, corrupt), mode, 0)


# ---- from the beginning, or not ----


def damaged(facts, *slots):
    """With these slots unreadable."""
    gone = tuple(Slot(s.index, SlotState.DIRTY, None, damaged=True) if s.index in slots else s for s in facts.slots)
    return replace(facts, slots=gone)


def begun(facts):
    return replace(facts, from_nothing=True)


NOTHING = RankFacts(1, (), 0, 0)
WRITING = replace(begun(rank(1)), slots=(Slot(0, SlotState.DIRTY, Version(1, 1)),))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ([rank(0, 1), rank(1)], "in memory: rank 0: 1 (lineage 1)"),
        ([rank(0, 6, 7), rank(1, 5)], "in memory: rank 0: 6 (lineage 1), 7 (lineage 1); rank 1: 5 (lineage 1)"),
        ([begun(rank(0, 1)), NOTHING], "rank 0: 1 (lineage 1)"),
        ([begun(rank(0, 1)), replace(WRITING, damaged=("lineage",))], "rank 1: the header's lineage damaged"),
        ([begun(rank(0, 1)), damaged(WRITING, 0)], "rank 1: slot 0 damaged and not used"),
        ([begun(rank(0, 1, 2)), WRITING], "rank 0: 1 (lineage 1), 2 (lineage 1)"),
        ([damaged(begun(rank(0, 1)), 0), damaged(begun(rank(1, 1)), 0)], "no version can be read"),
        ([replace(NOTHING, rank=0, lost=True), NOTHING], "rank 0: its segment was damaged"),
        ([replace(NOTHING, rank=n, lost=True) for n in range(99)], "rank 7: its segment.*and 91 more"),
        ([*(rank(n, 6, 7) for n in range(61)), rank(61)], "ranks 0-60: 6 (lineage 1), 7 (lineage 1); rank 61: none"),
        ([rank(n, 6 + n % 2) for n in range(20)], "ranks 0, 2, 4, 6, 8, 10, 12, 14, and 2 more: 6 (lineage 1)"),
        ([rank(n, n + 1) for n in range(99)], "rank 7: 8 \\(lineage 1\\); and 91 more"),
    ],
)
def test_what_is_sealed_or_damaged_is_named_instead_of_starting_from_the_beginning(facts, said):
    plan = plan_recovery(facts)
    assert plan.version is None and plan.state_lost
    with pytest.raises(ResumeError, match=f"{said if '*' in said or chr(92) in said else re.escape(said)}.*fresh"):
        choose_source(plan, "auto", 0)
    assert choose_source(plan, "fresh", 0).tier == "none" and choose_source(plan, "auto", 9).loaded == 9


def test_what_only_another_node_or_parity_still_has_is_named_too():
    nodes = [NodeFacts({1: frozenset([Version(1, 3)])}, frozenset([Version(1, 2)]))]
    plan = plan_recovery([RankFacts(0, (), 0, 0), NOTHING], (), nodes)
    assert "the state of rank 1 is on node 0 of this job, but the rank runs on another one now" in plan.reason
    with pytest.raises(ResumeError, match=r"in memory: parity: 2 \(lineage 1\); rank 0: none; rank 1: 3 \(lineage 1\)"):
        choose_source(plan, "auto", 0)


@pytest.mark.parametrize(
    "facts",
    [
        [NOTHING],
        [begun(rank(0)), begun(rank(1))],
        [begun(rank(0, 1)), WRITING],
        [damaged(rank(0, 6, 7), 0, 1), begun(rank(1, lineage=2))],
        [replace(rank(0), lost=True), begun(rank(1, lineage=2))],
        [rank(0, 6, 7), begun(rank(1, lineage=2))],
    ],
    ids=[
        "first start",
        "ended before the first",
        "ended in the first",
        "void though damaged",
        "void though lost",
        "void",
    ],
)
def test_a_start_from_the_beginning_that_gives_up_nothing_goes_on_by_itself(facts):
    plan = choose_source(plan_recovery(facts), "auto", 0)
    assert plan.tier == "none" and plan.version is None


def test_what_a_damaged_slot_or_record_would_have_said_decides_nothing():
    whole = [begun(rank(number, 4, 5, 6, completed=6)) for number in range(3)]
    hurt = replace(damaged(whole[1], 0), lineage=0, from_nothing=False, completed=None, damaged=("lineage",))
    plan = plan_recovery([whole[0], hurt, whole[2]])
    assert (plan.version, plan.lineage, plan.completed, plan.lost) == (Version(1, 6), 2, 6, 0)
    assert plan.table().endswith("\n  rank 1: slot 0, the header's lineage damaged and not used")
    alone = plan_recovery([replace(hurt, rank=0)])
    assert (alone.version, alone.lineage) == (Version(1, 6), 2), "sealed slots say what no record is left to say"


# ---- with nodes that keep each other's parity ----

DIGEST = 77
SHAPES = {  # nodes of the ranks, sharding groups, losses
    "3 nodes": ("abc", [(0, 1, 2)], 1),
    "3 nodes, tp 2": ("aabbcc", [(0, 2, 4), (1, 3, 5)], 1),
    "2+1+1 ranks": ("aabc", [(0, 1, 2, 3)], 1),
    "4 nodes in two pairs": ("aabbccdd", [(0, 2), (1, 3), (4, 6), (5, 7)], 1),
    "4 nodes, two losses": ("abcd", [(0, 1, 2, 3)], 2),
    "5 nodes, tp 2, two losses": ("aabbccddee", [(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)], 2),
}
few = st.builds(Version, st.integers(1, 2), st.integers(1, 3))


@dataclass(frozen=True)
class Wreck:
    """A job after a failure. The ranks of position i run on node i of now; `facts` are what their own segments say."""

    plan: ExchangePlan
    facts: tuple[RankFacts, ...]
    nodes: tuple[NodeFacts, ...]
    corrupt: frozenset[tuple[int, Version]]
    banned: frozenset[Version]


def facts_of(plan, nodes, lineage=2):
    """What the ranks' own segments say: those that lie on the node where the rank runs now; others are made anew."""
    facts = []
    for rank in range(len(plan.position_of_rank)):
        held = nodes[plan.position_of_rank[rank]].slots
        slots = tuple(Slot(i, SlotState.CLEAN, version) for i, version in enumerate(sorted(held.get(rank, ()))))
        facts.append(RankFacts(rank, slots, lineage if rank in held else 0, 3 if rank in held else 0))
    return tuple(facts)


@st.composite
def wrecks(draw):
    """Nodes that stood at a position each; some are lost, some stand elsewhere now, some hold less than they should."""
    on, groups, losses = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    plan = plan_exchange(list(on), groups, [100] * len(on), losses)
    whole = draw(st.sets(few, min_size=1, max_size=3))  # of these most have everything
    stood = []
    for position, ranks in enumerate(plan.ranks):
        fate = draw(st.sampled_from(["there", "there", "there", "there", "lost", "of another plan", "poor"]))
        if fate == "lost":
            stood.append(NodeFacts({}))
            continue
        slots, parity = {rank: frozenset(whole) for rank in ranks}, frozenset(whole)
        if fate == "poor":
            slots = {rank: frozenset(draw(st.sets(few, max_size=3))) for rank in ranks}
            parity = frozenset(draw(st.sets(few, max_size=2)))
        stood.append(NodeFacts(slots, parity, position, DIGEST + (fate == "of another plan"), lineage=2))
    order = draw(st.just(range(len(stood))) | st.permutations(range(len(stood))))
    nodes = tuple(stood[position] for position in order)
    corrupt = draw(st.sets(st.tuples(st.integers(0, len(on) - 1), few), max_size=3))
    return Wreck(plan, facts_of(plan, nodes), nodes, frozenset(corrupt), frozenset(draw(st.sets(few, max_size=1))))


def sound(wreck, node, rank, version):
    return version in node.slots.get(rank, ()) and (rank, version) not in wreck.corrupt


def stands(wreck, position, version):
    """The nodes that have all that lay at a position."""
    return [
        index
        for index, node in enumerate(wreck.nodes)
        if node.position == position and node.plan_digest == DIGEST and version in node.parity
        and all(sound(wreck, node, rank, version) for rank in wreck.plan.ranks[position])
    ]  # fmt: skip


def ways(wreck, version):
    """By rank, what would do; None where nothing does for one of them."""
    found = []
    for facts in wreck.facts:
        elsewhere = [i for i, node in enumerate(wreck.nodes) if sound(wreck, node, facts.rank, version)]
        (section,) = [s for s in wreck.plan.sections if any(e.rank == facts.rank for t in s.streams for e in t)]
        gone = [position for position in section.positions if not stands(wreck, position, version)]
        if has(facts, version) and (facts.rank, version) not in wreck.corrupt:
            found.append({Source(Way.OWN)})
        elif elsewhere:
            found.append({Source(Way.FETCH, index) for index in elsewhere})
        elif len(gone) <= wreck.plan.losses:
            found.append({Source(Way.DECODE)})
        else:
            return None
    return found


@settings(max_examples=600, deadline=None)
@given(wrecks())
def test_the_newest_version_that_every_rank_owns_fetches_or_decodes_is_taken(wreck):
    every = [Version(lineage, iteration) for lineage, iteration in itertools.product(range(1, 3), range(1, 4))]
    can_be_had = [version for version in every if version not in wreck.banned and ways(wreck, version) is not None]

    plan = plan_recovery(wreck.facts, wreck.corrupt, wreck.nodes, wreck.plan, DIGEST, wreck.banned)

    assert plan.version == (can_be_had[-1] if can_be_had else None)
    assert plan.lineage == 1 + max(n.lineage for n in wreck.nodes)
    if plan.version is None:
        assert plan.tier == "none" and plan.sources == ()
        return
    would_do = ways(wreck, plan.version)
    assert would_do is not None and len(plan.sources) == len(would_do)
    assert all(source in sources for source, sources in zip(plan.sources, would_do, strict=True))
    assert plan.tier == ("process" if {source.way for source in plan.sources} == {Way.OWN} else "node")
    decoded = [rank for rank, source in enumerate(plan.sources) if source.way is Way.DECODE]
    for position, index in plan.holders.items():
        assert index in stands(wreck, position, plan.version)
    for rank in decoded:
        for position in wreck.plan.section_of_rank[rank].positions:
            assert (position in plan.holders) != (position in plan.gone), "either it is read from, or not counted on"
            assert position in plan.holders or not stands(wreck, position, plan.version)
        assert wreck.plan.position_of_rank[rank] in plan.gone
    shuffled = list(reversed(wreck.facts))
    assert plan_recovery(shuffled, wreck.corrupt, wreck.nodes, wreck.plan, DIGEST, wreck.banned) == plan


def job(name, kept, counted=4):
    """A job in which version `counted` is complete and `kept` says which iterations the nodes' ranks hold beside it."""
    on, groups, losses = SHAPES[name]
    plan = plan_exchange(list(on), groups, [100] * len(on), losses)
    nodes = []
    for position, ranks in enumerate(plan.ranks):
        held = frozenset(Version(1, iteration) for iteration in (counted, *kept.get(position, ())))
        parity = frozenset([Version(1, counted)])
        slots, committed = dict.fromkeys(ranks, held), Version(1, counted)
        nodes.append(NodeFacts(slots, parity, position, DIGEST, lineage=1, committed=committed))
    return plan, nodes


LOST = NodeFacts({})


@pytest.mark.parametrize(
    ("name", "lost", "ranks", "says"),
    [
        ("3 nodes", (0, 2), "0, 2", "2 nodes that protect each other, RAIM5 makes up for 1"),
        ("3 nodes, tp 2", (1, 2), "2, 3, 4, 5", "2 nodes that protect each other, RAIM5 makes up for 1"),
        ("4 nodes in two pairs", (0, 2, 3), "4, 5, 6, 7", "2 nodes that protect each other, RAIM5 makes up for 1"),
        ("4 nodes, two losses", (0, 1, 3), "0, 1, 3", "3 nodes that protect each other, RAIM6 makes up for 2"),
    ],
)
def test_more_than_parity_makes_up_for_is_said_with_the_ranks_and_the_code(name, lost, ranks, says):
    exchange, nodes = job(name, {})
    for position in lost:
        nodes[position] = LOST
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert plan.version is None and plan.tier == "none" and plan.state_lost
    assert f"version 4 (lineage 1): the parts of ranks {ranks} are gone with {says}" in plan.reason
    with pytest.raises(ResumeError, match=f"ranks {ranks} are gone"):
        choose_source(plan, "auto", 0)


def test_parity_that_is_damaged_where_it_is_needed_is_called_damaged_when_recovery_refuses():
    exchange, nodes = job("3 nodes", {})
    damage = "node b: the parity in slot 0 is damaged, so the version there is not used"
    nodes[0], nodes[1] = LOST, replace(nodes[1], parity=frozenset(), damage=damage)
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert plan.version is None and plan.reason.endswith(f"; {damage}")
    with pytest.raises(ResumeError, match="node b: the parity in slot 0 is damaged"):
        choose_source(plan, "auto", 0)


@pytest.mark.parametrize("lost", [(), (0,), (3,), (1, 2), (0, 3)])
def test_one_node_of_each_pair_is_decoded_from_the_other(lost):
    exchange, nodes = job("4 nodes in two pairs", {position: [7] for position in range(4)})
    for position in lost:
        nodes[position] = LOST
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert plan.version == Version(1, 4 if lost else 7), "the newest is in memory alone, not in parity"
    assert plan.tier == ("node" if lost else "process") and plan.gone == lost
    decoded = {rank for rank, source in enumerate(plan.sources) if source.way is Way.DECODE}
    assert decoded == {rank for position in lost for rank in exchange.ranks[position]}
    assert plan.holders == ({p: p for p in range(4) if p not in lost} if lost else {})
    if lost:
        assert f"ranks {', '.join(map(str, sorted(decoded)))}: from parity" in plan.table()
        assert "from the node tier" in plan.table()


def test_nodes_that_have_changed_places_hand_over_what_they_hold_even_the_newest():
    exchange, nodes = job("3 nodes, tp 2", {0: [7], 1: [7], 2: [7]})
    nodes = [nodes[1], nodes[2], nodes[0]]
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert plan.version == Version(1, 7) and plan.tier == "node" and plan.lineage == 2
    assert plan.sources == tuple(Source(Way.FETCH, index) for index in (2, 2, 0, 0, 1, 1))
    assert "ranks 0, 1, 2, 3, 4, 5: from another node's" in plan.table()


def test_a_lost_node_and_others_that_moved_up_are_decoded_and_fetched_at_once():
    exchange, nodes = job("3 nodes", {})
    nodes = [nodes[1], nodes[2], LOST]
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert plan.sources == (Source(Way.DECODE), Source(Way.FETCH, 0), Source(Way.FETCH, 1))
    assert plan.holders == {1: 0, 2: 1} and plan.gone == (0,) and plan.lineage == 2


def test_parity_of_another_plan_is_of_no_use():
    exchange, nodes = job("3 nodes", {})
    nodes[1] = LOST
    facts = facts_of(exchange, nodes)
    assert plan_recovery(facts, (), nodes, exchange, DIGEST).version == Version(1, 4)
    assert plan_recovery(facts, (), nodes, exchange, DIGEST + 1).version is None
    nodes[2] = replace(nodes[2], plan_digest=DIGEST + 1)
    assert plan_recovery(facts, (), nodes, exchange, DIGEST).version is None


def test_one_corrupt_slot_is_decoded_and_a_second_of_its_group_is_too_much():
    exchange, nodes = job("3 nodes, tp 2", {})
    facts = facts_of(exchange, nodes)
    one = plan_recovery(facts, [(2, Version(1, 4))], nodes, exchange, DIGEST)
    assert one.version == Version(1, 4) and one.sources[2] == Source(Way.DECODE) and one.gone == (1,)
    assert {source.way for rank, source in enumerate(one.sources) if rank != 2} == {Way.OWN}
    two = plan_recovery(facts, [(2, Version(1, 4)), (4, Version(1, 4))], nodes, exchange, DIGEST)
    assert two.version is None


def test_what_was_reached_and_which_lineage_was_opened_is_known_from_where_the_ranks_were():
    exchange, nodes = job("3 nodes", {})
    nodes = [replace(node, completed={node.position or 0: 9 + index}, lineage=5) for index, node in enumerate(nodes)]
    nodes = [nodes[2], nodes[0], nodes[1]]
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert (plan.lineage, plan.completed, plan.lost) == (6, 9, 5)


def test_a_slot_that_lies_on_two_nodes_does_not_hide_the_position_it_belongs_to():
    """Given nodes that have changed places and a recovery that was struck after rank 1 was fetched, before the SMPs
    were told to protect: its slot lies on both nodes. When the third node is lost then, there is still enough."""
    exchange, nodes = job("3 nodes", {})
    fetched = replace(nodes[0], slots={**nodes[0].slots, 1: nodes[1].slots[1]})
    nodes = [nodes[1], fetched, LOST]
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert plan.version == Version(1, 4)
    assert plan.sources == (Source(Way.FETCH, 1), Source(Way.OWN), Source(Way.DECODE))


def test_parity_that_was_complete_on_one_node_only_is_not_what_the_reason_speaks_of():
    """Given version 6 on its way and complete on one node, when two of the others are lost: version 4 had counted,
    and it is gone with them; the rank of the third one is not."""
    on = "abcd"
    exchange = plan_exchange(list(on), [(0, 1, 2, 3)], [100] * 4, 1)
    held, whole = frozenset([Version(1, 4), Version(1, 6)]), frozenset([Version(1, 4)])
    first = NodeFacts({0: held}, held, 0, DIGEST, committed=Version(1, 4))
    nodes = [first, NodeFacts({1: held}, whole, 1, DIGEST), LOST, LOST]  # the second has not heard of it
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert plan.version is None and plan.gone == (2, 3)
    assert "version 4 (lineage 1): the parts of ranks 2, 3 are gone with 2 nodes" in plan.reason


@pytest.mark.parametrize(
    ("heard", "base", "kept"),
    [
        ((4, 6, None), 9, 6),
        ((4, 6, None), 6, 6),
        ((4, 6, None), 5, 4),  # 6 counts, cannot be put together any more, and is void
        ((None, None, None), 9, None),
        ((4, 6, None), None, None),
    ],
)
def test_the_newest_version_that_counts_on_any_node_is_kept_unless_it_is_void(heard, base, kept):
    def version(iteration):
        return None if iteration is None else Version(1, iteration)

    nodes = [NodeFacts({}, committed=version(iteration)) for iteration in heard]
    assert newest_committed(nodes, version(base), None, 0) == version(kept)


def test_a_version_that_is_complete_on_every_node_counts_although_none_has_heard_it():
    """Given version 4, which counted: the node that decided so was restarted before it had told any, and so was the
    job, from version 7 of the process tier. Version 4 is all that a lost node could be made up for by."""
    exchange, nodes = job("3 nodes", {position: [7] for position in range(3)})
    unheard = [replace(node, committed=None) for node in nodes]
    assert newest_committed(unheard, Version(1, 7), exchange, DIGEST) == Version(1, 4)
    assert newest_committed(unheard, Version(1, 3), exchange, DIGEST) is None, "it is void"
    assert newest_committed(unheard, Version(1, 7), None, 0) is None
    assert newest_committed(unheard, None, exchange, DIGEST) is None
    assert newest_committed(unheard, Version(1, 7), exchange, DIGEST + 1) is None, "it is parity of another plan"
    assert newest_committed([*unheard[:2], LOST], Version(1, 7), exchange, DIGEST) is None
    assert newest_committed([*unheard[:2], replace(unheard[2], slots={})], Version(1, 7), exchange, DIGEST) is None


def test_what_a_start_from_the_beginning_made_void_does_not_come_back_from_other_nodes():
    """Given `--ftp-resume fresh`, struck when one rank of three had opened its lineage."""
    exchange, nodes = job("3 nodes", {})
    nodes[0] = replace(nodes[0], slots={0: frozenset()})
    facts = list(facts_of(exchange, nodes, lineage=1))
    facts[0] = RankFacts(0, (), 2, 0, from_nothing=True)
    assert plan_recovery(facts).version is None, "so it is without other nodes"
    assert plan_recovery(facts, (), nodes, exchange, DIGEST).version is None


def test_512_nodes_of_which_one_is_lost_are_planned_for():
    on = [f"n{rank // 8}" for rank in range(4096)]
    groups = [tuple(range(first + start, start + 512, 8)) for start in range(0, 4096, 512) for first in range(8)]
    exchange = plan_exchange(on, groups, [1000] * 4096, 1)
    held = frozenset([Version(1, 4)])
    nodes = [NodeFacts(dict.fromkeys(ranks, held), held, p, DIGEST) for p, ranks in enumerate(exchange.ranks)]
    nodes[300] = LOST
    plan = plan_recovery(facts_of(exchange, nodes), (), nodes, exchange, DIGEST)
    assert plan.version == Version(1, 4) and plan.gone == (300,)
    assert [rank for rank, source in enumerate(plan.sources) if source.way is Way.DECODE] == list(range(2400, 2408))


def test_a_node_that_was_a_spare_knows_that_the_job_has_gone_on():
    """It has dropped what it held: a job of fresh nodes and it alone does not begin from nothing unasked."""
    fresh = [RankFacts(rank, (), 0, 0) for rank in range(2)]
    nodes = [NodeFacts({0: frozenset()}, lineage=3, released=3), NodeFacts({1: frozenset()})]
    plan = plan_recovery(fresh, (), nodes)
    assert plan.version is None and plan.state_lost and plan.lineage == 4
    with pytest.raises(ResumeError, match="went on in lineage 3 on other nodes.*--ftp-resume fresh"):
        choose_source(plan, "auto", 0)
    assert choose_source(plan, "fresh", 0).tier == "none" and choose_source(plan, "auto", 9).loaded == 9
    begun = [RankFacts(rank, (), 4, 0, from_nothing=True) for rank in range(2)]
    assert not plan_recovery(begun, (), nodes).state_lost, "as the user had said"


def test_a_corrupt_slot_of_a_rank_is_not_taken_for_state_that_is_elsewhere():
    """The SMP of its own node holds it too."""
    old = Version(1, 4)
    facts = [RankFacts(0, (Slot(0, SlotState.CLEAN, old),), 1, 4)]
    plan = plan_recovery(facts, [(0, old)], [NodeFacts({0: frozenset([old])}, lineage=1)])
    assert plan.version is None and plan.state_lost and plan.reason == "every version that all ranks hold is corrupt"


def test_what_is_older_than_what_a_job_went_on_with_is_never_restored():
    old, new = Version(2, 9), Version(3, 9)
    nodes = [NodeFacts({0: frozenset([old])}, released=3), NodeFacts({1: frozenset([old])})]

    def facts(version):
        return [RankFacts(rank, (Slot(0, SlotState.CLEAN, version),), version.lineage, 9) for rank in range(2)]

    assert plan_recovery(facts(old), (), nodes).version is None
    assert plan_recovery(facts(new), (), nodes).version == new
    assert plan_recovery(facts(old), (), [replace(node, released=0) for node in nodes]).version == old


def test_the_lineage_that_is_opened_is_newer_than_the_version_restored():
    """What was taken over has a lineage of its own before any rank has opened it."""
    facts = [RankFacts(rank, (Slot(0, SlotState.CLEAN, Version(6, 9)),), 0, 9) for rank in range(2)]
    assert plan_recovery(facts).lineage == 7


def marked(facts, marks):
    return replace(
        facts,
        slots=tuple(replace(s, mark=marks.get(s.version.iteration, Mark.NONE) if s.version else s.mark)
                    for s in facts.slots),
    )  # fmt: skip


def test_the_newest_certified_version_is_taken_before_newer_ones_that_nobody_compared():
    heard = marked(rank(0, 3, 6, 7, 8, completed=8), {3: Mark.CERTIFIED, 6: Mark.CERTIFIED, 7: Mark.UNAUDITED})
    plan = plan_recovery([heard, rank(1, 3, 6, 7, 8, completed=8)])
    assert (plan.version, plan.mark, plan.lost) == (Version(1, 6), Mark.CERTIFIED, 2), "one rank that heard is enough"
    assert plan.table() == (
        "recovery: iteration 6 of lineage 1 from the process tier, certified; every rank had completed 8, 2 lost; "
        "iteration 7 is computed next, again if it was logged before; lineage 2\n"
        "  newer, but not known whether their replicas agree: iterations 7, 8"
    )
    other = plan_recovery([heard, rank(1, 3, 7, 8, completed=8)])
    assert other.version == Version(1, 3), "not what one rank lacks"
    none = plan_recovery([heard, rank(1, 7, 8, completed=8)])
    assert (none.version, none.mark) == (Version(1, 8), Mark.NONE), "where no certified one can be had, the newest"
    assert plan_recovery([heard, rank(1, 3, 6, 7, 8)], {(1, Version(1, 6))}).version == Version(1, 3)


def test_a_version_whose_replicas_differed_is_never_taken():
    wrong = marked(rank(0, 7, 8, completed=8), {7: Mark.UNAUDITED, 8: Mark.MISMATCHED})
    plan = plan_recovery([wrong, rank(1, 7, 8, completed=8)])
    assert (plan.version, plan.mark) == (Version(1, 7), Mark.UNAUDITED)
    assert "from the process tier, unaudited;" in plan.table()
    alone = plan_recovery([marked(rank(0, 8, completed=8), {8: Mark.MISMATCHED}), rank(1, 8, completed=8)])
    assert alone.version is None and not alone.state_lost
    told = NodeFacts({0: frozenset({Version(1, 8)})}, marks={Version(1, 8): Mark.MISMATCHED})
    assert plan_recovery([rank(0, 8)], nodes=[told]).version is None, "an SMP's word is as good"


def test_replicas_that_are_let_drift_are_not_gone_back_behind():
    """Under steady noise nothing ever agrees again; what was captured holds each replica whole."""
    marks = {3: Mark.CERTIFIED, 7: Mark.DIVERGED, 8: Mark.UNAUDITED}
    plan = plan_recovery([marked(rank(r, 3, 7, 8, completed=8), marks) for r in (0, 1)])
    assert (plan.version, plan.mark) == (Version(1, 7), Mark.DIVERGED)
    del marks[3]
    assert plan_recovery([marked(rank(r, 3, 7, 8), marks) for r in (0, 1)]).version == Version(1, 8), "no comparing"


@given(survivors(), st.dictionaries(versions, st.sampled_from(Mark)), st.sets(st.tuples(st.integers(0, 4), versions)))
def test_with_marks_it_is_still_one_version_that_all_have(facts, marks, corrupt):
    clean = [slot.version for slot in facts[0].slots if slot.version and slot.state is SlotState.CLEAN]
    said = {slot.index: marks.get(slot.version, Mark.NONE) for slot in facts[0].slots if slot.version in clean}
    heard = tuple(replace(slot, mark=said.get(slot.index, Mark.NONE)) for slot in facts[0].slots)
    facts = [replace(facts[0], slots=heard), *facts[1:]]
    known = {s.version: s.mark for s in facts[0].slots if s.version and s.state is SlotState.CLEAN}
    common = {
        version
        for version in known
        if known[version] is not Mark.MISMATCHED
        and all(has(one, version) and (one.rank, version) not in corrupt for one in facts)
    }
    plan = plan_recovery(facts, corrupt)
    if not common:
        assert plan.version is None
        return
    good = {version for version in common if known[version] in (Mark.CERTIFIED, Mark.DIVERGED)}
    compared = Mark.CERTIFIED in known.values()
    assert plan.version == max(good if compared and good else common)
    assert plan.mark is known[plan.version]


# ---- the framework's own checkpoint, where replicas are compared ----


def audited(certified, newest, completed, agreed, **more):
    """Two ranks that hold a certified version and a newer one without a verdict."""
    one = rank(0, certified, newest, completed=completed)
    marked = tuple(
        replace(slot, mark=Mark.CERTIFIED if slot.version and slot.version.iteration == certified else Mark.NONE)
        for slot in one.slots
    )
    return [replace(one, rank=number, slots=marked, agreed=agreed, **more) for number in (0, 1)]


@pytest.mark.parametrize(
    ("facts", "loaded", "expected"),
    [
        (audited(10, 11, 11, 10), 11, "memory"),  # saved while the audit of 11 was pending
        (audited(10, 11, 10, 10), 11, "memory"),  # it died between Megatron's save and our version point
        (audited(10, 14, 14, 10), 13, "memory"),  # between two audits
        (audited(10, 14, 14, 10), 16, "own"),  # of a job that went on elsewhere
        (audited(100, 119, 119, 110), 105, "own"),  # an audit after it agreed
        (audited(100, 119, 119, 110, doubted=(101, 106)), 105, "memory"),  # but replicas were repaired in between
        (audited(10, 10, 10, 10, doubted=(11, 14)), 14, "memory"),  # refused at an earlier restart
        (audited(10, 14, 14, None), 14, "own"),  # nothing is compared
        (audited(10, 14, 14, (1 << 32) - 1), 14, "own"),  # protection was lost: it is all there is
        ([replace(each, agreed=4) for each in ALL_HOLD], 8, "own"),  # no version is certified
    ],
)
def test_a_checkpoint_of_the_frameworks_own_that_no_audit_vouches_for_is_not_preferred_to_a_certified_version(
    facts, loaded, expected
):
    plan = choose_source(plan_recovery(facts), "auto", loaded)
    assert plan.tier == ("process" if expected == "memory" else "storage")
    assert plan.refused == (loaded if expected == "memory" else 0)
    if expected == "memory":
        assert plan.mark is Mark.CERTIFIED
        assert f"the framework's own, saved when replicas were not known to agree: {loaded}" in plan.table()


def test_what_one_rank_knows_of_the_replicas_holds_for_all():
    one, other = audited(10, 14, 14, 10, doubted=(11, 12))
    later = replace(other, agreed=12, doubted=(13, 14))
    assert trust_of([one, later]) == (12, (11, 14)) and trust_of([rank(0)]) == (None, None)
