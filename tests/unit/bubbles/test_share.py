"""Senders that share a link: never more than it carries, and no plan gets all of them through in fewer iterations."""

import itertools
from fractions import Fraction
from math import ceil

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ft_plugins.bubbles.share import NO_RATE, largest_flow, share
from ft_plugins.bubbles.windows import Windows

LINK = 1_000_000  # bytes a second, and windows of whole seconds: what is lost by rounding to bytes does not show
END = 8


@st.composite
def seconds(draw):
    """The seconds in which a sender may send."""
    return frozenset(draw(st.sets(st.integers(0, END - 1), max_size=5)))


def windows(free):
    """Each run of seconds as a window of a bubble of its own."""
    begins = sorted(at for at in free if at - 1 not in free)
    ends = sorted(at + 1 for at in free if at + 1 not in free)
    return Windows(np.arange(len(begins)), np.array(begins, dtype=float), np.array(ends, dtype=float))


senders = st.lists(st.tuples(seconds(), st.integers(0, 40).map(lambda x: x * 100_000)), min_size=1, max_size=4)


def rate_at(rates, moment):
    return sum(
        rate for begin, end, rate in zip(rates.begin, rates.end, rates.rate, strict=True) if begin <= moment < end
    )


@settings(max_examples=400)
@given(senders)
def test_the_rates_add_up_to_the_link_where_anyone_may_send_and_to_nothing_elsewhere(given_):
    found = share([windows(free) for free, _ in given_], [need for _, need in given_], LINK)
    for tick in range(END):
        rates = [rate_at(one, tick + 0.5) for one in found]
        wanting = [tick in free and need > 0 for free, need in given_]
        assert all(rate == 0 or wants for rate, wants in zip(rates, wanting, strict=True))
        assert abs(sum(rates) - (LINK if any(wanting) else 0)) <= 1e-6 * LINK


@settings(max_examples=200)
@given(senders)
def test_a_window_is_used_from_when_its_sender_has_a_rate_until_it_has_none_any_more(given_):
    """So that who goes first in windows of its own is not met by one that has longer ones."""
    whole = [windows(free) for free, _ in given_]
    for rates, given_windows in zip(share(whole, [need for _, need in given_], LINK), whole, strict=True):
        used, least = rates.used(given_windows), NO_RATE * np.max(rates.rate, initial=0.0)
        assert np.array_equal(used.bubble, given_windows.bubble)
        for begin, end, low, high in zip(given_windows.begin, given_windows.end, used.begin, used.end, strict=True):
            ticks = [tick for tick in range(int(begin), int(end)) if rate_at(rates, tick + 0.5) > least]
            assert (low, high) == ((min(ticks), max(ticks) + 1) if ticks else (begin, end))


def fewest(given_):
    """Iterations, as a fraction, that the worst set of senders needs for all that its seconds carry."""
    wanting = [(free, need) for free, need in given_ if need]
    return max(
        Fraction(sum(need for _, need in some), LINK * len(frozenset().union(*(free for free, _ in some))))
        for count in range(1, len(wanting) + 1)
        for some in itertools.combinations(wanting, count)
    )


@settings(max_examples=400)
@given(senders)
def test_all_get_through_in_as_few_iterations_as_any_plan_needs(given_):
    """No plan can do with less than every set of senders needs by itself; this one needs no more, rounding apart."""
    assume(any(need for _, need in given_) and all(free for free, need in given_ if need))
    times = [windows(free) for free, _ in given_]
    found = share(times, [need for _, need in given_], LINK)
    carried = [int(one.carried(len(time.begin)).sum()) for one, time in zip(found, times, strict=True)]
    bound = fewest(given_)
    for (_, need), nbytes in zip(given_, carried, strict=True):
        if need:
            # each window loses less than a byte an iteration, each class a byte: 20 in all, of 100,000 at least
            assert need <= ceil(bound) * (nbytes + 20), f"{need} bytes at {nbytes} an iteration; {ceil(bound)} would do"
    assert max(Fraction(n, c + 20) for (_, n), c in zip(given_, carried, strict=True) if n) <= bound


@settings(max_examples=400)
@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_a_flow_is_as_large_as_the_smallest_cut_and_the_cut_is_named(data, senders, kinds):
    rows = st.lists(st.booleans(), min_size=kinds, max_size=kinds)
    may = data.draw(st.lists(rows, min_size=senders, max_size=senders))
    wanted = data.draw(st.lists(st.integers(0, 9), min_size=senders, max_size=senders))
    room = data.draw(st.lists(st.integers(0, 9), min_size=kinds, max_size=kinds))
    flow, short = largest_flow(may, wanted, room)
    for row, allowed, need in zip(flow, may, wanted, strict=True):
        assert all(nbytes >= 0 and (here or not nbytes) for nbytes, here in zip(row, allowed, strict=True))
        assert sum(row) <= need
    assert all(sum(column) <= space for column, space in zip(zip(*flow, strict=True), room, strict=True))

    def cut(some):
        """What `some` can do at most, and all others want."""
        reached = [space for kind, space in enumerate(room) if any(may[sender][kind] for sender in some)]
        return sum(reached) + sum(need for sender, need in enumerate(wanted) if sender not in some)

    every = (set(some) for count in range(senders + 1) for some in itertools.combinations(range(senders), count))
    assert sum(map(sum, flow)) == min(map(cut, every)) == cut(short)


def test_two_with_the_same_windows_share_by_what_they_have_to_send():
    first, second = share([windows(frozenset({0, 1, 4}))] * 2, [300, 100], LINK)
    assert first.carried(2).tolist() == [1_500_000, 750_000]
    assert second.carried(2).tolist() == [500_000, 250_000]


def test_one_that_has_few_windows_goes_first_in_them():
    few, many = share([windows(frozenset({0})), windows(frozenset({0, 1, 2, 3}))], [1000, 3000], LINK)
    assert rate_at(few, 0.5) == LINK and rate_at(many, 0.5) == 0
    assert rate_at(many, 1.5) == LINK


def test_one_without_windows_keeps_nobody_back():
    none, some = share([windows(frozenset()), windows(frozenset({2}))], [10**9, 1000], LINK)
    assert len(none.begin) == 0 and rate_at(some, 2.5) == LINK


def test_the_first_iteration_offers_what_comes_after_the_version_is_ready():
    (one,) = share([windows(frozenset({0, 1, 5}))], [1], LINK)
    assert one.carried(2, since=1.25).tolist() == [750_000, LINK]
    assert one.carried(2, since=9).tolist() == [0, 0]
