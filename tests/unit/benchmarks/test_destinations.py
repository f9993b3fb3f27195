"""How much of an iteration is bubbles, against counting instants; who sends to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.model.timeline import Kind, Span, Timeline
from workloads.pipelines import fitting
from workloads.pipelines.fitting import CopyPlacement

GRID = 20  # instants of an iteration


def timeline(rank: int, busy: frozenset[int]) -> Timeline:
    """Busy in these seconds of GRID."""
    spans = tuple(Span(Kind.FORWARD, float(at), float(at + 1)) for at in sorted(busy))
    return Timeline(rank, float(GRID), spans)


busy_instants = st.frozensets(st.integers(0, GRID - 1))


@given(busy_instants)
def test_a_bubble_share_is_the_part_of_the_time_in_which_a_rank_does_not_compute(busy: frozenset[int]) -> None:
    other = timeline(1, frozenset())
    shares = fitting.bubble_shares([timeline(0, busy), other])
    assert shares == pytest.approx((1 - len(busy) / GRID, 1))
    assert fitting.bubble_share([timeline(0, busy), other]) == pytest.approx(sum(shares) / 2)


@pytest.mark.parametrize(
    ("ranks", "per_node", "ring", "pairs"),
    [
        (4, 1, [3, 0, 1, 2], [1, 0, 3, 2]),
        (5, 1, [4, 0, 1, 2, 3], [1, 0, 4, 2, 3]),
        (3, 1, [2, 0, 1], [2, 0, 1]),
        (2, 1, [1, 0], [1, 0]),
        (8, 2, [7, 7, 1, 1, 3, 3, 5, 5], [2, 2, 1, 1, 6, 6, 5, 5]),
        (6, 2, [5, 5, 1, 1, 3, 3], [5, 5, 1, 1, 3, 3]),
        (2, 2, [None, None], [None, None]),
        (1, 1, [None], [None]),
    ],
)
def test_copies_go_to_the_nearest_stage_of_the_node_before_or_of_the_partner(
    ranks: int, per_node: int, ring: list[int | None], pairs: list[int | None]
) -> None:
    assert [fitting.destination(rank, ranks, per_node, CopyPlacement.RING) for rank in range(ranks)] == ring
    assert [fitting.destination(rank, ranks, per_node, CopyPlacement.PAIRS) for rank in range(ranks)] == pairs


@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from(CopyPlacement))
def test_each_node_has_the_copy_of_one_other(nodes: int, per_node: int, placement: CopyPlacement) -> None:
    ranks = nodes * per_node
    found = {(rank // per_node, fitting.destination(rank, ranks, per_node, placement)) for rank in range(ranks)}
    if nodes == 1:
        assert found == {(0, None)}
    else:
        homes = {node: to // per_node for node, to in found if to is not None}
        assert len(found) == nodes and set(homes) == set(homes.values()) == set(range(nodes))
        assert all(node != home for node, home in homes.items())
