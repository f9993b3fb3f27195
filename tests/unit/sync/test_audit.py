"""What digests say: who is wrong and where, when nobody can be named, and what is done about each."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.model.inventory import Role
from ft_plugins.sync.audit.audit import Audit, Offences, OnCorruption, Remedy, ScalarCopy, judge, promise, remedy
from ft_plugins.sync.buckets import ItemPiece, ReplicaBucket

REPAIR, AVERAGE, ROLLBACK = OnCorruption


def buckets(count, replicas=(0, 2, 4, 6), dtype="float32"):
    return [
        ReplicaBucket(n, replicas, n // 2, Role.PARAMETER, dtype, True, (ItemPiece(f"h.{n}.weight", 0, 9),), 36)
        for n in range(count)
    ]


def digests(replicas, count):
    return np.tile(np.arange(count, dtype=np.uint64) * np.uint64(1 << 60), (replicas, 1))


def test_replicas_that_are_alike_agree_and_nothing_is_done():
    found = judge(7, (0, 2, 4, 6), buckets(3), digests(4, 3))
    assert found == Audit(7, (0, 2, 4, 6), 3, ()) and found.agreed
    for chosen in OnCorruption:
        done = remedy(found, chosen)
        assert not done.changes and not done.rollback


def test_a_minority_is_named_with_rank_layer_and_bucket_and_repaired_from_the_first_of_the_majority():
    table = digests(4, 6)
    table[0, 5] ^= np.uint64(1)
    found = judge(7, (0, 2, 4, 6), buckets(6), table)
    (verdict,) = found.verdicts
    assert (verdict.wrong, verdict.source, verdict.bucket.number, verdict.bucket.layer) == ((0,), 2, 5, 2)
    assert str(verdict) == "rank 0 of 4 wrong in bucket 5: layer 2, parameter (h.5.weight)"
    (copy,) = remedy(found, REPAIR).copies
    assert (copy.bucket.number, copy.source, copy.targets) == (5, 2, (0,))
    assert [b.number for b in remedy(found, AVERAGE).averages] == [5]
    assert remedy(found, ROLLBACK).rollback and not remedy(found, ROLLBACK).changes


def test_two_that_differ_are_one_of_these_two_and_averaged():
    table = digests(2, 2)
    table[1, 0] ^= np.uint64(1)
    found = judge(3, (1, 3), buckets(2, (1, 3)), table)
    (verdict,) = found.verdicts
    assert verdict.source is None and verdict.wrong == (1, 3)
    assert str(found.verdicts[0]).startswith("ranks 1, 3, one of these two: bucket 0, layer 0")
    assert [b.number for b in remedy(found, REPAIR).averages] == [0] and not remedy(found, REPAIR).copies


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [0, 0, 1, 2], [0, 1, 2, 3]])
def test_half_or_the_most_of_a_few_is_no_majority(groups):
    table = digests(4, 1) + np.array(groups, dtype=np.uint64)[:, None]
    (verdict,) = judge(3, (0, 2, 4, 6), buckets(1), table).verdicts
    assert verdict.source is None and "some of these 4, no majority" in str(verdict)


def test_what_has_no_mean_is_copied_from_the_first_where_nobody_can_be_named():
    table = digests(2, 1)
    table[1, 0] += np.uint64(1)
    found = judge(3, (1, 3), buckets(1, (1, 3), "int64"), table)
    (copy,) = remedy(found, REPAIR).copies
    assert (copy.source, copy.targets) == (1, (3,)) and not remedy(found, REPAIR).averages


@given(st.integers(2, 9), st.data())
def test_no_majority_is_copied_over_and_every_bucket_that_differs_is_made_one(m, data):
    replicas = tuple(range(m))
    table = np.array(data.draw(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=m, max_size=m)))
    found = judge(1, replicas, buckets(3, replicas), table.astype(np.uint64))
    done = remedy(found, REPAIR)
    changed = {copy.bucket.number: copy for copy in done.copies}
    averaged = {bucket.number for bucket in done.averages}
    for column in range(3):
        values = table[:, column].tolist()
        if len(set(values)) == 1:
            assert column not in changed and column not in averaged
        elif column in changed:
            copy = changed[column]
            right = [r for r in replicas if values[r] == values[copy.source]]
            assert len(right) > m / 2 and set(right) | set(copy.targets) == set(replicas)
            assert not set(right) & set(copy.targets)
        else:
            assert column in averaged and max(values.count(v) for v in values) <= m / 2


def test_thousands_of_replicas_and_buckets_are_judged_and_shown_in_a_few_lines():
    replicas = tuple(range(4096))
    table = digests(4096, 500)
    table[17, :40] ^= np.uint64(5)
    found = judge(1, replicas, buckets(500, replicas), table)
    assert {verdict.wrong for verdict in found.verdicts} == {(17,)} and len(found.verdicts) == 40


def test_offences_count_iterations_and_ties_accuse_nobody():
    one = digests(4, 4)
    one[2, :2] ^= np.uint64(1)
    named = judge(1, (0, 2, 4, 6), buckets(4), one)
    tie = judge(2, (0, 2, 4, 6), buckets(1), digests(4, 1) + np.arange(4, dtype=np.uint64)[:, None])
    first = Offences().after(named)
    assert first.by_rank == {4: 1} and first.repeated() == ()
    assert first.after(tie).by_rank == {4: 1}
    assert first.after(Audit(3, (0, 2, 4, 6), 4, ())).after(named).repeated() == (4,)


@pytest.mark.parametrize(
    "given_, said",
    [
        ((1, REPAIR, False, True, 4, False, 0), "whose gradients are recomputed: the run stays bit-identical"),
        ((1, REPAIR, True, False, 4, False, 0), "before the next forward: the run stays bit-identical"),
        ((1, REPAIR, False, False, 4, False, 0), "cannot be recomputed here: replicas agree, but the run differs"),
        ((10, REPAIR, False, True, 4, False, 0), "replicas agree again, but the run differs from a clean one"),
        ((1, REPAIR, False, True, 2, False, 0), "two that differ are averaged"),
        ((1, AVERAGE, False, True, 4, False, 0), "replicas that differ are averaged"),
        ((5, ROLLBACK, False, True, 4, False, 0), "goes back to the newest version whose replicas agreed"),
        ((5, REPAIR, False, True, 4, False, 12), "12 tensors held by a single rank are not compared"),
        ((5, REPAIR, False, True, 4, False, 12), "an error in one reaches all replicas in the same way"),
        ((1, REPAIR, False, True, 0, True, 9), "rebuilt from optimizer state, without a majority, before"),
        ((9, REPAIR, False, True, 0, True, 9), "an error in one between two audits is not detected"),
        ((1, REPAIR, False, False, 0, True, 9), "here: the effect of a wrong copy stays in all replicas"),
    ],
)
def test_what_an_audit_promises_is_said_and_no_more(given_, said):
    text = promise(*given_)
    assert said in text and "an error that reached all replicas in the same way is not detected" in text


def test_where_one_replica_s_gradients_clip_those_of_all_that_is_said():
    said = promise(1, REPAIR, False, True, 4, False, 0, "we clip by the mean norm")
    assert said.endswith("we clip by the mean norm: the effect of one replica's wrong gradients on it stays in all "
                         "replicas, and the run then differs from a clean one")  # fmt: skip
    assert "we clip" not in promise(1, REPAIR, False, True, 0, True, 9, "we clip"), "of shards nothing is promised"
    assert "we clip" not in promise(1, ROLLBACK, False, True, 4, False, 0, "we clip"), "gone back to before it"


def test_of_shards_and_their_copies_nothing_is_said_of_a_majority_that_would_be_needed():
    said = promise(1, REPAIR, False, True, 0, True, 9)
    assert "averaged" not in said and "minority" not in said and "the run stays bit-identical" in said


def test_wrong_copies_are_made_anew_whatever_is_chosen_and_wrong_state_is_what_is_gone_back_for():
    those = buckets(2)
    copy = replace(those[1], role=Role.COPY)
    table = digests(4, 2)
    table[3, 1] ^= np.uint64(1)
    alone = judge(1, (0, 2, 4, 6), (those[0], copy), table)
    assert alone.verdicts[0].wrong == (6,) and not alone.agreed and alone.state == ()
    for chosen in OnCorruption:
        assert remedy(alone, chosen) == Remedy(derives=True)
    table[3, 0] ^= np.uint64(1)
    both = judge(1, (0, 2, 4, 6), (those[0], copy), table)
    assert remedy(both, ROLLBACK) == Remedy(rollback=True, derives=True)
    found = remedy(both, REPAIR)
    assert [one.bucket for one in found.copies] == [those[0]] and found.derives and found.averages == ()
    assert list(remedy(both, AVERAGE).averages) == [those[0]]


def test_what_is_beside_tensors_follows_the_first_replica_that_nobody_accuses():
    table = digests(4, 6)
    table[0, 1] ^= np.uint64(1)
    table[2, 4] ^= np.uint64(1)
    assert remedy(judge(1, (0, 2, 4, 6), buckets(6), table), REPAIR).scalars == ScalarCopy(2, (0, 4))
    table[:2, 5] ^= np.uint64(1)  # two against two, beside that: all are wrong of something
    assert remedy(judge(1, (0, 2, 4, 6), buckets(6), table), REPAIR).scalars == ScalarCopy(2, (0, 4, 6))
    assert remedy(judge(1, (0, 2, 4, 6), buckets(6), digests(4, 6)), REPAIR).scalars is None
