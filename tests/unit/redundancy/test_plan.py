"""The exchange plan: each byte is sent once for each parity, nothing lies with what it protects, any job is planned.

What a plan says is checked against bytes counted one by one, for random jobs and for the topologies of real ones.
"""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import TopologyError
from ft_plugins.model.topology import Topology
from ft_plugins.redundancy.exchange_plan import Extent, plan_exchange, positions, why_unprotected
from ft_plugins.redundancy.field import ORDER
from ft_plugins.redundancy.parity import ALIGNMENT, plan_decode
from harness.operations import doubling

NEEDED = {1: 2, 2: 4}  # nodes of a sharding group, by losses
SIZES = st.just(0) | st.integers(1, 70) | st.integers(0, 900)


@dataclass(frozen=True)
class Job:
    """What a plan is made from."""

    nodes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    losses: int

    def plan(self):
        return plan_exchange(self.nodes, self.groups, self.nbytes, self.losses)


@st.composite
def jobs(draw):
    """Up to 3 sharding groups over up to 7 nodes, each with any number of ranks on each node, numbered at random."""
    losses = draw(st.sampled_from([1, 2]))
    count = draw(st.integers(NEEDED[losses], 7))
    seats = []
    for group in range(draw(st.integers(1, 3))):
        there = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        for node in draw(st.permutations(range(count)))[: NEEDED[losses]]:
            there[node] = max(1, there[node])
        seats += [(node, group) for node, ranks in enumerate(there) for _ in range(ranks)]
    seats = draw(st.permutations(seats))
    groups = defaultdict(list)
    for rank, (_, group) in enumerate(seats):
        groups[group].append(rank)
    nbytes = draw(st.lists(SIZES, min_size=len(seats), max_size=len(seats)))
    return Job(tuple(f"n{node}" for node, _ in seats), tuple(map(tuple, groups.values())), tuple(nbytes), losses)


def real(per_node, losses, order="tp-cp-ep-dp-pp", **sizes):
    """A job as Megatron-LM lays it out: so many ranks on each node, uneven bytes."""
    nodes = tuple(f"n{node}" for node, ranks in enumerate(per_node) for _ in range(ranks))
    topology = Topology(**sizes, order=order)
    assert topology.world_size == len(nodes)
    nbytes = tuple(500 + 37 * rank for rank in range(len(nodes)))
    return Job(nodes, tuple(topology.sharding_groups().values()), nbytes, losses)


REAL = {
    "2+1+1 ranks, dp": real([2, 1, 1], 1, tp=1, dp=4, pp=1),
    "2+1+1+1 ranks, dp": real([2, 1, 1, 1], 2, tp=1, dp=5, pp=1),
    "8x2, n=4": real([2] * 8, 1, tp=2, dp=4, pp=2),
    "8x2, n=4, two losses": real([2] * 8, 2, tp=2, dp=4, pp=2),
    "4x4, n=2": real([4] * 4, 1, tp=2, dp=4, pp=2),
    "4x4, tp 4, n=4, two losses": real([4] * 4, 2, tp=4, dp=4, pp=1),
    "4x2, tp over two nodes": real([2] * 4, 1, tp=4, dp=2, pp=1),
    "4x2, dp last": real([2] * 4, 1, order="tp-cp-ep-pp-dp", tp=1, dp=4, pp=2),
}
either = jobs() | st.sampled_from(list(REAL.values()))


def bytes_of(extents):
    """(rank, offset) of each byte, in order."""
    return [(extent.rank, at) for extent in extents for at in range(extent.offset, extent.offset + extent.nbytes)]


# what is sent where


@settings(max_examples=150, deadline=None)
@given(either)
def test_every_byte_of_every_slot_is_in_exactly_one_send_for_each_parity(job):
    plan = job.plan()
    for which in range(job.losses):
        sent = Counter()
        for position, sends in enumerate(plan.sends):
            for send in sends:
                if send.area.which == which:
                    extents = list(plan.sections[send.area.section].extents(send.node, send.start, send.stop))
                    sent.update(bytes_of(extents))
                    assert {extent.rank for extent in extents} <= set(plan.ranks[position]), "it is not there to send"
        assert sent == Counter((rank, at) for rank, size in enumerate(job.nbytes) for at in range(size))


