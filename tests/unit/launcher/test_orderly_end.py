"""What becomes of the state in memory when a job ends in order: at the end of training, before it, or unknown."""

import pytest

from ft_plugins.launcher.agent.orderly_end import EndPlan, end_plan, reached
from ft_plugins.snapshot.segment.header import AT_END, EARLY, UNKNOWN

STORED = {"state": "done", "iteration": 15, "path": "/ck/v1-15"}
OFF, FULL = {"state": "off"}, {"state": "failed", "reason": "No space left on device"}


def plan(ending, outcome, done=15, held=15):
    return end_plan(ending, done, held, outcome, "j", 1800.0)


@pytest.mark.parametrize("outcome", [STORED, OFF, FULL, {"state": "nothing"}])
def test_at_the_end_of_training_memory_is_dropped_and_the_success_said(outcome):
    words = "the job succeeded: training ended after iteration 15; exit status 0"
    assert plan(AT_END, outcome) == EndPlan(True, "succeeded", words)
    assert plan(AT_END, outcome, done=0) == EndPlan(True), "of a script that trained nothing that was seen"


def test_before_it_memory_is_dropped_only_once_the_version_is_in_storage():
    ended = "training ended after iteration 15, before its own end"
    on = "the same command goes on from there"
    assert plan(EARLY, STORED) == EndPlan(True, "stopped", f"{ended}: iteration 15 is in /ck/v1-15; {on}")
    drop = f"{on}; `ft-plugins end j` on each node drops it"
    kept = f"{ended}: iteration 15 is kept in memory for 30.0 min"
    assert plan(EARLY, OFF) == EndPlan(False, "stopped", f"{kept}; {drop}")
    assert plan(EARLY, FULL) == EndPlan(False, "stopped", f"{kept} (No space left on device); {drop}")
    assert not plan(EARLY, {"state": "writing"}).drop and not plan(EARLY, {"state": "nothing"}, held=None).drop


def test_iterations_that_no_version_holds_are_named():
    again = "the same command goes on from there, and computes up to iteration {} again"
    assert again.format(18) in plan(EARLY, STORED, 18).words
    kept = plan(EARLY, OFF, held=12).words
    assert "iteration 12 is kept" in kept and again.format(15) in kept


def test_where_nothing_says_where_training_ends_the_last_version_is_stored_or_its_loss_said():
    assert plan(UNKNOWN, STORED).drop and "iteration 15 is in /ck/v1-15" in plan(UNKNOWN, STORED).words
    off = plan(UNKNOWN, OFF)
    assert off.drop and "iteration 15 is dropped, since nothing says where training ends" in off.words
    assert not plan(UNKNOWN, FULL).drop, "what could not be stored is not dropped"
    assert {plan(UNKNOWN, each).status for each in (STORED, OFF, FULL)} == {"succeeded"}


def status(*ranks, attached=True, holds=True):
    """`ranks`: ending and the last completed iteration of each; both hold iteration 5."""
    slots = [{"state": "CLEAN" if holds else "EMPTY", "lineage": 1, "iteration": 5}]
    segments = [{"attached": attached, "ending": each[0], "completed": each[1], "slots": slots} for each in ranks]
    return {"segments": segments, "refused": [], "previous_sizes": {}, "node_tier": {}, "missing": []}


@pytest.mark.parametrize(
    ("ranks", "left", "ending"),
    [
        (((AT_END, 6), (AT_END, 6)), False, AT_END),
        (((AT_END, 6), (AT_END, 6)), True, AT_END),
        (((EARLY, 6), (AT_END, 6)), False, EARLY),
        (((UNKNOWN, 6), (EARLY, 6)), False, EARLY),
        (((UNKNOWN, 6), (UNKNOWN, 6)), False, UNKNOWN),
        (((UNKNOWN, 6), (UNKNOWN, 6)), True, EARLY),
        (((UNKNOWN, 6), (UNKNOWN, 5)), False, EARLY),
    ],
)
def test_one_rank_that_is_not_at_the_end_is_enough(ranks, left, ending):
    assert reached(status(*ranks), left) == (ending, 6, 5)


def test_a_job_that_holds_nothing_keeps_nothing():
    assert reached(status((EARLY, 0), holds=False), left=False)[0] == AT_END
    assert reached(status(), left=True)[0] == AT_END
