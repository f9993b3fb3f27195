"""Copies on pipeline neighbours: on another node, in ring order, every byte once; carried out like parity.

Random pipelines over random nodes, the shapes of real jobs, and 8,192 ranks. What the exchange plan says is checked
against bytes, copied and put together again by the same pure code that SMPs use.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ResumeError, TopologyError
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.model.topology import Topology
from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.redundancy.neighbour import (
    NeighbourCopy,
    NeighbourPlan,
    partner,
    pipelines,
    plan_copies_and_parity,
    plan_neighbours,
    why_unplaced,
)
from ft_plugins.smp.exchange.frames import Parity, decoded
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.segment.slots import Version
from harness.operations import doubling
from workloads.pipelines.goodput import partners

V = Version(1, 7)


@dataclass(frozen=True)
class Job:
    """What a plan is made from."""

    nodes: tuple[str, ...]
    pipelines: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]

    def plan(self):
        return plan_neighbours(self.nodes, self.pipelines, self.nbytes)


@st.composite
def anywhere(draw):
    """Up to 4 pipelines of up to 6 stages, their ranks numbered and placed at random: some cannot be protected."""
    count, stages = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    ranks = draw(st.permutations(range(count * stages)))
    nodes = draw(st.lists(st.integers(0, 3), min_size=len(ranks), max_size=len(ranks)))
    nbytes = draw(st.lists(st.integers(0, 300), min_size=len(ranks), max_size=len(ranks)))
    cut = [tuple(ranks[first : first + stages]) for first in range(0, len(ranks), stages)]
    return Job(tuple(f"n{node}" for node in nodes), tuple(cut), tuple(nbytes))


def loses(plan, lost):
    """The ranks whose state is gone if the nodes at the positions `lost` are lost at the same time."""
    return tuple(copy.rank for at in sorted(lost) for copy in plan.sent_from[at] if copy.target in lost)


def survives(plan, lost):
    return not loses(plan, lost)


jobs = anywhere().filter(lambda job: not why_unplaced(job.nodes, job.pipelines))


def real(per_node, nodes, order="tp-cp-ep-dp-pp", **sizes):
    """A job as Megatron-LM lays it out, with uneven bytes."""
    where = tuple(f"n{rank // per_node}" for rank in range(per_node * nodes))
    topology = Topology(**sizes, order=order)
    return Job(where, pipelines(topology), tuple(200 + 13 * rank for rank in range(len(where))))


PAPER = {
    "d2m2p4": real(4, 4, dp=2, tp=2, pp=4),
    "d4m1p4": real(4, 4, dp=4, tp=1, pp=4),
    "d1m4p4": real(4, 4, dp=1, tp=4, pp=4),
    "d2m1p8": real(4, 4, dp=2, tp=1, pp=8),
    "d1m2p8": real(4, 4, dp=1, tp=2, pp=8),
}
OTHER = {
    "d4m1p4, dp last": real(4, 4, order="tp-cp-ep-pp-dp", dp=2, tp=1, pp=8),
    "8 stages on two nodes": real(8, 2, dp=2, tp=1, pp=8),
    "one rank a node": real(1, 5, dp=1, tp=1, pp=5),
}
either = jobs | st.sampled_from(list((PAPER | OTHER).values()))


# where a copy goes


@settings(max_examples=200)
@given(either)
def test_no_copy_is_on_the_node_of_what_it_copies_and_every_rank_has_one(job):
    plan = job.plan()
    assert [copy.rank for copy in plan.copies] == list(range(len(job.nodes)))
    for copy in plan.copies:
        assert copy.source != copy.target and copy.nbytes == job.nbytes[copy.rank]
        assert plan.nodes[copy.source] == job.nodes[copy.rank] and plan.nodes[copy.target] == job.nodes[copy.receiver]


@settings(max_examples=200)
@given(either)
def test_it_goes_to_the_nearest_stage_of_the_partner_node(job):
    plan = job.plan()
    for pipeline in job.pipelines:
        there = list(dict.fromkeys(job.nodes[rank] for rank in pipeline))
        for stage, rank in enumerate(pipeline):
            copy = plan.copies[rank]
            found = pipeline.index(copy.receiver)
            assert there.index(job.nodes[copy.receiver]) == partner(there.index(job.nodes[rank]), len(there))
            assert copy.stages_back == stage - found
            same = [at for at, other in enumerate(pipeline) if job.nodes[other] == job.nodes[copy.receiver]]
            assert abs(stage - found) == min(abs(stage - at) for at in same)


@pytest.mark.parametrize(
    ("nodes", "keeper"),
    [(2, [1, 0]), (3, [2, 0, 1]), (4, [1, 0, 3, 2]), (5, [1, 0, 4, 2, 3]), (6, [1, 0, 3, 2, 5, 4])],
)
def test_nodes_are_partners_in_pairs_and_the_last_three_of_an_odd_number_in_a_ring(nodes, keeper):
    assert [partner(node, nodes) for node in range(nodes)] == keeper


@pytest.mark.parametrize("nodes", range(2, 10))
def test_partners_are_those_that_a_copy_is_lost_with(nodes):
    plan = plan_neighbours([f"n{node}" for node in range(nodes)], [tuple(range(nodes))], [8] * nodes)
    for node, others in enumerate(partners(nodes)):
        assert others == {other for other in range(nodes) if not survives(plan, {node, other})}


@pytest.mark.parametrize("name", PAPER)
def test_in_the_paper_s_shapes_two_nodes_keep_the_copies_of_each_other(name):
    plan = PAPER[name].plan()
    for copy in plan.copies:
        assert copy.target == copy.source ^ 1
    assert [len(kept) for kept in plan.kept_on] == [4, 4, 4, 4]
    assert {copy.stages_back for copy in plan.copies} == ({1, 2, -1, -2} if name.endswith("p8") else {1, -1})
    assert plan.fatal_pairs == ((0, 1), (2, 3))


@settings(max_examples=200)
@given(anywhere())
def test_a_job_is_refused_exactly_when_a_pipeline_stands_on_one_node(job):
    alone = [p for p in job.pipelines if len({job.nodes[rank] for rank in p}) == 1]
    reason = why_unplaced(job.nodes, job.pipelines)
    assert bool(reason) == bool(alone)
    if reason:
        with pytest.raises(TopologyError) as refused:
            job.plan()
        assert str(refused.value) == reason
    if reason and len(set(job.nodes)) > 1:
        assert f"rank{'s' if len(alone[0]) > 1 else ''} {', '.join(map(str, alone[0]))} ha" in reason


def test_what_cannot_be_had_is_said_in_words():
    assert why_unplaced(["a", "a"], [(0, 1)]) == "all ranks are on one node"
    assert "rank 0 has no other stage" in why_unplaced(["a", "b"], [(0,), (1,)])
    assert "ranks 0, 1 have all their stages on node a" in why_unplaced(["a", "a", "b", "b"], [(0, 1), (2, 3)])
    assert "an order with pp last" in why_unplaced(["a", "a", "b", "b"], [(0, 1), (2, 3)])


@pytest.mark.parametrize("stages", [[(0, 1)], [(0, 1, 2), (1, 2)]])
def test_a_rank_in_no_pipeline_or_in_two_is_refused(stages):
    with pytest.raises(TopologyError, match="3 ranks, but the pipelines are"):
        plan_neighbours(["a", "b", "c"], stages, [1, 1, 1])


def test_nodes_that_meet_on_a_link_are_together_whoever_of_them_sends():
    ways = {0: 1, 1: 0, 2: 1, 3: 4, 4: 3, 5: 2, 6: 4}  # position -> where its copy goes; a rank on each
    copies = tuple(NeighbourCopy(rank, rank, to, to, 100, 1) for rank, to in ways.items())
    plan = NeighbourPlan(tuple("abcdefg"), tuple((rank,) for rank in ways), copies)
    for rank in ways:
        assert {copy.rank for copy in plan.linked_copies(rank)} == ({0, 1, 2, 5} if rank in (0, 1, 2, 5) else {3, 4, 6})


def test_pipelines_are_those_of_the_topology_in_the_order_of_stages():
    topology = Topology(tp=2, pp=4, dp=2)
    assert pipelines(topology) == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))  # the paper's figure 1
    assert all(topology.coords(rank).pp == stage for group in pipelines(topology) for stage, rank in enumerate(group))


# which bytes: each once, and 1/n of what n replicas hold


@pytest.mark.parametrize("name", PAPER)
def test_every_byte_of_every_replica_set_is_copied_exactly_once(name):
    """Dense weights are held by all of a stage's replicas, moments by one rank each, as ZeRO-1 has it."""
    job = PAPER[name]
    sizes = {key: int(value) for key, value in zip(("dp", "tp", "pp"), name[1::2], strict=True)}
    topology = Topology(**sizes)
    layouts = []
    for rank in range(16):
        replicas = topology.replicas(rank)
        layouts.append(plan_layout(Inventory.of(rank, [
            Item("weight", "float32", (1000,), 4000, Role.PARAMETER, replicas),
            Item("moment", "float32", (77,), 308, Role.MOMENT, (rank,)),
        ]), job.nodes, 512))  # fmt: skip
    plan = plan_neighbours(job.nodes, job.pipelines, [layout.nbytes for layout in layouts])
    copied = Counter()
    for rank, layout in enumerate(layouts):
        sets = {item.name: stream.replicas for stream in layout.streams for item in stream.items}
        own = Counter()
        for send in plan.exchange().sends[plan.copies[rank].source]:
            for extent in plan.exchange().sections[send.area.section].extents(send.node, send.start, send.stop):
                if extent.rank != rank:
                    continue
                for piece in (piece for bucket in layout.buckets for piece in bucket.pieces):
                    low = max(piece.offset, extent.offset)
                    high = min(piece.offset + piece.nbytes, extent.offset + extent.nbytes)
                    for at in range(low, high):
                        copied[sets[piece.item], piece.item, piece.item_offset + at - piece.offset] += 1
                        own[piece.item] += 1
        assert own["moment"] == 308, "all of what it alone holds"
        assert abs(own["weight"] - 4000 / len(sets["weight"])) <= 64, "and its part of what they all hold"
    wanted = {(topology.replicas(rank), "weight", at) for rank in range(16) for at in range(4000)}
    wanted |= {((rank,), "moment", at) for rank in range(16) for at in range(308)}
    assert set(copied) == wanted and set(copied.values()) == {1}


