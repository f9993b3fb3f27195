"""Which differences show that a loop did not continue, and which do not."""

from __future__ import annotations

import math

import pytest

from ft_plugins.recovery.recomputed import judge
from ft_plugins.snapshot.ledger import Entry, Part

BEFORE = Entry(
    6,
    {Part.FIRST_READ: 60, Part.INPUT: 61, Part.COUNTERS: 62, Part.GROUPS: 63, Part.GENERATORS: 64, Part.OWN: 65},
    {Part.RATE: 0.5, Part.LOSS: 2.0, Part.NORM: 1.0},
)
KNOWN = {1: Entry(1, {Part.FIRST_READ: 10, Part.INPUT: 11}), 6: BEFORE}


def changed(**parts: float) -> Entry:
    by_part = {Part[name.upper()]: value for name, value in parts.items()}
    digests = {part: int(value) for part, value in by_part.items() if not part.is_number}
    numbers = {part: value for part, value in by_part.items() if part.is_number}
    return Entry(6, {**BEFORE.digests, **digests}, {**BEFORE.numbers, **numbers})


def test_an_iteration_that_is_as_it_was_has_no_difference() -> None:
    assert judge(changed(), BEFORE, KNOWN) is None
    assert judge(Entry(6), BEFORE, KNOWN) is None


def test_reading_what_another_iteration_read_ends_the_job_and_names_it() -> None:
    difference = judge(changed(first_read=10, input=11, loss=3.0), BEFORE, KNOWN)
    assert difference is not None and difference.ends and difference.read_in == 1
    assert difference.sentence.startswith("iteration 6 reads what iteration 1 read")


@pytest.mark.parametrize(
    "parts",
    [{"counters": 1}, {"groups": 1}, {"rate": 0.25}, {"generators": 1}, {"input": 7, "rate": 0.25, "loss": 9.0}],
)
def test_other_counters_rates_or_generators_end_the_job(parts: dict[str, float]) -> None:
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
    ],
)
def test_what_may_be_a_loader_or_a_kernel_is_an_alarm_alone(parts: dict[str, float]) -> None:
    difference = judge(changed(**parts), BEFORE, KNOWN)
    assert difference is not None and not difference.ends and difference.continued


def test_what_follows_an_iteration_that_differed_is_its_consequence() -> None:
    difference = judge(changed(first_read=10, input=11, counters=1), BEFORE, KNOWN, differed=True)
    assert difference is not None and not difference.ends and difference.read_in is None


def test_the_user_may_force_either() -> None:
    stopped = judge(changed(loss=2.5), BEFORE, KNOWN, mode="stop")
    warned = judge(changed(counters=1), BEFORE, KNOWN, mode="warn")
    assert stopped is not None and stopped.ends and stopped.continued
    assert warned is not None and not warned.ends and not warned.continued


def test_numbers_are_shown_and_a_batch_is_named_once() -> None:
    difference = judge(changed(first_read=7, input=7, rate=0.25), BEFORE, KNOWN)
    assert difference is not None
    assert "differs from before the restore in: batch, learning rate (learning rate 0.25 in place of 0.5)" in (
        difference.sentence
    )
