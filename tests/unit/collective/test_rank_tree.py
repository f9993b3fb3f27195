"""The tree of ranks reaches everybody, in rank order, with few connections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.collective.operations import ARITY, place_of
from ft_plugins.errors import TopologyError


def tree(world_size, on_node):
    return [place_of(rank, world_size, on_node) for rank in range(world_size)]


def depth(places, rank):
    parent = places[rank].parent
    return 0 if parent is None else 1 + depth(places, parent)


@given(st.integers(1, 700), st.integers(1, 9))
def test_every_rank_is_below_rank_0_once_and_those_below_a_rank_follow_it(world_size, on_node):
    places = tree(world_size, on_node)
    assert [place.rank for place in places if place.parent is None] == [0]
    assert sorted(child for place in places for child in place.children) == list(range(1, world_size))
    for place in places:
        assert all(places[child].parent == place.rank for child in place.children)
        at = place.rank + 1
        for child in sorted(place.children):
            assert child == at, "no gap between the ranks below one child and the next child"
            at = places[child].stop
        assert at == place.stop


@given(st.integers(1, 700), st.integers(1, 9))
def test_a_rank_has_few_neighbours_and_only_the_first_of_a_node_has_some_elsewhere(world_size, on_node):
    for place in tree(world_size, on_node):
        own = [child for child in place.children if child // on_node == place.rank // on_node]
        assert len(own) < on_node and len(place.children) - len(own) <= ARITY
        if place.rank % on_node:
            assert place.children == () and place.parent == place.rank // on_node * on_node


def test_the_tree_stays_flat():
    places = tree(16384, 8)
    assert max(depth(places, rank) for rank in range(0, 16384, 7)) == 5, "4 between nodes, 1 in the node"
    assert max(len(place.children) for place in places) == ARITY + 7


@pytest.mark.parametrize("rank, world_size, on_node", [(4, 4, 1), (-1, 4, 1), (0, 4, 0)])
def test_a_rank_that_does_not_exist_has_no_place(rank, world_size, on_node):
    with pytest.raises(TopologyError, match=f"no rank {rank} in a job of {world_size}"):
        place_of(rank, world_size, on_node)