@settings(max_examples=150)
@given(either)
def test_budgets_add_up_to_what_is_sent(job):
    plan = job.plan()
    exchange = plan.exchange()
    assert sum(plan.sent_bytes(at) for at in range(len(plan.nodes))) == sum(job.nbytes)
    for position in range(len(plan.nodes)):
        assert plan.kept_bytes(position) == exchange.parity_bytes(position), "what its vault claims"
        padding = plan.kept_bytes(position) - sum(copy.nbytes for copy in plan.kept_on[position])
        assert 0 <= padding <= 63 * len(plan.kept_on[position])


# carried out as parity is


def vaults(plan, slots):
    """What each node keeps when all sends are XORed into zeros at their place."""
    kept = [np.zeros(plan.parity_bytes(position), dtype=np.uint8) for position in range(len(plan.nodes))]
    for position, sends in enumerate(plan.sends):
        for send in sends:
            at = send.area.offset
            for extent in plan.sections[send.area.section].extents(send.node, send.start, send.stop):
                assert extent.rank in plan.ranks[position], "it is not there to send"
                part = slots[extent.rank][extent.offset : extent.offset + extent.nbytes]
                kept[send.area.position][at : at + extent.nbytes] ^= part
                at += extent.nbytes
    return kept


def put_together(plan, rank, lost, kept):
    """The slot of a rank from what is kept at positions that are not lost, by the frames that SMPs go by."""
    slot = np.zeros(plan.nbytes[rank], dtype=np.uint8)
    for frame in decoded(plan, rank, V, lost):
        for part in frame.parts:
            assert part.position not in lost and isinstance(part.wanted, Parity) and part.factor == 1
            area = plan.area_of[part.wanted.key]
            assert area.position == part.position
            start = area.offset + part.wanted.at
            at = frame.offset + part.at
            slot[at : at + part.wanted.nbytes] ^= kept[part.position][start : start + part.wanted.nbytes]
    return slot


