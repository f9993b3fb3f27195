"""Redundancy groups: bounded, of like size, apart by failure domain, and each of them decodes what it says it does."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.model.topology import Topology
from ft_plugins.redundancy.exchange_plan import plan_exchange, positions, why_unprotected
from ft_plugins.redundancy.grouping import SharedDomain, cut_nodes, redundancy_groups, shared_domains
from ft_plugins.redundancy.parity import LEAST_NODES, plan_decode
from ft_plugins.redundancy.sections import Extent
from harness.operations import doubling


@st.composite
def labels(draw):
    """The domains of up to 40 nodes, from all apart to all together."""
    count = draw(st.integers(1, 40))
    kinds = draw(st.integers(1, count))
    return [f"rack{draw(st.integers(0, kinds - 1))}" for _ in range(count)]


alone = st.integers(1, 40).map(lambda count: list(range(count)))


@settings(max_examples=400, deadline=None)
@given(labels() | alone, st.integers(2, 12), st.sampled_from([1, 2]))
def test_a_cut_divides_the_nodes_into_groups_of_like_size_none_too_small(domains, most, losses):
    cut = cut_nodes(domains, most, losses)
    assert sorted(node for group in cut for node in group) == list(range(len(domains)))
    sizes = [len(group) for group in cut]
    assert max(sizes) - min(sizes) <= 1
    least = LEAST_NODES[losses]
    if len(domains) < least:
        assert len(cut) == 1, "as it is: it cannot be protected anyway"
        return
    assert min(sizes) >= least
    # too large only if one more group would make one too small
    assert max(sizes) <= most or len(domains) // (len(cut) + 1) < least


@settings(max_examples=400, deadline=None)
@given(labels(), st.integers(2, 12), st.sampled_from([1, 2]))
def test_nodes_of_a_domain_are_apart_wherever_groups_can_have_that_many(domains, most, losses):
    cut, largest = cut_nodes(domains, most, losses), max(Counter(domains).values())
    together = max(max(Counter(domains[node] for node in group).values()) for group in cut)
    limit = max(1, len(domains) // LEAST_NODES[losses])
    assert together == -(-largest // len(cut)), "no other cut into that many groups has fewer together"
    assert (together == 1) == (largest <= limit)
    assert (together <= losses) == (-(-largest // losses) <= limit)


@pytest.mark.parametrize(
    ("domains", "most", "losses", "sizes"),
    [
        (range(8), 8, 1, [8]),
        (range(9), 8, 1, [5, 4]),
        (range(16), 8, 1, [8, 8]),
        (range(17), 8, 1, [6, 6, 5]),
        (range(3), 2, 1, [3]),  # two would leave one node alone
        (range(5), 2, 1, [3, 2]),
        (range(7), 4, 2, [7]),  # RAIM6 needs four
        (range(9), 4, 2, [5, 4]),
        ("AAAABBBBCCCCDDDD", 8, 1, [4, 4, 4, 4]),  # apart, at the cost of smaller groups
        ("AABBCCDD", 8, 1, [4, 4]),
        ("AAAAAABB", 8, 1, [8]),  # six of one rack cannot be apart in four pairs
        ("AAAA", 8, 1, [4]),
        ("AAAABBBB", 8, 2, [4, 4]),  # two of a rack in each: RAIM6 makes up for both
    ],
)
def test_the_number_of_groups_is_the_least_that_keeps_to_the_bound_and_the_domains(domains, most, losses, sizes):
    assert [len(group) for group in cut_nodes(domains, most, losses)] == sizes


def test_the_groups_of_the_docstring_are_those_that_are_made():
    assert cut_nodes(range(10), 8, 1) == ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))
    assert cut_nodes("AAAABBBCCC", 8, 1) == ((0, 4, 8), (1, 5, 9), (2, 6), (3, 7))


# ---- of a job ----


@st.composite
def jobs(draw):
    """A topology in an order of Megatron-LM's, nodes of any number of ranks, domains by position."""
    order = draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]))
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    topology = Topology(tp=tp, pp=pp, dp=draw(st.integers(1, 14)), order=order)
    per_node = draw(st.integers(1, 8))
    nodes = [f"n{rank // per_node}" for rank in range(topology.world_size)]
    count = len(set(nodes))
    racks = draw(st.integers(1, count))
    domains = [draw(st.sampled_from(["", *(f"r{rack}" for rack in range(racks))])) for _ in range(count)]
    return nodes, tuple(topology.sharding_groups().values()), domains if draw(st.booleans()) else []