@settings(max_examples=150, deadline=None)
@given(either)
def test_nothing_of_a_stripe_lies_with_anything_else_of_it(job):
    """So that a lost node takes one piece of a stripe at most: what `losses` parities make up for."""
    plan = job.plan()
    givers = defaultdict(list)
    keepers = {
        (area.section, area.stripe, area.which): position for position, areas in enumerate(plan.areas) for area in areas
    }
    for position, sends in enumerate(plan.sends):
        for send in sends:
            assert send.area.position != position, "it is sent to whom it comes from"
            assert plan.sections[send.area.section].positions[send.node] == position, "a send of another node's stream"
            assert keepers[send.area.section, send.area.stripe, send.area.which] == send.area.position
            givers[send.area.section, send.area.stripe, send.area.which].append(position)
    for section in plan.sections:
        for stripe in range(len(section.positions)):
            data = givers[section.index, stripe, 0]
            assert all(sorted(givers[section.index, stripe, which]) == sorted(data) for which in range(job.losses))
            on = data + [keepers[section.index, stripe, which] for which in range(job.losses)]
            assert len(set(on)) == len(on) and set(on) <= set(section.positions)


@settings(max_examples=150, deadline=None)
@given(either)
def test_the_areas_of_a_node_lie_side_by_side_in_what_it_claims(job):
    plan = job.plan()
    for position, areas in enumerate(plan.areas):
        at = 0
        for area in areas:
            assert area.position == position and area.offset == at and area.nbytes % ALIGNMENT == 0
            at += area.nbytes
        assert at == plan.parity_bytes(position)
        held = Counter((area.section, area.stripe, area.which) for area in areas)
        assert set(held.values()) <= {1}
    every = Counter((area.section, area.stripe, area.which) for areas in plan.areas for area in areas)
    assert every == Counter(
        (section.index, stripe, which)
        for section in plan.sections
        for stripe in range(len(section.positions))
        for which in range(job.losses)
    ), "a parity is kept nowhere, or twice"
    for sends in plan.sends:
        for send in sends:
            assert 0 <= send.start <= send.stop and send.stop - send.start <= send.area.nbytes


@settings(max_examples=100, deadline=None)
@given(either)
def test_the_pieces_of_a_stripe_enter_q_with_factors_of_their_own_and_p_with_none(job):
    factors = defaultdict(list)
    for sends in job.plan().sends:
        for send in sends:
            factors[send.area.section, send.area.stripe, send.area.which].append(send.exponent)
    for (_, _, which), exponents in factors.items():
        assert len(set(exponents)) == (len(exponents) if which else 1)
        assert which or exponents[0] == 0
        assert all(0 <= exponent < ORDER for exponent in exponents)


@settings(max_examples=100, deadline=None)
@given(either)
def test_copies_are_kept_by_as_many_other_nodes_of_the_section_as_may_be_lost(job):
    plan = job.plan()
    where, _ = positions(job.nodes)
    for rank in range(len(job.nodes)):
        holders = plan.small_state_holders(rank)
        own = where.index(job.nodes[rank])
        (section,) = [section for section in plan.sections if rank in job.groups[section.index]]
        assert section is plan.section_of_rank[rank] and own == plan.position_of_rank[rank]
        assert len(set(holders)) == job.losses and own not in holders and set(holders) <= set(section.positions)
    for position in range(len(plan.nodes)):
        kept = plan.small_state_on(position)
        assert list(kept) == [rank for rank in range(len(job.nodes)) if position in plan.small_state_holders(rank)]


# sections, positions, streams


@settings(max_examples=100, deadline=None)
@given(either)
def test_nodes_stand_in_the_order_of_their_lowest_ranks(job):
    plan = job.plan()
    assert sorted(plan.nodes) == sorted(set(job.nodes))
    assert [ranks[0] for ranks in plan.ranks] == sorted(ranks[0] for ranks in plan.ranks)
    for node, ranks in zip(plan.nodes, plan.ranks, strict=True):
        assert list(ranks) == [rank for rank, on in enumerate(job.nodes) if on == node]


