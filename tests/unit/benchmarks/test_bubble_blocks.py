"""What blocks of one run say of what copies cost, by made-up seconds and events."""

from collections import Counter

import pytest

from ft_plugins.events import Event
from workloads.bubble_blocks import BLOCK, commit_interval, committed_between, compared, cost, rounds, sent_share
from workloads.cluster import IterationBlock
from workloads.emulated_rank import OFF, ON, ONCE


def test_every_pair_has_one_block_of_each_mode_and_the_order_is_drawn():
    found = rounds(16, 40, 3, seed=1)
    assert found[0] == (ON, 16) and {count for _, count in found[1:]} == {BLOCK}
    pairs = [Counter(mode for mode, _ in found[at : at + 2]) for at in range(1, len(found), 2)]
    assert pairs == [Counter((ON, OFF))] * 40 + [Counter((ONCE, OFF))] * 3
    assert 5 < sum(mode == ON for mode, _ in found[1:81:2]) < 35
    assert found == rounds(16, 40, 3, seed=1) != rounds(16, 40, 3, seed=2)


def block(mode, seconds, completed=0):
    return IterationBlock(mode, (seconds,) * BLOCK, (0.0,) * BLOCK, completed)


def test_each_block_is_compared_with_its_neighbour_and_what_drifts_is_in_neither():
    """Iterations get slower all the time, by 1% from pair to pair; protected ones take 3% more than the others."""
    speeds = [1.01**number for number in range(8)]
    blocks = [block(ON, 99.0)]
    for number, speed in enumerate(speeds):
        pair = [block(ON, 1.03 * speed), block(OFF, speed)]
        blocks += pair if number % 2 else pair[::-1]
    blocks += [block(ONCE, 3.0), block(OFF, 2.0)]
    found = cost(blocks, 8)
    expected = pytest.approx(0.03)
    assert found.overhead == found.overhead_upper == found.overhead_mean == found.overhead_mean_upper == expected
    assert [found.null, found.null_lower, found.null_upper] == pytest.approx([1 / 1.01 - 1] * 3)
    assert found.unplanned == 0.5
    assert found.seconds == pytest.approx((speeds[3] + speeds[4]) / 2)
    assert [len(those) for those in compared(blocks, 8)] == [16, 2]


def test_a_few_dear_blocks_are_in_the_mean_and_not_in_the_median():
    blocks = [block(ON, 99.0)]
    for number in range(20):
        blocks += [block(ON, 2.0 if number == 7 else 1.0), block(OFF, 1.0)]
    found = cost([*blocks, block(ONCE, 1.0), block(OFF, 1.0)], 20)
    assert found.overhead == found.overhead_upper == 0
    assert found.overhead_mean == pytest.approx(0.05) and found.overhead_mean_upper >= 0.1


def test_how_sure_a_null_comparison_is_is_told_beside_it():
    """Of ten comparisons of two blocks without protection five differ, by 4%."""
    blocks = [block(ON, 99.0)]
    for number in range(20):
        blocks += [block(ON, 1.0), block(OFF, 1.04 if number % 4 == 0 else 1.0)]
    found = cost([*blocks, block(ONCE, 1.0), block(OFF, 1.0)], 20)
    assert [found.null, found.null_lower, found.null_upper] == pytest.approx([0.02, 0.0, 0.04])


def counts(*versions):
    """A version that counts for each (iteration, bytes in bubbles, bytes late)."""
    fields = [{"iteration": at, "in": i, "late": late} for at, i, late in versions]
    found = [Event("version.committed", 0.0, fields=each) for each in fields]
    return [Event("bubbles.planned", 0.0), *found]


def test_what_went_is_counted_from_the_first_version_to_the_last_that_was_followed_by_another_one():
    events = counts((8, 500, 500), (10, 600, 600), (12, 690, 610), (14, 780, 620), (16, 781, 1620), (18, 9999, 9999))
    assert [event.fields["iteration"] for event in committed_between(events, 10, 16)] == [10, 12, 14, 16]
    assert commit_interval(events, 10, 16) == 2
    assert sent_share([events], 10, 16, ["in"], ["in", "late"]) == 180 / 200
    assert sent_share([events, counts((10, 0, 0), (12, 0, 200), (16, 0, 300))], 10, 16, ["in"], ["in", "late"]) == 0.45


def test_of_too_few_versions_nothing_is_told():
    assert sent_share([counts((10, 1, 1), (12, 2, 2))], 10, 16, ["in"], ["late"]) is None
    assert sent_share([counts()], 10, 16, ["in"], ["late"]) is None
    assert commit_interval(counts((10, 1, 1)), 10, 16) == 6
