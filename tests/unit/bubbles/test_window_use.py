"""How much of a window is used in which frames were late."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.bubbles.gate.window_use import CUT, REGROWTH, Shortened

WINDOW, OTHER = (3, 0), (3, 1)


def test_all_of_a_window_is_used_until_a_frame_was_late_in_it():
    windows = Shortened()
    windows.opened(WINDOW, 1000)
    assert windows.used(WINDOW, 1000) == 1000
    windows.late(WINDOW, 1000)
    assert (windows.used(WINDOW, 1000), windows.used(OTHER, 1000)) == (900, 1000)
    for _ in range(20):
        windows.late(WINDOW, 1000)
    assert windows.used(WINDOW, 1000) == 0


@pytest.mark.parametrize("least", [500, 1000])
def test_frames_are_late_in_one_of_eleven_openings_at_most_whatever_makes_them_late(least):
    """A bubble of 0.5 to 1.5 times what was planned, or of no less; and a few frames that are stuck."""
    windows, drawn, late, used = Shortened(), random.Random(7), 0, 0
    for opening in range(4000):
        windows.opened(WINDOW, 1000)
        if drawn.random() < 0.03 or windows.used(WINDOW, 1000) > drawn.randint(least, 1500):
            windows.late(WINDOW, 1000)
            late += opening >= 2000
        used += windows.used(WINDOW, 1000) if opening >= 2000 else 0
    # in the mean what is dropped is grown again; at the end a window may be shorter than at first by as much as it has
    assert late * CUT <= 2000 * REGROWTH / (1 - REGROWTH) + 1
    # 6 % of bubbles are shorter than 560; drops of three in a hundred are soon grown
    assert used / 2000 >= (550 if least == 500 else 800)


def test_more_is_used_each_time_until_it_is_all():
    windows = Shortened()
    windows.late(WINDOW, 1000)
    used = []
    for _ in range(11):
        windows.opened(WINDOW, 1000)
        used.append(windows.used(WINDOW, 1000))
    assert used == [*range(910, 1000, 10), 1000, 1000]


def test_a_window_that_a_new_plan_makes_shorter_is_used_no_longer_than_it_is():
    windows = Shortened()
    windows.late(WINDOW, 1000)
    assert windows.used(WINDOW, 300) == 300


@given(st.lists(st.booleans(), max_size=50))
def test_never_more_than_the_window_nor_less_than_all_late_frames_take_of_it(told):
    windows, least = Shortened(), 1000
    for late in told:
        if late:
            windows.late(WINDOW, 1000)
            least = max(0, least - 100)
        else:
            windows.opened(WINDOW, 1000)
        assert least <= windows.used(WINDOW, 1000) <= 1000