@settings(max_examples=100, deadline=None)
@given(either)
def test_a_section_is_a_sharding_group_spread_over_the_nodes_of_its_ranks(job):
    plan = job.plan()
    assert len(plan.sections) == len(job.groups)
    for section, group in zip(plan.sections, job.groups, strict=True):
        assert job.groups[section.index] == group and list(section.positions) == sorted(set(section.positions))
        assert len(section.positions) == len(section.streams) == len(section.placement.sizes)
        for position, stream, size in zip(section.positions, section.streams, section.placement.sizes, strict=True):
            here = sorted(rank for rank in group if job.nodes[rank] == plan.nodes[position])
            assert stream == tuple(Extent(rank, 0, job.nbytes[rank]) for rank in here) and here
            assert size == sum(job.nbytes[rank] for rank in here)


@settings(max_examples=150, deadline=None)
@given(either, st.data())
def test_extents_cover_a_range_of_a_stream_byte_by_byte(job, data):
    section = data.draw(st.sampled_from(job.plan().sections))
    node = data.draw(st.integers(0, len(section.streams) - 1))
    stream = bytes_of(section.streams[node])
    start = data.draw(st.integers(0, len(stream)))
    stop = data.draw(st.integers(start, len(stream)))
    extents = list(section.extents(node, start, stop))
    assert bytes_of(extents) == stream[start:stop]
    assert all(extent.nbytes > 0 for extent in extents), "nothing is read to no end"


def test_a_range_that_begins_in_one_slot_and_ends_in_the_third_is_named_in_three_parts():
    plan = plan_exchange(["a", "b", "a", "a"], [(0, 1, 2, 3)], [10, 99, 5, 20], 1)
    assert list(plan.sections[0].extents(0, 7, 18)) == [Extent(0, 7, 3), Extent(2, 0, 5), Extent(3, 0, 3)]
    assert list(plan.sections[0].extents(0, 10, 15)) == [Extent(2, 0, 5)]
    assert list(plan.sections[0].extents(0, 35, 35)) == []


@settings(max_examples=100, deadline=None)
@given(either, st.randoms(use_true_random=False))
def test_the_order_in_which_a_group_is_told_changes_nothing(job, random):
    shuffled = replace(job, groups=tuple(tuple(random.sample(group, len(group))) for group in job.groups))
    assert shuffled.plan() == job.plan() and hash(job.plan()) == hash(shuffled.plan())


# bytes: what the plan says is enough


def encode(plan, slots):
    """The parity slot of each node, byte by byte: multiplied by 2 as often as the exponent says, then XORed."""
    kept = [np.zeros(plan.parity_bytes(position), dtype=np.uint8) for position in range(len(plan.nodes))]
    for sends in plan.sends:
        for send in sends:
            at = send.area.offset
            for extent in plan.sections[send.area.section].extents(send.node, send.start, send.stop):
                part = slots[extent.rank][extent.offset : extent.offset + extent.nbytes].astype(np.uint16)
                for _ in range(send.exponent):
                    part = np.where(part & 0x80, (part << 1) ^ 0x11D, part << 1)
                kept[send.area.position][at : at + extent.nbytes] ^= part.astype(np.uint8)
                at += extent.nbytes
    return kept


def multiply(factor, part):
    found, power = np.zeros_like(part, dtype=np.uint16), part.astype(np.uint16)
    for bit in range(8):
        if factor >> bit & 1:
            found ^= power
        power = np.where(power & 0x80, (power << 1) ^ 0x11D, power << 1)
    return found.astype(np.uint8)


