"""Which version is written and what is removed: nodes that decide alone decide alike, and nothing that counts goes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.snapshot.capture.retention import (
    NodeOffer,
    Storage,
    StoredCheckpoint,
    candidates,
    due,
    newest_held_by_all,
    next_turn,
    surplus,
    to_announce,
)
from ft_plugins.snapshot.schedule import ChosenSchedule, Intervals
from ft_plugins.snapshot.segment.slots import Mark, Version

STORAGE = Storage("/ck", interval=100, every=1, keep=2, world_size=4)


def v(iteration, lineage=1):
    return Version(lineage, iteration)


@pytest.mark.parametrize(
    ("held", "last", "alone", "expected"),
    [
        ([98, 99], None, True, None),
        ([99, 100, 101], None, True, 100),
        ([99, 100, 101], 100, True, None),
        ([101, 102], None, True, 102),  # the turn was overwritten before it was seen
        ([101, 102], None, False, None),  # other nodes may have seen it
        ([101, 102], 100, True, None),
        ([199, 200, 201], 100, False, 200),
        ([99, 100], 101, True, None),
    ],
)
def test_a_multiple_of_the_interval_is_due_once(held, last, alone, expected):
    found = due([v(i) for i in held], STORAGE, v(last) if last else None, None, alone)
    assert found == (v(expected) if expected else None)


def test_without_an_interval_nothing_is_due_but_what_was_named():
    quiet = replace(STORAGE, interval=0)
    assert due([v(100), v(200)], quiet, None, None, True) is None
    assert due([v(100), v(200)], quiet, None, v(200), True) == v(200)
    assert next_turn(100, quiet, None) is None and next_turn(100, quiet, v(200)) == 200


@pytest.mark.parametrize(
    ("good", "held", "last", "alone", "expected"),
    [
        ([], [100, 101], None, True, None),  # the verdict is still to come
        ([100], [100, 101], None, True, 100),
        ([104], [100, 104], None, False, None),  # drifts, and is not compared: 110 is
        ([110], [110, 111], None, True, 110),  # 100 differed
        ([110], [110, 111], None, False, None),  # another node may have had 100
        ([110], [110, 111], 100, True, None),
    ],
)
def test_where_replicas_are_compared_a_turn_is_that_of_a_version_whose_verdict_is_good(
    good, held, last, alone, expected
):
    audited = replace(STORAGE, audits=10)
    found = due([v(i) for i in held], audited, v(last) if last else None, None, alone, {v(i) for i in good})
    assert found == (v(expected) if expected else None)
    assert next_turn(101, replace(audited, interval=5), None) == 110


def test_nodes_at_rest_write_the_newest_that_is_certified_and_never_one_that_differs():
    held = (v(6), v(7), v(8))
    first = NodeOffer((0, 1), held, {v(6): Mark.CERTIFIED, v(7): Mark.UNAUDITED})
    assert newest_held_by_all([first, NodeOffer((2, 3), held)], 4) == v(6), "one node that has heard it speaks for all"
    assert newest_held_by_all([first, NodeOffer((2, 3), held, {v(6): Mark.MISMATCHED})], 4) == v(8)
    assert newest_held_by_all([NodeOffer((0, 1), held), NodeOffer((2, 3), held, {v(8): Mark.MISMATCHED})], 4) == v(7)


def test_a_restored_version_that_lies_in_storage_is_not_due_again_and_the_next_turn_of_its_lineage_is():
    assert due([v(100), v(101, 2)], STORAGE, v(100), None, True) is None
    assert due([v(101, 2), v(200, 2)], STORAGE, v(100), None, True) == v(200, 2)
    assert due([v(100, 2)], STORAGE, v(100), None, True) == v(100, 2), "captured anew after an older one was restored"


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 300))
def test_every_multiple_has_one_snapshot_and_next_turn_announces_it(interval, every, completed):
    storage = replace(STORAGE, interval=interval, every=every)
    turns = [i for i in range(every, 1000, every) if due([v(i)], storage, None, None, False)]
    assert set(turns) == {i for m in range(interval, 1000, interval) if (i := -(-m // every) * every) < 1000}
    assert next_turn(completed, storage, None) == min(i for i in turns if i > completed)


some_intervals = st.builds(Intervals, st.integers(1, 9), st.integers(1, 50))


@given(st.integers(1, 300), some_intervals, some_intervals)
def test_where_intervals_change_every_version_is_judged_by_those_of_its_own_iteration(since, before, now):
    chosen = replace(STORAGE, chosen=ChosenSchedule(since, now, before, 0))

    def turns(storage, every, within):
        return [i for i in within if i % every == 0 and due([v(i)], storage, None, None, False)]

    old = replace(STORAGE, interval=before.stored, every=before.captured)
    new = replace(STORAGE, interval=now.stored, every=now.captured)
    past, later = range(1, since), range(since, 600)
    assert turns(chosen, before.captured, past) == turns(old, before.captured, past)
    assert turns(chosen, now.captured, later) == turns(new, now.captured, later)
    assert next_turn(since, chosen, None) == next_turn(since, new, None)


@given(st.integers(0, 10**6), st.integers(1, 50), st.floats(0, 1000))
def test_a_name_is_of_a_snapshot_that_nobody_has_begun(completed, every, rate):
    named = to_announce(3, completed, every, rate)
    assert named.lineage == 3 and named.iteration % every == 0
    assert named.iteration > completed + every, "the next one may be begun already"
    assert named.iteration >= completed + 3 * rate - 1e-6, "seconds ahead, for all to have heard of it"


def test_nodes_at_rest_write_the_newest_that_all_of_them_offer():
    first, second = NodeOffer((0, 1), (v(7), v(8))), NodeOffer((2, 3), (v(6), v(7)))
    assert newest_held_by_all([first, second], 4) == v(7)
    assert newest_held_by_all([first], 4) is None, "two ranks have not said"
    assert newest_held_by_all([first, NodeOffer((2, 3), (v(8, 2),))], 4) is None, "another lineage is another version"


def test_what_a_lost_node_had_offered_gives_way_to_the_offer_of_its_substitute():
    first, lost = NodeOffer((0, 1), (v(5), v(9, 2))), NodeOffer((2, 3), (v(5), v(8)))
    substitute = NodeOffer((2, 3), (v(9, 2),))
    assert newest_held_by_all([first, lost], 4) == v(5)
    assert newest_held_by_all([lost, first, substitute], 4) == v(9, 2)
    assert newest_held_by_all([substitute, first, lost], 4) == v(9, 2)


def stored(version, complete=True, fingerprint="f"):
    name = f"v{version.lineage}-{version.iteration}"
    return StoredCheckpoint(version, name, complete, fingerprint if complete else "")


def test_the_newest_are_kept_and_what_was_never_finished_before_them_goes():
    found = [
        stored(v(100)),
        stored(v(200)),
        stored(v(300, 2)),
        stored(v(150), complete=False),
        stored(v(250, 2), complete=False),
        stored(v(400, 2), complete=False),
        stored(v(90), fingerprint="another"),
    ]
    assert [each.version for each in surplus(found, 2, "f")] == [v(100), v(150), v(250, 2)]
    assert [each.version for each in surplus(found, 1, "f")] == [v(100), v(150), v(200), v(250, 2)]
    assert surplus(found, 2, "nobody") == (), "nothing of ours is complete: nothing may go"


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.booleans()), unique_by=lambda t: t[:2]))
def test_pruning_leaves_the_newest_complete_ones(entries):
    found = [stored(Version(lineage, iteration), complete) for lineage, iteration, complete in entries]
    left = [each for each in found if each not in surplus(found, 2, "f")]
    complete = sorted((each.version for each in found if each.complete), reverse=True)
    assert sorted((each.version for each in left if each.complete), reverse=True) == complete[:2]
    assert [each.version for each in candidates(left, "f")] == complete[:2]


def test_a_checkpoint_that_is_kept_is_never_pruned_nor_counted_among_the_newest():
    found = [replace(stored(v(100)), kept=True), stored(v(200)), stored(v(300)), replace(stored(v(400)), kept=True)]
    assert surplus(found, 2, "f") == ()
    assert [each.version for each in surplus([*found, stored(v(500))], 2, "f")] == [v(200)]
    assert [each.version for each in surplus([*found, stored(v(500))], 1, "f")] == [v(200), v(300)]
    assert surplus([found[0], found[3]], 1, "f") == ()


def certified(version, known=True):
    return replace(stored(version), certified=known)


def test_the_newest_certified_checkpoint_is_never_pruned():
    found = [certified(v(100)), certified(v(200)), certified(v(300), False), certified(v(400), False)]
    assert [each.version for each in surplus(found, 2, "f")] == [v(100)]
    assert [each.version for each in surplus([*found, certified(v(500))], 2, "f")] == [v(100), v(200), v(300)]


def test_where_any_is_certified_those_of_which_it_is_not_known_go_last():
    good, unknown, drifting = certified(v(200)), certified(v(300), False), certified(v(400), None)
    older = certified(v(100), False)
    assert candidates([older, good, unknown], "f") == (good, unknown, older)
    assert candidates([older, good, unknown, drifting], "f") == (drifting, good, unknown, older), "compared by nobody"
    assert candidates([older, unknown], "f") == (unknown, older), "nothing certified: the newest as it is"
    another = replace(good, fingerprint="another")
    assert candidates([older, another, unknown], "f") == (unknown, older)


def test_candidates_are_those_of_the_job_and_those_that_cannot_say_whose_they_are():
    damaged = StoredCheckpoint(v(300), "v1-300", True, "", "its manifest is damaged")
    found = [stored(v(100)), stored(v(200), fingerprint="another"), stored(v(400), complete=False), damaged]
    assert candidates(found, "f") == (damaged, stored(v(100)))
