"""The windows of two ranks are the times in which both are idle, reserves apart: compared with every tick counted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.bubbles.windows import WINDOWS, Reserve, shared
from ft_plugins.errors import ConfigError
from ft_plugins.model.timeline import Bubble

NONE = Reserve(0, 0)


@st.composite
def idle(draw, end=24, most=6):
    """Bubbles at whole seconds."""
    count = draw(st.integers(0, most))
    edges = sorted(draw(st.lists(st.integers(0, end), min_size=2 * count, max_size=2 * count, unique=True)))
    return tuple(
        Bubble(10 + number, float(begin), float(stop), 100 + number)
        for number, (begin, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True))
    )


def ticks(bubbles, begin, end):
    """Which seconds of which bubble are left of it when so much is reserved."""
    return {
        at: place
        for place, bubble in enumerate(bubbles)
        for at in range(int(bubble.begin) + begin, int(bubble.end) - end)
    }


def run_of(both, at):
    """How many ticks in a row lie in the same two bubbles as `at`, itself counted."""
    low = high = at
    while both.get(low - 1) == both[at]:
        low -= 1
    while both.get(high + 1) == both[at]:
        high += 1
    return high + 1 - low


def told(windows):
    return list(zip(windows.bubble.tolist(), windows.begin.tolist(), windows.end.tolist(), strict=True))


@settings(max_examples=300)
@given(idle(), idle(), st.integers(0, 2), st.integers(0, 2), st.integers(0, 4))
def test_a_window_is_where_both_are_idle_for_long_enough_and_nothing_is_reserved(
    sender, receiver, begin, end, shortest
):
    found = told(shared(sender, receiver, Reserve(begin, end, shortest)))
    own, other = ticks(sender, begin, end), ticks(receiver, begin, end)
    both = {at: (place, other[at]) for at, place in own.items() if at in other}
    wanted = {at: place for at, (place, _) in both.items() if run_of(both, at) >= shortest}
    assert {at: place for place, low, high in found for at in range(int(low), int(high))} == wanted
    assert all(low < high for _, low, high in found), "a window of no length"
    assert all(before[2] <= after[1] for before, after in zip(found, found[1:], strict=False))


def test_of_many_windows_of_one_bubble_the_longest_are_taken():
    sender = (Bubble(0, 0, 1000, -1), Bubble(1, 2000, 3000, 4))
    receiver = tuple(Bubble(i, 20.0 * i, 20.0 * i + 1 + i % 13, i) for i in range(12)) + (Bubble(12, 2100, 2200, 12),)
    found = told(shared(sender, receiver, NONE))
    lengths = sorted((high - low for place, low, high in found if place == 0), reverse=True)
    assert lengths == sorted((1.0 + i % 13 for i in range(12)), reverse=True)[:WINDOWS]
    assert found[-1] == (1, 2100.0, 2200.0), "and another bubble keeps its own"
    assert [low for _, low, _ in found] == sorted(low for _, low, _ in found)


def test_bubbles_that_overlap_are_refused():
    with pytest.raises(ConfigError, match="overlap or are not in order of time"):
        shared((Bubble(0, 0, 2, -1), Bubble(1, 1, 3, 0)), (), NONE)
    with pytest.raises(ConfigError, match="overlap or are not in order of time"):
        shared((), (Bubble(0, 2, 1, -1),), NONE)


def test_less_than_no_time_cannot_be_reserved():
    with pytest.raises(ConfigError, match="reserved times of a bubble"):
        Reserve(0.1, -1)
    with pytest.raises(ConfigError, match="0.1 s, 0.2 s, -1 s"):
        Reserve(0.1, 0.2, -1)


def test_ranks_that_share_nothing_have_no_windows():
    assert told(shared((Bubble(0, 0, 1, -1),), (Bubble(0, 1, 2, 3),), NONE)) == []
    assert told(shared((), (), NONE)) == []
    assert shared((Bubble(0, 0, 4, -1),), (Bubble(0, 1, 3, 3),), NONE).seconds == 2
