"""Whole layers into windows: what goes into each is the most that fits, by brute force; every byte goes out once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.bubbles.layers import UNITS, LayerPart, fill, fullest
from harness.operations import doubling


def most(sizes, room):
    """The largest sum within `room`, of all subsets."""
    return max(
        sum(some)
        for count in range(len(sizes) + 1)
        for some in itertools.combinations(sizes, count)
        if sum(some) <= room
    )


@settings(max_examples=400)
@given(st.lists(st.integers(0, 60), max_size=10), st.integers(0, 200))
def test_what_goes_into_a_window_is_the_most_that_fits(sizes, room):
    places = fullest(sizes, room)
    assert places == sorted(set(places)), "a layer twice"
    assert sum(sizes[place] for place in places) == most(sizes, room)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=9), st.integers(1, 1 << 42))
def test_large_layers_are_counted_in_units_and_never_too_many(sizes, room):
    """What is lost by counting in units: what would fit with so much less room, and at most half."""
    taken = sum(sizes[place] for place in fullest(sizes, room))
    rounding = len(sizes) * -(-room // UNITS)
    assert taken <= room
    assert taken >= most(sizes, max(0, room - rounding)), "each layer is rounded by less than a unit"
    assert 2 * taken >= most(sizes, room)


def test_a_layer_that_just_fits_is_not_left_out_by_rounding():
    assert fullest([1, 2 * UNITS + 1], 2 * UNITS + 1) == [1]


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 50), max_size=8),
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_every_byte_goes_out_once_and_no_window_takes_more_than_it_carries(layers, every, clipped):
    first = [min(one, room) for one, room in zip(clipped + [40] * 5, every, strict=False)]
    turns = fill(layers, first, every, 1000)
    for number, turn in enumerate(turns):
        for parts, room in zip(turn, every if number else first, strict=True):
            assert sum(part.nbytes for part in parts) <= room
    out = [at for turn in turns for parts in turn for part in parts for at in range(part.start, part.stop)]
    assert sorted(out) == list(range(sum(layers)))
    assert not turns or len(turns) == 1 or any(turns[-1]), "an iteration in which nothing goes out at the end"


def test_a_window_is_filled_better_by_others_than_by_the_first_that_fit():
    (turn,) = fill([50, 30, 40, 30], [100, 50], [100, 50], 10)
    assert turn == [(LayerPart(50, 80), LayerPart(80, 120), LayerPart(120, 150)), (LayerPart(0, 50),)]


def test_a_layer_that_no_window_takes_whole_is_cut():
    assert fill([25], [10, 4], [10, 4], 10) == [
        [(LayerPart(0, 10),), (LayerPart(10, 14),)],
        [(LayerPart(14, 24),), (LayerPart(24, 25),)],
    ]


def test_beside_a_cut_layer_others_go_whole_in_what_is_left_of_a_window():
    assert fill([3, 25, 6], [10, 4], [10, 4], 10) == [
        [(LayerPart(3, 13),), (LayerPart(13, 17),)],
        [(LayerPart(17, 27),), (LayerPart(27, 28), LayerPart(0, 3))],
        [(LayerPart(28, 34),), ()],
    ]


@settings(max_examples=200)
@given(
    st.lists(st.integers(41, 200), min_size=1, max_size=6),
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
)
def test_layers_that_no_window_takes_whole_take_no_more_iterations_than_bytes_do(layers, every):
    """Windows of one iteration may be unlike: a cut by the largest would leave the others empty."""
    turns = fill(layers, every, every, 1200)
    assert len(turns) == -(-sum(layers) // sum(every))


def test_no_more_iterations_are_filled_than_are_asked_for():
    turns = fill([10, 10, 10], [10], [10], 2)
    assert [[len(parts) for parts in turn] for turn in turns] == [[1], [1]]


@pytest.mark.parametrize("size", [lambda layer: 1 << 30, lambda layer: (1 << 30) + 977 * layer * layer])
def test_layers_are_chosen_in_steps_of_the_square_of_their_number(size):
    def chosen(layers):
        turns = fill([size(layer) for layer in range(layers)], [5 << 30] * 4, [5 << 30] * 4, 100)
        assert sum(len(parts) for turn in turns for parts in turn) == layers

    assert doubling(chosen, 48) < 5
