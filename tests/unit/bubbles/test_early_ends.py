"""How much of a window is used whose bubble has ended before its time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.bubbles.early_ends import EarlyEnds

WINDOW, OTHER = (3, 0), (3, 1)


def test_all_of_a_window_is_used_until_its_bubble_ends_early_and_then_the_half_way_to_that() -> None:
    ends = EarlyEnds()
    ends.opened(WINDOW, 1000)
    assert ends.used(WINDOW, 1000) == 1000
    ends.ended(WINDOW, 1000, after=600)
    assert (ends.used(WINDOW, 1000), ends.used(OTHER, 1000)) == (800, 1000)
    ends.ended(WINDOW, 1000, after=900)  # began within what was used, at another time
    assert ends.used(WINDOW, 1000) == 800


def test_more_is_used_each_time_until_it_is_all() -> None:
    ends = EarlyEnds()
    ends.ended(WINDOW, 1000, after=900)
    used = []
    for _ in range(7):
        ends.opened(WINDOW, 1000)
        used.append(ends.used(WINDOW, 1000))
    assert used == [960, 970, 980, 990, 1000, 1000, 1000]


def test_a_window_that_a_new_plan_makes_shorter_is_used_no_longer_than_it_is() -> None:
    ends = EarlyEnds()
    ends.ended(WINDOW, 1000, after=0)
    assert ends.used(WINDOW, 300) == 300


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2000)), max_size=50))
def test_never_more_than_the_window_nor_less_than_was_there(told: list[tuple[bool, int]]) -> None:
    ends, least = EarlyEnds(), 1000
    for early, after in told:
        if early:
            ends.ended(WINDOW, 1000, after)
            least = min(least, after)
        else:
            ends.opened(WINDOW, 1000)
        assert least <= ends.used(WINDOW, 1000) <= 1000
