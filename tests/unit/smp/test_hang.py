"""The decision whether a job hangs, for which rank it waits, and which ranks are slow."""

from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.model.progress import WorkPhase
from ft_plugins.smp.tree.agreement import Announcement, NodeReport, Summary, merge, summarize
from ft_plugins.smp.tree.tree_messages import from_child, from_parent, packed_announcement, packed_summary
from ft_plugins.smp.watch import hang
from ft_plugins.smp.watch.hang import (
    HangVerdict,
    Signs,
    Stall,
    culprits,
    judge,
    limit_of,
    merged,
    slow_ranks,
    stall_of_ended,
    works,
)
from ft_plugins.snapshot.segment.progress_words import KEPT, RankProgress

NOW = 1000.0
USUAL = RankProgress(
    rank=0, iteration=7, edges=3, phase=WorkPhase.AFTER_FORWARD, edge_at=NOW, since=NOW, done=6, limit_seconds=None,
    stage=0, ranks=4, ranks_of_node=4, shared=False, longest=2.0, first=50.0, seconds=(1.0,) * 5, computed=(0.5,) * 5,
)  # fmt: skip


def ranks(count=4, **of_all):
    same = replace(USUAL, ranks=count, ranks_of_node=count, **of_all)
    return [replace(same, rank=rank) for rank in range(count)]


# ---- the limit ----


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, hang.LEAST_SECONDS),
        ({"seconds": (20.0,) * 5}, 20 * hang.ITERATIONS),
        ({"seconds": (1.0, 1.0, 1.0, 1.0, 400.0)}, hang.LEAST_SECONDS),  # the median counts, of its own rank's
        ({"longest": 100.0}, 100 * hang.LONGEST),
        ({"seconds": (1.0, 1.0)}, 50 * hang.ITERATIONS),  # too few are known: the first counts
        ({"seconds": (), "first": 1e6}, hang.LONG_SECONDS),
        ({"done": 0}, hang.LONG_SECONDS),
        ({"phase": WorkPhase.EVALUATION}, hang.LONG_SECONDS),
        ({"phase": WorkPhase.SAVING, "limit_seconds": 5.0}, hang.LONG_SECONDS),
        ({"phase": WorkPhase.SAVING, "limit_seconds": 5000.0}, 5000.0),
        ({"limit_seconds": 5.0}, 5.0),
        ({"limit_seconds": 0.0}, 0.0),
        ({"limit_seconds": 0.0, "done": 0}, 0.0),
    ],
)
def test_the_limit_follows_from_what_was_given_or_measured(fields, limit):
    assert limit_of(ranks(**fields)) == limit


def test_one_rank_in_an_evaluation_gives_the_whole_node_time():
    some = ranks()
    assert limit_of([*some[:3], replace(some[3], phase=WorkPhase.EVALUATION)]) == hang.LONG_SECONDS


@pytest.mark.parametrize(
    ("fields", "how", "limit"),
    [
        ({}, {"hangs": 2}, hang.LEAST_SECONDS * hang.GROWTH**2),
        ({"done": 0}, {"hangs": 1}, hang.LONG_SECONDS * hang.GROWTH),  # it was taken for a hang
        ({"phase": WorkPhase.SAVING}, {"hangs": 2}, hang.LONG_SECONDS * hang.GROWTH**2),
        ({}, {"apart": True}, hang.APART_SECONDS),
        ({"limit_seconds": 5.0}, {"hangs": 2}, 5.0),
        ({"limit_seconds": 5.0, "done": 0}, {"hangs": 1}, hang.LONG_SECONDS),
        ({"limit_seconds": 5.0}, {"apart": True}, 5.0),
    ],
)
def test_hangs_in_the_same_iteration_and_a_node_that_sees_no_other_have_more_time_unless_a_limit_is_given(
    fields, how, limit
):
    assert limit_of(ranks(**fields), **how) == limit


# ---- the verdict ----


def test_no_rank_hangs_while_one_of_them_completes_iterations():
    waiting = ranks(since=NOW - 1e6, edge_at=NOW - 1e6)
    assert judge(waiting, NOW).stall is not None
    assert judge([*waiting[:3], replace(waiting[3], since=NOW)], NOW) == HangVerdict(0.0, hang.LEAST_SECONDS)