@settings(max_examples=100)
@given(either)
def test_what_is_survived_can_be_put_together_and_what_is_not_is_refused(job):
    plan = job.plan()
    exchange = plan.exchange()
    rng = np.random.default_rng(3)
    slots = [rng.integers(0, 256, size, dtype=np.uint8) for size in job.nbytes]
    kept = vaults(exchange, slots)
    count = len(plan.nodes)
    for lost in itertools.chain(*(itertools.combinations(range(count), many) for many in (1, 2, 3) if many <= count)):
        together = any(at in plan.keepers[other] for at in lost for other in lost)
        assert survives(plan, lost) == (not together)
        for rank in (rank for position in lost for rank in exchange.ranks[position]):
            if plan.copies[rank].target in lost:
                assert rank in loses(plan, lost)
                if job.nbytes[rank]:
                    with pytest.raises(ResumeError):
                        list(decoded(exchange, rank, V, lost))
            else:
                assert rank not in loses(plan, lost)
                assert (put_together(exchange, rank, lost, kept) == slots[rank]).all()


@settings(max_examples=100)
@given(either)
def test_any_one_node_may_be_lost_and_two_unless_one_keeps_the_other_s(job):
    plan = job.plan()
    assert all(survives(plan, [at]) for at in range(len(plan.nodes)))
    for pair in itertools.combinations(range(len(plan.nodes)), 2):
        assert survives(plan, pair) == (pair not in plan.fatal_pairs)


@settings(max_examples=100)
@given(either)
def test_small_state_lies_where_the_copy_is(job):
    exchange = job.plan().exchange()
    for copy in job.plan().copies:
        assert exchange.small_state_holders(copy.rank) == (copy.target,)
    for position in range(len(exchange.nodes)):
        assert list(exchange.small_state_on(position)) == [copy.rank for copy in job.plan().kept_on[position]]
        assert not any(exchange.parts[rank] for rank in exchange.ranks[position])


