"""Batches that are read ahead are noticed by what an iteration reads; letters stand for what a script does.

r: it reads a batch; R: the first one of another pass, whose last one it has left; s: a micro-step; a space: the update,
and so the next iteration.
"""

import pytest

from ft_plugins.adapters.deepspeed.read_ahead import IterationReads, ReadPace, unproven


def refused(story, usual=None):
    """The iteration that is refused; 0 if none is."""
    reads = IterationReads(usual)
    for number, iteration in enumerate(story.split(), 1):
        for letter in iteration:
            if letter in "rR":
                reads.reading(left=letter == "R")
            else:
                reads.computing()
        if reads.problem() is not None:
            return number
        reads.updated(silent=False)
    return 0


@pytest.mark.parametrize(
    "story",
    [
        "rs rs rs",
        "rsrs rsrs",
        "rrss rrss",  # all batches of an iteration first
        "rssss rssss",  # a batch in four parts
        "rrs rrs",  # two batches joined, or of two loaders
        "rsrs rs rsrsrs",  # accumulation that changes
        "s s s",  # from no loader
        "rs rs rRs rs",  # a batch at which the script ends a pass
        "rRs rs rs",  # a look at a batch
        "rs Rs rs",  # a pass that is left behind its last micro-step
        "rrss rRss",  # all batches of an iteration first, of two passes
    ],
)
def test_a_loop_that_reads_what_it_trains_on_is_followed(story):
    assert refused(story) == 0


@pytest.mark.parametrize(
    ("story", "at"),
    [
        ("rrs rs rs s", 2),  # one ahead, as accelerate's loaders
        ("rrrs rs rs", 2),  # two ahead
        ("rsrsr rsrs", 2),  # the next batch right before the update
        ("rrssss rssss", 2),  # one ahead, in four parts
        ("rs rs rrs", 3),  # a batch that is left out
        ("rs s s", 2),  # several updates with one batch
        ("rsss sr", 2),  # a batch whose parts belong to two updates
    ],
)
def test_a_loop_that_holds_batches_back_is_refused_when_it_shows(story, at):
    assert refused(story) == at


def test_the_message_names_both_counts():
    reads = IterationReads(ReadPace(1, 1, True))
    reads.reading(3)
    reads.computing()
    assert "it read 3 batches for 1 micro-steps, but an earlier one 1 for 1" in str(reads.problem())


def test_after_a_restore_the_pace_is_that_of_the_captured_iteration():
    assert refused("rs rs", ReadPace(1, 1, True)) == 0
    assert refused("rrrs", ReadPace(1, 1, True)) == 1, "the script skips batches, and the restored loader did so too"


def test_the_end_of_a_loader_without_length_is_no_batch():
    reads = IterationReads(ReadPace(1, 1, True))
    for batches in (1, -1, 1):
        reads.reading(batches)
    reads.computing()
    assert reads.problem() is None


def test_a_first_iteration_that_read_more_is_restored_only_if_the_second_did_so_too():
    for read, proven in ((1, True), (2, False), (0, True)):
        reads = IterationReads()
        for later in (False, True):
            reads.reading(read)
            reads.computing()
            pace = reads.updated(silent=False)
            assert pace is not None and (unproven(pace) is None) == (proven or later)
            if unproven(pace):
                assert "read 2 batches for 1 micro-steps" in str(unproven(pace))


def test_an_iteration_whose_reads_are_not_counted_has_no_pace():
    reads = IterationReads()
    reads.computing()
    assert reads.updated(silent=True) is None and reads.usual is None
