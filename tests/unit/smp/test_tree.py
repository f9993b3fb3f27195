"""The shape of the tree of SMPs: whatever is lost, the rest stays connected below one root and no node is crowded."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.smp.tree.tree import ARITY, candidates, children_of, depth_of, parent_of


@pytest.mark.parametrize(("nodes", "depth"), [(1, 0), (2, 1), (9, 1), (10, 2), (73, 2), (74, 3), (2048, 4)])
def test_the_depth_grows_with_the_logarithm_of_the_job(nodes, depth):
    assert max(map(depth_of, range(nodes))) == depth


@given(st.integers(1, 5000))
def test_every_node_but_the_root_is_the_child_of_its_parent(nodes):
    children = [child for position in range(nodes) for child in children_of(position, nodes)]
    assert children == list(range(1, nodes)), "each once, in order"
    for position in {0, nodes // 17, nodes // 2, nodes - 1}:
        assert all(parent_of(child) == position for child in children_of(position, nodes))
        assert len(children_of(position, nodes)) <= ARITY


@given(st.integers(0, 2047))
def test_candidates_are_all_lower_positions_once_beginning_with_the_parent(position):
    order = list(candidates(position))
    assert sorted(order) == list(range(position))
    assert order[:1] == ([parent_of(position)] if position else [])
    if depth_of(position) > 1:
        assert {parent_of(one) for one in order[:ARITY]} == {parent_of(order[0])}, "first the siblings of the parent"


def live_parent(position, lost):
    return next((one for one in candidates(position) if one not in lost), None)


@st.composite
def jobs(draw, most_lost):
    """The number of nodes, and the lost positions: any of them, with a preference for those with children."""
    nodes = draw(st.integers(1, 2048))
    anywhere, inner = st.integers(0, nodes - 1), st.integers(0, max(0, (nodes - 2) // ARITY))
    lost = draw(st.sets(anywhere | inner, max_size=min(most_lost, nodes - 1)))
    return nodes, lost


@settings(max_examples=150, deadline=None)
@given(jobs(most_lost=200))
def test_whatever_is_lost_the_rest_stays_connected_below_the_lowest_live_position(job):
    nodes, lost = job
    live = [position for position in range(nodes) if position not in lost]
    parents = {position: live_parent(position, lost) for position in live}
    assert [position for position, above in parents.items() if above is None] == live[:1]
    for position, above in parents.items():
        assert above is None or (above < position and above in parents), "no circle, and no edge to a lost node"


@settings(max_examples=300, deadline=None)
@given(jobs(most_lost=2))
def test_after_two_losses_no_node_has_more_than_twice_its_children(job):
    nodes, lost = job
    crowd = Counter(live_parent(position, lost) for position in range(nodes) if position not in lost)
    del crowd[None]
    assert max(crowd.values(), default=0) <= 2 * ARITY


def test_the_children_of_a_lost_node_spread_over_its_siblings():
    crowd = Counter(live_parent(child, {5}) for child in children_of(5, 2048))
    assert set(crowd) == set(range(1, ARITY + 1)) - {5} and max(crowd.values()) == 2
