"""How many batches each update trains on: a loop that reads ahead is refused, one whose numbers vary is not."""

import pytest

from ft_plugins.adapters.data.loader_reads import LoopReads
from ft_plugins.errors import ConfigError


def updates(counts, done=0, usual=None):
    """Iterations behind `done` that read `counts` batches each; what is saved with the position behind them."""
    step = done
    reads = LoopReads(lambda: step, lambda: True)
    reads.required, reads.usual = True, usual
    for count in counts:
        step += 1
        for _ in range(count):
            reads.reading(object())
        reads.require()
    return reads.usual


VARYING = [2, 3, 2, 3, 3, 2, 3, 2, 2, 3]


@pytest.mark.parametrize("killed", range(2, len(VARYING)))
def test_a_loop_whose_updates_train_on_varying_numbers_of_batches_goes_on_after_every_resume(killed):
    """Batches are added until there are enough tokens."""
    saved = updates(VARYING[:killed])
    assert updates(VARYING[killed:], killed, saved) == 0


def test_what_is_known_to_vary_stays_so_over_several_resumes():
    saved = updates(VARYING[:5])
    for killed in (5, 6, 7):
        saved = updates(VARYING[killed : killed + 1], killed, saved)
    assert updates([3, 2], 8, saved) == 0


@pytest.mark.parametrize("before", [[], [2], [3], [2, 2, 2]], ids=str)
def test_a_loop_that_reads_ahead_is_refused_after_a_resume_too(before):
    done = len(before)
    saved = updates(before)
    with pytest.raises(ConfigError, match=f"iteration {done + 2} read 2 batches, but iteration {done + 1}, .* 3: "):
        updates([3, 2], done, saved)
