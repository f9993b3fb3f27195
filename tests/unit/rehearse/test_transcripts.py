"""Two transcripts of one job: what counts as a difference, and which one is named."""

import json

import pytest

from ft_plugins.rehearse.transcripts import (
    TranscriptEntry,
    TranscriptError,
    compare_transcripts,
    epoch_ends,
    not_exercised,
    read_transcripts,
)

LAST, RANKS = 8, 2


def line(iteration, rank, lineage=1, kind="iteration", **parts):
    seen = {"batch": f"b{iteration}", "rate": (0.5 / iteration).hex(), "loss": (1.0 / iteration).hex(), "norm": None}
    small = {"scheduler": {"step": iteration}, "position": {"read": iteration % 5}, "caller": {"seconds": 1}}
    small |= {"python": "p", "torch": f"t{iteration}"}
    items = {"w": {"xxh3": f"w{iteration}"}, "m": {"xxh3": f"m{iteration}"}}
    values = {"seen": seen if kind == "iteration" else {}, "small": small, "items": items, "phases": ()} | parts
    return TranscriptEntry(rank, kind, iteration, lineage, world_size=RANKS, **values)


def run(*lives, ranks=RANKS):
    """A run whose lives begin after and end with these iterations."""
    entries = []
    for lineage, (begun, ended) in enumerate(lives, 1):
        for rank in range(ranks):
            entries += [line(begun, rank, lineage, "restored")] if begun else []
            entries += [line(iteration, rank, lineage) for iteration in range(begun + 1, ended + 1)]
    return entries


FAILED = run((0, 5), (4, 6), (6, LAST))


def changed(entries, *, at, rank, lineage, kind="iteration", **parts):
    chosen = (kind, at, rank, lineage)
    return [
        line(at, rank, lineage, kind, **{**{"seen": e.seen, "small": e.small, "items": e.items}, **parts})
        if (e.kind, e.iteration, e.rank, e.lineage) == chosen
        else e
        for e in entries
    ]


def compared(failed, restores=2):
    return compare_transcripts(failed, run((0, LAST)), restores)


def test_a_killed_run_that_is_as_the_unfailed_one_is_exact():
    outcome = compared(FAILED)
    assert outcome.exact and outcome.restored == (4, 6)
    assert outcome.sentence.startswith("exact over 8 iterations, ")


def test_what_protection_changes_without_any_failure_is_named_and_rates_are_left_to_the_state():
    apart = [
        TranscriptEntry(one.rank, one.kind, one.iteration, 0, {**one.seen, "rate": None}, (), one.small, one.items)
        for one in run((0, 3))
    ]
    assert compare_transcripts(FAILED, run((0, LAST)), 2, apart) == compared(FAILED)
    changes = changed(apart, at=2, rank=1, lineage=0, items={"w": {"xxh3": "w2"}, "m": {"xxh3": "other"}})
    outcome = compare_transcripts(FAILED, run((0, LAST)), 2, changes)
    assert not outcome.exact
    assert "protection changes training, without any failure: iteration 2, rank 1: state /m/" in outcome.sentence


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"seen": {**line(7, 1).seen, "batch": "b2"}, "items": {"w": {"xxh3": "?"}}}, "the batch: b2 != b7"),
        ({"seen": {**line(7, 1).seen, "rate": "?"}}, "learning rate"),
        ({"small": {**line(7, 1).small, "torch": "?"}}, "random numbers /torch: ? != t7"),
        ({"small": {**line(7, 1).small, "scheduler": {"step": 3}}}, "small state /scheduler/step: 3 != 7"),
        ({"items": {**line(7, 1).items, "m": {"xxh3": "?"}}}, "state /m/xxh3: ? != m7"),
        ({"items": {"w": line(7, 1).items["w"]}}, "state /m/xxh3: nothing != m7"),
    ],
)
def test_the_first_difference_is_named_with_its_cause_first(parts, named):
    outcome = compared(changed(FAILED, at=7, rank=1, lineage=3, **parts))
    assert not outcome.exact and outcome.difference is not None
    assert str(outcome.difference).startswith("iteration 7, rank 1: ") and named in str(outcome.difference)


def test_an_iteration_that_was_computed_twice_is_compared_each_time():
    outcome = compared(changed(FAILED, at=5, rank=0, lineage=2, seen={**line(5, 0).seen, "batch": "b1"}))
    assert str(outcome.difference).startswith("iteration 5, rank 0: the batch")


def test_a_batch_on_any_rank_explains_a_value_on_another():
    failed = changed(FAILED, at=7, rank=0, lineage=3, items={"w": {"xxh3": "?"}})
    outcome = compared(changed(failed, at=7, rank=1, lineage=3, seen={**line(7, 1).seen, "batch": "?"}))
    assert str(outcome.difference).startswith("iteration 7, rank 1: the batch")


