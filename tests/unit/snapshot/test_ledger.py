"""The ledger: what is recorded of each iteration comes back bit for bit, or is not known."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.snapshot.ledger import FIRST_KEPT, KEPT, Entry, Ledger, Part
from ft_plugins.snapshot.shape import LEDGER_ROOM

DIGESTS = [part for part in Part if not part.is_number]
NUMBERS = [part for part in Part if part.is_number]


def fresh() -> tuple[np.ndarray, Ledger]:
    words = np.zeros(LEDGER_ROOM // 8, dtype=np.uint64)
    return words, Ledger(words)


@given(
    st.integers(1, (1 << 32) - 1),
    st.dictionaries(st.sampled_from(DIGESTS), st.integers(0, (1 << 64) - 1)),
    st.dictionaries(st.sampled_from(NUMBERS), st.floats()),
)
def test_an_entry_comes_back_with_the_low_half_of_its_digests_and_all_bits_of_its_numbers(
    iteration: int, digests: dict[Part, int], numbers: dict[Part, float]
) -> None:
    _, ledger = fresh()
    for part, value in {**digests, **numbers}.items():
        ledger.record(iteration, part, value)
    expected = Entry(iteration, {part: digest & 0xFFFFFFFF for part, digest in digests.items()}, numbers)
    entry = ledger.entry(iteration) or Entry(iteration)
    assert entry.digests == expected.digests and entry.numbers.keys() == expected.numbers.keys()
    assert entry.differing(expected) == ()
    assert {one.iteration for one in ledger.entries().values()} == ({iteration} if digests or numbers else set())


def test_the_first_iterations_and_the_newest_ones_stay() -> None:
    _, ledger = fresh()
    last = 1000
    for iteration in range(1, last + 1):
        ledger.record(iteration, Part.INPUT, iteration)
    kept = sorted(ledger.entries())
    assert kept == [*range(1, FIRST_KEPT + 1), *range(last - KEPT + 1, last + 1)]
    assert all(entry.digests == {Part.INPUT: iteration} for iteration, entry in ledger.entries().items())


def test_an_iteration_that_takes_the_entry_of_another_one_inherits_nothing() -> None:
    _, ledger = fresh()
    ledger.record(FIRST_KEPT + 1, Part.INPUT, 5)
    ledger.record(FIRST_KEPT + 1, Part.LOSS, 2.5)
    ledger.record(FIRST_KEPT + 1 + KEPT, Part.GENERATORS, 7)
    assert ledger.entry(FIRST_KEPT + 1) is None
    entry = ledger.entry(FIRST_KEPT + 1 + KEPT)
    assert entry is not None and entry.digests == {Part.GENERATORS: 7} and entry.numbers == {}


def test_a_flipped_bit_makes_one_word_unknown_and_no_other() -> None:
    words, ledger = fresh()
    for part in DIGESTS:
        ledger.record(3, part, 17 + part)
    place = int(np.flatnonzero(words)[0])
    words[place + Part.INPUT] ^= np.uint64(1 << 40)
    entry = ledger.entry(3)
    assert entry is not None and entry.digests == {part: 17 + part for part in DIGESTS if part is not Part.INPUT}
    words[place] ^= np.uint64(1)
    assert ledger.entry(3) is None and not ledger.entries()


def test_parts_that_only_one_of_two_entries_knows_do_not_differ_and_a_nan_equals_itself() -> None:
    one = Entry(2, {Part.INPUT: 1}, {Part.LOSS: math.nan, Part.RATE: 0.5})
    other = Entry(2, {Part.STATE: 9}, {Part.LOSS: math.nan, Part.RATE: 0.25})
    assert one.differing(other) == (Part.RATE,)
    assert Entry(2, {}, {Part.LOSS: 0.0}).differing(Entry(2, {}, {Part.LOSS: -0.0})) == (Part.LOSS,)


def test_what_is_cleared_is_not_known() -> None:
    _, ledger = fresh()
    ledger.record(1, Part.INPUT, 5)
    ledger.clear()
    assert ledger.entries() == {}