# scale, and people


def test_planning_copies_of_twice_as_many_ranks_takes_twice_the_steps():
    def plan(dp):
        topology = Topology(tp=8, pp=8, dp=dp)
        ranks = topology.world_size
        made = plan_neighbours([f"n{rank // 8}" for rank in range(ranks)], pipelines(topology), [1 << 30] * ranks)
        made.exchange()
        made.table()

    assert doubling(plan, 16) < 2.2


def test_8192_ranks_are_planned():
    nodes = tuple(f"n{rank // 8}" for rank in range(8192))
    topology = Topology(tp=8, pp=64, dp=16)
    plan = plan_neighbours(nodes, pipelines(topology), [1 << 30] * 8192)
    exchange = plan.exchange()
    assert sum(send.stop - send.start for send in exchange.sends[17]) == 8 << 30
    assert exchange.parity_bytes(1023) == 8 << 30 and exchange.small_state_holders(8191) == (1023 - 16,)
    assert survives(plan, [0, 1]) and not survives(plan, [0, 16])
    assert len(plan.table().splitlines()) == 1 + 1 + 16 + 1


def test_the_table_says_who_may_be_lost_and_whose_copy_lives_where():
    plan = plan_neighbours(["a", "a", "b", "c"], [(0, 1, 2, 3)], [1000, 100, 64, 1])
    assert plan.table().splitlines() == [
        "copies on the nearest stage of the partner node, 3 nodes: any one may be lost; of several, all but those with "
        "a+b, a+c, b+c",
        "  node a: sends 1100 bytes per version to 1 node; keeps 64 bytes of others, 128 for 2 versions",
        "  node b: sends 64 bytes per version to 1 node; keeps 64 bytes of others, 128 for 2 versions",
        "  node c: sends 1 bytes per version to 1 node; keeps 1152 bytes of others, 2304 for 2 versions",
        "  rank 0 on a: 1000 bytes to c (rank 3, 3 stages on)",
        "  rank 1 on a: 100 bytes to c (rank 3, 2 stages on)",
        "  rank 2 on b: 64 bytes to a (rank 1, 1 stage back)",
        "  rank 3 on c: 1 bytes to b (rank 2, 1 stage back)",
    ]


# parity beside copies


NODES = ("a", "a", "b", "b", "c", "c", "d", "d")  # two stages of two nodes, two pipelines on each pair of them
PIPELINES, GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))


def test_with_both_exactly_what_one_of_the_two_survives_is_survived():
    nbytes = [1000 + 64 * rank for rank in range(8)]
    both = plan_copies_and_parity(NODES, PIPELINES, GROUPS, nbytes)
    copies = plan_neighbours(NODES, PIPELINES, nbytes)
    parity = plan_exchange(NODES, GROUPS, nbytes, 1)
    for count in range(5):
        for lost in itertools.combinations(range(4), count):
            for rank in (rank for at in lost for rank in both.ranks[at]):
                by_copy, by_parity = rank not in loses(copies, lost), parity.recovery_sections(rank, lost) is not None
                found = both.recovery_sections(rank, lost)
                assert (found is not None) == (by_copy or by_parity)
                if by_copy:
                    assert found == (both.sections[rank],), "a copy is read once"


def test_both_is_two_plans_side_by_side():
    nbytes = [1000 + 64 * rank for rank in range(8)]
    both = plan_copies_and_parity(NODES, PIPELINES, GROUPS, nbytes)
    copies = plan_neighbours(NODES, PIPELINES, nbytes).exchange()
    parity = plan_exchange(NODES, GROUPS, nbytes, 1)
    assert [section.index for section in both.sections] == list(range(len(both.sections)))
    for position in range(4):
        assert both.parity_bytes(position) == copies.parity_bytes(position) + parity.parity_bytes(position)
        stored = both.small_state_on(position)
        assert stored == tuple(rank for rank in range(8) if position in both.small_state_holders(rank))
        assert set(stored) == {*copies.small_state_on(position), *parity.small_state_on(position)}
        sent = sum(send.stop - send.start for send in both.sends[position])
        beside = sum(both.parity_sent_bytes(rank) for rank in both.ranks[position])
        assert sent == beside + sum(nbytes[rank] for rank in both.ranks[position])
    assert "copies on the nearest" in both.table() and "RAIM5" in both.table()


def test_both_is_refused_where_either_cannot_be_had():
    with pytest.raises(TopologyError, match="at least 2 nodes"):
        plan_copies_and_parity(("a", "b"), [(0, 1)], [(0,), (1,)], [10, 10])
    with pytest.raises(TopologyError, match="no other stage"):
        plan_copies_and_parity(("a", "b"), [(0,), (1,)], [(0, 1)], [10, 10])
