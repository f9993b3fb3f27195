"""What several incarnations of a rank leave in its ledger, and what the next one makes of it."""

import numpy as np
import pytest
import torch

from ft_plugins.errors import LoopError
from ft_plugins.events import Events
from ft_plugins.snapshot.segment.ledger import Ledger, LedgerPart
from ft_plugins.snapshot.segment.shape import LEDGER_ROOM
from ft_plugins.systems.iteration_ledger import IterationLedger

RATE = 0.5


class Rank:
    """A rank whose ledger outlives its incarnations."""

    def __init__(self, rank=0):
        self.rank, self.words = rank, Ledger(np.zeros(LEDGER_ROOM // 8, dtype=np.uint64))
        self.said = []

    def begin(self, base, mode="auto", condemned=()):
        """An incarnation that continues after `base`."""
        events = Events("n", self.rank)
        events.subscribe(self._hear)
        ledger = IterationLedger(self.rank, mode, events)
        ledger.open(self.words, base, condemned)
        return ledger

    def _hear(self, event):
        self.said.append(event.name)


def iterate(ledger, step, reads=None, until="", **small):
    """One iteration; it dies after the first read, or at the fence, if `until` says so."""
    torch.manual_seed(step)
    ledger.begin(step)
    ledger.read(100 + (step if reads is None else reads))
    if until == "read":
        return
    ledger.read(7)
    ledger.forwards_done()
    ledger.read(999)  # a repair computes the iteration again
    ledger.graded(step)
    ledger.fence(RATE)
    if until == "fence":
        return
    ledger.end(step, {"scheduler": {"steps": step}, "python": 1, **small})


def died_in(step, until):
    rank = Rank()
    first = rank.begin(None)
    for number in range(1, step):
        iterate(first, number)
    iterate(first, step, until=until)
    return rank


@pytest.mark.parametrize("until", ["read", "fence"])
def test_a_loop_that_begins_again_is_ended_also_in_its_third_incarnation(until):
    rank = died_in(6, until)
    for _ in range(3):
        again = rank.begin(5)
        with pytest.raises(LoopError, match="iteration 6 reads what iteration 1 read"):
            iterate(again, 6, reads=1)
    continues = rank.begin(5)
    iterate(continues, 6)
    iterate(continues, 7)
    assert rank.said == ["resume.differed"] * 3


def test_what_was_recorded_stays_until_everything_lost_is_computed_again_and_what_was_compared_is_known():
    rank = Rank()
    first = rank.begin(None)
    for number in range(1, 8):
        iterate(first, number)
    iterate(first, 8, until="fence")
    before = rank.words.entries()
    iterate(rank.begin(5), 6, reads=1000)  # not what it was, then dies
    assert rank.words.entries() == before
    again = rank.begin(5)
    for number in range(6, 9):
        iterate(again, number)
    compared, differing = again.compared(7)
    assert not differing and {LedgerPart.INPUT, LedgerPart.GRADIENTS, LedgerPart.SCHEDULE} <= compared
    assert LedgerPart.STATE not in compared, "nothing was sealed"
    assert LedgerPart.SCHEDULE not in again.compared(8)[0]
    iterate(again, 9)
    assert rank.said == ["resume.differed"] and 9 in rank.words.entries()


@pytest.mark.parametrize(("condemned", "said"), [((), ["resume.differed"]), ((0,), [])])
def test_what_other_ranks_recorded_of_a_loop_that_was_ended_is_forgotten(condemned, said):
    """Rank 1 had not come so far before the first failure, so it cannot see that the second incarnation is wrong."""
    other = Rank(rank=1)
    first = other.begin(None)
    for step in range(1, 6):
        iterate(first, step)
    iterate(other.begin(5), 6, reads=1, until="fence")
    iterate(other.begin(5, condemned=condemned), 6)
    assert other.said == said


def test_the_rank_that_ended_a_loop_says_so_to_the_next_incarnation_once():
    rank = died_in(6, "fence")
    with pytest.raises(LoopError):
        iterate(rank.begin(5), 6, reads=1)
    assert rank.words.condemned
    again = rank.begin(5, condemned=(0,))
    iterate(again, 6)
    again.summarize()
    assert not rank.words.condemned and rank.said == ["resume.differed"]
    assert LedgerPart.GRADIENTS in again.compared(6)[0]


def test_a_generator_of_which_a_logger_may_draw_ends_nothing():
    rank = Rank()
    first = rank.begin(None)
    for step in range(1, 8):
        iterate(first, step)
    again = rank.begin(5)
    iterate(again, 6, python=2)
    iterate(again, 7)
    assert rank.said == ["resume.differed"]


def test_captured_bytes_are_compared_at_the_next_fence():
    rank = Rank()
    first = rank.begin(None)
    for step in range(1, 8):
        iterate(first, step)
        first.sealed(step, 50 + step)
    iterate(first, 8, until="fence")
    again = rank.begin(5)
    iterate(again, 6)
    again.sealed(6, 56)
    iterate(again, 7)
    again.sealed(7, 1)
    assert rank.said == []
    iterate(again, 8)
    assert rank.said == ["resume.differed"] and again.compared(7)[1] == {LedgerPart.STATE}
    iterate(again, 9)
    entry = rank.words.entries().get(7)
    assert entry is not None and entry.digests[LedgerPart.STATE] == 1


@pytest.mark.parametrize("name", ["0", "1", "57", "99"])
def test_where_a_restore_is_proven_every_entry_of_a_large_mapping_is_compared(name):
    was, ledger = {"own": dict.fromkeys(map(str, range(100)), 0)}, Rank().begin(0)
    ledger.begin(1)
    ledger.end(1, {"own": {**was["own"], name: 1}}, was)
    assert ledger.compared(1)[1] == {LedgerPart.OWN}


def test_without_a_ledger_nothing_is_kept_or_compared():
    ledger = IterationLedger(0, "auto", Events("n", 0), keeps=False)
    words = Ledger(np.zeros(LEDGER_ROOM // 8, dtype=np.uint64))
    ledger.open(words, None)
    iterate(ledger, 1)
    ledger.sealed(1, 5)
    assert words.entries() == {} and not ledger._sealed
