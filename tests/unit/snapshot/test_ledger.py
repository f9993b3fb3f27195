"""The ledger: what is recorded of each iteration comes back bit for bit, or is not known."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.snapshot.segment.ledger import FIRST_KEPT, KEPT, Ledger, LedgerEntry, LedgerPart
from ft_plugins.snapshot.segment.shape import LEDGER_ROOM

DIGESTS = [part for part in LedgerPart if not part.is_number]
NUMBERS = [part for part in LedgerPart if part.is_number]


def fresh():
    words = np.zeros(LEDGER_ROOM // 8, dtype=np.uint64)
    return words, Ledger(words)


@given(
    st.integers(1, (1 << 32) - 1),
    st.dictionaries(st.sampled_from(DIGESTS), st.integers(0, (1 << 64) - 1)),
    st.dictionaries(st.sampled_from(NUMBERS), st.floats()),
)
def test_an_entry_comes_back_with_the_low_half_of_its_digests_and_all_bits_of_its_numbers(iteration, digests, numbers):
    _, ledger = fresh()
    for part, value in {**digests, **numbers}.items():
        ledger.record(iteration, part, value)
    expected = LedgerEntry(iteration, {part: digest & 0xFFFFFFFF for part, digest in digests.items()}, numbers)
    entry = ledger.entries().get(iteration) or LedgerEntry(iteration)
    assert entry.digests == expected.digests and entry.numbers.keys() == expected.numbers.keys()
    assert entry.differing(expected) == ()
    assert {one.iteration for one in ledger.entries().values()} == ({iteration} if digests or numbers else set())


def test_the_first_iterations_and_the_newest_ones_stay():
    _, ledger = fresh()
    last = 1000
    for iteration in range(1, last + 1):
        ledger.record(iteration, LedgerPart.INPUT, iteration)
    kept = sorted(ledger.entries())
    assert kept == [*range(1, FIRST_KEPT + 1), *range(last - KEPT + 1, last + 1)]
    assert all(entry.digests == {LedgerPart.INPUT: iteration} for iteration, entry in ledger.entries().items())


def test_an_iteration_that_takes_the_entry_of_another_one_inherits_nothing():
    _, ledger = fresh()
    ledger.record(FIRST_KEPT + 1, LedgerPart.INPUT, 5)
    ledger.record(FIRST_KEPT + 1, LedgerPart.LOSS, 2.5)
    ledger.record(FIRST_KEPT + 1 + KEPT, LedgerPart.GENERATORS, 7)
    assert ledger.entries().get(FIRST_KEPT + 1) is None
    entry = ledger.entries().get(FIRST_KEPT + 1 + KEPT)
    assert entry is not None and entry.digests == {LedgerPart.GENERATORS: 7} and entry.numbers == {}


def test_a_flipped_bit_makes_one_word_unknown_and_no_other():
    words, ledger = fresh()
    for part in DIGESTS:
        ledger.record(3, part, 17 + part)
    place = int(np.flatnonzero(words)[0])
    words[place + LedgerPart.INPUT] ^= np.uint64(1 << 40)
    entry = ledger.entries().get(3)
    assert entry is not None and entry.digests == {part: 17 + part for part in DIGESTS if part is not LedgerPart.INPUT}
    words[place] ^= np.uint64(1)
    assert ledger.entries().get(3) is None and not ledger.entries()


def test_parts_that_only_one_of_two_entries_knows_do_not_differ_and_a_nan_equals_itself():
    one = LedgerEntry(2, {LedgerPart.INPUT: 1}, {LedgerPart.LOSS: math.nan, LedgerPart.RATE: 0.5})
    other = LedgerEntry(2, {LedgerPart.STATE: 9}, {LedgerPart.LOSS: math.nan, LedgerPart.RATE: 0.25})
    assert one.differing(other) == (LedgerPart.RATE,)
    assert LedgerEntry(2, {}, {LedgerPart.LOSS: 0.0}).differing(LedgerEntry(2, {}, {LedgerPart.LOSS: -0.0})) == (
        LedgerPart.LOSS,
    )


def test_what_is_cleared_is_not_known():
    _, ledger = fresh()
    ledger.record(1, LedgerPart.INPUT, 5)
    ledger.clear()
    assert ledger.entries() == {}