@settings(max_examples=300, deadline=None)
@given(jobs(), st.integers(2, 9), st.sampled_from([1, 2]))
def test_redundancy_groups_divide_every_sharding_group_by_nodes(job, most, losses):
    nodes, groups, domains = job
    made = redundancy_groups(nodes, groups, most, losses, domains)
    assert sorted(rank for group in made for rank in group) == list(range(len(nodes)))
    for group in groups:
        parts = [part for part in made if set(part) & set(group)]
        assert all(set(part) <= set(group) for part in parts)
        there = [{nodes[rank] for rank in part} for part in parts]
        assert sum(map(len, there)) == len(set().union(*there)), "the ranks of a node stay together"
        assert max(map(len, there)) - min(map(len, there)) <= 1
    assert bool(why_unprotected(nodes, made, losses)) == bool(why_unprotected(nodes, groups, losses))


def plan_of(job, most, losses):
    """The exchange within groups of at most `most` nodes; None if they cannot survive so many losses."""
    nodes, groups, domains = job
    made = redundancy_groups(nodes, groups, most, losses, domains)
    if why_unprotected(nodes, made, losses):
        return None
    return plan_exchange(nodes, made, [64 * (1 + rank % 3) for rank in range(len(nodes))], losses, streams(groups))


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(2, 9), st.sampled_from([1, 2]))
def test_as_many_losses_as_a_group_survives_in_every_group_at_once_can_be_decoded(job, most, losses):
    if (plan := plan_of(job, most, losses)) is None:
        return
    gone = set()  # of each distinct set of nodes, the first ones, unless a group has lost as many already
    for section in plan.sections:
        for position in section.positions[:losses]:
            after = gone | {position}
            if all(len(after & set(other.positions)) <= losses for other in plan.sections):
                gone = after
    assert gone
    for rank in range(len(job[0])):
        assert plan.recovery_sections(rank, gone) is not None
    for section in plan.sections:
        lost = [node for node, position in enumerate(section.positions) if position in gone]
        assert not lost or plan_decode(section.placement, lost) or not any(section.placement.sizes)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(2, 9), st.sampled_from([1, 2]))
def test_every_byte_of_any_single_node_is_decoded_from_other_nodes_of_each_of_its_groups(job, most, losses):
    if (plan := plan_of(job, most, losses)) is None:
        return
    for lost, section in itertools.product(range(len(plan.nodes)), plan.sections):
        if lost not in section.positions:
            continue
        node, placement, decoded = section.positions.index(lost), section.placement, 0
        for rebuild in plan_decode(placement, [node]):
            stripe, (kind, which) = placement.stripes[rebuild.stripe], rebuild.wanted
            piece = placement.piece(rebuild.stripe, which) if kind == "data" else None
            nbytes = piece.stop - piece.start if piece else 0
            holders = {which if kind == "data" else stripe.parity_nodes[which] for kind, which, _ in rebuild.sources}
            assert node not in holders and (holders or not nbytes)
            decoded += nbytes
        assert decoded == placement.sizes[node]


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(2, 9), st.sampled_from([1, 2]))
def test_a_node_sends_to_the_nodes_of_its_groups_alone_and_is_rebuilt_from_them(job, most, losses):
    nodes, groups, domains = job
    made = redundancy_groups(nodes, groups, most, losses, domains)
    if why_unprotected(nodes, made, losses):
        return
    plan = plan_exchange(nodes, made, [64] * len(nodes), losses, streams(groups))
    place = plan.position_of_rank
    mates = [set() for _ in plan.nodes]
    for group in made:
        for rank in group:
            mates[place[rank]] |= {place[other] for other in group}
    for position, ranks in enumerate(plan.ranks):
        targets = {send.area.position for send in plan.sends[position]}
        targets |= {holder for rank in ranks for holder in plan.small_state_holders(rank)}
        for rank in ranks:  # a bucket of data, and one for each part of parity
            buckets = [(0, plan.nbytes[rank]), *((part.offset, part.stop - part.start) for part in plan.parts[rank])]
            targets |= {place[check.source.rank] for check in plan.checks(rank, buckets)}
        targets |= {other for rank in ranks for section in plan.sections_of_rank[rank] for other in section.positions}
        assert targets <= mates[position]