@pytest.mark.parametrize("name", REAL)
def test_any_loss_that_is_survived_leaves_enough_to_put_every_slot_together(name):
    job = REAL[name]
    plan = job.plan()
    rng = np.random.default_rng(5)
    slots = [rng.integers(0, 256, size, dtype=np.uint8) for size in job.nbytes]
    kept = encode(plan, slots)
    areas = {(area.section, area.stripe, area.which): area for there in plan.areas for area in there}
    for section in plan.sections:
        whole = [np.concatenate([slots[extent.rank] for extent in stream]) for stream in section.streams]
        for lost in itertools.combinations(range(len(section.positions)), job.losses):
            found = [np.zeros_like(stream) if node in lost else stream for node, stream in enumerate(whole)]
            for rebuild in plan_decode(section.placement, lost):
                if rebuild.wanted[0] == "parity":
                    continue
                stripe = section.placement.stripes[rebuild.stripe]
                pieces = {piece.node: piece for piece in stripe.data}
                wanted = pieces[rebuild.node]
                sum_ = np.zeros(wanted.stop - wanted.start, dtype=np.uint8)
                for kind, which, factor in rebuild.sources:
                    if kind == "data":
                        assert which not in lost
                        part = whole[which][pieces[which].start : pieces[which].stop]
                    else:
                        area = areas[section.index, stripe.index, which]
                        assert area.position not in [section.positions[node] for node in lost]
                        part = kept[area.position][area.offset : area.offset + area.nbytes]
                    part = part[: len(sum_)]
                    sum_[: len(part)] ^= multiply(factor, part)
                found[rebuild.node][wanted.start : wanted.stop] = sum_
            assert all((a == b).all() for a, b in zip(found, whole, strict=True)), f"{name}: {lost}"


# what cannot be planned


@pytest.mark.parametrize(
    ("nodes", "groups", "losses", "said"),
    [
        (["a", "a"], [(0, 1)], 1, "all ranks are on one node"),
        (["a", "a"], [(0, 1)], 2, "all ranks are on one node"),
        (["a", "a", "b", "b"], [(0, 1), (2, 3)], 1, "RAIM5 needs the ranks of each sharding group on at least 2"),
        (["a", "a", "b", "b"], [(0, 1), (2, 3)], 1, "but ranks 0, 1 are on 1"),
        (["a", "b", "c"], [(0, 1, 2)], 2, "RAIM6 needs the ranks of each sharding group on at least 4"),
        (["a", "b", "c"], [(0, 1, 2)], 2, "but ranks 0, 1, 2 are on 3"),
        (["a", "b", "c", "d", "d"], [(0, 1, 2, 3), (4,)], 1, "but ranks 4 are on 1"),
        (["a", "b", "c"], [(0, 1, 2)], 2, "dp last"),
    ],
)
def test_what_cannot_be_survived_is_said_in_words_and_refused_with_them(nodes, groups, losses, said):
    reason = why_unprotected(nodes, groups, losses)
    assert said in reason
    with pytest.raises(TopologyError) as refused:
        plan_exchange(nodes, groups, [64] * len(nodes), losses)
    assert str(refused.value) == reason


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 3), st.sampled_from([1, 2]))
def test_a_job_is_unprotected_exactly_when_a_group_stands_on_too_few_nodes(on, count, losses):
    nodes = [f"n{node}" for node in on]
    groups = [tuple(range(first, len(on), count)) for first in range(min(count, len(on)))]
    few = [group for group in groups if len({nodes[rank] for rank in group}) < NEEDED[losses]]
    reason = why_unprotected(nodes, groups, losses)
    assert bool(reason) == bool(few)
    if not few:
        plan_exchange(nodes, groups, [1] * len(nodes), losses)
    elif len(set(nodes)) > 1:
        assert f"ranks {', '.join(map(str, few[0]))} " in reason


@pytest.mark.parametrize("groups", [[(0, 1)], [(0, 1, 2), (1, 2)], [(0, 1, 2), (0, 1, 2)]])
def test_a_rank_in_no_group_or_in_two_is_refused(groups):
    with pytest.raises(TopologyError, match="3 ranks, but the sharding groups are"):
        plan_exchange(["a", "b", "c"], groups, [1, 1, 1], 1)


