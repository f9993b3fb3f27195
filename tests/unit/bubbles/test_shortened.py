"""How much of a window is used in which frames were late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.bubbles.shortened import Shortened

WINDOW, OTHER = (3, 0), (3, 1)


def test_all_of_a_window_is_used_until_a_frame_was_late_and_then_the_half_way_to_what_was_there() -> None:
    windows = Shortened()
    windows.opened(WINDOW, 1000)
    assert windows.used(WINDOW, 1000) == 1000
    windows.late(WINDOW, 1000, there=600)
    assert (windows.used(WINDOW, 1000), windows.used(OTHER, 1000)) == (800, 1000)
    windows.late(WINDOW, 1000, there=900)  # began within what was used, at another time
    assert windows.used(WINDOW, 1000) == 800


def test_more_is_used_each_time_until_it_is_all() -> None:
    windows = Shortened()
    windows.late(WINDOW, 1000, there=900)
    used = []
    for _ in range(7):
        windows.opened(WINDOW, 1000)
        used.append(windows.used(WINDOW, 1000))
    assert used == [960, 970, 980, 990, 1000, 1000, 1000]


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