def test_in_a_first_iteration_and_in_an_evaluation_every_edge_counts():
    moving = ranks(since=NOW - 1e6, edge_at=NOW - 100, done=0)
    assert judge(moving, NOW) == HangVerdict(100.0, hang.LONG_SECONDS)
    assert judge(moving, NOW + hang.LONG_SECONDS).stall is not None
    evaluating = ranks(since=NOW - 1e6, edge_at=NOW - 100, phase=WorkPhase.EVALUATION)
    assert judge(evaluating, NOW).stall is None


def test_edges_without_an_iteration_are_no_progress():
    assert judge(ranks(since=NOW - 100, edge_at=NOW), NOW).stall is not None


def test_ranks_are_judged_once_all_have_begun_and_until_one_has_ended():
    waiting = ranks(since=0.0)
    assert judge([], NOW) == judge(waiting[:3], NOW) == HangVerdict()
    assert judge([*waiting[:3], replace(waiting[3], phase=WorkPhase.ENDED)], NOW) == HangVerdict()


def test_what_was_not_watched_counts_for_nothing():
    waiting = ranks(since=0.0)
    assert judge(waiting, NOW, watched_since=NOW - 5) == HangVerdict(5.0, hang.LEAST_SECONDS)


def test_switched_off_nothing_hangs():
    assert judge(ranks(since=0.0, limit_seconds=0.0), 1e9).stall is None


# ---- the culprit ----


def named(some, stopped=()):
    return [rank.rank for rank in culprits(some, stopped)]


def test_the_one_that_did_not_come_to_the_collective_is_the_culprit():
    some = ranks()
    assert named(some) == []
    for behind in (
        replace(some[2], phase=WorkPhase.FORWARD, edges=2),
        replace(some[2], phase=WorkPhase.DATA, edges=1),
        replace(some[2], iteration=6, edges=9, phase=WorkPhase.AFTER_UPDATE),
        replace(some[2], edges=1),  # of an earlier microbatch
    ):
        assert named([*some[:2], behind, some[3]]) == [2]


def test_all_that_are_behind_are_named():
    some = ranks()
    assert named([some[0], *(replace(one, phase=WorkPhase.FORWARD, edges=2) for one in some[1:])]) == [1, 2, 3]


def test_a_stopped_rank_is_the_culprit_wherever_it_is():
    assert named(ranks(), (3,)) == [3]
    stall = judge(ranks(since=0.0), NOW, stopped=(3,)).stall
    assert stall is not None and not stall.waits, "not even where it waits"


def test_with_a_pipeline_stages_are_compared_by_what_they_do_not_by_their_edges():
    """Stage 0, of ranks 0 and 1, has done more than stage 1 at any time."""
    first = [replace(one, edges=9, phase=WorkPhase.RECV) for one in ranks()[:2]]
    last = [replace(one, edges=4, phase=WorkPhase.REDUCE, stage=1) for one in ranks()[2:]]
    assert named([*first, *last]) == []
    stuck = replace(last[0], edges=2, phase=WorkPhase.FORWARD)
    assert named([replace(first[0], edges=7), first[1], stuck, last[1]]) == [2], "rank 0 waits for its output"
    assert named([first[0], replace(last[0], phase=WorkPhase.FORWARD)]) == [2], "one rank per stage"


def test_where_forwards_hold_collectives_the_one_in_a_forward_may_wait_too():
    some = ranks(shared=True, phase=WorkPhase.FORWARD, edges=2)
    assert named([*some[:3], replace(some[3], phase=WorkPhase.DATA, edges=1)]) == [3]
    assert named([*some[:3], replace(some[3], phase=WorkPhase.AFTER_FORWARD, edges=1)]) == [3], "an earlier microbatch"


@settings(max_examples=30)
@given(st.integers(2, 4096), st.data())
def test_among_thousands_of_ranks_the_one_that_is_behind_is_named(count, data):
    culprit = data.draw(st.integers(0, count - 1))
    behind = data.draw(st.sampled_from([{"edges": 2, "phase": WorkPhase.FORWARD}, {"iteration": 6}, {"edges": 1}]))
    some = ranks(count, since=0.0)
    some[culprit] = replace(some[culprit], **behind)
    verdict = judge(some, NOW)
    assert verdict.ranks == (culprit,) and verdict.stall is not None
    assert verdict.stall.rank == culprit and not verdict.stall.even


