"""Passes that a script ends by a count of its own are seen by their lengths."""

import itertools
from unittest import mock

import pytest

from ft_plugins.adapters.data import left_passes
from ft_plugins.adapters.data.left_passes import LeftPasses
from ft_plugins.snapshot.capture import codec
from tests.unit.adapters.test_torch_loop import Loop, run


def lengths(story, left, taken):
    """The batch at which a pass turns out longer, 0 for none: r reads one, e finds the end, | begins another pass. The
    first pass is a restored one, of which `taken` were read, if any; the one before it was left after `left`."""
    passes, read, said = LeftPasses(), 0, list[str]()
    if taken:
        passes.restored(left, taken)
    with mock.patch.object(left_passes, "say", lambda words, alarm: said.append(words)):
        for letter in story:
            read += letter == "r"
            {"r": passes.reading, "e": passes.ended, "|": passes.begin}[letter]()
            if said:
                return read
    return 0


@pytest.mark.parametrize(
    ("story", "left", "taken", "at"),
    [
        ("|rrr|rrr|rr|rrrr", 0, 0, 0),  # of no restored one
        ("r|rrr|rrr", 3, 2, 0),  # ended where the others are
        ("rrr|rrr", 3, 2, 2),
        ("rrr|rrr|rrr", 0, 2, 6),  # in the first pass: seen by the next one
        ("r|rrr|rrr", 0, 2, 0),
        ("rrre|rrr|rrr", 0, 2, 6),  # a whole one, unlike the others
        ("rre|rrr|rrr", 4, 2, 2),
        ("rrre|rrrre|rre", 0, 2, 0),  # all are whole ones, whose lengths are the data's matter
        ("rr|rrrrr|rr", 4, 2, 0),  # the others have lengths of their own
    ],
)
def test_a_restored_pass_that_gets_longer_than_its_neighbours_is_seen(story, left, taken, at):
    assert lengths(story, left, taken) == at


class Cut(Loop):
    """Ends each pass after 3 of its 4 batches."""

    by = "code"

    def _endless(self):
        for epoch in itertools.count(self.sampler.epoch):
            self.sampler.set_epoch(epoch)
            if self.by == "slice":
                yield from itertools.islice(self.loader, 3)
            else:
                yield from self._counted() if self.by == "code" else self._by_function()

    def _counted(self):
        for number, batch in enumerate(self.loader):
            if number == 3:
                return
            yield batch

    def _by_function(self):
        for number, batch in enumerate(self.loader):
            if is_enough(number):
                return
            yield batch


def is_enough(number):
    return number >= 3


@pytest.mark.parametrize(("by", "done"), itertools.product(("code", "slice", "function"), (2, 5, 6)))
def test_a_loop_of_plain_torch_that_ends_its_passes_by_a_count_is_named(by, done, monkeypatch, capsys):
    """Restored in the middle of its first or second pass, or at a pass's end, which it has not found yet."""
    monkeypatch.setattr(Cut, "by", by)
    first = Cut()
    host = first.host()
    run(first, host, 0, done)
    small = codec.decode(codec.encode(host.small_state()))
    second = Cut()
    host = second.host()
    host.allocate(())
    host.restore(small)
    run(second, host, done, done + 8, small)
    assert "takes more batches of the restored pass" in capsys.readouterr().err