def test_as_many_nodes_as_raim6_has_factors_for_are_planned():
    count = ORDER + 2
    nodes, groups = [f"n{rank}" for rank in range(count)], [tuple(range(count))]
    assert why_unprotected(nodes, groups, 2) == ""
    assert plan_exchange(nodes, groups, [1] * count, 2).losses == 2


def test_more_nodes_than_raim6_has_factors_for_are_unprotected():
    count = ORDER + 3
    nodes, groups = [f"n{rank}" for rank in range(count)], [tuple(range(count))]
    with pytest.raises(TopologyError) as refused:
        plan_exchange(nodes, groups, [1] * count, 2)
    assert why_unprotected(nodes, groups, 2) == str(refused.value)
    assert "supports at most 257 nodes" in str(refused.value) and "258 ranks" in str(refused.value)
    assert why_unprotected(nodes, groups, 1) == "", "which is what the message says"


# scale, and people


@pytest.mark.parametrize(
    ("ranks", "per_node", "width", "losses"),
    [(4096, 8, 64, 1), (4096, 8, 64, 2), (512, 1, 512, 1)],
    ids=["512x8, n=64, RAIM5", "512x8, n=64, RAIM6", "512x1, n=512, RAIM5"],
)
def test_512_nodes_are_planned(ranks, per_node, width, losses):
    nodes = [f"n{rank // per_node}" for rank in range(ranks)]
    stage = width * per_node
    groups = [
        tuple(range(first, first + stage, per_node))
        for start in range(0, ranks, stage)
        for first in range(start, start + per_node)
    ]
    plan = plan_exchange(nodes, groups, [1 << 30] * ranks, losses)
    assert len(plan.nodes) == 512
    block = plan.sections[0].placement.block
    assert plan.parity_bytes(511) == per_node * losses * block
    assert len(plan.sends[7]) == per_node * (width - losses) * losses
    assert sum(send.stop - send.start for send in plan.sends[7]) == per_node * losses << 30
    assert len(plan.small_state_on(3)) == per_node * losses
    shown = min(8, len(groups))  # of the groups; the others and the nodes are a line each
    assert len(plan.table().splitlines()) == 1 + shown + (len(groups) > shown) + 1


@pytest.mark.parametrize("losses", [1, 2])
def test_a_plan_grows_with_the_groups_and_with_the_square_of_their_nodes_as_what_is_sent_does(losses):
    def plan(width, groups):
        ranks = [tuple(range(first, first + width)) for first in range(0, width * groups, width)]
        plan_exchange([f"n{rank}" for rank in range(width * groups)], ranks, [1 << 30] * width * groups, losses).table()

    assert doubling(lambda groups: plan(8, groups), 32) < 2.2
    assert doubling(lambda width: plan(width, 2), 16) < 5


def test_the_table_says_who_keeps_and_sends_what():
    plan = plan_exchange(["a", "a", "b", "b", "c", "c"], [(0, 2, 4), (1, 3, 5)], [1000, 100, 1000, 100, 1000, 100], 1)
    assert plan.table().splitlines() == [
        "RAIM5 over 3 nodes: any 1 of each group may be lost",
        "  group 0: ranks 0, 2, 4 on a, b, c; blocks of 512 bytes",
        "  group 1: ranks 1, 3, 5 on a, b, c; blocks of 64 bytes",
        "  nodes a, b, c: each keeps 576 bytes of parity, sends 1100 per version",
    ]


def test_two_parities_are_kept_and_sent_where_two_may_be_lost():
    plan = plan_exchange(list("abcd"), [(0, 1, 2, 3)], [1000, 0, 64, 128], 2)
    assert plan.table().splitlines() == [
        "RAIM6 over 4 nodes: any 2 of each group may be lost",
        "  group 0: ranks 0-3 on a, b, c, d; blocks of 512 bytes",
        "  node a: keeps 1024 bytes of parity, sends 2000 per version",
        "  node b: keeps 1024 bytes of parity, sends 0 per version",
        "  node c: keeps 1024 bytes of parity, sends 128 per version",
        "  node d: keeps 1024 bytes of parity, sends 256 per version",
    ]