# ---- ranks that may be at work ----


@pytest.mark.parametrize(
    ("phase", "signs", "at_work"),
    [
        (WorkPhase.FORWARD, Signs(busy=0.9), True),  # it computes alone, in one call perhaps
        (WorkPhase.FORWARD, Signs(busy=0.01, moved=True), False),  # a thread that now and then does something
        (WorkPhase.AFTER_FORWARD, Signs(busy=0.9), False),  # a collective may poll
        (WorkPhase.AFTER_FORWARD, Signs(busy=0.9, moved=True), True),
        (WorkPhase.DATA, Signs(blocked=True), True),  # a file system stalls
        (WorkPhase.DATA, Signs(), False),
    ],
)
def test_a_rank_is_at_work_by_its_processor_its_stack_or_its_device(phase, signs, at_work):
    assert works(replace(USUAL, phase=phase), signs) is at_work


def stall_of(some, seconds, **more):
    return judge(some, NOW + seconds, **more).stall


@pytest.mark.parametrize("phase", [WorkPhase.AFTER_UPDATE, WorkPhase.VERSION_POINT, WorkPhase.BETWEEN])
def test_a_rank_past_its_update_is_waited_for_for_half_an_hour(phase):
    late, *others = ranks()
    some = [replace(late, iteration=6, phase=phase), *others]
    for seconds, patient in ((61.0, True), (hang.LONG_SECONDS, True), (hang.LONG_SECONDS + 1, False)):
        stall = stall_of(some, seconds)
        assert stall is not None and (stall.rank, stall.patient) == (0, patient), seconds
    given = stall_of([replace(each, limit_seconds=5.0) for each in some], 6.0)
    assert given is not None and not given.patient
    held = stall_of(some, 61.0, stopped=[0])
    assert held is not None and not held.patient


def test_work_that_was_seen_counts_for_as_long_as_the_limit():
    some = ranks(phase=WorkPhase.FORWARD)
    for worked, patient in (({}, False), ({2: NOW + 40}, True), ({2: NOW + 400}, True)):
        stall = stall_of(some, 450.0 if worked == {2: NOW + 400} else 100.0, worked=worked)
        assert stall is not None and stall.patient is patient
    gone = stall_of(some, 500.0, worked={2: NOW + 400})
    assert gone is not None and not gone.patient


def test_of_several_nodes_the_one_that_is_waited_for_decides_whether_to_wait():
    uploads = Stall(20, True, 9, 0, WorkPhase.AFTER_UPDATE, 0, False, patient=True)
    waits = Stall(21, True, 3, 1, WorkPhase.AFTER_FORWARD, 1, False)
    stuck = Stall(20, False, 2, 1, WorkPhase.FORWARD, 1, False)
    assert merged([uploads, waits]) == uploads
    assert merged([uploads, stuck]) == stuck
    moves = Stall(21, True, 3, 2, WorkPhase.AFTER_FORWARD, 2, False, patient=True)
    assert merged([waits, moves]) == replace(moves, even=False), "of equals, the one at work"
    even = replace(stuck, even=True)
    assert merged([even, replace(even, iteration=21)]) == stuck, "one node is behind the other"
    ended = stall_of_ended(ranks(2, iteration=19), 2)
    assert merged([ended, even]) == even and merged([ended, moves]) == moves, "the ended ranks are not waited for"
    assert merged([ended, None]) is None, "others work on"


# ---- of all nodes ----

STALLS = st.builds(
    Stall, st.integers(1, 3), st.booleans(), st.integers(0, 3), st.integers(0, 9),
    st.sampled_from([WorkPhase.DATA, WorkPhase.FORWARD, WorkPhase.AFTER_FORWARD, WorkPhase.ENDED]), st.integers(0, 3),
    st.booleans(), st.booleans(),
)  # fmt: skip