def streams(groups):
    """State that each sharding group holds identically, of which each rank captures 32 bytes."""
    return [[Extent(rank, 0, 32) for rank in group] for group in groups]


@settings(max_examples=200, deadline=None)
@given(jobs(), st.integers(2, 9), st.sampled_from([1, 2]))
def test_a_domain_is_named_exactly_if_its_loss_is_not_survived(job, most, losses):
    nodes, groups, domains = job
    made = redundancy_groups(nodes, groups, most, losses, domains)
    names, _ = positions(nodes)
    domain_of = dict(zip(names, domains, strict=False))

    def too_many(domain):
        members = ({nodes[rank] for rank in group if domain_of.get(nodes[rank]) == domain} for group in made)
        return any(len(lost) > losses for lost in members)

    named = [shared.domain for shared in shared_domains(nodes, made, losses, domains)]
    assert sorted(named) == sorted(domain for domain in set(domains) - {""} if too_many(domain))


def test_the_domain_that_is_named_comes_with_its_nodes():
    nodes, groups = ["a", "b", "c"], ((0, 1, 2),)
    assert list(shared_domains(nodes, groups, 1, ["x", "x", ""])) == [SharedDomain("x", ("a", "b"))]
    assert list(shared_domains(nodes, groups, 2, ["x", "x", ""])) == []


@pytest.mark.parametrize("count", range(2, 9))
def test_up_to_eight_nodes_nothing_changes_without_domains(count):
    topology = Topology(tp=2, dp=count, pp=2)
    nodes = [f"n{rank // 2 % count}" for rank in range(topology.world_size)]
    groups = tuple(topology.sharding_groups().values())
    assert redundancy_groups(nodes, groups, 8, 1) == groups


def test_more_nodes_than_raim6_has_factors_for_are_no_obstacle_once_they_are_cut():
    nodes, groups = [f"n{rank}" for rank in range(300)], (tuple(range(300)),)
    assert "at most 257" in why_unprotected(nodes, groups, 2) and not why_unprotected(nodes, groups, 2, whole=False)
    assert plan_exchange(nodes, redundancy_groups(nodes, groups, 8, 2), [64] * 300, 2).losses == 2


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("sizes", [{"tp": 8, "pp": 16}, {"tp": 4, "pp": 4}, {"tp": 1, "pp": 4}])
@pytest.mark.parametrize("in_racks", [False, True])
def test_cutting_groups_of_twice_as_many_ranks_takes_twice_the_steps(order, sizes, in_racks):
    def cut(world):
        topology = Topology(**sizes, dp=world // math.prod(sizes.values()), order=order)
        nodes = [f"node{rank // 8}" for rank in range(world)]
        domains = [f"rack{position // 16}" for position in range(world // 8)] if in_racks else []
        made = redundancy_groups(nodes, tuple(topology.sharding_groups().values()), 8, 1, domains)
        largest = max(len({nodes[rank] for rank in group}) for group in made)
        assert largest <= 8 and sum(map(len, made)) == world
        assert not list(shared_domains(nodes, made, 1, domains)), "racks of 16 nodes are fewer than pairs"

    assert doubling(cut, 4096 if in_racks else 1024) < 3


def test_groups_on_the_same_nodes_are_cut_the_same_way_so_fewer_pairs_are_fatal():
    topology = Topology(tp=8, dp=24, pp=1)
    nodes = [f"n{rank // 8}" for rank in range(topology.world_size)]
    made = redundancy_groups(nodes, tuple(topology.sharding_groups().values()), 8, 1)
    together = {
        frozenset(pair) for group in made for pair in itertools.combinations({nodes[rank] for rank in group}, 2)
    }
    assert len(made) == 8 * 3 and len(together) == 3 * math.comb(8, 2)