def test_restored_bytes_are_those_that_the_same_run_had_captured():
    outcome = compared(changed(FAILED, at=4, rank=1, lineage=2, kind="restored", items={"w": {"xxh3": "?"}}))
    assert str(outcome.difference).startswith("iteration 4, rank 1: restored state ")


def test_data_positions_are_not_compared():
    small = {**line(7, 0).small, "position": {"read": 99}}
    assert compared(changed(FAILED, at=7, rank=0, lineage=3, small=small)).exact


def test_kernels_that_are_not_deterministic_show_before_a_kill_and_leave_the_trajectory_out():
    failed = [line(e.iteration, e.rank, e.lineage, e.kind, items={"w": {"xxh3": f"x{e.iteration}"}}) for e in FAILED]
    outcome = compared(failed)
    assert outcome.exact and outcome.irreproducible is not None
    assert "exact except for the trajectory, which is not deterministic" in outcome.sentence
    wrong = changed(failed, at=7, rank=0, lineage=3, seen={**line(7, 0).seen, "batch": "b1"})
    assert not compared(wrong).exact
    torn = changed(failed, at=4, rank=0, lineage=2, kind="restored", items={"w": {"xxh3": "?"}})
    assert not compared(torn).exact


def test_data_that_is_not_reproducible_is_not_exact_whatever_a_restore_does():
    failed = changed(FAILED, at=1, rank=0, lineage=1, seen={**line(1, 0).seen, "batch": "?"})
    outcome = compared(failed)
    assert not outcome.exact and "not reproducible, with or without a failure" in outcome.sentence


def test_values_that_are_not_captured_are_listed_if_a_restart_changes_them_and_the_verdict_says_so():
    def observed(at, lineage, **last):
        return {"at": at, "rank": 0, "lineage": lineage, "small": {**line(at, 0).small, "observed": {"last": last}}}

    golden = changed(run((0, LAST)), **observed(3, 1, time="1", seen=3))
    golden = changed(golden, **observed(7, 1, time="2", seen=7, late=1))
    failed = changed(changed(FAILED, **observed(3, 1, time="5", seen=3)), **observed(7, 3, time="6", seen=1))
    outcome = compare_transcripts(failed, golden, 2)
    assert outcome.exact and outcome.uncaptured == ("seen",)
    assert outcome.sentence.startswith("exact, but for what is not captured (1 listed), over 8 iterations")
    assert compare_transcripts(FAILED, golden, 2).sentence.startswith("exact over 8 iterations")


def test_generators_that_the_script_does_not_seed_are_compared_where_they_were_restored():
    failed = [
        line(e.iteration, e.rank, e.lineage, e.kind, small={**e.small, "python": f"own{e.iteration}"}) for e in FAILED
    ]
    outcome = compared(failed)
    assert outcome.exact and outcome.left_out == ("random numbers python",)
    lost = changed(failed, at=4, rank=0, lineage=2, kind="restored", small={**line(4, 0).small, "python": "fresh"})
    assert not compared(lost).exact


def everywhere(entries, change):
    return [line(e.iteration, e.rank, e.lineage, e.kind, **change(e)) for e in entries]


NOISY = everywhere(FAILED, lambda e: {"items": {"w": {"xxh3": f"x{e.iteration}"}}})


def test_without_a_trajectory_batches_and_restored_bytes_have_to_have_been_seen():
    unseen = [line(e.iteration, e.rank, seen={**e.seen, "batch": None}) for e in run((0, LAST))]
    blind = everywhere(NOISY, lambda e: {"items": e.items, "seen": {**e.seen, "batch": None} if e.seen else {}})
    outcome = compare_transcripts(blind, unseen, 2)
    assert not outcome.exact and "the batches of 8 iterations were not seen" in outcome.sentence
    plain = everywhere(FAILED, lambda e: {"seen": {**e.seen, "batch": None} if e.seen else {}})
    assert compare_transcripts(plain, unseen, 2).exact, "equal states show equal batches"
    deferred = everywhere(NOISY, lambda e: {"items": e.items, "deferred": True})
    assert "could not be compared" in compared(deferred).sentence


