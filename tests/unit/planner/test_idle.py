"""Bubbles that two ranks share, against counting instants; what fits into them, by hand and for every schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.model.timeline import Kind, Span, Timeline
from ft_plugins.planner import idle
from ft_plugins.planner.idle import Placement
from ft_plugins.planner.pipeline import Pipeline, Schedule
from ft_plugins.planner.simulate import Link, Times, simulate

GRID = 20  # instants of an iteration


def timeline(rank: int, busy: frozenset[int]) -> Timeline:
    """Busy in these seconds of GRID."""
    spans = tuple(Span(Kind.FORWARD, float(at), float(at + 1)) for at in sorted(busy))
    return Timeline(rank, float(GRID), spans)


busy_instants = st.frozensets(st.integers(0, GRID - 1))


@given(busy_instants, busy_instants)
def test_shared_idle_time_is_when_neither_computes(ours: frozenset[int], theirs: frozenset[int]) -> None:
    expected = GRID - len(ours | theirs)
    assert idle.shared_idle(timeline(0, ours), timeline(1, theirs)) == pytest.approx(expected)
    shares = idle.bubble_shares([timeline(0, ours), timeline(1, theirs)])
    assert shares == pytest.approx((1 - len(ours) / GRID, 1 - len(theirs) / GRID))
    assert idle.bubble_share([timeline(0, ours), timeline(1, theirs)]) == pytest.approx(sum(shares) / 2)


def test_messages_have_both_ends_of_a_bubble_but_not_the_ends_of_the_iteration() -> None:
    ours, theirs = timeline(0, frozenset({4, 10})), timeline(1, frozenset({12}))
    # ours: 0-4, 5-10, 11-20; with half a second for messages 0-3.5, 5.5-9.5, 11.5-20; theirs 0-11.5, 13.5-20
    assert idle.shared_idle(ours, theirs) == 4 + 5 + 1 + 7
    assert idle.shared_idle(ours, theirs, 0.5) == 3.5 + 4 + 0 + 6.5
    assert idle.shared_idle(ours, theirs, 3.0) == 1 + 4  # 0-1, and 16-20 of 14-20


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
    assert [idle.destination(rank, ranks, per_node) for rank in range(ranks)] == ring
    assert [idle.destination(rank, ranks, per_node, Placement.PAIRS) for rank in range(ranks)] == pairs


@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from(Placement))
def test_each_node_has_the_copy_of_one_other(nodes: int, per_node: int, placement: Placement) -> None:
    ranks = nodes * per_node
    found = {(rank // per_node, idle.destination(rank, ranks, per_node, placement)) for rank in range(ranks)}
    if nodes == 1:
        assert found == {(0, None)}
    else:
        homes = {node: to // per_node for node, to in found if to is not None}
        assert len(found) == nodes and set(homes) == set(homes.values()) == set(range(nodes))
        assert all(node != home for node, home in homes.items())


def test_the_slowest_rank_decides_how_many_iterations_a_checkpoint_takes() -> None:
    timelines = [timeline(0, frozenset(range(0, 16))), timeline(1, frozenset(range(2, 16)))]  # both idle 16-20
    assert idle.capacities(timelines) == (4.0, 4.0)
    assert [idle.fit(timelines, nbytes, 100.0) for nbytes in (1, 400, 401, 1200)] == [1, 1, 2, 3]
    busy = [timeline(0, frozenset(range(10))), timeline(1, frozenset(range(10, GRID)))]
    assert idle.fit(busy, 1, 100.0) is None and idle.bubble_share(busy) == 0.5
    assert idle.fit([timelines[0]], 1, 100.0) is None  # nobody to send to


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("ranks", "count"), [(4, 16), (8, 32), (8, 8)])
def test_the_first_stage_shares_little_with_the_last_and_pairs_share_what_neighbours_do(
    schedule: Schedule, ranks: int, count: int
) -> None:
    found = simulate(Pipeline(schedule, ranks, count, 2 if schedule is Schedule.INTERLEAVED else 1), Times())
    first, *others = idle.capacities(found)
    assert first <= min(others) / 2
    if schedule in (Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE):
        assert first == pytest.approx(0, abs=1e-9) and idle.fit(found, 1, 1) is None
    pairs = [share for share in others[::2] for _ in range(2)]  # of 1 with 0, of 3 with 2
    assert idle.capacities(found, placement=Placement.PAIRS) == pytest.approx(pairs)
    assert (idle.fit(found, 1e3, 1e3, placement=Placement.PAIRS) or 0) >= 1


@given(st.integers(2, 6), st.integers(1, 12), st.floats(0, 1), st.floats(0.1, 100), st.floats(0.1, 100))
def test_more_bytes_or_less_bandwidth_never_take_fewer_iterations(
    ranks: int, count: int, latency: float, nbytes: float, bandwidth: float
) -> None:
    found = simulate(Pipeline(Schedule.ONE_F_ONE_B, ranks, count), Times(links=(Link(latency),)))
    usual = idle.fit(found, nbytes, bandwidth)
    more, slower, kept = (
        idle.fit(found, 2 * nbytes, bandwidth),
        idle.fit(found, nbytes, bandwidth / 2),
        idle.fit(found, nbytes, bandwidth, reserved=latency),
    )
    if usual is None:
        assert more is slower is kept is None
    else:
        assert more is not None and slower is not None and usual <= more == slower <= 2 * usual
        assert kept is None or kept >= usual