@given(st.lists(STALLS | st.none(), min_size=1, max_size=5), st.randoms())
def test_stalls_are_merged_in_any_order_and_any_number_of_times(stalls, generator):
    whole = merged(stalls)
    shuffled = generator.sample(stalls, len(stalls))
    assert merged(shuffled) == whole == merged([*stalls, *stalls])
    assert reduce(lambda one, other: merged([one, other]), stalls) == whole
    if whole is not None:
        assert None not in stalls and merged([whole]) == whole


def test_thousands_of_nodes_agree_on_one_rank_and_one_node_that_works_on_is_enough_for_no_hang():
    """2,048 nodes of 8 ranks, reported up a tree; rank 9,999 sleeps in its forward."""
    stalls = []
    for node in range(2048):
        own = [replace(one, rank=8 * node + one.rank, ranks=16384, since=0.0) for one in ranks(8)]
        own = [replace(one, edges=2, phase=WorkPhase.FORWARD) if one.rank == 9999 else one for one in own]
        stalls.append(judge(own, NOW, position=node).stall)
    summaries = [summarize(node, NodeReport(1, stall=stall)) for node, stall in enumerate(stalls)]
    while len(summaries) > 1:
        summaries = [merge(summaries[at : at + 9]) for at in range(0, len(summaries), 9)]
    stall = summaries[0].stall
    assert stall is not None and (stall.rank, stall.position) == (9999, 9999 // 8) and not stall.even
    assert not stall.waits
    assert stall.who("b") == "rank 9999 of node b, in the forward of iteration 7"
    assert merge([summaries[0], summarize(5, NodeReport(1))]).stall is None


def test_if_no_rank_of_any_node_is_behind_that_is_said():
    stalls = [judge(ranks(since=0.0), NOW, position=node).stall for node in range(3)]
    whole = merged(stalls)
    assert whole is not None and whole.even
    assert whole.who("b").startswith("all ranks, none behind the others, after the forward")


@given(STALLS | st.none())
def test_stalls_pass_through_messages(stall):
    assert from_child(packed_summary(Summary(5, 3, stall=stall))) == Summary(5, 3, stall=stall)
    assert from_parent(packed_announcement(Announcement(stall=stall))) == Announcement(stall=stall)


# ---- slow ranks ----


def compared(*seconds, of=KEPT):
    some = ranks(len(seconds), seconds=(1.0,) * of)
    return [replace(one, computed=(time,) * of) for one, time in zip(some, seconds, strict=True)]


def test_a_rank_that_computes_much_longer_than_its_peers_is_slow():
    [slow] = slow_ranks(compared(0.2, 0.2, 0.5, 0.2))
    assert (slow.rank, slow.factor, slow.seconds) == (2, 2.5, 0.3)
    for seconds, before in ((0.28, [2]), (0.28, []), (0.24, [2])):  # until it has come half way back
        found = [one.rank for one in slow_ranks(compared(0.2, 0.2, seconds, 0.2), before)]
        assert found == ([2] if seconds == 0.28 and before else [])


@pytest.mark.parametrize(
    "some",
    [
        compared(0.25, 0.25, 0.375, 0.25),  # half as long again, and no more
        compared(0.01, 0.01, 0.1, 0.01),  # too little of an iteration
        compared(0.2, 0.2, 0.5, 0.2, of=KEPT - 1),  # too few iterations
        compared(0.5),
        [replace(one, seconds=(0.03,) * KEPT) for one in compared(0.01, 0.01, 0.05, 0.01)],  # too short to matter
    ],
)
def test_other_ranks_are_not_slow(some):
    assert slow_ranks(some) == ()


def test_single_slow_iterations_do_not_make_a_rank_slow():
    some = compared(0.2, 0.2, 0.2)
    some[1] = replace(some[1], computed=(9.0,) * (KEPT // 2 - 1) + (0.2,) * (KEPT - KEPT // 2 + 1))
    assert slow_ranks(some) == ()


def test_stages_are_not_compared_with_each_other():
    some = compared(0.2, 0.2, 0.9, 0.9)
    assert slow_ranks([*some[:2], *(replace(one, stage=1) for one in some[2:])]) == ()
    alone, *others = compared(0.2, 0.2, 0.2, 0.5)
    assert [one.rank for one in slow_ranks([replace(alone, stage=1), *others])] == [3], "others after one without peers"
