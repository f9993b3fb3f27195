"""How much is bubbles, who sends to whom, within how many iterations a version fits: by hand, and as a job plans it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.bubbles.bubble_plan import plan_bubbles
from ft_plugins.bubbles.filling import Granularity, transfers_of
from ft_plugins.bubbles.windows import Reserve
from ft_plugins.model.timeline import Kind, SenderFacts, Span, Timeline, bubbles
from ft_plugins.redundancy.neighbour import plan_neighbours
from workloads.pipelines import fitting
from workloads.pipelines.fitting import CopyPlacement
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.pipelines.simulate import PipelineLink, Times, simulate

GRID = 20  # seconds of an iteration


def timeline(rank, busy):
    """Busy in these seconds of GRID."""
    spans = tuple(Span(Kind.FORWARD, float(at), float(at + 1)) for at in sorted(busy))
    return Timeline(rank, float(GRID), spans)


def shared(timelines, placement=CopyPlacement.RING):
    """Seconds that each rank shares with its destination."""
    found = fitting.plan(timelines, 1, 1, placement=placement)
    assert found is not None
    return [one.shared_seconds for one in found.senders]


def test_the_slowest_rank_decides_how_many_iterations_a_version_takes():
    timelines = timeline(0, frozenset(range(0, 16))), timeline(1, frozenset(range(2, 16)))  # both idle 16-20
    assert shared(timelines) == [4.0, 4.0]
    assert [fitting.fit(timelines, nbytes, 100.0) for nbytes in (1, 400, 400.5, 401, 1200)] == [1, 1, 2, 2, 3]
    assert fitting.fit(timelines, 400, 100.0, reserved=0.5) == 2, "300 bytes in 3 seconds"
    busy = timeline(0, frozenset(range(10))), timeline(1, frozenset(range(10, GRID)))
    assert fitting.fit(busy, 1, 100.0) is None
    assert fitting.fit(timelines[:1], 1, 100.0) is None, "nobody to send to"
    assert fitting.fit(timelines, 400 * 101, 100.0) is None, "more iterations than a job would take"


def test_stages_of_one_node_share_its_link_and_use_what_another_leaves():
    """Four stages on two nodes: 1 and 0 send to 3, 2 and 3 to 1; rank 0 idles twice as long as rank 1."""
    busy = {0: range(0, 12), 1: range(0, 16), 2: range(0, 12), 3: range(0, 12)}
    timelines = [timeline(rank, frozenset(those)) for rank, those in busy.items()]
    found = fitting.plan(timelines, 300, 100.0, per_node=2)
    assert found is not None and found.iterations == 1
    assert [one.shared_seconds for one in found.senders] == [8.0, 4.0, 4.0, 4.0]
    assert all(one.transfer.source != one.transfer.target for one in found.senders)


@pytest.mark.parametrize("schedule", [one for one in PipelineSchedule if one is not PipelineSchedule.CHIMERA])
@pytest.mark.parametrize(("ranks", "count"), [(4, 16), (8, 32), (8, 8)])
def test_the_first_stage_shares_little_with_the_last_and_pairs_share_what_neighbours_do(schedule, ranks, count):
    found = simulate(Pipeline(schedule, ranks, count, 2 if schedule is PipelineSchedule.INTERLEAVED else 1), Times())
    first, *others = shared(found)
    assert first <= min(others) / 2
    if schedule in (PipelineSchedule.GPIPE, PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE):
        assert first == pytest.approx(0, abs=1e-9) and fitting.fit(found, 1, 1e6, placement=CopyPlacement.RING) is None
    pairs = [share for share in others[::2] for _ in range(2)]  # of 1 with 0, of 3 with 2
    assert shared(found, CopyPlacement.PAIRS) == pytest.approx(pairs)
    assert (fitting.fit(found, 1e6, 1e6, placement=CopyPlacement.PAIRS) or 0) >= 1


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(1, 12), st.floats(0, 1), st.floats(1e5, 1e8), st.floats(1e5, 1e8))
def test_more_bytes_or_less_bandwidth_never_take_fewer_iterations(ranks, count, latency, nbytes, bandwidth):
    found = simulate(Pipeline(PipelineSchedule.ONE_F_ONE_B, ranks, count), Times(links=(PipelineLink(latency),)))
    usual = fitting.fit(found, nbytes, bandwidth)
    more, slower, kept = (
        fitting.fit(found, 2 * nbytes, bandwidth),
        fitting.fit(found, nbytes, bandwidth / 2),
        fitting.fit(found, nbytes, bandwidth, reserved=latency),
    )
    never = 1 << 30
    assert (usual or never) <= (more or never) and (usual or never) <= (kept or never)
    if usual is not None and more is not None and slower is not None:
        assert abs(more - slower) <= 1, "whole bytes of each window are counted"
        assert more <= 2 * usual + 1


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("granularity", Granularity)
def test_it_is_the_plan_that_a_job_makes(granularity, per_node):
    found = simulate(Pipeline(PipelineSchedule.ONE_F_ONE_B, 8, 16), Times(links=(PipelineLink(0.2),)))
    forecast = fitting.plan(found, 6_000_000, 1e6, per_node=per_node, reserved=0.1, layers=10, granularity=granularity)
    nodes = [f"n{rank // per_node}" for rank in range(8)]
    copies = plan_neighbours(nodes, [tuple(range(8))], [6_000_000] * 8)
    made = plan_bubbles(
        transfers_of(copies.copies, dict.fromkeys(range(8), SenderFacts(layers=(600_000,) * 10))),
        dict(enumerate(found)),
        {rank: bubbles(one, 0.0) for rank, one in enumerate(found)},
        per_node * 1e6,
        Reserve(0.1, 0.1),
        granularity,
    )
    assert forecast == made and made.fill_layers is not None


def test_with_layers_a_plan_has_both_fills_and_bytes_fill_at_least_as_much():
    timelines = simulate(
        Pipeline(PipelineSchedule.ONE_F_ONE_B, 8, 32), Times((0.015,), (0.03,), (0.015,), links=(PipelineLink(1e-3),))
    )
    plan = fitting.plan(timelines, 1e9, 1e9, layers=12)
    assert plan is not None and plan.fill_bytes is not None and plan.fill_layers is not None
    assert plan.fill_layers <= plan.fill_bytes == pytest.approx(1.0)


busy_instants = st.frozensets(st.integers(0, GRID - 1))


@given(busy_instants)
def test_a_bubble_share_is_the_part_of_the_time_in_which_a_rank_does_not_compute(busy):
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
def test_copies_go_to_the_nearest_stage_of_the_node_before_or_of_the_partner(ranks, per_node, ring, pairs):
    assert [fitting.destination(rank, ranks, per_node, CopyPlacement.RING) for rank in range(ranks)] == ring
    assert [fitting.destination(rank, ranks, per_node, CopyPlacement.PAIRS) for rank in range(ranks)] == pairs


@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from(CopyPlacement))
def test_each_node_has_the_copy_of_one_other(nodes, per_node, placement):
    ranks = nodes * per_node
    found = {(rank // per_node, fitting.destination(rank, ranks, per_node, placement)) for rank in range(ranks)}
    if nodes == 1:
        assert found == {(0, None)}
    else:
        homes = {node: to // per_node for node, to in found if to is not None}
        assert len(found) == nodes and set(homes) == set(homes.values()) == set(range(nodes))
        assert all(node != home for node, home in homes.items())