def test_a_value_that_is_not_reproducible_hides_nothing_else():
    timed = everywhere(FAILED, lambda e: {"small": {**e.small, "caller": {"seconds": 7 * e.iteration}}})
    outcome = compared(timed)
    assert outcome.exact and outcome.left_out == ("small state /caller/seconds",)
    wrong = [
        line(e.iteration, e.rank, e.lineage, e.kind, small=e.small, items={**e.items, "w": {"xxh3": "?"}})
        if e.lineage == 3
        else e
        for e in timed
    ]
    assert not compared(wrong).exact
    noisy = everywhere(NOISY, lambda e: {"items": e.items, "small": {**e.small, "scheduler": {"step": 0, "best": 2}}})
    again = changed(noisy, at=7, rank=0, lineage=3, seen={**line(7, 0).seen, "batch": "b1"})
    assert not compared(again).exact


def test_a_rank_that_wrote_nothing_and_a_golden_run_that_was_restarted_prove_nothing():
    alone = compare_transcripts(run((0, 5), (4, 6), (6, LAST), ranks=1), run((0, LAST), ranks=1), 2)
    assert "only ranks [0] of 2 have written a transcript" in alone.sentence
    silent = [e for e in FAILED if not (e.kind == "restored" and e.rank == 1 and e.lineage == 2)]
    assert "ranks [1] did not write down what they restored" in compared(silent).sentence
    assert "the unfailed run was itself restarted" in compare_transcripts(FAILED, FAILED, 2).sentence


def test_a_run_that_ends_early_goes_on_too_long_or_restores_too_seldom_proves_nothing():
    assert "iteration 8 of rank 0 is in the unfailed run alone" in compared(run((0, 5), (4, 6), (6, 7))).sentence
    assert "in the failed run alone" in compared(run((0, 5), (4, 6), (6, 9))).sentence
    assert "restored 2 time(s); expected 3" in compared(FAILED, restores=3).sentence


def test_what_was_not_exercised_is_listed():
    assert epoch_ends(run((0, LAST))) == (5,)
    assert epoch_ends(run((0, 3), (2, 4))) == (), "an iteration that was computed twice is no new pass"
    missing = not_exercised(FAILED)
    assert [each.partition(":")[0] for each in missing] == [
        missing[0].partition(":")[0],
        "an epoch's end after a resume", "an evaluation", "the script's own checkpoint", "a skipped update",
        "another phase of the learning rate's schedule",
    ]  # fmt: skip
    later = changed(run((0, 3), (2, LAST)), at=6, rank=0, lineage=2, phases=("evaluation", "saving"))
    assert not_exercised(later) == [missing[0], *missing[4:]]
    second = run((0, 6), (5, LAST))
    assert missing[0].startswith("a resume in a later epoch") and missing[0] not in not_exercised(second)


@pytest.mark.parametrize(
    ("rates", "shown"),
    [
        ((8, 8, 8, 8, 8, 8, 4, 4), True),  # a step
        ((1, 2, 3, 4, 5, 6, 6, 6), True),  # a warm-up, then constant
        ((3, 4, 5, 6, 7, 8, 7, 6), True),
        ((9, 8, 7, 6, 5, 4, 3, 2), False),
        ((8, 8, 8, 4, 4, 4, 4, 4), False),  # the step was before the kills
        ((8, 8, 8, 8, 8, 8, 8, 8), False),
    ],
)
def test_another_phase_of_the_rate_is_one_in_which_it_moves_otherwise(rates, shown):
    entries = [
        line(e.iteration, e.rank, e.lineage, e.kind, seen={**e.seen, "rate": float(rates[e.iteration - 1]).hex()})
        for e in FAILED
    ]
    assert any("another phase" in each for each in not_exercised(entries)) != shown


def test_an_update_that_was_skipped_is_no_phase_of_the_rate():
    def seen(e):
        skipped = e.iteration == 7
        rate = 9 - min(e.iteration, 6) - max(0, e.iteration - 7)
        return {**e.seen, "rate": float(rate).hex(), "norm": "inf" if skipped else "0x1p+0"}

    missing = not_exercised([line(e.iteration, e.rank, e.lineage, e.kind, seen=seen(e)) for e in FAILED])
    assert any("another phase" in each for each in missing) and not any("skipped" in each for each in missing)


def test_a_damaged_or_empty_transcript_is_named(tmp_path):
    with pytest.raises(TranscriptError, match="no iteration was completed"):
        read_transcripts(tmp_path)
    entry = {"kind": "iteration", "iteration": 1, "lineage": 1, "small": {}, "items": {}, "loss": None}
    entry["world_size"] = 4
    (tmp_path / "rank-00003.jsonl").write_text(json.dumps(entry) + "\n" + json.dumps(entry)[:20])
    assert [(e.rank, e.iteration) for e in read_transcripts(tmp_path)] == [(3, 1)]
    (tmp_path / "rank-00003.jsonl").write_text("{}\n")
    with pytest.raises(TranscriptError, match="rank-00003.jsonl is no transcript"):
        read_transcripts(tmp_path)
