"""How much of a window is used in which frames were late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.bubbles.shortened import Shortened

WINDOW, OTHER = (3, 0), (3, 1)


def test_all_of_a_window_is_used_until_a_frame_was_late_and_then_what_was_there_but_half_of_it_at_least() -> None:
    windows = Shortened()
    windows.opened(WINDOW, 1000)
    assert windows.used(WINDOW, 1000) == 1000
    windows.late(WINDOW, 1000, there=600)
    assert (windows.used(WINDOW, 1000), windows.used(OTHER, 1000)) == (600, 1000)
    windows.late(WINDOW, 1000, there=900)  # began within what was used, at another time
    assert windows.used(WINDOW, 1000) == 600
    windows.late(WINDOW, 1000, there=10)
    assert windows.used(WINDOW, 1000) == 300


def test_more_is_used_each_time_until_it_is_all() -> None:
    windows = Shortened()
    windows.late(WINDOW, 1000, there=900)
    used = []
    for _ in range(40):
        windows.opened(WINDOW, 1000)
        used.append(windows.used(WINDOW, 1000))
    assert used[:3] == [903, 906, 910] and used == sorted(used), "2.5 of 1000 each time, and 1% of the missing 100"
    assert used.index(1000) == 33


def test_an_odd_iteration_is_forgotten_in_the_end() -> None:
    windows, count = Shortened(), 0
    windows.late(WINDOW, 1000, there=0)
    while windows.used(WINDOW, 1000) < 1000:
        windows.opened(WINDOW, 1000)
        count += 1
    assert windows.used(WINDOW, 1000) == 1000 and count == 110


def test_a_window_that_a_new_plan_makes_shorter_is_used_no_longer_than_it_is() -> None:
    windows = Shortened()
    windows.late(WINDOW, 1000, there=0)
    assert windows.used(WINDOW, 300) == 300


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2000)), max_size=50))
def test_never_more_than_the_window_nor_less_than_was_there(told: list[tuple[bool, int]]) -> None:
    windows, least = Shortened(), 1000
    for early, after in told:
        if early:
            windows.late(WINDOW, 1000, after)
            least = min(least, after)
        else:
            windows.opened(WINDOW, 1000)
        assert least <= windows.used(WINDOW, 1000) <= 1000
