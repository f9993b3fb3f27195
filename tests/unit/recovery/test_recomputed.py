"""Which differences show that a loop did not continue, and which do not."""

import math

import pytest

from ft_plugins.recovery.recomputed import judge
from ft_plugins.snapshot.segment.ledger import LedgerEntry, LedgerPart

BEFORE = LedgerEntry(
    6,
    {
        LedgerPart.FIRST_READ: 60,
        LedgerPart.INPUT: 61,
        LedgerPart.COUNTERS: 62,
        LedgerPart.SCHEDULE: 66,
        LedgerPart.DRAWN: 67,
        LedgerPart.LIBRARY: 68,
        LedgerPart.GROUPS: 63,
        LedgerPart.GENERATORS: 64,
        LedgerPart.OWN: 65,
    },
    {LedgerPart.RATE: 0.5, LedgerPart.LOSS: 2.0, LedgerPart.NORM: 1.0},
)
KNOWN = {1: LedgerEntry(1, {LedgerPart.FIRST_READ: 10, LedgerPart.INPUT: 11}), 6: BEFORE}


def changed(**parts):
    by_part = {LedgerPart[name.upper()]: value for name, value in parts.items()}
    digests = {part: int(value) for part, value in by_part.items() if not part.is_number}
    numbers = {part: value for part, value in by_part.items() if part.is_number}
    return LedgerEntry(6, {**BEFORE.digests, **digests}, {**BEFORE.numbers, **numbers})


def test_an_iteration_that_is_as_it_was_has_no_difference():
    assert judge(changed(), BEFORE, KNOWN) is None
    assert judge(LedgerEntry(6), BEFORE, KNOWN) is None


def test_reading_what_another_iteration_read_ends_the_job_and_names_it():
    difference = judge(changed(first_read=10, input=11, loss=3.0), BEFORE, KNOWN)
    assert difference is not None and difference.ends and difference.read_in == 1
    assert difference.sentence.startswith("iteration 6 reads what iteration 1 read")


@pytest.mark.parametrize(
    "parts",
    [
        {"counters": 1},
        {"groups": 1},
        {"schedule": 1},
        {"rate": 0.25},
        {"generators": 1},
        {"drawn": 1},
        {"input": 7, "rate": 0.25, "loss": 9.0},
    ],
)
def test_other_counters_schedules_or_generators_end_the_job(parts):
    difference = judge(changed(**parts), BEFORE, KNOWN)
    assert difference is not None and difference.ends and not difference.continued
    assert difference.sentence.endswith("the loop did not continue where the restored state is")


@pytest.mark.parametrize(
    "parts",
    [
        {"loss": 2.5},
        {"first_read": 7, "input": 7, "loss": 2.5},
        {"input": 7, "generators": 1},  # a loader that draws
        {"own": 1},
        {"norm": math.inf, "counters": 1, "rate": 0.1},  # an update that one of the two skipped
        {"loss": 2.5, "schedule": 1, "groups": 1},  # a schedule that follows the loss
        {"library": 1},  # a logger draws
    ],
)
def test_what_may_be_a_loader_or_a_kernel_is_an_alarm_alone(parts):
    difference = judge(changed(**parts), BEFORE, KNOWN)
    assert difference is not None and not difference.ends and difference.continued


def test_what_follows_an_iteration_that_differed_is_its_consequence():
    difference = judge(changed(counters=1, rate=0.1, generators=1), BEFORE, KNOWN, {LedgerPart.STATE})
    assert difference is not None and not difference.ends


def test_what_is_read_is_no_consequence_of_numbers_that_differed_but_of_inputs_that_did():
    again = changed(first_read=10, input=11)
    by_numbers = judge(again, BEFORE, KNOWN, {LedgerPart.STATE, LedgerPart.LOSS})
    by_inputs = judge(again, BEFORE, KNOWN, {LedgerPart.INPUT})
    assert by_numbers is not None and by_numbers.ends and by_numbers.read_in == 1
    assert by_inputs is not None and not by_inputs.ends and by_inputs.read_in is None


def test_without_a_loss_a_schedule_that_differs_may_follow_it_and_unseen_inputs_prove_nothing():
    unseen = LedgerEntry(6, {LedgerPart.SCHEDULE: 1, LedgerPart.DRAWN: 1})
    now = LedgerEntry(6, {LedgerPart.SCHEDULE: 2, LedgerPart.DRAWN: 2})
    difference = judge(now, unseen, {6: unseen})
    assert difference is not None and not difference.ends


def test_an_input_that_never_changes_names_no_other_iteration():
    constant = {number: LedgerEntry(number, {LedgerPart.FIRST_READ: 5, LedgerPart.INPUT: number}) for number in (5, 6)}
    now = LedgerEntry(6, {LedgerPart.FIRST_READ: 5, LedgerPart.INPUT: 99})
    difference = judge(now, constant[6], constant)
    assert difference is not None and difference.read_in is None and not difference.ends


def test_the_user_may_force_either():
    stopped = judge(changed(loss=2.5), BEFORE, KNOWN, mode="stop")
    warned = judge(changed(counters=1), BEFORE, KNOWN, mode="warn")
    assert stopped is not None and stopped.ends and stopped.continued
    assert warned is not None and not warned.ends and not warned.continued


def test_numbers_are_shown_and_a_batch_is_named_once():
    difference = judge(changed(first_read=7, input=7, rate=0.25), BEFORE, KNOWN)
    assert difference is not None
    assert "differs from before the restore in: batch, learning rate (learning rate 0.25 in place of 0.5)" in (
        difference.sentence
    )
